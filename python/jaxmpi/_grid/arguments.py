"""Checks of the arguments of grids, before anything is sent. Errors name function, argument, value and what to do."""

import itertools
import math
import numbers
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from jaxmpi._grid.halos import RULES, Number, Rule, Rules, Widths
from jaxmpi._jax import internals
from jaxmpi._primitive import arguments, keys

_MOST_AXES = 6
"""The largest number of axes of a grid. With n axes a halo has up to 3^n regions."""


def check_numbers(x: Any, operation: str, name: str, rules: Rules) -> None:
    """Raise ValueError for a boundary that the field's dtype cannot hold."""
    for rule in itertools.chain(*rules):
        if isinstance(rule, Number) and not _holds(x, rule.value):
            raise ValueError(f"{operation}: boundary is {rule.text}, which {name} of {x.dtype} cannot hold.")


def _holds(x: Any, value: Any) -> bool:
    if keys.is_key(x):
        return False
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the code below reports the problem
        number = np.asarray(value)
        held = number.astype(x.dtype).astype(number.dtype)
    if jnp.issubdtype(x.dtype, jnp.complexfloating) or (internals.inexact(x) and number.dtype.kind != "c"):
        return bool(np.isfinite(held) or not np.isfinite(number))
    return bool(held == number)


def reach(rule: Any, width: int) -> int:
    """Return how many cells of a block are copied into its halo at a wall."""
    if width == 0 or rule not in RULES:
        return 0
    return {"edge": 1, "symmetric": width, "reflect": width + 1}[rule]


def is_listed(values: Any) -> bool:
    """Return whether it is a sequence of values, and not a single one."""
    return isinstance(values, list | tuple | range) or (isinstance(values, np.ndarray) and values.ndim > 0)


def integers(values: Any, function: str, what: str) -> list[int]:
    if isinstance(values, MPI.Comm):
        raise TypeError(f"{function}: {what} must be integers, got {values!r}: pass a communicator as comm=.")
    return [arguments.integer(value, function, what) for value in (values if is_listed(values) else [values])]


def axis(value: Any, dimensions: int, function: str) -> int:
    """Return an axis of a grid, counted from the front."""
    position = _index(value, function, "axis")
    if not -dimensions <= position < dimensions:
        raise ValueError(f"{function}: there is no axis {position} in a grid of {dimensions}.")
    return position % dimensions


def axes(values: Any, function: str, what: str = "axes") -> list[int]:
    if not is_listed(values) and not isinstance(values, int | np.integer):
        raise TypeError(f"{function}: {what} must be a tuple or list of integers, got {values!r:.60}.")
    return [_index(value, function, what) for value in (values if is_listed(values) else [values])]


def indices(values: Any, dimensions: int, function: str) -> dict[int, int]:
    """Return the index of a cell along some axes of a grid, which are counted from the front."""
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise TypeError(
            f"{function}: index is {values!r:.60}: pass a dict with a global index for some axes of the grid, such as "
            "{0: 10}."
        )
    positions = {axis(key, dimensions, function): _index(value, function, "index") for key, value in values.items()}
    if len(positions) < len(values):
        raise ValueError(f"{function}: index is {values!r:.60}: an axis is named twice.")
    return positions


def _index(value: Any, function: str, what: str) -> int:
    """Return an integer that is a position. Refuse a truth value."""
    if isinstance(value, bool):
        raise TypeError(f"{function}: {what} must be a Python or NumPy integer, got {value} of type bool.")
    return arguments.integer(value, function, what)


def fill_in(processes: list[int], size: int) -> tuple[int, ...]:
    """Return the numbers of processes along the axes, with numbers in the place of zeros."""
    if len(processes) > _MOST_AXES:
        raise ValueError(f"Grid: {len(processes)} axes; more than {_MOST_AXES} are not possible.")
    fixed = math.prod(number for number in processes if number)
    if not processes or min(processes) < 0 or size % fixed or (0 not in processes and fixed != size):
        raise ValueError(
            f"Grid: {tuple(processes)} processes, and the communicator has {size} ranks: their product must be that "
            "number. For 0 along an axis a number is chosen: jaxmpi.Grid((0, 0))."
        )
    return tuple(MPI.Compute_dims(size, processes))


def blocks(shape: Any, dims: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the cells of each process along each axis."""
    if shape is None:
        return tuple((0,) * number for number in dims)
    sizes = list(shape) if is_listed(shape) else [shape]
    if len(sizes) != len(dims):
        raise ValueError(f"Grid: shape is {shape}: the grid has {len(dims)} axes, pass a size for each of them.")
    blocks = []
    for size, number in zip(sizes, dims, strict=True):
        if is_listed(size):
            parts = tuple(integers(size, "Grid", "shape"))
            if len(parts) != number:
                raise ValueError(f"Grid: {len(parts)} blocks {parts} along an axis of {number} processes.")
        else:
            whole = arguments.integer(size, "Grid", "shape")
            parts = tuple(whole // number + (i < whole % number) for i in range(number))
        if min(parts) < 0:
            raise ValueError(f"Grid: shape is {shape}: no size may be negative.")
        blocks.append(parts)
    return tuple(blocks)


def truth(value: Any, operation: str, name: str) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{operation}: {name} must be True or False, and not traced, got {value!r}.")
    return bool(value)


def truths(values: Any, dimensions: int) -> tuple[bool, ...]:
    listed = list(values) if is_listed(values) else [values] * dimensions
    if len(listed) != dimensions or not all(isinstance(value, bool | np.bool_) or value in (0, 1) for value in listed):
        raise ValueError(f"Grid: periodic is {values!r}: pass True or False, or one of them for each axis of the grid.")
    return tuple(map(bool, listed))


def is_of_all(boundary: Any) -> bool:
    """Return whether it is one rule, or rules of axes and sides, and not a tree with a boundary for each field."""
    if isinstance(boundary, list | tuple):
        return not hasattr(boundary, "_fields")
    return boundary is None or jax.tree_util.all_leaves([boundary])


def widths(width: Any, dimensions: int, function: str, what: str = "width") -> Widths:
    listed = list(width) if is_listed(width) else [width] * dimensions
    if len(listed) != dimensions:
        raise ValueError(
            f"{function}: {what} is {width}: the grid has {dimensions} axes, pass one number or one for each."
        )
    widths = []
    for entry in listed:
        pair = integers(entry, function, what)
        pair = pair * 2 if not is_listed(entry) else pair
        if len(pair) != 2 or min(pair) < 0:
            raise ValueError(
                f"{function}: {what} is {width}: pass for each axis a number of cells (0 or more), or (before, behind)."
            )
        widths.append((pair[0], pair[1]))
    return tuple(widths)


def rules(boundary: Any, dimensions: int, function: str) -> Rules:
    listed = list(boundary) if isinstance(boundary, list | tuple) else [boundary] * dimensions
    if len(listed) != dimensions:
        raise ValueError(f"{function}: boundary is {boundary!r}: pass one rule, or one for each of {dimensions} axes.")
    rules = []
    for entry in listed:
        pair = list(entry) if isinstance(entry, list | tuple) else [entry, entry]
        if len(pair) != 2:
            raise ValueError(f"{function}: boundary is {boundary!r}: for each axis a rule, or a pair (before, behind).")
        rules.append((rule(pair[0], function), rule(pair[1], function)))
    return tuple(rules)


def rule(value: Any, function: str) -> Rule:
    if internals.is_tracer(value):
        raise TypeError(f"{function}: boundary is traced: it must be known while tracing, like a shape.")
    if value is None or (isinstance(value, str) and value in RULES):
        return value
    if isinstance(value, numbers.Number | np.generic) or (hasattr(value, "shape") and value.shape == ()):
        number = np.asarray(value)
        if number.dtype.kind in "biufc":
            return Number(repr(number.item()), number.item())
        if jnp.issubdtype(number.dtype, jnp.floating):  # a dtype of ml_dtypes
            return Number(repr(float(number)), float(number))
    raise ValueError(
        f"{function}: boundary has the rule {value!r}: possible are None, a number, {', '.join(map(repr, RULES))}."
    )
