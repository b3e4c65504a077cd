"""Redistribution: blocks of one division of a global array become blocks of another one.

Both divisions are grids over the same ranks. Each cell of the global array goes from the rank whose block contains it
now to the rank whose new block contains it. Blocks are boxes, so the cells that one rank sends to another are a box,
too. Both ranks know this box from the two divisions. A rank sends one message to each rank whose block overlaps its
own, and to no other.

A staggered field has one point more along an axis, and adjacent blocks share a point. The block behind the point sends
it, except for the last point of the axis, and each block that contains it receives it.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxmpi._grid.halos import Layout, Widths
from jaxmpi._mpi import plans
from jaxmpi._mpi.plans import Box, Move, Plan
from jaxmpi._primitive.params import Pattern

Interval = tuple[int, int]
"""Start and end of cells along one axis of the global array."""


@dataclass(frozen=True)
class Place:
    """How the arrays of a field lie."""

    axes: tuple[int, ...]
    """The axes of the source array that belong to the grids, from the end, in the order of the grids."""
    target_axes: tuple[int, ...]
    """As `axes`, of the target array: the same axes, perhaps in another order."""
    staggered: tuple[bool, ...]
    """Whether the field is staggered along each axis of the grids."""
    name: str
    """The name of the field, which the ranks compare."""

    @property
    def walk(self) -> tuple[int, ...] | None:
        """The axes of the source array in the order of the axes of the target array, the last ones. None: the same."""
        if self.axes == self.target_axes:
            return None
        at = dict(zip(self.target_axes, self.axes, strict=True))
        return tuple(at.get(axis, axis) for axis in range(min(self.axes), 0))


@dataclass(frozen=True)
class Division:
    """A layout of blocks, and the halos around them in the arrays."""

    layout: Layout
    widths: Widths

    def owned(self, axis: int, staggered: bool) -> list[Interval]:
        """Return the cells along an axis that each process along it sends."""
        *others, (start, end) = self.layout.intervals(axis)
        return [*others, (start, end + staggered)]

    def contained(self, axis: int, staggered: bool) -> list[Interval]:
        """Return the cells along an axis in the block of each process along it."""
        return [(start, end + staggered) for start, end in self.layout.intervals(axis)]

    def shape(self, rank: int, shape: Sequence[int], axes: Sequence[int], staggered: Sequence[bool]) -> tuple[int, ...]:
        """Return the shape of a rank's array, whose `axes` are those of the grid, from the shape of any array with the
        same other axes."""
        sizes = list(shape)
        for axis, extra, size, pair in zip(axes, staggered, self.layout.block(rank), self.widths, strict=True):
            sizes[axis] = size + extra + sum(pair)
        return tuple(sizes)


@dataclass(frozen=True)
class Redistribution(Pattern):
    """The pattern of a redistribution on one rank."""

    rank: int
    source: Division
    target: Division

    def behind(self, place: Place, axes: int) -> Place:
        shifted = [tuple(axis - axes for axis in chosen) for chosen in (place.axes, place.target_axes)]
        return dataclasses.replace(place, axes=shifted[0], target_axes=shifted[1])

    def batch(self, adjoint: bool) -> tuple[int, int]:
        return 0, 0

    def results(self, avals: Sequence[Any], per_array: tuple[Place, ...], adjoint: bool) -> list[Any]:
        return [
            jax.ShapeDtypeStruct(self.shapes(x.shape, place)[not adjoint], x.dtype)
            for x, place in zip(avals, per_array, strict=True)
        ]

    def shapes(self, shape: Sequence[int], place: Place) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of the source array and of the target array, from the shape of either."""
        source = self.source.shape(self.rank, shape, place.axes, place.staggered)
        return source, self.target.shape(self.rank, shape, place.target_axes, place.staggered)

    def plan(self, rank: int, avals: tuple[Any, ...], per_array: tuple[Place, ...], adjoint: bool) -> Plan:
        return _plan(self, avals, per_array, adjoint)


def best_division(shape: Sequence[int], processes: Sequence[int], whole: int) -> tuple[int, ...]:
    """Return numbers of processes, one along the axis `whole`, by the rule of `Grid.pencil`."""

    def cost(dims: Sequence[int]) -> tuple[int, int, int, int, tuple[int, ...]]:
        largest = math.prod(-(-size // number) for size, number in zip(shape, dims, strict=True))
        messages = math.prod(-(-new // old) for new, old in zip(dims, processes, strict=True))
        changed = sum(new != old for new, old in zip(dims, processes, strict=True))
        # Of several, take the one that cuts the last axis least, because rows along it are contiguous in memory.
        return largest, messages, changed, max(dims), tuple(dims[::-1])

    return min(_factorizations(math.prod(processes), len(shape), whole), key=cost)


def _factorizations(number: int, axes: int, whole: int) -> Iterator[tuple[int, ...]]:
    """Yield all numbers of processes along the axes whose product is `number`, with one along the axis `whole`."""
    if axes == 0:
        if number == 1:
            yield ()
        return
    for first in [1] if whole == 0 else [n for n in range(1, number + 1) if number % n == 0]:
        for rest in _factorizations(number // first, axes - 1, whole - 1):
            yield (first, *rest)


def _overlaps(mine: Interval, theirs: Sequence[Interval]) -> list[tuple[int, Interval]]:
    """Return the intervals that overlap this one: the number of each, and the common cells."""
    common = ((at, (max(mine[0], start), min(mine[1], end))) for at, (start, end) in enumerate(theirs))
    return [(at, (start, end)) for at, (start, end) in common if start < end]


def _boxes(
    here: Sequence[Interval], there: Sequence[Sequence[Interval]], layout: Layout
) -> Iterator[tuple[int, tuple[Interval, ...]]]:
    """Yield the ranks of a layout whose boxes overlap the box `here`, and the common cells. `there`: the intervals of
    the layout along each axis."""
    for chosen in itertools.product(*map(_overlaps, here, there)):
        yield layout.rank([at for at, _ in chosen]), tuple(common for _, common in chosen)


def _box(
    cells: Sequence[Interval],
    division: Division,
    rank: int,
    shape: Sequence[int],
    axes: Sequence[int],
    walk: tuple[int, ...] | None = None,
) -> Box:
    """Return the box of cells of the global array in the array of a rank."""
    starts, counts = [0] * len(shape), list(shape)
    at = division.layout.coordinates(rank)
    for axis, (place, (start, end)) in enumerate(zip(axes, cells, strict=True)):
        origin = division.layout.intervals(axis)[at[axis]][0]
        starts[place], counts[place] = start - origin + division.widths[axis][0], end - start
    return Box(tuple(starts), tuple(counts), (1,) * len(shape), walk=walk)


@plans.cached
def _plan(pattern: Redistribution, avals: tuple[Any, ...], per_array: tuple[Place, ...], adjoint: bool) -> Plan:
    rank, source, target = pattern.rank, pattern.source, pattern.target
    moves: list[Move] = []
    facts = []
    for leaf, (aval, place) in enumerate(zip(avals, per_array, strict=True)):
        axes, target_axes, staggered = place.axes, place.target_axes, place.staggered
        owned = [source.owned(axis, extra) for axis, extra in enumerate(staggered)]
        wanted = [target.contained(axis, extra) for axis, extra in enumerate(staggered)]
        # The arrays of other ranks have other shapes, but a move uses only the shape of this rank.
        shapes = pattern.shapes(aval.shape, place)
        of_source = [owned[i][at] for i, at in enumerate(source.layout.coordinates(rank))]
        of_target = [wanted[i][at] for i, at in enumerate(target.layout.coordinates(rank))]
        for other, cells in _boxes(of_source, wanted, target.layout):
            read = _box(cells, source, rank, shapes[0], axes, place.walk)
            written = _box(cells, target, rank, shapes[1], target_axes) if other == rank else read
            moves.append(Move((0,), leaf, rank, read, other, written))
        for other, cells in _boxes(of_target, owned, source.layout):
            if other != rank:
                written = _box(cells, target, rank, shapes[1], target_axes)
                moves.append(Move((0,), leaf, other, written, rank, written))
        rest = tuple(size for i, size in enumerate(aval.shape) if i - len(aval.shape) not in axes)
        places = [tuple(axis % len(aval.shape) for axis in chosen) for chosen in (axes, target_axes)]
        facts.append((*places, rest, staggered, np.dtype(aval.dtype).name, place.name))
    adds = adjoint and any(any(place.staggered) for place in per_array)
    if adjoint:
        moves = [move.reverse() for move in moves]
    divisions = [(division.layout.blocks, division.widths) for division in (source, target)]
    return plans.make(
        rank,
        avals,
        moves,
        results=pattern.results(avals, per_array, adjoint),
        combines="SUM" if adds else None,
        zeroed=True,
        signature=plans.signature("redistribute", divisions, facts, adjoint),
    )
