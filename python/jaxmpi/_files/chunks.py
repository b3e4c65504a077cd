"""Chunks of stored arrays: their shape, the rank that writes each, and how a rank gets the values of its chunks.

A stored array is divided into chunks of one size, each a file. The chunks of a field are divided among the processes of
its grid, so that no two ranks write one: a chunk belongs to the process whose block contains the middle of it. If the
regions of the processes are not the blocks of the grid, the field is redistributed to them first. A field whose blocks
are as large as chunks, or a multiple, is written without that.

A field that is staggered along an axis has one point more there, and adjacent blocks share a point. The code turns
regions into blocks of cells that contain all points of the region, and perhaps one more, which is cut off.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxmpi._files import dtypes
from jaxmpi._grid.grid import Grid
from jaxmpi._grid.halos import Widths
from jaxmpi._grid.redistribute import redistribute
from jaxmpi._primitive import keys

LARGEST = 64 << 20
"""The largest number of bytes in a chunk whose shape the user does not give."""

Interval = tuple[int, int]
Index = tuple[int, ...]


@dataclass(frozen=True)
class Region:
    """The points of a stored array that this rank writes: whole chunks, except at the end of the array."""

    shape: tuple[int, ...]
    """The shape of the stored array."""
    chunks: tuple[int, ...]
    """The shape of a chunk."""
    points: tuple[Interval, ...]
    """Start and end along each axis."""
    nothing: bool = False
    """Whether this rank writes nothing. The points of an array without axes cannot express this."""


def covering(
    chunks: Sequence[int], points: Sequence[Interval]
) -> Iterator[tuple[Index, tuple[slice, ...], tuple[slice, ...]]]:
    """Yield the chunks that have some of the points: the index, and the places in the chunk and among the points."""
    along = []
    for size, (start, end) in zip(chunks, points, strict=True):
        parts = []
        for number in range(start // size, -(-end // size)) if end > start else ():
            origin = number * size
            low, high = max(origin, start), min(origin + size, end)
            parts.append((number, slice(low - origin, high - origin), slice(low - start, high - start)))
        along.append(parts)
    for chosen in itertools.product(*along):
        yield tuple(c[0] for c in chosen), tuple(c[1] for c in chosen), tuple(c[2] for c in chosen)


@dataclass(frozen=True)
class Blocks:
    """The source of this rank's region of a field of a grid. All ranks call `take` together."""

    region: Region
    grid: Grid
    target: Grid
    """The grid whose blocks contain the regions."""
    axes: tuple[int, ...]
    """The axes of the field that belong to the grid, from the front."""
    widths: Widths

    def take(self, x: Any) -> np.ndarray:
        """Return the values of this rank's region, in the dtype in the file, from its block with halo."""
        if self.target is self.grid:
            starts = [low for low, _ in self.widths]
        else:
            x = in_words(
                x,
                lambda y: redistribute(y, self.grid, self.target, axes=self.axes, source_width=self.widths),
            )
            starts = [0] * len(self.axes)
        values = values_of(x)
        index = [slice(None)] * values.ndim
        for axis, start in zip(self.axes, starts, strict=True):
            low, high = self.region.points[axis]
            index[axis] = slice(start, start + high - low)
        return dtypes.encode(values[tuple(index)])


@dataclass(frozen=True)
class Whole:
    """The source of this rank's part of an array that all ranks have."""

    region: Region

    def take(self, x: Any) -> np.ndarray:
        return dtypes.encode(values_of(x)[tuple(slice(start, end) for start, end in self.region.points)])


def values_of(x: Any) -> np.ndarray:
    """Return an array of JAX or NumPy, or a number, as an array of NumPy, with words in the place of keys. Do not copy
    CPU memory."""
    return np.asarray(keys.words(x) if isinstance(x, jax.Array) else x)


def in_words(x: Any, work: Callable[[Any], Any]) -> Any:
    """Return the result of `work(x)`, which moves an array, exact to the last bit.

    XLA may convert narrow floating-point numbers to wider ones, so these travel as integers. So do dtypes that cannot
    be communicated. JAX may cut NumPy's wide numbers to 32 bits, so these travel as words of 32 bits, on one more axis
    behind all others. NaN and infinity travel too, even if JAX is set to refuse them. Arrays travel from one device.
    """
    with jax.debug_nans(False), jax.debug_infs(False):
        if isinstance(x, jax.Array) and len(x.devices()) > 1:
            x = jax.device_put(x, min(x.devices(), key=lambda device: device.id))
        if keys.is_key(x):
            return work(x)
        dtype = np.dtype(x.dtype)
        if dtype.itemsize <= 2 and dtype.kind not in "biu":
            words = np.ascontiguousarray(values_of(x)).view(f"u{dtype.itemsize}")
            return np.asarray(work(jax.device_put(words))).view(dtype)
        if isinstance(x, jax.Array):
            return work(x)
        if jax.dtypes.canonicalize_dtype(dtype) == dtype:
            return np.asarray(work(jax.device_put(x)))
        words = np.ascontiguousarray(x)[..., None].view(np.uint32)
        return np.ascontiguousarray(np.asarray(work(jax.device_put(words)))).view(dtype)[..., 0]


def blocks(
    grid: Grid,
    shape: Sequence[int],
    axes: tuple[int, ...],
    widths: Widths,
    dtype: np.dtype,
    requested: Sequence[int] | None,
    kept: Sequence[int] | None = None,
) -> Blocks:
    """Return how a field of this global shape is stored. `requested`: the sizes of chunks along the axes of the grid.
    `kept`: the shape of a chunk in an existing file."""
    whole = tuple(shape)
    points = [whole[axis] for axis in axes]
    sizes = list(whole)
    even = [-(-count // number) for count, number in zip(points, grid.processes, strict=True)]
    for axis, size in zip(axes, even if requested is None else requested, strict=True):
        sizes[axis] = size
    if kept is not None and len(kept) == len(whole):
        sizes = list(kept)
    elif requested is None:
        sizes = limited(sizes, dtype.itemsize)
    sizes = [max(1, size) for size in sizes]
    regions = [
        _regions(size, sizes[axis], grid._layout.intervals(at))
        for at, (axis, size) in enumerate(zip(axes, points, strict=True))
    ]
    cells = [
        tuple(min(end, size) - min(start, size) for start, end in intervals)
        for intervals, size in zip(regions, grid.global_shape, strict=True)
    ]
    target = grid if list(cells) == list(grid._layout.blocks) else grid._like(grid.processes, cells)
    mine: list[Interval] = [(0, size) for size in whole]
    for axis, intervals, at in zip(axes, regions, grid.coordinates, strict=True):
        mine[axis] = intervals[at]
    return Blocks(Region(whole, tuple(sizes), tuple(mine)), grid, target, axes, widths)


def _regions(points: int, size: int, blocks: Sequence[Interval]) -> list[Interval]:
    """Return the points along an axis that each process along it writes: whole chunks of this size."""
    count = -(-points // size)
    starts = np.arange(count) * size
    middles = (starts + np.minimum(starts + size, points) - 1) // 2
    ends = np.array([end for _, end in blocks])
    last = int(np.searchsorted(ends, ends[-1]))  # the last process that has cells
    owners = np.minimum(np.searchsorted(ends, middles, side="right"), last)
    edges = np.searchsorted(owners, np.arange(len(blocks) + 1))
    return [(min(int(low) * size, points), min(int(high) * size, points)) for low, high in itertools.pairwise(edges)]


def limited(sizes: Sequence[int], itemsize: int) -> list[int]:
    """Return the shape of a chunk, cut along the first axes until it has at most `LARGEST` bytes. Cut into equal parts
    if there are equal parts that are not much too small."""
    cut = list(sizes)
    for axis, size in enumerate(cut):
        parts = -(-math.prod(cut) * itemsize // LARGEST)
        if parts <= 1:
            break
        parts = min(parts, size)
        equal = next((n for n in range(parts, min(4 * parts, size) + 1) if size % n == 0), None)
        cut[axis] = -(-size // (equal or parts))
    return cut


def whole(shape: Sequence[int], dtype: np.dtype, rank: int, size: int) -> Whole:
    """Return how to store an array that all ranks have. Rank 0 writes a single chunk. Ranks divide several chunks."""
    sizes = [max(1, n) for n in limited(shape, dtype.itemsize)]
    points: list[Interval] = [(0, n) for n in shape]
    if sizes:
        cut = next((axis for axis, n in enumerate(sizes) if n < shape[axis]), 0)
        count = -(-shape[cut] // sizes[cut])
        low, high = (min(shape[cut], (-(-count * at // size)) * sizes[cut]) for at in (rank, rank + 1))
        points[cut] = (low, high)
    return Whole(Region(tuple(shape), tuple(sizes), tuple(points), nothing=not sizes and rank > 0))
