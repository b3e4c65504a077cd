"""The dtypes in files. Zarr's dtypes hold the values of all others exactly, and their bits can be restored.

Other programs do not know some dtypes, for example bfloat16 or int4. Values of these are stored in the smallest dtype
of NumPy that has all of them. So other programs read right numbers. The name of the dtype, which is stored with the
values, is enough to restore each bit.
"""

import functools
import sys
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

_PLAIN = {
    *("bool", "float16", "float32", "float64", "complex64", "complex128"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
}
"""The dtypes that Zarr has."""
_WIDER = {
    **dict.fromkeys(("bfloat16", "float8_e8m0fnu"), "float32"),
    **dict.fromkeys(("int1", "int2", "int4"), "int8"),
    **dict.fromkeys(("uint1", "uint2", "uint4"), "uint8"),
}
"""The stored dtype of each dtype that Zarr lacks. Other floating-point numbers of one byte fit in float16."""


def named(name: str) -> np.dtype:
    """Return the dtype of a name. Raise TypeError for an unknown name."""
    return np.dtype(getattr(ml_dtypes, name, name))


def in_files(dtype: np.dtype) -> np.dtype:
    """Return the dtype in the byte order of files. On most machines it is the usual object."""
    return dtype if sys.byteorder == "little" else dtype.newbyteorder("<")


def stored(dtype: Any) -> np.dtype:
    """Return the dtype in which values are stored. Raise TypeError if no dtype holds them all."""
    kind = np.dtype(dtype)
    if kind.name in _PLAIN:
        return in_files(np.dtype(kind.name))
    if kind.name in _WIDER:
        return np.dtype(_WIDER[kind.name])
    if kind.itemsize == 1 and _is_floating(kind):
        return np.dtype(np.float16)
    raise TypeError(f"dtype {kind} cannot be stored: pass numbers or truth values")


def encode(values: np.ndarray) -> np.ndarray:
    """Return the values in the stored dtype. Return the array itself if it already has this dtype."""
    there = stored(values.dtype)
    if values.dtype.name == "bfloat16":  # the bits of bfloat16 are the upper half of the bits of float32
        return np.asarray(values.view(np.uint16).astype(np.uint32) << 16).view(there)
    if _is_floating(values.dtype) and values.dtype.itemsize == 1:
        return np.asarray(_table(values.dtype.name)[values.view(np.uint8)])
    return values.astype(there, copy=False)


def decode(values: np.ndarray, name: str) -> np.ndarray:
    dtype = named(name)
    if name == "bfloat16":
        return np.asarray(np.asarray(values, order="C").view(np.uint32) >> 16).astype(np.uint16).view(dtype)
    if dtype.itemsize == 1 and _is_floating(dtype):
        with np.errstate(all="ignore"):
            converted = values.astype(dtype)
        _, payload = _of_nan(values)
        return np.where(np.isnan(values), payload.astype(np.uint8), converted.view(np.uint8)).view(dtype)
    return values.astype(dtype, copy=False)


def _is_floating(dtype: np.dtype) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


@functools.cache
def _table(name: str) -> np.ndarray:
    """Return the stored value of each byte. A NaN has the byte in its last bits."""
    every = np.arange(256, dtype=np.uint8)
    values = every.view(named(name)).astype(stored(named(name)))
    quiet, _ = _of_nan(values)
    bits = np.dtype(f"u{values.itemsize}")
    return np.where(np.isnan(values), quiet | every.astype(bits), values.view(bits)).view(values.dtype)


def _of_nan(values: np.ndarray) -> tuple[int, np.ndarray]:
    """Return the bits of a NaN, and the last bits of all values."""
    bits = np.dtype(f"u{values.itemsize}")
    quiet = int(np.array(np.nan, values.dtype).view(bits))
    return quiet, np.asarray(values, order="C").view(bits) & 0xFF  # np.ascontiguousarray adds an axis to a scalar
