"""The record of a leaf of a tree in a file: the type, the dtype, and the axes that were divided among ranks."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxmpi._files import dtypes, trees
from jaxmpi._jax import internals
from jaxmpi._primitive import keys

_PYTHON: dict[type, Any] = {bool: np.bool_, float: np.float64, complex: np.complex128}
TYPES = ("jax", "numpy", "scalar", "key", "index", "str", "int", "float", "complex", "bool", "array")
"""The possible types of a leaf: an array of JAX or NumPy, a scalar of NumPy, random keys, indices of rows, a text or a
number. "array" is any array or number of a series."""


@dataclass(frozen=True)
class Record:
    """A leaf, as the attributes of the file store it."""

    name: str
    type: str
    """One of `TYPES`."""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    """The shape. For a field, the shape of the global array."""
    division: str = ""
    """The kind of division: "grid", "rows", or empty for none."""
    axes: tuple[int, ...] = ()
    """The axes that were divided."""
    index: str = ""
    """The name of the array that has the indices of rows, if they have gaps."""
    value: str | None = None
    """A value that no array holds: a text, or an integer of more than 64 bits."""
    impl: str = ""
    """The implementation of random keys."""
    weak: str = ""
    """"weak" for an array of JAX that takes the dtype of the other operand, as Python's numbers do."""

    def __str__(self) -> str:
        """Return all of it as a text, for errors, and for ranks to compare."""
        words = [f"{self.name} is {self.type}", self.dtype, str(self.shape) if self.shape else "", self.impl]
        words += [f"divided along {self.axes} ({self.division})" if self.division else "", self.index]
        return " ".join(filter(None, words)) + ("" if self.value is None else f" {self.value!r}")

    @property
    def stored(self) -> bool:
        """Whether the file has an array of this name."""
        return self.value is None

    @property
    def stored_dtype(self) -> np.dtype:
        return dtypes.stored(dtypes.named(self.dtype))

    @property
    def words(self) -> tuple[int, ...]:
        """The shape of each key's words."""
        return keys.words_of(self.impl) if self.impl else ()

    def to_json(self) -> dict[str, Any]:
        default = Record("", "")
        return {name: value for name, value in vars(self).items() if value != getattr(default, name)}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "Record":
        """Make a record. Raise ValueError for impossible content, for example a name that leads out of the folder."""
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in content.items()
        }
        record = Record(**fields)
        trees.check_name(record.name, "an array", "the file")
        if record.name != trees.plain(record.name) or record.type not in TYPES:
            raise ValueError(f"an array is called {record.name!r:.80} and is {record.type!r:.80}")
        return record


def describe(name: str, x: Any, operation: str) -> Record:
    """Return the record of a leaf that is not divided. Raise TypeError if it cannot be in a file."""
    if internals.is_tracer(x):
        raise TypeError(f"{operation}: {name} is traced: call it outside of compiled functions.")
    if isinstance(x, jax.Array) and x.is_deleted():
        raise ValueError(f"{operation}: {name} has been deleted, or donated to a compiled function.")
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{operation}: {name} is a masked array, and files have no masks: pass x.filled(...).")
    if isinstance(x, str):
        return Record(name, "str", value=str(x))
    if type(x) is int:
        fits = next((kind for kind in (np.int64, np.uint64) if np.iinfo(kind).min <= x <= np.iinfo(kind).max), None)
        return Record(name, "int", value=str(x)) if fits is None else Record(name, "int", np.dtype(fits).name)
    if type(x) in _PYTHON:
        return Record(name, type(x).__name__, np.dtype(_PYTHON[type(x)]).name)
    if isinstance(x, jax.Array) and keys.is_key(x):
        return Record(name, "key", "uint32", tuple(x.shape), impl=str(keys.impl(x.dtype)))
    if isinstance(x, jax.Array | np.ndarray | np.generic):
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            raise TypeError(
                f"{operation}: {name} is divided among the devices of several processes: pass this rank's block "
                "(Grid.from_sharded)."
            )
        try:
            dtypes.stored(x.dtype)
        except TypeError as error:
            raise TypeError(f"{operation}: {name}: {error}.") from None
        kind = "jax" if isinstance(x, jax.Array) else "numpy" if isinstance(x, np.ndarray) else "scalar"
        weak = "weak" if getattr(x, "weak_type", False) else ""
        return Record(name, kind, np.dtype(x.dtype).name, tuple(x.shape), weak=weak)
    raise TypeError(
        f"{operation}: {name} is {x!r:.60} of type {type(x).__name__}: pass arrays of JAX or NumPy, Python numbers, "
        "strings, random keys, or trees of these."
    )


def array(record: Record, x: Any) -> Any:
    """Return the leaf as an array of JAX or NumPy."""
    return native(x) if isinstance(x, jax.Array | np.ndarray) else np.asarray(x, record.dtype)


def native(x: Any) -> Any:
    """Return the leaf. Convert an array of NumPy in another byte order to the order of this machine."""
    return x.astype(x.dtype.newbyteorder("=")) if isinstance(x, np.ndarray) and not x.dtype.isnative else x


def digest(values: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data, digest_size=8).hexdigest()
