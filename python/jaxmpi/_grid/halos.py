"""Halos: the origin of the cells around a block.

A field on a grid of processes is one global array. Each process holds a block of it and, around the block, the halo:
copies of cells of the neighbours. Along an axis, `low` cells of the halo lie before the block and `high` behind it. At
a wall, where the grid ends, the halo holds copies of the process's own cells. Halos of other processes copy them, too.

The halo consists of regions, one for each direction: a number -1, 0 or 1 for each axis, not all of them 0. Each region
is a copy of a region of one process. The origin of a cell is computed for each axis alone:

    in direction 0       over the block, from index `low` on, and over the halo at a wall that has no rule.
    -1, a neighbour      over its last `low` cells. A staggered field shares the last point with this process.
    +1, a neighbour      over its first `high` cells, also without the shared point.
    a wall with a rule   edge: the last cell before the wall; symmetric: the cells before the wall, backwards; reflect:
                         the same without the last one; a number: not copied but filled

So no region depends on another, and all are exchanged at once. These are the rules of numpy.pad, applied to the global
array axis by axis.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxmpi._mpi import plans
from jaxmpi._mpi.plans import Box, Fill, Move, Plan
from jaxmpi._primitive.params import Pattern

Widths = tuple[tuple[int, int], ...]
"""The widths of a halo along each axis of the grid: before the block and behind it."""

RULES = ("edge", "reflect", "symmetric")


@dataclass(frozen=True)
class Number:
    """A number as a rule. Numbers are equal if their texts are equal: so NaN equals itself, and 0.0 is not -0.0."""

    text: str
    value: Any = dataclasses.field(compare=False)


Rule = str | Number | None
"""The filling of the halo at a wall: a number, one of RULES, or nothing."""


@dataclass(frozen=True)
class Layout:
    """A grid of processes, in which the last axis varies fastest, and the cells of each along each axis."""

    blocks: tuple[tuple[int, ...], ...]
    periodic: tuple[bool, ...]

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(map(len, self.blocks))

    def coordinates(self, rank: int) -> tuple[int, ...]:
        return tuple(map(int, np.unravel_index(rank, self.dims)))

    def rank(self, coordinates: Sequence[int]) -> int:
        return int(np.ravel_multi_index(tuple(coordinates), self.dims))

    def intervals(self, axis: int) -> list[tuple[int, int]]:
        """Return start and end of the blocks along an axis, in the global array."""
        return list(itertools.pairwise(itertools.accumulate(self.blocks[axis], initial=0)))

    def block(self, rank: int) -> tuple[int, ...]:
        """Return the cells of a process along each axis."""
        return tuple(sizes[at] for sizes, at in zip(self.blocks, self.coordinates(rank), strict=True))

    def is_wall(self, axis: int, at: int, side: int) -> bool:
        return not self.periodic[axis] and not 0 <= at + side < len(self.blocks[axis])

    def neighbor(self, rank: int, direction: Sequence[int]) -> int:
        """Return the process in a direction. Along an axis with a wall there, it is the same."""
        there = list(self.coordinates(rank))
        for axis, side in enumerate(direction):
            if not self.is_wall(axis, there[axis], side):
                there[axis] = (there[axis] + side) % len(self.blocks[axis])
        return self.rank(there)


Rules = tuple[tuple[Rule, Rule], ...]
"""The rules of a field along each axis of the grid: before the blocks and behind them."""
Spec = tuple[tuple[int, ...], Rules, str]
"""The axes of a field that belong to the grid, from the end, in its order; the field's rules; the field's name."""


def _linear(rule: Rule) -> Rule:
    return Number("0", 0) if isinstance(rule, Number) else rule


@dataclass(frozen=True)
class Halo(Pattern):
    """The pattern of an exchange, which is the same on all ranks."""

    layout: Layout
    widths: Widths
    corners: bool

    aliases = True

    def plan(self, rank: int, avals: tuple[Any, ...], per_array: tuple[Spec, ...], adjoint: bool) -> Plan:
        return _plan(self, rank, avals, per_array, adjoint)

    def results(self, avals: Sequence[Any], per_array: Any, adjoint: bool) -> Sequence[Any]:
        return avals

    def batch(self, adjoint: bool) -> tuple[int, int]:
        return 0, 0

    def behind(self, place: Spec, axes: int) -> Spec:
        chosen, rules, name = place
        return tuple(axis - axes for axis in chosen), rules, name

    def linear(self, per_array: Sequence[Spec]) -> tuple[Spec, ...]:
        """Return the specs of the fields for the linear part of an exchange: with zero in the place of numbers."""
        return tuple(
            (axes, tuple((_linear(low), _linear(high)) for low, high in rules), name) for axes, rules, name in per_array
        )

    def directions(self) -> Iterator[tuple[int, ...]]:
        for direction in itertools.product((-1, 0, 1), repeat=len(self.widths)):
            if any(direction) and (self.corners or sum(map(abs, direction)) == 1):
                yield direction


@dataclass(frozen=True)
class Field:
    """A field, the same on all ranks. It has the axes that belong to the grid, in the grid's order, and the sizes of
    the others. `staggered`: along which axes of the grid it is longer by one. Then dtype, rules at walls, and name."""

    axes: tuple[int, ...]
    others: tuple[int, ...]
    staggered: tuple[bool, ...]
    dtype: Any
    rules: Rules
    name: str = ""

    def shape(self, halo: Halo, rank: int) -> list[int]:
        """Return the shape of a rank's block with its halo."""
        sizes = list(self.others)
        block = halo.layout.block(rank)
        for axis in sorted(self.axes):
            at = self.axes.index(axis)
            sizes.insert(axis, block[at] + self.staggered[at] + sum(halo.widths[at]))
        return sizes


def describe(halo: Halo, rank: int, aval: Any, place: Spec) -> Field:
    """Return a field from its shape on this rank, which has been checked."""
    axes, rules, name = place
    positions = tuple(axis % len(aval.shape) for axis in axes)
    others = tuple(size for axis, size in enumerate(aval.shape) if axis not in positions)
    block = halo.layout.block(rank)
    staggered = tuple(aval.shape[axis] - sum(halo.widths[at]) - block[at] == 1 for at, axis in enumerate(positions))
    return Field(positions, others, staggered, np.dtype(aval.dtype), rules, name)


def _is_left(halo: Halo, field: Field, axis: int, at: int, side: int) -> bool:
    """Return whether there is a wall at which the halo stays as it is."""
    return halo.layout.is_wall(axis, at, side) and field.rules[axis][side > 0] is None


def _along(halo: Halo, field: Field, axis: int, at: int, side: int, sizes: tuple[int, int]) -> tuple[Any, Any]:
    """Return the extent of a region along one axis, for the process with coordinate `at` there: (start, count) of the
    region, and (start, step) of the origin, or None if the origin is a number. `sizes`: of the block and of the
    neighbour's block."""
    extra = int(field.staggered[axis])
    low, high = halo.widths[axis]
    here, there = sizes
    size = here + extra
    if side == 0:
        # With corners, a halo without a rule is copied like cells of the block.
        before, behind = (halo.corners and _is_left(halo, field, axis, at, side) for side in (-1, 1))
        start, end = 0 if before else low, low + size + (high if behind else 0)
        return (start, end - start), (start, 1)
    start, count = (0, low) if side < 0 else (low + size, high)
    if not halo.layout.is_wall(axis, at, side):
        return (start, count), (there if side < 0 else low + extra, 1)
    rule = field.rules[axis][side > 0]
    last = low if side < 0 else low + size - 1
    if rule == "edge":
        return (start, count), (last, 0)
    if rule in ("reflect", "symmetric"):
        # The first cell outside the wall copies `last`, or with reflect the cell before it.
        nearest = last - side * (rule == "reflect")
        return (start, count), (nearest if side > 0 else nearest + count - 1, -1)
    return (start, count), None


def _regions(halo: Halo, rank: int, field: Field) -> Iterator[tuple[tuple[int, ...], int, Box, Any]]:
    """Yield the regions of a rank's halo. Each has a direction, the rank that it comes from, the box that is written,
    and the box that is read or the number that fills it."""
    at = halo.layout.coordinates(rank)
    shape = field.shape(halo, rank)
    for direction in halo.directions():
        if any(side != 0 and _is_left(halo, field, axis, at[axis], side) for axis, side in enumerate(direction)):
            continue
        source = halo.layout.neighbor(rank, direction)
        here, there = halo.layout.block(rank), halo.layout.block(source)
        written = [(0, size, 1) for size in shape]  # start, count and step along each axis
        read, number = written.copy(), None
        for axis, (side, place) in enumerate(zip(direction, field.axes, strict=True)):
            (start, count), origin = _along(halo, field, axis, at[axis], side, (here[axis], there[axis]))
            written[place] = start, count, 1
            if origin is None:  # of several numbers the number of the last axis is taken, as by numpy.pad
                number = field.rules[axis][side > 0]
            else:
                read[place] = origin[0], count, origin[1]
        yield direction, source, _box(written), _box(read) if number is None else number


def _box(extents: Sequence[tuple[int, int, int]]) -> Box:
    starts, counts, steps = zip(*extents, strict=True)
    return Box(starts, counts, steps)


@plans.cached
def _plan(halo: Halo, rank: int, avals: tuple[Any, ...], per_array: tuple[Spec, ...], adjoint: bool) -> Plan:
    """Return the plan of an exchange, or of the adjoint, which adds the halo to the cells it copies and clears it."""
    fields = [describe(halo, rank, aval, place) for aval, place in zip(avals, per_array, strict=True)]
    moves: list[Move] = []
    fills: list[Fill] = []
    around = {halo.layout.neighbor(rank, direction) for direction in halo.directions()}
    for other in sorted({rank, *around}):
        for leaf, field in enumerate(fields):
            for key, source, written, read in _regions(halo, other, field):
                if isinstance(read, Box):
                    if rank in (source, other):
                        moves.append(Move(key, leaf, source, read, other, written))
                    filled = adjoint and other == rank
                    value = 0
                else:
                    filled, value = other == rank, 0 if adjoint else read.value
                if filled:
                    fills.append(Fill(leaf, written, value))
    if adjoint:
        moves = [move.reverse() for move in moves]
    combines = "SUM" if adjoint else None
    signature = plans.signature("exchange", halo, fields, adjoint)
    return plans.make(rank, avals, moves, fills, combines=combines, signature=signature)
