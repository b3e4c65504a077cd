"""Arrays that are divided among the ranks along their first axis, by counts of rows: checks of arguments.

Counts are known while tracing, as integers for all ranks, or at run time, as arrays. At run time the ranks exchange
their counts first. A rank whose counts are impossible sends a negative number instead. So all ranks make the same MPI
calls, and each rank concerned raises (`struct parts` in csrc/mpi/by_counts.c).
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi._mpi.library import CONSTANTS
from jaxmpi._primitive import arguments

IMPOSSIBLE: int = CONSTANTS["IMPOSSIBLE_COUNT"]
NO_SUCH_RANK: int = CONSTANTS["NO_SUCH_RANK"]
"""The number that a rank sends in the place of counts whose rows cannot be sent."""
OTHER_ARRAYS: int = CONSTANTS["OTHER_ARRAYS"]
"""The number in the place of the counts of a rank with other arrays."""
MOST = 2**31 - 1
"""Rows of an array, which MPI counts by an int."""


def of_all(counts: Any, size: int, operation: str, argument: str) -> tuple[int, ...] | None:
    """Return a count for each rank, known while tracing; None for counts that are known at run time."""
    if counts is None or isinstance(counts, jax.Array) or _is_scalar(counts):
        return None
    try:
        known = tuple(map(operator.index, counts))
    except TypeError:
        raise TypeError(
            f"{operation}: {argument} must be a sequence of integers, one for each rank, got {counts!r}. Counts that "
            "are known at run time are JAX arrays of integers."
        ) from None
    if len(known) != size:
        raise ValueError(
            f"{operation}: {argument} must have a count of rows for each of the {size} ranks, got {len(known)}."
        )
    if min(known) < 0 or sum(known) > MOST:
        raise ValueError(f"{operation}: {argument} must not be negative, nor more than {MOST} in all; got {counts!r}.")
    return known


def _is_scalar(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim == 0
    return not hasattr(value, "__len__")


@functools.lru_cache(maxsize=1024)
def operand(counts: tuple[int, ...]) -> np.ndarray:
    """Count as the core reads them."""
    return np.asarray(counts, np.int32)


def rows_of(leaves: Sequence[Any], names: Sequence[str], operation: str) -> int:
    """Return the length of the first axis, which all leaves have in common."""
    for leaf, name in zip(leaves, names, strict=True):
        if leaf.ndim == 0:
            raise ValueError(
                f"{operation}: {name} is a scalar, and the first axis is what is divided among the ranks. Reshape it."
            )
        if leaf.shape[0] != leaves[0].shape[0]:
            raise ValueError(
                f"{operation}: {name} has {leaf.shape[0]} rows and {names[0]} {leaves[0].shape[0]}: the counts are of "
                "the first axis of each array, so these must be as long. Make a call for each array."
            )
    return leaves[0].shape[0] if leaves else 0


def most(leaves: Sequence[Any], rows: int) -> int:
    """Return how many rows may be counted: any number if there is no array."""
    return rows if leaves else MOST


def match(have: int, expected: int, what: str, operation: str, names: Sequence[str]) -> None:
    """Raise ValueError if the number of rows of an array differs from the counts."""
    if names and have != expected:
        raise ValueError(f"{operation}: {names[0]} has {have} rows, and {what} {expected}.")


def room(rows: Any, default: int | None, operation: str) -> int:
    """Return the rows of a result whose counts are known at run time."""
    if rows is None:
        if default is None:
            raise ValueError(f"{operation}: pass rows=, for how many rows the result has room.")
        rows = default
    rows = arguments.integer(rows, operation, "rows")
    if not 0 <= rows <= MOST:
        raise ValueError(f"{operation}: rows must be between 0 and {MOST}; got {rows}.")
    return rows


def no_room(rows: Any, operation: str) -> None:
    """Raise ValueError for an argument without meaning where counts are known while tracing."""
    if rows is not None:
        raise ValueError(f"{operation}: rows= is for counts that are JAX arrays; here the counts say it. Leave it out.")


def numbers(counts: Any, shape: tuple[int, ...], operation: str, argument: str) -> jax.Array:
    """Return counts that are known at run time as an array of that shape."""
    if not isinstance(counts, jax.Array):
        if shape:
            raise TypeError(f"{operation}: {argument} must be an array of integers of shape {shape}, got {counts!r}.")
        counts = arguments.integer(counts, operation, argument)
    counts = jnp.asarray(counts)
    if not jnp.issubdtype(counts.dtype, jnp.integer):
        raise TypeError(f"{operation}: {argument} must be integers, got dtype {counts.dtype}.")
    if counts.shape != shape:
        wanted = f"of shape {shape}, a count for each rank" if shape else "a scalar, the count of this rank"
        known = "" if shape else " Counts of all ranks, known while tracing, are a sequence or a NumPy array."
        raise ValueError(f"{operation}: {argument} must be {wanted}; got shape {counts.shape}.{known}")
    return counts


def possible(counts: jax.Array, rows: int) -> jax.Array:
    """Return the counts as the core reads them; IMPOSSIBLE if one of them is negative or the sum exceeds `rows`."""
    if counts.dtype.itemsize < 4:
        counts = counts.astype(jnp.int32)
    each = jnp.all((counts >= 0) & (counts <= rows))
    narrow = counts.astype(jnp.int32)
    total = jnp.sum(narrow, dtype=jnp.int32)  # it may wrap, and then differs from the sum in floating point
    fits = (total >= 0) & (total <= rows) & (jnp.sum(narrow.astype(jnp.float32)) < 2.0**32 - 2.0**30)
    return jnp.where(each & fits, narrow, IMPOSSIBLE)
