"""`jaxmpi.io.load`: a tree, read by all ranks, on any grid and any number of ranks."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
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
    path: Path
    skeleton: Any
    records: Mapping[str, Record]
    arrays: Mapping[str, store.Stored]


def _state(path: Path, data: bytes, operation: str) -> State:
    """Read metadata. Raise ValueError if they are not the metadata of a state, or are damaged."""
    root = metadata.decode(path, data, operation)
    if root is None or "series" in root[0]:
        what = "Zarr, but no state of jaxmpi.io" if root is None else "a series of a jaxmpi.io.Writer"
        raise ValueError(
            f"{operation}: {path} is {what}: read it with xarray or zarr. To continue from a state, save it with "
            "jaxmpi.io.checkpoint."
        )
    text, metas = root

    def parse() -> State:
        records = {record.name: record for record in map(Record.from_json, text["leaves"])}
        arrays = {}
        for name, record in records.items():
            if record.stored:
                sums = metadata.unpack(text["sums"][name])
                stored = arrays[name] = store.Stored.from_meta(path / name, metas[name], sums)
                shape = (*record.shape, *record.words)
                wrong_axes = any(not 0 <= axis < len(shape) for axis in record.axes)
                if (stored.dtype, stored.shape) != (record.stored_dtype, shape) or wrong_axes:
                    raise ValueError(f"{record} is stored as {stored.dtype} of shape {stored.shape}")
            elif record.type != "str":
                int(record.value or "")
            if record.index and records[record.index].type != "index":
                raise ValueError(f"{record.index} has no indices of rows")
        return State(path, text["tree"], records, arrays)

    return metadata.parsed(path, parse, operation)


@dataclass(frozen=True)
class Wanted:
    """A leaf to read: the record in the file with the wanted type, and the division here."""

    record: Record
    division: Any
    axes: tuple[int, ...]
    staggered: tuple[int, ...]
    widths: Any


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
                state = _state(where, data, operation)
                wanted, build = _wanted(state, grid, width, axes, like)
                facts = [
                    (f"what is wanted of {leaf.record.name}", f"{leaf.record}, along {leaf.axes}, width {leaf.widths}")
                    for leaf in wanted
                ]
                return (state, wanted, build), facts

            state, wanted, build = agreement.check_equal(clone, operation, work)
            read = partial(_read, state, wanted, clone, operation)
            try:
                readers = _readers(clone, state, wanted, operation)
                values = agreement.run_on_all(clone, operation, read)
            except Exception:  # on all ranks
                if agreement.of_rank(clone, clone.rank == 0 and _is_another(path, data, operation)):
                    continue
                raise
            for i, leaf in enumerate(wanted):  # frees the stored values, one leaf after the other
                values[i] = _finished(values[i], leaf, readers.get(i))
            return build(values)
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


def _is_another(path: Any, data: bytes, operation: str) -> bool:
    """Return whether another job has replaced the state."""
    try:
        return commit.look(Path(commit.place(path, operation)))[1] != data
    except OSError:
        return False


def _wanted(state: State, grid: Any, width: Any, axes: Any, like: Any) -> Any:
    """Return the leaves to read, and a function that makes a tree of their values."""
    operation = "load"
    layout.check_needed(layout.divided(grid), Options(width, axes), operation)
    if like is None:
        tree = metadata.parsed(state.path, lambda: trees.build(state.skeleton, state.records.__getitem__), operation)
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
        if record.type == "jax" and jax.dtypes.canonicalize_dtype(kind := dtypes.named(record.dtype)) != kind:
            raise ValueError(
                f"{operation}: {record.name} is of {record.dtype}, which JAX has only with 64-bit types: set "
                'JAX_ENABLE_X64=1 or jax.config.update("jax_enable_x64", True) before, or get an array of NumPy by a '
                f"like= that has np.empty(..., np.{record.dtype}) there."
            )
        if hasattr(target, "shape") and tuple(target.shape) != _local_shape(leaf):
            raise ValueError(
                f"{operation}: {record.name} in like has shape {tuple(target.shape)}, and the loaded one has "
                f"{_local_shape(leaf)} on this rank."
            )
        wanted.append(leaf)
    return wanted, lambda values: jax.tree.unflatten(structure, values)


def _retyped(record: Record, x: Any, operation: str) -> Record:
    """Return the record of a leaf with the type that `like` has there. Raise ValueError if the dtype differs."""
    kind, dtype = type(x).__name__, getattr(x, "dtype", None)
    if dtype is not None:
        if keys.is_key(x):
            kind, same = "key", record.type == "key" and str(keys.impl(dtype)) == record.impl
        else:
            kind = "numpy" if isinstance(x, np.ndarray) else "scalar" if isinstance(x, np.generic) else "jax"
            same = record.type != "key" and np.dtype(dtype).name == record.dtype
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


def _place(record: Record, division: Any, width: Any, axes: Any, operation: str) -> Wanted:
    if division is None or not record.division:
        return Wanted(record, None, (), (), ())
    if isinstance(division, IndexMap):
        if record.division != "rows":
            raise ValueError(
                f"{operation}: {record.name} was not divided by an IndexMap: pass a Grid, or None for all of it."
            )
        if division._total != record.shape[0]:
            raise ValueError(
                f"{operation}: {record.name} has {record.shape[0]} rows, and all ranks together own {division._total} "
                "of the map."
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


def _readers(comm: MPI.Intracomm, state: State, wanted: Sequence[Wanted], operation: str) -> dict[int, rows.Transfer]:
    """Return the transfers of rows to the ranks that need them, for leaves that are rows. Raise errors on all ranks."""
    known: dict[Any, rows.Transfer] = {}
    readers: dict[int, rows.Transfer] = {}
    for i, leaf in enumerate(wanted):
        if not isinstance(leaf.division, IndexMap):
            continue
        stored, index = state.arrays[leaf.record.name], leaf.record.index
        key = leaf.division, index, stored.chunks[0]
        if key not in known:
            points = _run(stored, comm)
            indices = agreement.run_on_all(comm, operation, partial(_indices, state, index, points, operation))
            try:
                known[key] = rows.reader(leaf.division, indices)
            except ValueError as error:
                text = str(error).replace("IndexMap: no rank owns", "the file has no rows").partition(". ")[0]
                raise ValueError(f"{operation}: {leaf.record.name} and the map have other rows: {text}") from error
        readers[i] = known[key]
    return readers


def _run(stored: store.Stored, comm: MPI.Intracomm) -> Interval:
    """Return the rows of the file that this rank reads."""
    return rows.interval(rows.run_of(stored.shape[0], comm.size, stored.chunks[0]), stored.shape[0], comm.rank)


def _indices(state: State, index: str, points: Interval, operation: str) -> np.ndarray:
    if not index:
        return np.arange(*points)
    with commit.naming(f"{operation}: cannot read", state.path / index):
        return store.read(state.arrays[index], [points]).astype(np.int64)


def _read(state: State, wanted: Sequence[Wanted], comm: MPI.Intracomm, operation: str) -> list[Any]:
    """Read this rank's points of the leaves without halo, in the dtypes of the file, and values that have no array."""
    values: list[Any] = []
    for leaf in wanted:
        record = leaf.record
        if record.value is not None:
            values.append(record.value if record.type == "str" else int(record.value))
            continue
        stored = state.arrays[record.name]
        points: list[Interval] = [(0, size) for size in stored.shape]
        if isinstance(leaf.division, Grid):
            extents = leaf.division._extents(leaf.division._comm.rank, leaf.staggered)
            for axis, (start, size) in zip(leaf.axes, extents, strict=True):
                points[axis] = (start, start + size)
        elif isinstance(leaf.division, IndexMap):
            points[0] = _run(stored, comm)
        with commit.naming(f"{operation}: cannot read", stored.path):
            values.append(store.read(stored, points))
    return values


def _typed(record: Record, stored: np.ndarray) -> Any:
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


def _finished(values: Any, leaf: Wanted, reader: rows.Transfer | None) -> Any:
    """Return the leaf from the values in the file, with halo or ghosts. All ranks call it together."""
    if leaf.record.value is not None:
        return values
    if reader is not None:
        values = chunks.in_words(values, reader.move)
    if isinstance(leaf.division, Grid) and any(map(any, leaf.widths)):
        grid = leaf.division
        pad = partial(grid.pad, width=leaf.widths, axes=leaf.axes)
        values = chunks.in_words(values, lambda x: grid.exchange(pad(x), leaf.widths, axes=leaf.axes))
    value = _typed(leaf.record, values)
    shape, dtype = np.shape(value), getattr(value, "dtype", None)
    if shape != _local_shape(leaf) or (leaf.record.type in ("jax", "numpy", "scalar") and dtype != leaf.record.dtype):
        raise RuntimeError(f"load: {leaf.record} has become {dtype} of shape {shape}: this is an error of jaxmpi.")
    return value
