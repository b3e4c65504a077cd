"""Checks of the arguments of maps. Errors name function, argument and value, and what to do."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxmpi._jax import internals
from jaxmpi._unstructured.lookup import Lookup, distinct


@dataclass(frozen=True)
class Names:
    """The names of the function and the arguments with which a user makes a map, for errors."""

    operation: str = "IndexMap"
    owned: str = "owned"
    ghosts: str = "ghosts"
    unowned: str = (
        "Add it to owned on one rank, or leave it out of ghosts; all ranks of the communicator make the map together."
    )


@dataclass(frozen=True, eq=False)
class LocalRows:
    """The rows that a rank owns and the rows of which it has copies, as the user passes them."""

    owned: np.ndarray
    lookup: Lookup
    """The positions of rows in `owned`."""
    ghosts: np.ndarray
    """The copies in ascending order, each once, without rows that this rank owns."""
    owners: np.ndarray | None
    """The rank that owns each ghost, if the user has passed it."""


def some(values: Iterable[Any], count: int | None = None) -> str:
    """List the first five of some values. `count`: how many there are in all."""
    listed = [str(value) for value in values]
    others = (len(listed) if count is None else count) - len(listed[:5])
    return ", ".join(listed[:5]) + (f" and {others} more" if others else "")


def integers(values: Any, operation: str, name: str, any_shape: bool = False) -> np.ndarray:
    """Return an array of integers, as int64, with one dimension unless it may have any shape.

    Raise TypeError for traced values or no integers, ValueError for values beyond int64 and for another shape.
    """
    if internals.is_tracer(values):
        raise TypeError(
            f"{operation}: {name} is traced: indices must be known while tracing, like a shape. Pass a NumPy array, "
            "and call this outside of compiled functions."
        )
    if isinstance(values, np.ma.MaskedArray):
        raise TypeError(f"{operation}: {name} is a masked array: pass {name}.compressed(), which drops masked entries.")
    array = values if isinstance(values, np.ndarray) else np.asarray(values)
    if array.dtype == object and array.ndim == 0 and not isinstance(values, (int, np.ndarray)):
        advice = "an empty array if there are none" if values is None else f"for example sorted({name})"
        raise TypeError(
            f"{operation}: {name} is {'None' if values is None else f'a {type(values).__name__}'}: pass an array or a "
            f"list of integers, {advice}."
        )
    if array.ndim != 1 and not any_shape:
        raise ValueError(
            f"{operation}: {name} has shape {array.shape}: pass one dimension, for example np.ravel({name})."
        )
    if array.size == 0:  # NumPy's empty arrays are floating
        return np.zeros(array.shape, np.int64)
    is_of_ints = array.dtype == object and all(type(value) is int for value in array.flat)  # too large for a dtype
    if array.dtype == np.uint64 or is_of_ints:
        if not (array <= np.iinfo(np.int64).max).all() or not (array >= np.iinfo(np.int64).min).all():
            raise ValueError(f"{operation}: {name} has {array.max()}, and the largest index is 2^63 - 1.")
    elif array.dtype.kind not in "iu":
        raise TypeError(f"{operation}: {name} must be integers, got dtype {array.dtype}: use {name}.astype(np.int64).")
    return array.astype(np.int64)


def indices(values: Any, operation: str, name: str, any_shape: bool = False) -> np.ndarray:
    """Return global indices. Raise TypeError and ValueError like `integers`, and ValueError for negative ones."""
    array = integers(values, operation, name, any_shape)
    if array.size and array.min() < 0:
        raise ValueError(
            f"{operation}: {name} has negative indices: {some(array[array < 0])}. Global indices begin with 0; leave "
            "out numbers that stand for no row."
        )
    return array


def ranks(values: Any, operation: str, name: str, size: int) -> np.ndarray:
    array = integers(values, operation, name)
    wrong = array[(array < 0) | (array >= size)]
    if len(wrong):
        raise ValueError(f"{operation}: {name} has {some(wrong)}, and the ranks are 0 to {size - 1}.")
    return array


def rows(owned: Any, ghosts: Any, owners: Any, names: Names, rank: int, size: int) -> LocalRows:
    """Check the arguments of a map and return them. Raise TypeError or ValueError."""
    operation = names.operation
    mine = indices(owned, operation, names.owned)
    lookup = Lookup.from_list(mine)
    if len(repeated := lookup.repeated()):
        raise ValueError(
            f"{operation}: {names.owned} has indices twice: {some(distinct(lookup.values[repeated]))}. Each row is "
            f"owned once: np.unique({names.owned}) removes repeated indices."
        )
    copies = indices(ghosts, operation, names.ghosts)
    if owners is None:
        if lookup.consecutive:  # it is cheaper to leave out owned rows first, for example most columns of a matrix
            copies = copies[lookup.positions(copies) < 0]
        copies = distinct(copies)
        return LocalRows(mine, lookup, copies[lookup.positions(copies) < 0], None)
    of_copies = ranks(owners, operation, "owners", size)
    if len(of_copies) != len(copies):
        raise ValueError(
            f"{operation}: {len(copies)} ghosts and {len(of_copies)} owners: pass the owner of each, or no owners."
        )
    listed = copies
    copies, first, which = np.unique(listed, return_index=True, return_inverse=True)
    if len(differ := listed[of_copies != of_copies[first][which]]):
        raise ValueError(
            f"{operation}: owners has two ranks for ghosts that are there twice: {some(distinct(differ))}. Pass each "
            "ghost once, with the rank that owns it."
        )
    of_copies = of_copies[first]
    is_mine = lookup.positions(copies) >= 0
    if len(wrong := copies[is_mine != (of_copies == rank)]):
        raise ValueError(
            f"{operation}: this is rank {rank}, and owners and owned disagree whether it owns {some(wrong)}."
        )
    return LocalRows(mine, lookup, copies[~is_mine], of_copies[~is_mine])


def csr(indptr: Any, entries: Any, rows: Any, operation: str) -> tuple[int, np.ndarray, np.ndarray | None]:
    """Return the number of rows of a block of a matrix, the columns, and the rows if the user has passed them.

    Raise TypeError or ValueError.
    """
    starts = integers(indptr, operation, "indptr")
    columns = indices(entries, operation, "indices")
    if len(starts) == 0 or starts[0] != 0 or starts[-1] != len(columns) or (starts[1:] < starts[:-1]).any():
        raise ValueError(
            f"{operation}: indptr must rise from 0 to the number of indices, {len(columns)}, and have one number more "
            f"than this rank has rows; got {len(starts)} numbers: {some(starts)}. If A has all rows, pass the arrays "
            "of A[first:end]."
        )
    owned = None if rows is None else indices(rows, operation, "rows")
    if owned is not None and len(owned) != len(starts) - 1:
        raise ValueError(
            f"{operation}: {len(owned)} rows, and indptr is of {len(starts) - 1}: pass the global index of each row of "
            "this rank."
        )
    return len(starts) - 1, columns, owned


def edges(senders: Any, receivers: Any, owner: Any, operation: str, rank: int, size: int) -> Any:
    """Return the edges of a rank: their positions in the arguments, their senders and receivers, and the owner of each
    vertex.

    Raise TypeError or ValueError.
    """
    owners = ranks(owner, operation, "owner", size)
    ends = []
    for name, values in (("senders", senders), ("receivers", receivers)):
        vertices = indices(values, operation, name)
        if len(beyond := vertices[vertices >= len(owners)]):
            raise ValueError(
                f"{operation}: {name} has {some(beyond)}, and owner is of {len(owners)} vertices: pass the rank of "
                "each vertex of the whole graph."
            )
        ends.append(vertices)
    if len(ends[0]) != len(ends[1]):
        raise ValueError(f"{operation}: {len(ends[0])} senders and {len(ends[1])} receivers: an edge has one of each.")
    kept = np.flatnonzero(owners[ends[1]] == rank)
    return kept, ends[0][kept], ends[1][kept], owners
