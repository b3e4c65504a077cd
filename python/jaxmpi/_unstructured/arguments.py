"""Checks of the arguments of maps. Errors name function, argument and value, and what to do."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxmpi._jax import internals
from jaxmpi._unstructured.lookup import Lookup, distinct

_SHOWN = 5
"""The number of wrong values that an error shows."""


@dataclass(frozen=True)
class Names:
    """The names of the function and the arguments with which a user makes a map, for errors."""

    operation: str = "IndexMap"
    owned: str = "owned"
    ghosts: str = "ghosts"
    unowned: str = (
        "Add it to owned on one rank, or leave it out of ghosts; all ranks of the communicator make the map together."
    )
    """The advice about ghosts that no rank owns."""


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
    """List the first of some values. `count`: how many there are in all."""
    listed = [str(value) for value in values]
    count = len(listed) if count is None else count
    shown = listed[:_SHOWN]
    others = count - len(shown)
    return ", ".join(shown) + (f" and {others} more" if others else "")


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
    if array.dtype == np.uint64 or _is_of_ints(array):
        if not (array <= np.iinfo(np.int64).max).all() or not (array >= np.iinfo(np.int64).min).all():
            raise ValueError(f"{operation}: {name} has {array.max()}, and the largest index is 2^63 - 1.")
    elif array.dtype.kind not in "iu":
        raise TypeError(f"{operation}: {name} must be integers, got dtype {array.dtype}: use {name}.astype(np.int64).")
    return array.astype(np.int64)


def _is_of_ints(array: np.ndarray) -> bool:
    """Return whether these are integers of Python that no dtype of NumPy can hold."""
    return array.dtype == object and all(type(value) is int for value in array.flat)


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
    order = np.argsort(copies, kind="stable")
    copies, of_copies = copies[order], of_copies[order]
    again = copies[1:] == copies[:-1]
    if len(differ := np.flatnonzero(again & (of_copies[1:] != of_copies[:-1]))):
        raise ValueError(
            f"{operation}: owners has two ranks for ghosts that are there twice: {some(copies[differ])}. Pass each "
            "ghost once, with the rank that owns it."
        )
    first = np.concatenate([np.ones(min(1, len(copies)), bool), ~again])
    copies, of_copies = copies[first], of_copies[first]
    is_mine = lookup.positions(copies) >= 0
    if len(wrong := copies[is_mine != (of_copies == rank)]):
        raise ValueError(
            f"{operation}: this is rank {rank}, and owners and owned disagree whether it owns {some(wrong)}."
        )
    return LocalRows(mine, lookup, copies[~is_mine], of_copies[~is_mine])
