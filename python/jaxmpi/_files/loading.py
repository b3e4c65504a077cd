"""`jaxmpi.io.load`: a tree, read by all ranks, on any grid and any number of ranks."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from mpi4py import MPI

from jaxmpi._files import chunks, commit, dtypes, layout, metadata, rows, store, trees
from jaxmpi._files.chunks import Interval
from jaxmpi._files.layout import Options
from jaxmpi._files.records import Record
from jaxmpi._grid import arguments as checks
from jaxmpi._grid.grid import Grid, Width
from jaxmpi._grid.halos import Halo
from jaxmpi._jax import internals
from jaxmpi._mpi import agreement
from jaxmpi._primitive import keys
from jaxmpi._unstructured.index_map import IndexMap

_PYTHON = {"int": int, "float": float, "complex": complex, "bool": bool}
_TRIES = 50
"""How often a state is read again because another job has replaced it in between."""


@dataclass(frozen=True)
class State:
    """A state as its metadata describe it."""

    path: Path
    skeleton: Any
    records: Mapping[str, Record]
    arrays: Mapping[str, store.Stored]

    @staticmethod
    def from_bytes(path: Path, data: bytes, operation: str) -> "State":
        """Read metadata. Raise ValueError if they are not the metadata of a state, or are damaged."""
        root = metadata.decode(path, data, operation)
        if root is None:
            raise ValueError(
                f"{operation}: {path} is Zarr, but no state of jaxmpi.io: read it with zarr or xarray instead."
            )
        if "series" in root.text:
            raise ValueError(
                f"{operation}: {path} is a series of a jaxmpi.io.Writer: read it with xarray or zarr. To continue from "
                "a state, save it with jaxmpi.io.checkpoint."
            )
        return metadata.parsed(path, partial(State._from_root, path, root), operation)

    @staticmethod
    def _from_root(path: Path, root: metadata.Root) -> "State":
        records = {record.name: record for record in map(Record.from_json, root.text["leaves"])}
        sums = root.text.get("sums")
        arrays = {}
        for name, record in records.items():
            if record.stored:
                sums_of_chunks = None if sums is None else metadata.unpack(sums[name])
                arrays[name] = store.Stored.from_meta(path / name, root.arrays[name], sums_of_chunks)
                _check_stored(record, arrays[name])
            elif record.type != "str":
                int(record.value or "")
            if record.index and records[record.index].type != "index":
                raise ValueError(f"{record.index} has no indices of rows")
        return State(path, root.text["tree"], records, arrays)


def _check_stored(record: Record, stored: store.Stored) -> None:
    """Raise ValueError unless an array matches the record of its leaf."""
    dtype, shape = dtypes.stored(dtypes.named(record.dtype)), (*record.shape, *record.words)
    if (stored.dtype, stored.shape) != (dtype, shape) or any(not 0 <= axis < len(shape) for axis in record.axes):
        raise ValueError(f"{record} is stored as {stored.dtype} of shape {stored.shape}")


class _Replaced(Exception):
    """Another job has replaced the state while this one was reading it."""


@dataclass(frozen=True)
class Wanted:
    """A leaf to read: the record in the file with the wanted type, and the division here."""

    record: Record
    division: Any
    axes: tuple[int, ...]
    staggered: tuple[int, ...]
    widths: Any

    def text(self) -> str:
        """Return the text that must be the same on all ranks."""
        return f"{self.record}, loaded along {self.axes} with width {self.widths}"


def load(
    path: str | os.PathLike[str],
    *,
    grid: Any = None,
    width: Width | dict[str, Any] = 0,
    axes: Sequence[int] | None = None,
    comm: MPI.Comm | None = None,
    like: Any = None,
) -> Any:
    """Load a tree that `save` has saved: on any grid and any number of ranks. Each rank reads what it needs.

    All ranks call it, outside of compiled functions.

    Args:
      path: the folder.
      grid: the division of fields among the ranks: a `Grid` of the global shape with which they were saved, or for rows
        an `IndexMap` of the same rows, in any division. None: each rank gets all of them. Or a tree of these that is a
        prefix of the tree. Values that were not divided are the same on all ranks.
      width: the width of the halo of the fields, as in `Grid.scatter`: cells of neighbours, and zeros at walls. Or a
        dict with widths for some keys of the tree.
      axes: which axes of the fields belong to the Grid. None: the same as when they were saved.
      comm: an intra-communicator, if there is no grid. None: a clone of COMM_WORLD.
      like: a tree of arrays, `jax.ShapeDtypeStruct`, or Python values. It determines which leaves are loaded, and their
        types: where it has an array of NumPy, the result has one. None: the tree that was saved, of dicts, lists and
        tuples. A tree with other nodes, for example NamedTuples or states of optax, needs it. The file may have more.

    Returns:
      The tree. Blocks have halos of this width. Rows are the rows that this rank owns, then its ghosts.

    Raises:
      ValueError, TypeError: the file lacks a leaf of `like`, or has another dtype. The grid has another shape, or the
        map other rows. The file has 64-bit types and JAX is without them. Or it is no state.
      OSError: chunks are missing or damaged, or cannot be read. FileNotFoundError: the file does not exist. An error of
        one rank is raised on all of them.
    """
    operation = "load"
    with layout.together(grid, comm, operation) as clone:
        for _ in range(_TRIES):
            where, data = agreement.of_rank(
                clone, agreement.run_on_all(clone, operation, lambda: _metadata(path, clone.rank, operation))
            )

            def work(where: Path = where, data: bytes = data) -> tuple[Any, agreement.Facts]:
                state = State.from_bytes(where, data, operation)
                wanted, build = _wanted(state, grid, width, axes, like)
                facts = [(f"what is wanted of {leaf.record.name}", leaf.text()) for leaf in wanted]
                return (state, wanted, build), facts

            state, wanted, build = agreement.check_equal(clone, operation, work)
            check = partial(_check_read, clone, path, data, operation)
            with contextlib.suppress(_Replaced):
                return build(_values(clone, state, wanted, check, operation))
        raise OSError(
            f"{operation}: other jobs have replaced {path} {_TRIES} times while it was read: wait for their end."
        )


def _metadata(path: Any, rank: int, operation: str) -> tuple[Path, bytes]:
    """Return the place of a state, and its metadata. Rank 0 reads them and sends them to the others."""
    store.need(operation)
    whole = Path(commit.place(path, operation))
    if rank > 0:
        return whole, b""
    with commit.naming(f"{operation}: cannot read", whole):
        try:
            return commit.look(whole)
        except FileNotFoundError:
            if not commit.is_there(whole):
                text = f"there is no {whole}."
            elif commit.newest(whole) is not None:
                text = f"{whole} is a folder of states: pass jaxmpi.io.latest(path), or the path of one of them."
            else:
                text = f"{whole} is no state of jaxmpi.io: it has no {whole / store.META}."
            raise FileNotFoundError(f"{operation}: {text}") from None


def _check_read(comm: MPI.Intracomm, path: Any, data: bytes, operation: str, failure: Exception | None) -> None:
    """Raise an error of one rank on all ranks. Raise `_Replaced` if another state has taken the place of this one."""
    try:
        agreement.sums(comm, operation, failure)
    except Exception:
        if agreement.of_rank(comm, comm.rank == 0 and _is_another(path, data, operation)):
            raise _Replaced from None
        raise


def _is_another(path: Any, data: bytes, operation: str) -> bool:
    try:
        return commit.look(Path(commit.place(path, operation)))[1] != data
    except OSError:
        return False


def _wanted(state: State, grid: Any, width: Any, axes: Any, like: Any) -> Any:
    """Return the leaves to read, and a function that makes a tree of their values."""
    operation = "load"
    layout.check_needed(layout.divided(grid), Options(width, axes), operation)
    if like is None:
        tree = metadata.parsed(
            state.path, lambda: trees.build(state.skeleton, lambda name: state.records[name]), operation
        )
        records, structure = jax.tree.flatten(tree)
        names = [record.name for record in records]
        targets: list[Any] = [None] * len(records)
    else:
        structure = jax.tree.structure(like)
        names, targets = trees.leaves(like, operation)
        listed = [record.name for record in state.records.values() if record.type != "index"]
        absent = [name for name in names if name not in listed]
        if absent:
            raise ValueError(
                f"{operation}: like has {', '.join(absent[:5])}, and {state.path} has {', '.join(listed)}."
            )
        records = [_retyped(state.records[name], x, operation) for name, x in zip(names, targets, strict=True)]
    tree = jax.tree.unflatten(structure, records)
    each, widths = trees.spread(grid, tree, operation), trees.spread_width(width, tree, operation)
    wanted = []
    for record, target, division, leaf_width in zip(records, targets, each, widths, strict=True):
        leaf = _place(record, division, leaf_width, axes, operation)
        _check_possible(record, operation)
        if hasattr(target, "shape"):
            _check_shape(leaf, tuple(target.shape), operation)
        wanted.append(leaf)
    return wanted, lambda values: jax.tree.unflatten(structure, values)


def _retyped(record: Record, x: Any, operation: str) -> Record:
    """Return the record of a leaf with the type that `like` has there. Raise ValueError if the dtype differs."""
    kind, dtype = type(x).__name__, getattr(x, "dtype", None)
    if dtype is not None:
        key = keys.is_key(x)
        kind = (
            "key" if key else "numpy" if isinstance(x, np.ndarray) else "scalar" if isinstance(x, np.generic) else "jax"
        )
        same = record.type == "key" if key else record.type != "key" and np.dtype(dtype).name == record.dtype
        if key and same and str(keys.impl(x.dtype)) != record.impl:
            same = False
    else:
        same = kind == record.type or (
            kind in _PYTHON and record.type in ("jax", "numpy", "scalar") and not record.shape
        )
    if not same:
        wanted = f"of dtype {dtype}" if dtype is not None else f"of type {kind}"
        in_file = f"keys of {record.impl}" if record.type == "key" else record.dtype or record.type
        raise ValueError(
            f"{operation}: {record.name} in like is {wanted}, and in the file {record.type} of {in_file}: pass this "
            "type in like=, and convert the loaded values."
        )
    return dataclasses.replace(record, type=kind, weak="weak" if getattr(x, "weak_type", False) else "")


def _check_possible(record: Record, operation: str) -> None:
    if record.type != "jax":
        return
    if jax.dtypes.canonicalize_dtype(dtypes.named(record.dtype)) != dtypes.named(record.dtype):
        raise ValueError(
            f"{operation}: {record.name} is of {record.dtype}, which JAX has only with 64-bit types: set "
            'JAX_ENABLE_X64=1 or jax.config.update("jax_enable_x64", True) before, or get an array of NumPy by a like= '
            f"that has np.empty(..., np.{record.dtype}) there."
        )


def _place(record: Record, division: Any, width: Any, axes: Any, operation: str) -> Wanted:
    """Return the leaf with its division here."""
    if division is None or not record.division:
        return Wanted(record, None, (), (), ())
    division._check_alive(operation)
    if isinstance(division, IndexMap):
        if record.division != "rows":
            raise ValueError(
                f"{operation}: {record.name} was not divided by an IndexMap: pass a Grid, or None for all of it."
            )
        total = rows.numbering(division).total
        if total != record.shape[0]:
            raise ValueError(
                f"{operation}: {record.name} has {record.shape[0]} rows, and all ranks together own {total} of the map."
            )
        return Wanted(record, division, (0,), (0,), ())
    division._need_shape(operation)
    chosen = record.axes if axes is None else axes
    count = len(division.processes)
    if axes is None and len(chosen) != count:
        raise ValueError(
            f"{operation}: {record.name} of shape {record.shape} was divided along its axes {record.axes}, and the "
            f"grid has {count}: axes= says which axes of the array belong to the grid."
        )
    advice = " The grid must have the shape with which it was saved."
    cut = division._cut(record.shape, chosen, division.global_shape, operation, record.name, advice)
    widths = checks.widths(width, count, operation)
    halo = Halo(division._layout, widths, True)
    division._check_blocks(halo, checks.rules(None, count, operation), f"{operation}: {record.name}")
    return Wanted(record, division, tuple(axis % len(record.shape) for axis in cut.axes), cut.staggered, widths)


def _local_shape(leaf: Wanted) -> tuple[int, ...]:
    shape = list(leaf.record.shape)
    if isinstance(leaf.division, IndexMap):
        shape[0] = sum(leaf.division.sizes)
    elif leaf.division is not None:
        sizes = zip(leaf.axes, leaf.division.local_shape, leaf.staggered, leaf.widths, strict=True)
        for axis, size, extra, pair in sizes:
            shape[axis] = size + extra + sum(pair)
    return tuple(shape)


def _check_shape(leaf: Wanted, shape: tuple[int, ...], operation: str) -> None:
    right = _local_shape(leaf)
    if shape != right:
        raise ValueError(
            f"{operation}: {leaf.record.name} in like has shape {shape}, and the loaded one has {right} on this rank."
        )


def _values(
    comm: MPI.Intracomm,
    state: State,
    wanted: Sequence[Wanted],
    check: Callable[[Exception | None], None],
    operation: str,
) -> list[Any]:
    """Return the values of the leaves. All ranks call `check` with the read error of this one, if any."""
    readers = _readers(comm, state, wanted, check, operation)
    failure: Exception | None = None
    loaded: list[Any] = []
    for leaf, reader in zip(wanted, readers, strict=True):
        values, error = (None, None) if failure else agreement.capture(partial(_read, state, leaf, reader, operation))
        failure = failure or error
        loaded.append(values)
    check(failure)
    for i, (leaf, reader) in enumerate(zip(wanted, readers, strict=True)):
        loaded[i] = _finished(loaded[i], leaf, reader)  # frees the stored values, one leaf after the other
    return loaded


def _readers(
    comm: MPI.Intracomm,
    state: State,
    wanted: Sequence[Wanted],
    check: Callable[[Exception | None], None],
    operation: str,
) -> list[rows.Reader | None]:
    """Return the transfers of rows to the ranks that need them, for the leaves that are rows."""
    known: dict[Any, rows.Reader] = {}
    readers: list[rows.Reader | None] = []
    for leaf in wanted:
        if not isinstance(leaf.division, IndexMap):
            readers.append(None)
            continue
        stored, index = state.arrays[leaf.record.name], leaf.record.index
        key = leaf.division, index, stored.chunks[0]
        if key not in known:
            run = rows.run_of(stored.shape[0], comm.size, stored.chunks[0])
            points = rows.interval(run, stored.shape[0], comm.rank)
            indices, failure = agreement.capture(partial(_indices, state, index, points, operation))
            check(failure)
            assert indices is not None
            try:
                known[key] = rows.reader(leaf.division, indices, points)
            except ValueError as error:
                text = (
                    str(error)
                    .removeprefix("IndexMap: ")
                    .replace("no rank owns", "the file has no rows")
                    .partition(". ")[0]
                )
                raise ValueError(f"{operation}: {leaf.record.name} and the map have other rows: {text}") from error
        readers.append(known[key])
    return readers


def _indices(state: State, index: str, points: Interval, operation: str) -> np.ndarray:
    """Return the global indices of rows of the file."""
    if not index:
        return np.arange(*points)
    with commit.naming(f"{operation}: cannot read", state.path / index):
        return store.read(state.arrays[index], [points]).astype(np.int64)


def _read(state: State, leaf: Wanted, reader: rows.Reader | None, operation: str) -> Any:
    """Read this rank's points of a leaf without halo, in the dtype of the file; or return a value that has no array."""
    record = leaf.record
    if record.value is not None:
        return record.value if record.type == "str" else int(record.value)
    stored = state.arrays[record.name]
    points: list[Interval] = [(0, size) for size in stored.shape]
    if isinstance(leaf.division, Grid):
        rank = leaf.division._comm.rank
        for axis, (start, size) in zip(leaf.axes, leaf.division._extents(rank, leaf.staggered), strict=True):
            points[axis] = (start, start + size)
    if reader is not None:
        points[0] = reader.points
    with commit.naming(f"{operation}: cannot read", stored.path):
        return store.read(stored, points)


def _typed(record: Record, stored: np.ndarray) -> Any:
    """Return values in the type of the record."""
    values = dtypes.decode(stored, record.dtype)
    if record.type in _PYTHON:
        return _PYTHON[record.type](values[()])
    if record.type == "scalar":
        return values[()]
    if record.type == "numpy":
        return values
    array = jax.device_put(values)
    array = internals.weak(array) if record.weak else array
    return jax.random.wrap_key_data(array, impl=record.impl) if record.type == "key" else array


def _finished(values: Any, leaf: Wanted, reader: rows.Reader | None) -> Any:
    """Return the leaf from the values in the file, with halo or ghosts. All ranks call it together."""
    if leaf.record.value is not None:
        return values
    if reader is not None:
        values = chunks.in_words(values, reader.move)
    if isinstance(leaf.division, Grid) and any(map(any, leaf.widths)):
        grid = leaf.division

        def fill(x: Any) -> Any:
            return grid.exchange(grid.pad(x, leaf.widths, axes=leaf.axes), leaf.widths, axes=leaf.axes)

        values = chunks.in_words(values, fill)
    value = _typed(leaf.record, values)
    shape, dtype = np.shape(value), getattr(value, "dtype", None)
    if shape != _local_shape(leaf) or (leaf.record.type in ("jax", "numpy", "scalar") and dtype != leaf.record.dtype):
        raise RuntimeError(f"load: {leaf.record} has become {dtype} of shape {shape}: this is an error of jaxmpi.")
    return value
