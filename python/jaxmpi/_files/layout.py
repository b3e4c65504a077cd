"""How a tree is stored: for each leaf the array in the file, and how this rank comes by its part of it.

It is found on each rank by itself, from the arguments alone; ranks then compare what must be the same.
"""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from mpi4py import MPI

from jaxmpi._files import chunks as tiles
from jaxmpi._files import dtypes, metadata, records, rows, trees
from jaxmpi._files.chunks import Blocks, Region, Whole
from jaxmpi._files.records import Record
from jaxmpi._files.rows import Indices, Rows
from jaxmpi._grid import arguments as given
from jaxmpi._grid.grid import Grid
from jaxmpi._jax import internals
from jaxmpi._mpi import agreement, communicators, survival
from jaxmpi._mpi.private_comms import clone_of
from jaxmpi._mpi.watch import waiting
from jaxmpi._unstructured.index_map import IndexMap

_ADVICE = (
    " Pass its block by the grid; width= says what halo it has, axes= which axes are the grid's, and a tree as grid= "
    'which leaves are fields: {"state": grid, "step": None}.'
)


@dataclass
class Part:
    """A leaf, and the array in the file."""

    record: Record
    value: Any
    source: Blocks | Rows | Indices | Whole | None
    """Where this rank's region comes from; None for what no array holds."""
    dims: tuple[str, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> np.dtype:
        """The dtype in which it is stored."""
        return dtypes.stored(dtypes.named(self.record.dtype))

    def bits(self) -> np.ndarray:
        """The whole of an array that is not divided."""
        return tiles.values_of(self.value)


@dataclass
class Options:
    """The arguments of `save` and of `Writer` that say how arrays are stored."""

    width: Any = 0
    axes: Any = None
    chunks: Any = None
    dims: Any = None
    coords: Any = None
    attrs: Any = None
    kept: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The shapes of chunks of arrays that are in a file already."""


def communicator(divisions: Any, comm: Any, operation: str) -> MPI.Comm:
    """The communicator of the first division, or the one that was given."""
    communicators.resolve(comm, operation)
    for first in divided(divisions):
        first._check_alive(operation)
        return first.comm
    return communicators.default_mpi() if comm is None else comm


def divided(divisions: Any) -> list[Any]:
    """The grids and maps in a tree of divisions."""
    return [x for x in jax.tree.leaves(divisions, is_leaf=trees.is_division) if isinstance(x, Grid | IndexMap)]


@contextlib.contextmanager
def together(divisions: Any, comm: Any, operation: str) -> Iterator[MPI.Intracomm]:
    """The clone on which ranks agree. Finds out what all must know of maps. Errors of one rank are raised on all, and
    within it what tells of a death is a ProcessFailed."""
    internals.check_outside(operation)
    its, failure = agreement.capture(lambda: communicator(divisions, comm, operation))
    known = communicators.resolve(its, operation)
    its = communicators.default_mpi() if its is None else its
    with survival.failing(its, f"io.{operation}"):
        with waiting(known, f"io.{operation}"):  # a rank that does not come is reported by the others
            clone = clone_of(its)
            listed = divided(divisions) if failure is None else []
            if failure is None:
                _, failure = agreement.capture(lambda: _check_ranks(listed, comm, clone, operation))
            rows.learn(clone, operation, [its for its in listed if isinstance(its, IndexMap)], failure)
        yield clone


def _check_ranks(listed: Sequence[Any], comm: MPI.Comm | None, clone: MPI.Intracomm, operation: str) -> None:
    """Raises ValueError unless all grids and maps, and the communicator that was given, have the same ranks."""
    for division in listed:
        division._check_alive(operation)
    for other in (*(division.comm for division in listed), *([] if comm is None else [comm])):
        if MPI.Comm.Compare(clone, other) not in (MPI.IDENT, MPI.CONGRUENT):
            raise ValueError(
                f"{operation}: grids and comm have communicators of other ranks, or of the same in another order: "
                "make all with one comm=."
            )


def parts(tree: Any, divisions: Any, comm: MPI.Intracomm, options: Options, operation: str) -> list[Part]:
    """The leaves of a tree, each with its array in the file and its source. Raises TypeError or ValueError."""
    names, leaves = trees.leaves(tree, operation)
    each = trees.spread(divisions, tree, operation)
    for division in each:
        if division is not None:
            division._check_alive(operation)
    check_needed(divided(divisions), options, operation)
    dims = Dimensions(each, options.dims, operation)
    found: list[Part] = []
    indices: dict[str, Rows] = {}
    widths = trees.spread_width(options.width, tree, operation)
    for name, x, division, width in zip(names, leaves, each, widths, strict=True):
        record = records.describe(name, x, operation)
        x = records.native(x)
        its = _axes_of(division)
        if division is None or len(record.shape) < its or record.type not in ("jax", "numpy", "key"):
            part = whole(record, x, comm)
        elif isinstance(division, Grid):
            part = _blocks(record, x, division, width, options, operation)
        else:
            part = _rows(record, x, division, comm, options, operation)
        part.dims = dims.of(part, division)
        found.append(part)
        if isinstance(part.source, Rows) and part.source.numbering.has_gaps:
            index = part.dims[0]
            part.record = dataclasses.replace(part.record, index=index)
            indices[index] = part.source
    if clash := {*indices} & {*names}:
        raise ValueError(
            f"{operation}: a leaf of the tree and the indices of rows are both called {min(clash)!r}: rename the leaf, "
            "or pass dims=."
        )
    return [*found, *(_indices(name, source) for name, source in indices.items())]


def check_needed(divisions: Sequence[Any], options: Options, operation: str) -> None:
    """Raises ValueError for arguments that say something of fields, where there are no such fields."""
    of_grid = options.axes is not None or any(its != 0 for its in jax.tree.leaves(options.width))
    if of_grid and not any(isinstance(division, Grid) for division in divisions):
        raise ValueError(
            f"{operation}: width and axes are those of fields of a Grid, and here is none: pass it as grid=."
        )
    if options.chunks is None:
        return
    if given.is_listed(options.chunks):
        _check_lengths(options.chunks, divisions, operation, "chunks")
    elif not divisions:
        raise ValueError(f"{operation}: chunks is that of fields, and here are none: pass a Grid or IndexMap as grid=.")


def check_names(found: Sequence[Part], operation: str) -> None:
    """Raises ValueError for a number that is called as an axis is, for which xarray could not open the file."""
    dims = {dim for part in found for dim in part.dims}
    for part in found:
        if part.record.name in dims and part.source is not None and not part.dims:
            raise ValueError(
                f"{operation}: a leaf of the tree and an axis are both called {part.record.name!r}: rename the "
                "leaf, or pass other dims=."
            )


def _axes_of(division: Any) -> int:
    return len(division.processes) if isinstance(division, Grid) else 1


def whole(record: Record, x: Any, comm: MPI.Comm) -> Part:
    """What is the same on all ranks."""
    if not record.stored:
        return Part(record, x, None)
    x = records.array(record, x)
    dtype = dtypes.stored(dtypes.named(record.dtype))
    return Part(record, x, tiles.whole((*record.shape, *record.words), dtype, comm.rank, comm.size))


def _blocks(record: Record, x: Any, grid: Grid, width: Any, options: Options, operation: str) -> Part:
    grid._need_shape(operation)
    widths = given.widths(width, len(grid.processes), operation)
    expected = [size + sum(pair) for size, pair in zip(grid.local_shape, widths, strict=True)]
    cut = grid._cut(x.shape, options.axes, expected, operation, record.name, _ADVICE)
    axes = tuple(axis % x.ndim for axis in cut.axes)
    shape = tuple(cut._with([size + extra for size, extra in zip(grid.global_shape, cut.staggered, strict=True)]))
    record = dataclasses.replace(record, shape=shape, division="grid", axes=axes)
    dtype = dtypes.stored(dtypes.named(record.dtype))
    sizes = chunk_sizes(options.chunks, len(axes), operation)
    kept = options.kept.get(record.name)
    return Part(record, x, tiles.blocks(grid, (*shape, *record.words), axes, widths, dtype, sizes, kept))


def _rows(record: Record, x: Any, map: IndexMap, comm: MPI.Intracomm, options: Options, operation: str) -> Part:
    if x.shape[0] != sum(map.sizes):
        raise ValueError(
            f"{operation}: {record.name} has shape {x.shape}, and its first axis must have this rank's "
            f"{sum(map.sizes)} rows: {map.sizes[0]} that it owns, then {map.sizes[1]} ghosts. A tree as grid= says "
            'which leaves are rows of the map: {"state": map, "step": None}.'
        )
    numbering = rows.numbering(map)
    record = dataclasses.replace(record, shape=(numbering.total, *x.shape[1:]), division="rows", axes=(0,))
    sizes = options.kept.get(record.name) or chunk_sizes(options.chunks, 1, operation)
    dtype = dtypes.stored(dtypes.named(record.dtype))
    shape = (*x.shape[1:], *record.words)
    region, run = rows.source(numbering, comm, shape, dtype, sizes[0] if sizes else None)
    return Part(record, x, Rows(region, map, numbering, comm, run))


def _indices(name: str, its: Rows) -> Part:
    """The coordinate that says which rows there are."""
    run = its.region.points[0]
    region = Region((its.numbering.total,), its.region.chunks[:1], (run,))
    record = Record(name, "index", "int64", region.shape, "rows", (0,))
    return Part(record, None, Indices(region, its.map, its.numbering, its.comm, its.run), (name,))


def chunk_sizes(chunks: Any, axes: int, operation: str) -> tuple[int, ...] | None:
    """The sizes of chunks along the axes of a division, where they are given for as many axes."""
    if chunks is None:
        return None
    listed = given.integers(chunks, operation, "chunks")
    if min(listed, default=0) < 1:
        raise ValueError(f"{operation}: chunks is {chunks}: pass sizes of 1 or more along the axes of the grid.")
    if not given.is_listed(chunks):
        return tuple(listed * axes)
    return tuple(listed) if len(listed) == axes else None


def _check_lengths(listed: Any, each: Sequence[Any], operation: str, name: str) -> None:
    """Raises ValueError if no division has as many axes as the list has entries."""
    counts = sorted({_axes_of(division) for division in each if division is not None})
    if len(listed) not in counts:
        raise ValueError(
            f"{operation}: {name} has {len(listed)} entries: pass one for each axis of the grid "
            f"({' or '.join(map(str, counts)) or 'here is none'})."
        )


# --- dimensions and attributes ----------------------------------------------------------------------------------------


class Dimensions:
    """The names of the axes of arrays: arrays that have one in common have the same size along it."""

    def __init__(self, each: Sequence[Any], names: Any, operation: str):
        self._operation = operation
        self._names = None if names is None else [names] if isinstance(names, str) else list(names)
        if self._names is not None:
            if not all(isinstance(name, str) and name for name in self._names) or len({*self._names}) < len(
                self._names
            ):
                raise ValueError(
                    f"{operation}: dims is {names!r}: pass different names, one for each axis of the grid."
                )
            for name in self._names:
                trees.check_name(trees.plain(name), f"dims={names!r}", operation)
                if name != trees.plain(name):
                    raise ValueError(f"{operation}: dims is {names!r}: pass names without / and \\.")
            _check_lengths(self._names, each, operation, "dims")
        self._meanings: dict[str, tuple[int, Any]] = {}
        self._known: dict[Any, list[str]] = {}

    def of(self, part: Part, division: Any) -> tuple[str, ...]:
        if part.source is None:
            return ()
        record, shape = part.record, part.source.region.shape
        names = [f"{record.name}_{axis}" for axis in range(len(shape))]
        if record.division:
            sizes = division.global_shape if isinstance(division, Grid) else [shape[0]]
            for axis, name, size in zip(record.axes, self._base(division, sizes), sizes, strict=True):
                names[axis] = name if shape[axis] == size else f"{name}_outer"
        return tuple(names)

    def _base(self, division: Any, sizes: Sequence[int]) -> list[str]:
        """The names of the axes of a division. Grids of one shape have them in common."""
        of_grid = isinstance(division, Grid)
        token = tuple(sizes) if of_grid else division
        if token in self._known:
            return self._known[token]
        given = self._names is not None and len(self._names) == len(sizes)
        default = [f"axis_{axis}" for axis in range(len(sizes))] if of_grid else ["index"]
        base = self._names if given and self._names else default
        meanings = [(size, None if of_grid else division) for size in sizes]
        for number in itertools.count():
            names = [f"{name}_{number}" if number else name for name in base]
            its = dict(zip(names, meanings, strict=True))
            if all(self._meanings.get(name, meaning) == meaning for name, meaning in its.items()):
                break
            if given:
                raise ValueError(
                    f"{self._operation}: dims={names} would name the axes of two grids or maps that differ: leave dims "
                    "out, or save them to different files."
                )
        self._meanings.update(its)
        self._known[token] = names
        return names


def coordinates(found: Sequence[Part], coords: Any, comm: MPI.Comm, operation: str) -> list[Part]:
    """The coordinates, as arrays of the names of their dimensions."""
    if coords is None:
        return []
    if not isinstance(coords, Mapping):
        raise TypeError(f"{operation}: coords is {coords!r:.60}: pass a dict with an array for a dimension's name.")
    sizes = {
        dim: size
        for part in found
        if part.source
        for dim, size in zip(part.dims, part.source.region.shape, strict=True)
    }
    taken = {part.record.name for part in found}
    made = []
    for name, values in coords.items():
        array = np.asarray(values)
        if name not in sizes:
            raise ValueError(f"{operation}: coords has {name!r}, and the dimensions are {', '.join(sizes) or 'none'}.")
        if name in taken:
            raise ValueError(f"{operation}: a leaf of the tree and a coordinate are both called {name!r}: rename one.")
        if array.shape != (sizes[name],):
            raise ValueError(
                f"{operation}: the coordinate {name!r} has shape {array.shape}, and the global array {sizes[name]} "
                "points there: pass those of all ranks."
            )
        trees.check_name(name, f"the coordinate {name!r}", operation)
        part = whole(records.describe(name, array, operation), array, comm)
        part.dims = (name,)
        made.append(part)
    return made


def attributes(found: Sequence[Part], attrs: Any, operation: str) -> dict[str, Any]:
    """Gives arrays their attributes, and returns those of the group."""
    if attrs is None:
        return {}
    if not isinstance(attrs, Mapping) or not all(isinstance(its, Mapping) for its in attrs.values()):
        raise TypeError(
            f'{operation}: attrs must be a dict with a dict for the name of an array ("h", "state.h"), or "" for the '
            "group."
        )
    try:
        plain = json.loads(json.dumps(dict(attrs), default=_plain, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{operation}: attrs has what JSON cannot hold: {error}") from error
    of_group = dict(plain.pop("", {}))
    if metadata.KEY in of_group:
        raise ValueError(f"{operation}: attrs of the group has {metadata.KEY!r}, where the tree is kept: rename it.")
    by_name = {part.record.name: part for part in found}
    for name, its in plain.items():
        if name not in by_name:
            raise ValueError(f"{operation}: attrs has {name!r}, and the arrays are {', '.join(by_name)}.")
        by_name[name].attributes = its
    return of_group


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return np.asarray(value).tolist()
    raise TypeError(f"{value!r:.60} of type {type(value).__name__}")
