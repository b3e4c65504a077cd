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
from jaxmpi._files import metadata, records, rows, trees
from jaxmpi._files.chunks import Region
from jaxmpi._files.records import Record
from jaxmpi._files.rows import Rows
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
    source: Any
    """The source of this rank's region: Blocks, Rows or Whole. None: no array holds the value."""
    dims: tuple[str, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass
class Options:
    """The arguments of `save` and of `Writer` that determine how arrays are stored."""

    width: Any = 0
    axes: Any = None
    chunks: Any = None
    dims: Any = None
    coords: Any = None
    attrs: Any = None
    compressor: Any = None
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
    return [x for x in jax.tree.leaves(divisions, is_leaf=trees.is_division) if isinstance(x, Grid | IndexMap)]


@contextlib.contextmanager
def together(divisions: Any, comm: Any, operation: str) -> Iterator[MPI.Intracomm]:
    """Yield the clone on which ranks agree. Share the facts about maps that all ranks need. Raise errors of one rank on
    all. In the context, errors of MPI that mean a death become ProcessFailed."""
    internals.check_outside(operation)
    known_comm, failure = agreement.capture(lambda: communicator(divisions, comm, operation))
    known = communicators.resolve(known_comm, operation)
    known_comm = communicators.default_mpi() if known_comm is None else known_comm
    with survival.failing(known_comm, f"io.{operation}"):
        with waiting(known, f"io.{operation}"):  # if a rank does not come, the others report it
            clone = clone_of(known_comm)

            def find() -> list[IndexMap]:
                if failure is not None:
                    raise failure
                listed = divided(divisions)
                for division in listed:
                    division._check_alive(operation)
                for other in (*(division.comm for division in listed), clone if comm is None else comm):
                    if MPI.Comm.Compare(clone, other) not in (MPI.IDENT, MPI.CONGRUENT):
                        raise ValueError(
                            f"{operation}: grids and comm have communicators of other ranks, or of the same in another "
                            "order: make all with one comm=."
                        )
                return [division for division in listed if isinstance(division, IndexMap)]

            rows.learn(clone, operation, find)
        yield clone


def parts(tree: Any, divisions: Any, comm: MPI.Intracomm, options: Options, operation: str) -> list[StoredArray]:
    """Return the leaves of a tree, each with its array in the file and its source. Raise TypeError or ValueError."""
    names, leaves = trees.leaves(tree, operation)
    each = trees.spread(divisions, tree, operation)
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
        if isinstance(part.source, Rows) and part.source.map._numbering.has_gaps:
            index = part.dims[0]
            part.record = dataclasses.replace(part.record, index=index)
            indices[index] = part.source
    if clash := {*indices} & {*names}:
        raise ValueError(
            f"{operation}: a leaf of the tree and the indices of rows are both called {min(clash)!r}: rename the leaf, "
            "or pass dims=."
        )
    for name, source in indices.items():  # coordinates with the indices of the rows
        region = Region(source.region.shape[:1], source.region.chunks[:1], source.region.points[:1])
        record = Record(name, "index", "int64", region.shape, "rows", (0,))
        source = dataclasses.replace(source, region=region, takes_indices=True)
        arrays.append(StoredArray(record, None, source, (name,)))
    return arrays


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


def _axes_of(division: Any) -> int:
    return len(division.processes) if isinstance(division, Grid) else 1


def whole(record: Record, x: Any, comm: MPI.Comm) -> StoredArray:
    if not record.stored:
        return StoredArray(record, x, None)
    shape = (*record.shape, *record.words)
    source = tiles.whole(shape, record.stored_dtype, comm.rank, comm.size)
    return StoredArray(record, records.array(record, x), source)


def _blocks(record: Record, x: Any, grid: Grid, width: Any, options: Options, operation: str) -> StoredArray:
    grid._need_shape(operation)
    widths = checks.widths(width, len(grid.processes), operation)
    expected = [size + sum(pair) for size, pair in zip(grid.local_shape, widths, strict=True)]
    cut = grid._cut(x.shape, options.axes, expected, operation, record.name, _ADVICE)
    axes = tuple(axis % x.ndim for axis in cut.axes)
    shape = tuple(cut._with([size + extra for size, extra in zip(grid.global_shape, cut.staggered, strict=True)]))
    record = dataclasses.replace(record, shape=shape, division="grid", axes=axes)
    sizes, kept = chunk_sizes(options.chunks, len(axes), operation), options.kept.get(record.name)
    source = tiles.blocks(grid, (*shape, *record.words), axes, widths, record.stored_dtype, sizes, kept)
    return StoredArray(record, x, source)


def _rows(record: Record, x: Any, map: IndexMap, comm: MPI.Intracomm, options: Options, operation: str) -> StoredArray:
    if x.shape[0] != sum(map.sizes):
        raise ValueError(
            f"{operation}: {record.name} has shape {x.shape}, and its first axis must have this rank's "
            f"{sum(map.sizes)} rows: {map.sizes[0]} that it owns, then {map.sizes[1]} ghosts. A tree as grid= says "
            'which leaves are rows of the map: {"state": map, "step": None}.'
        )
    record = dataclasses.replace(record, shape=(map._total, *x.shape[1:]), division="rows", axes=(0,))
    sizes = options.kept.get(record.name) or chunk_sizes(options.chunks, 1, operation)
    shape = (*x.shape[1:], *record.words)
    return StoredArray(record, x, rows.source(map, comm, shape, record.stored_dtype, sizes[0] if sizes else None))


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
            plain = all(isinstance(name, str) and name and name == trees.plain(name) for name in self._names)
            if not plain or len({*self._names}) < len(self._names):
                raise ValueError(
                    f"{operation}: dims is {names!r}: pass names without / and \\, one for each axis of the grid."
                )
            for name in self._names:
                trees.check_name(name, f"dims={names!r}", operation)
            _check_lengths(self._names, each, operation, "dims")
        self._meanings: dict[str, tuple[int, Any]] = {}

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
        return names


def coordinates(arrays: Sequence[StoredArray], coords: Any, comm: MPI.Comm, operation: str) -> list[StoredArray]:
    if coords is None:
        return []
    if not isinstance(coords, Mapping):
        raise TypeError(f"{operation}: coords is {coords!r:.60}: pass a dict with an array for a dimension's name.")
    sizes: dict[str, int] = {}
    for part in arrays:
        sizes.update(zip(part.dims, part.source.region.shape if part.source else (), strict=True))
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
