"""The root's metadata: those of Zarr, and one attribute with what `load` and `Writer` keep there, as a JSON text.

The text has a checksum over itself and over the metadata of all arrays, without their attributes, which anybody may
change. So a shape, a name or a number that was damaged is an error. The text of a state also has the checksum of each
chunk, by which a chunk belongs to one array of one state.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
KEY = "jaxmpi"
"""The attribute of the group that is ours."""
META = "zarr.json"
FORMAT = 2
"""The number of the form in which trees are stored. Form 1, whose attribute is an object without checksums, is read."""


class Refusal(ValueError):
    """Metadata that are right, and cannot be used here: what follows the name of the state in the error."""


@dataclass(frozen=True)
class Root:
    """What a root says, once its checksum has been compared."""

    text: dict[str, Any]
    """What `load` and `Writer` keep there."""
    arrays: dict[str, Any]
    """Zarr's metadata of each array."""


def encode(arrays: Mapping[str, Any], attributes: Mapping[str, Any], text: Mapping[str, Any]) -> bytes:
    """The root's metadata. `attributes` are the user's."""
    sealed = {"format": FORMAT, **text}
    sealed["checksum"] = _checksum(sealed, arrays)
    root = {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {**attributes, KEY: json.dumps(sealed, allow_nan=False)},
        "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": dict(arrays)},
    }
    return json.dumps(root, allow_nan=False).encode()


def _checksum(text: Mapping[str, Any], arrays: Mapping[str, Any]) -> str:
    metas = {name: {key: its for key, its in meta.items() if key != "attributes"} for name, meta in arrays.items()}
    plain = json.dumps([{key: its for key, its in text.items() if key != "checksum"}, metas], sort_keys=True)
    return hashlib.blake2b(plain.encode(), digest_size=16).hexdigest()


def decode(folder: Path, data: bytes, operation: str) -> Root | None:
    """What a root says; None where it is a group of Zarr that jaxmpi has not written. Raises ValueError if it is
    damaged, or of a later version."""

    def work() -> Root | None:
        root = json.loads(data)
        text = root["attributes"].get(KEY)
        if text is None:
            return None
        text = json.loads(text) if isinstance(text, str) else text
        if text["format"] > FORMAT:
            raise Refusal(f"is of a later version of jaxmpi (format {text['format']}): update jaxmpi.")
        arrays = root["consolidated_metadata"]["metadata"]
        if text["format"] > 1 and text["checksum"] != _checksum(text, arrays):
            raise ValueError("its checksum is not that of what it says; restore the file as it was written")
        return Root(text, arrays)

    return parsed(folder, work, operation)


def parsed(folder: Path, work: Callable[[], T], operation: str) -> T:
    """What `work` makes of metadata. Whatever it raises but a Refusal says that the file is damaged."""
    try:
        return work()
    except Refusal as error:
        raise ValueError(f"{operation}: {folder} {error}") from None
    except Exception as error:
        said = str(error) if type(error) is ValueError else repr(error)
        raise ValueError(f"{operation}: {folder / META} is damaged: {said[:300]}") from error


def pack(sums: np.ndarray) -> str:
    """The checksums of chunks as a text."""
    return base64.b64encode(sums.astype("<u4").tobytes()).decode()


def unpack(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text, validate=True), "<u4")
