"""The root's metadata: Zarr's metadata, and one attribute with a JSON text, in which `load` and `Writer` keep theirs.

The text has a checksum over itself and over the metadata of all arrays. Their attributes are left out, because anybody
may change them. So a damaged shape, name or number is an error. The text of a state also has the checksum of each
chunk, by which a chunk belongs to one array of one state.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
KEY = "jaxmpi"
"""The name of jaxmpi's attribute of the group."""
META = "zarr.json"
FORMAT = 2
"""The number of the format of trees."""


class Refusal(ValueError):
    """Metadata that are correct, but cannot be used here. The text follows the name of the state in the error."""


Root = tuple[dict[str, Any], dict[str, Any]]
"""The text of `load` and `Writer`, and Zarr's metadata of each array, if the checksum is correct."""


def encode(arrays: Mapping[str, Any], attributes: Mapping[str, Any], text: Mapping[str, Any]) -> bytes:
    """Return the root's metadata. `attributes` are the user's."""
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
    metas = {name: {key: value for key, value in meta.items() if key != "attributes"} for name, meta in arrays.items()}
    plain = json.dumps([{key: value for key, value in text.items() if key != "checksum"}, metas], sort_keys=True)
    return hashlib.blake2b(plain.encode(), digest_size=16).hexdigest()


def decode(folder: Path, data: bytes, operation: str) -> Root | None:
    """Return the content of a root, or None if it is a group of Zarr that jaxmpi has not written. Raise ValueError if
    it is damaged, or of a later version."""

    def work() -> Root | None:
        root = json.loads(data)
        text = root["attributes"].get(KEY)
        if text is None:
            return None
        text = json.loads(text)
        if text["format"] > FORMAT:
            raise Refusal(f"is of a later version of jaxmpi (format {text['format']}): update jaxmpi.")
        arrays = root["consolidated_metadata"]["metadata"]
        if text["checksum"] != _checksum(text, arrays):
            raise ValueError("the checksum does not match the content; restore the file as it was written")
        return text, arrays

    return parsed(folder, work, operation)


def parsed(folder: Path, work: Callable[[], T], operation: str) -> T:
    """Return the result of `work` on metadata. If it raises anything but a Refusal, report the file as damaged."""
    try:
        return work()
    except Refusal as error:
        raise ValueError(f"{operation}: {folder} {error}") from None
    except Exception as error:
        reason = str(error) if type(error) is ValueError else repr(error)
        raise ValueError(f"{operation}: {folder / META} is damaged: {reason[:300]}") from error


def pack(sums: np.ndarray) -> str:
    return base64.b64encode(sums.astype("<u4").tobytes()).decode()


def unpack(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text, validate=True), "<u4")
