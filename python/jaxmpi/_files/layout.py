"""The layout of a tree in a file: for each leaf the stored array, and the source of this rank's part of it.

Each rank computes it by itself, from the arguments alone. Then ranks compare the values that must be the same.
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
from jaxmpi._grid import arguments as checks
from jaxmpi._grid.grid import Grid
from jaxmpi._jax import internals
from jaxmpi._mpi import agreement, communicators, survival
from jaxmpi._mpi.private_comms import clone_of
from jaxmpi._mpi.watch import waiting
from jaxmpi._unstructured.index_map import IndexMap

_ADVICE = (
    " Pass the block by the grid; width= gives the halo, axes= the axes that are the grid's, and a tree as grid= the "
    'leaves that are fields: {"state": grid, "step": None}.'
)


@dataclass
class StoredArray:
    """A leaf, and the array in the file."""

    record: Record
    value: Any
    source: Blocks | Rows | Indices | Whole | None
    """The source of this rank's region. None: no array holds the value."""
    dims: tuple[str, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> np.dtype:
        """The dtype in the file."""
        return dtypes.stored(dtypes.named(self.record.dtype))

    def bits(self) -> np.ndarray:
        """Return all values of an array that is not divided."""
        return tiles.values_of(self.value)


@dataclass
class Options:
    """The arguments of `save` and of `Writer` that determine how arrays are stored."""

    width: Any = 0
    axes: Any = None
    chunks: Any = None
    dims: Any = None
    coords: Any = None
    attrs: Any = None
    kept: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The shapes of chunks of arrays in an existing file."""


def communicator(divisions: Any, comm: Any, operation: str) -> MPI.Comm:
    """Return the communicator of the first division, or else `comm`."""
    communicators.resolve(comm, operation)
    for first in divided(divisions):
        first._check_alive(operation)
        return first.comm
    return communicators.default_mpi() if comm is None else comm


def divided(divisions: Any) -> list[Any]:
    """Return the grids and maps in a tree of divisions."""
    return [x for x in jax.tree.leaves(divisions, is_leaf=trees.is_division) if isinstance(x, Grid | IndexMap)]


@contextlib.contextmanager
def together(divisions: Any, comm: Any, operation: str) -> Iterator[MPI.Intracomm]:
    """Yield the clone on which ranks agree. Share the facts about maps that all ranks need. Raise errors of one rank on
    all. In the context, errors of MPI that mean a death become ProcessFailed."""
    internals.check_outside(operation)
    known_comm, _ = agreement.capture(lambda: communicator(divisions, comm, operation))  # `_maps` raises an error again
    known = communicators.resolve(known_comm, operation)
    known_comm = communicators.default_mpi() if known_comm is None else known_comm
    with survival.failing(known_comm, f"io.{operation}"):
        with waiting(known, f"io.{operation}"):  # if a rank does not come, the others report it
            clone = clone_of(known_comm)
            rows.learn(clone, operation, lambda: _maps(divisions, comm, clone, operation))
        yield clone


def _maps(divisions: Any, comm: Any, clone: MPI.Intracomm, operation: str) -> list[IndexMap]:
    """Return the maps among divisions. Raise an error unless all grids and maps, and the communicator of the user, live
    and have the same ranks."""
    communicator(divisions, comm, operation)
    listed = divided(divisions)
    for division in listed:
        division._check_alive(operation)
    for other in (*(division.comm for division in listed), *([] if comm is None else [comm])):
        if MPI.Comm.Compare(clone, other) not in (MPI.IDENT, MPI.CONGRUENT):
            raise ValueError(
                f"{operation}: grids and comm have communicators of other ranks, or of the same in another order: "
                "make all with one comm=."
            )
    return [division for division in listed if isinstance(division, IndexMap)]


def parts(tree: Any, divisions: Any, comm: MPI.Intracomm, options: Options, operation: str) -> list[StoredArray]:
    """Return the leaves of a tree, each with its array in the file and its source. Raise TypeError or ValueError."""
    names, leaves = trees.leaves(tree, operation)
    each = trees.spread(divisions, tree, operation)
    for division in each:
        if division is not None:
            division._check_alive(operation)
    check_needed(divided(divisions), options, operation)
    dims = Dimensions(each, options.dims, operation)
    arrays: list[StoredArray] = []
    indices: dict[str, Rows] = {}
    widths = trees.spread_width(options.width, tree, operation)
    for name, x, division, width in zip(names, leaves, each, widths, strict=True):
        record = records.describe(name, x, operation)
        x = records.native(x)
        axes = _axes_of(division)
        if division is None or len(record.shape) < axes or record.type not in ("jax", "numpy", "key"):
            part = whole(record, x, comm)
        elif isinstance(division, Grid):
            part = _blocks(record, x, division, width, options, operation)
        else:
            part = _rows(record, x, division, comm, options, operation)
        part.dims = dims.of(part, division)
        arrays.append(part)
        if isinstance(part.source, Rows) and part.source.numbering.has_gaps:
            index = part.dims[0]
            part.record = dataclasses.replace(part.record, index=index)
            indices[index] = part.source
    if clash := {*indices} & {*names}:
        raise ValueError(
            f"{operation}: a leaf of the tree and the indices of rows are both called {min(clash)!r}: rename the leaf, "
            "or pass dims=."
        )
    return [*arrays, *(_indices(name, source) for name, source in indices.items())]


def check_needed(divisions: Sequence[Any], options: Options, operation: str) -> None:
    """Raise ValueError if there are arguments for fields, and no fields."""
    of_grid = options.axes is not None or any(width != 0 for width in jax.tree.leaves(options.width))
    if of_grid and not any(isinstance(division, Grid) for division in divisions):
        raise ValueError(f"{operation}: width and axes are for fields of a Grid, and there is none: pass it as grid=.")
    if options.chunks is None:
        return
    if checks.is_listed(options.chunks):
        _check_lengths(options.chunks, divisions, operation, "chunks")
    elif not divisions:
        raise ValueError(f"{operation}: chunks is for fields, and there are none: pass a Grid or IndexMap as grid=.")


def check_names(arrays: Sequence[StoredArray], operation: str) -> None:
    """Raise ValueError if a number and an axis have the same name, because xarray could not open the file."""
    dims = {dim for part in arrays for dim in part.dims}
    for part in arrays:
        if part.record.name in dims and part.source is not None and not part.dims:
            raise ValueError(
                f"{operation}: a leaf of the tree and an axis are both called {part.record.name!r}: rename the "
                "leaf, or pass other dims=."
            )


def _axes_of(division: Any) -> int:
    return len(division.processes) if isinstance(division, Grid) else 1


def whole(record: Record, x: Any, comm: MPI.Comm) -> StoredArray:
    """Return a leaf that is the same on all ranks."""
    if not record.stored:
        return StoredArray(record, x, None)
    x = records.array(record, x)
    dtype = dtypes.stored(dtypes.named(record.dtype))
    return StoredArray(record, x, tiles.whole((*record.shape, *record.words), dtype, comm.rank, comm.size))


def _blocks(record: Record, x: Any, grid: Grid, width: Any, options: Options, operation: str) -> StoredArray:
    grid._need_shape(operation)
    widths = checks.widths(width, len(grid.processes), operation)
    expected = [size + sum(pair) for size, pair in zip(grid.local_shape, widths, strict=True)]
    cut = grid._cut(x.shape, options.axes, expected, operation, record.name, _ADVICE)
    axes = tuple(axis % x.ndim for axis in cut.axes)
    shape = tuple(cut._with([size + extra for size, extra in zip(grid.global_shape, cut.staggered, strict=True)]))
    record = dataclasses.replace(record, shape=shape, division="grid", axes=axes)
    dtype = dtypes.stored(dtypes.named(record.dtype))
    sizes = chunk_sizes(options.chunks, len(axes), operation)
    kept = options.kept.get(record.name)
    return StoredArray(record, x, tiles.blocks(grid, (*shape, *record.words), axes, widths, dtype, sizes, kept))


def _rows(record: Record, x: Any, map: IndexMap, comm: MPI.Intracomm, options: Options, operation: str) -> StoredArray:
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
    return StoredArray(record, x, Rows(region, map, numbering, comm, run))


def _indices(name: str, source: Rows) -> StoredArray:
    """Return the coordinate with the indices of the rows."""
    run = source.region.points[0]
    region = Region((source.numbering.total,), source.region.chunks[:1], (run,))
    record = Record(name, "index", "int64", region.shape, "rows", (0,))
    return StoredArray(record, None, Indices(region, source.map, source.numbering, source.comm, source.run), (name,))


def chunk_sizes(chunks: Any, axes: int, operation: str) -> tuple[int, ...] | None:
    """Return the sizes of chunks along the axes of a division, if the user has passed them for as many axes."""
    if chunks is None:
        return None
    listed = checks.integers(chunks, operation, "chunks")
    if min(listed, default=0) < 1:
        raise ValueError(f"{operation}: chunks is {chunks}: pass sizes of 1 or more along the axes of the grid.")
    if not checks.is_listed(chunks):
        return tuple(listed * axes)
    return tuple(listed) if len(listed) == axes else None


def _check_lengths(listed: Any, each: Sequence[Any], operation: str, name: str) -> None:
    """Raise ValueError if no division has as many axes as the list has entries."""
    counts = sorted({_axes_of(division) for division in each if division is not None})
    if len(listed) not in counts:
        raise ValueError(
            f"{operation}: {name} has {len(listed)} entries: pass one for each axis of the grid "
            f"({' or '.join(map(str, counts)) or 'here is none'})."
        )


# --- dimensions and attributes ----------------------------------------------------------------------------------------


class Dimensions:
    """The names of the axes of arrays. Arrays that share a name have the same size along that axis."""

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

    def of(self, part: StoredArray, division: Any) -> tuple[str, ...]:
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
        """Return the names of the axes of a division. Grids of one shape share them."""
        of_grid = isinstance(division, Grid)
        token = tuple(sizes) if of_grid else division
        if token in self._known:
            return self._known[token]
        named = self._names is not None and len(self._names) == len(sizes)
        default = [f"axis_{axis}" for axis in range(len(sizes))] if of_grid else ["index"]
        base = self._names if named and self._names else default
        meanings = [(size, None if of_grid else division) for size in sizes]
        for number in itertools.count():
            names = [f"{name}_{number}" if number else name for name in base]
            meanings_by_name = dict(zip(names, meanings, strict=True))
            if all(self._meanings.get(name, meaning) == meaning for name, meaning in meanings_by_name.items()):
                break
            if named:
                raise ValueError(
                    f"{self._operation}: dims={names} would name the axes of two grids or maps that differ: leave dims "
                    "out, or save them to different files."
                )
        self._meanings.update(meanings_by_name)
        self._known[token] = names
        return names


def coordinates(arrays: Sequence[StoredArray], coords: Any, comm: MPI.Comm, operation: str) -> list[StoredArray]:
    """Return the coordinates, as arrays with the names of their dimensions."""
    if coords is None:
        return []
    if not isinstance(coords, Mapping):
        raise TypeError(f"{operation}: coords is {coords!r:.60}: pass a dict with an array for a dimension's name.")
    sizes = {
        dim: size
        for part in arrays
        if part.source
        for dim, size in zip(part.dims, part.source.region.shape, strict=True)
    }
    taken = {part.record.name for part in arrays}
    listed = []
    for name, values in coords.items():
        array = np.asarray(values)
        if name not in sizes:
            raise ValueError(f"{operation}: coords has {name!r}, and the dimensions are {', '.join(sizes) or 'none'}.")
        if name in taken:
            raise ValueError(f"{operation}: a leaf of the tree and a coordinate are both called {name!r}: rename one.")
        if array.shape != (sizes[name],):
            raise ValueError(
                f"{operation}: the coordinate {name!r} has shape {array.shape}, and the global array {sizes[name]} "
                "points there: pass the coordinates of all ranks."
            )
        trees.check_name(name, f"the coordinate {name!r}", operation)
        part = whole(records.describe(name, array, operation), array, comm)
        part.dims = (name,)
        listed.append(part)
    return listed


def attributes(arrays: Sequence[StoredArray], attrs: Any, operation: str) -> dict[str, Any]:
    """Set the attributes of arrays, and return the attributes of the group."""
    if attrs is None:
        return {}
    if not isinstance(attrs, Mapping) or not all(isinstance(entry, Mapping) for entry in attrs.values()):
        raise TypeError(
            f'{operation}: attrs must be a dict with a dict for the name of an array ("h", "state.h"), or "" for the '
            "group."
        )
    try:
        plain = json.loads(json.dumps(dict(attrs), default=_plain, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{operation}: attrs has a value that JSON cannot hold: {error}") from error
    of_group = dict(plain.pop("", {}))
    if metadata.KEY in of_group:
        raise ValueError(f"{operation}: attrs of the group has {metadata.KEY!r}, where the tree is kept: rename it.")
    by_name = {part.record.name: part for part in arrays}
    for name, entry in plain.items():
        if name not in by_name:
            raise ValueError(f"{operation}: attrs has {name!r}, and the arrays are {', '.join(by_name)}.")
        by_name[name].attributes = entry
    return of_group


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return np.asarray(value).tolist()
    raise TypeError(f"{value!r:.60} of type {type(value).__name__}")
