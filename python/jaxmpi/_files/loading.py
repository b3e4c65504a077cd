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
from jaxmpi._grid import arguments as given
from jaxmpi._grid.grid import Grid, Width
from jaxmpi._grid.halos import Halo
from jaxmpi._jax import internals
from jaxmpi._mpi import agreement
from jaxmpi._primitive import keys
from jaxmpi._unstructured.index_map import IndexMap

_PYTHON = {"int": int, "float": float, "complex": complex, "bool": bool}
_TRIES = 50
"""How often a state is read anew because another job has replaced it meanwhile."""


@dataclass(frozen=True)
class State:
    """A state as its metadata describe it."""

    path: Path
    skeleton: Any
    records: Mapping[str, Record]
    arrays: Mapping[str, store.Stored]

    @staticmethod
    def of(path: Path, data: bytes, operation: str) -> "State":
        """Raises ValueError if the metadata are not those of a state, or are damaged."""
        root = metadata.decode(path, data, operation)
        if root is None:
            raise ValueError(
                f"{operation}: {path} is Zarr, but no state of jaxmpi.io: read it with zarr or xarray instead."
            )
        if "series" in root.text:
            raise ValueError(
                f"{operation}: {path} is a series of a jaxmpi.io.Writer: read it with xarray or zarr; to go on from, "
                "save a state with jaxmpi.io.checkpoint."
            )
        return metadata.parsed(path, partial(State._of, path, root), operation)

    @staticmethod
    def _of(path: Path, root: metadata.Root) -> "State":
        records = {record.name: record for record in map(Record.of_json, root.text["leaves"])}
        sums = root.text.get("sums")
        arrays = {}
        for name, record in records.items():
            if record.stored:
                its = None if sums is None else metadata.unpack(sums[name])
                arrays[name] = store.Stored.of(path / name, root.arrays[name], its)
                _check_stored(record, arrays[name])
            elif record.type != "str":
                int(record.value or "")
            if record.index and records[record.index].type != "index":
                raise ValueError(f"{record.index} has no indices of rows")
        return State(path, root.text["tree"], records, arrays)


def _check_stored(record: Record, stored: store.Stored) -> None:
    """Raises ValueError unless an array is what the record of its leaf says."""
    dtype, shape = dtypes.stored(dtypes.named(record.dtype)), (*record.shape, *record.words)
    if (stored.dtype, stored.shape) != (dtype, shape) or any(not 0 <= axis < len(shape) for axis in record.axes):
        raise ValueError(f"{record} is stored as {stored.dtype} of shape {stored.shape}")


class _Replaced(Exception):
    """Another job has replaced the state while this one was reading it."""


@dataclass(frozen=True)
class Wanted:
    """A leaf that is read: what it is in the file, what is made of it, and how it is divided."""

    record: Record
    division: Any
    axes: tuple[int, ...]
    staggered: tuple[int, ...]
    widths: Any

    def text(self) -> str:
        """What all ranks must have alike."""
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
    """Loads a tree that `save` has saved: on any grid and any number of ranks, each of which reads what it needs.

    All ranks call it, outside of compiled functions.

    Args:
      path: the folder.
      grid: how fields are divided among the ranks: a `Grid` of the global shape with which they were saved; for rows an
        `IndexMap` of the same rows, in any division. None: each rank gets all of them. Or a tree of these that is a
        prefix of the tree. What was not divided is the same on all ranks.
      width: of the halo that fields get, as in `Grid.scatter`: cells of neighbours, and zeros at walls. Or a dict with
        those of some keys of the tree.
      axes: which axes of the fields are those of the Grid. None: those with which they were saved.
      comm: an intra-communicator, where there is no grid; a clone of COMM_WORLD where it is None.
      like: a tree of arrays, `jax.ShapeDtypeStruct`, or Python values that says what is loaded, and of which types:
        arrays of NumPy where it has such. None: the tree that was saved, of dicts, lists and tuples. A tree with other
        nodes, such as NamedTuples or states of optax, needs it. The file may have more.

    Returns:
      The tree. Blocks have halos of this width; rows are those that this rank owns, then its ghosts.

    Raises:
      ValueError, TypeError: the file has not what `like` has, or other dtypes; the grid has another shape; a map other
        rows; JAX is without 64-bit types and the file has them; it is no state.
      OSError: chunks are missing or damaged, or cannot be read; FileNotFoundError: there is no such file.
        An error of one rank is raised on all of them.
    """
    operation = "load"
    with layout.together(grid, comm, operation) as clone:
        for _ in range(_TRIES):
            where, data = agreement.of_rank(
                clone, agreement.run_on_all(clone, operation, lambda: _metadata(path, clone.rank, operation))
            )

            def work(where: Path = where, data: bytes = data) -> tuple[Any, agreement.Facts]:
                state = State.of(where, data, operation)
                wanted, build = _wanted(state, grid, width, axes, like)
                return (state, wanted, build), [(its.record.name, its.text()) for its in wanted]

            state, wanted, build = agreement.check_equal(clone, operation, work, _differs)

            def check(failure: Exception | None, data: bytes = data) -> None:
                _check_read(clone, failure, path, data, operation)

            with contextlib.suppress(_Replaced):
                return build(_values(clone, state, wanted, check, operation))
        raise OSError(
            f"{operation}: other jobs have replaced {path} {_TRIES} times while it was read: wait for their end."
        )


def _differs(what: str, mine: str, root: str) -> str:
    return f"{what} is not wanted as on rank 0: {mine[:200]} and {root[:200]}. All ranks call it alike."


def _metadata(path: Any, rank: int, operation: str) -> tuple[Path, bytes]:
    """Where a state is, and its metadata; on rank 0, which tells the others."""
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


def _check_read(comm: MPI.Intracomm, failure: Exception | None, path: Any, data: bytes, operation: str) -> None:
    """Raises on all ranks what one of them could not read; `_Replaced` if the state is another one by now."""
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
    """The leaves that are read, and what makes a tree of their values."""
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
        there = [record.name for record in state.records.values() if record.type != "index"]
        absent = [name for name in names if name not in there]
        if absent:
            raise ValueError(f"{operation}: like has {', '.join(absent[:5])}, and {state.path} has {', '.join(there)}.")
        records = [_retyped(state.records[name], x, operation) for name, x in zip(names, targets, strict=True)]
    tree = jax.tree.unflatten(structure, records)
    each, widths = trees.spread(grid, tree, operation), trees.spread_width(width, tree, operation)
    wanted = []
    for record, target, division, its_width in zip(records, targets, each, widths, strict=True):
        its = _place(record, division, its_width, axes, operation)
        _check_possible(record, operation)
        if hasattr(target, "shape"):
            _check_shape(its, tuple(target.shape), operation)
        wanted.append(its)
    return wanted, lambda values: jax.tree.unflatten(structure, values)


def _retyped(record: Record, x: Any, operation: str) -> Record:
    """The record of a leaf that becomes what `like` has in its place. Raises ValueError for another dtype."""
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
        its = f"of dtype {dtype}" if dtype is not None else f"of type {kind}"
        there = f"keys of {record.impl}" if record.type == "key" else record.dtype or record.type
        raise ValueError(
            f"{operation}: {record.name} in like is {its}, and in the file {record.type} of {there}: pass like= with "
            "that, and convert what has been loaded."
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
    """How a leaf is divided here."""
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
            f"grid has {count}: axes= says which of the array's those are."
        )
    advice = " The grid must have the shape with which it was saved."
    cut = division._cut(record.shape, chosen, division.global_shape, operation, record.name, advice)
    widths = given.widths(width, count, operation)
    halo = Halo(division._layout, widths, True)
    division._check_blocks(halo, given.rules(None, count, operation), f"{operation}: {record.name}")
    return Wanted(record, division, tuple(axis % len(record.shape) for axis in cut.axes), cut.staggered, widths)


def _local_shape(its: Wanted) -> tuple[int, ...]:
    shape = list(its.record.shape)
    if isinstance(its.division, IndexMap):
        shape[0] = sum(its.division.sizes)
    elif its.division is not None:
        sizes = zip(its.axes, its.division.local_shape, its.staggered, its.widths, strict=True)
        for axis, size, extra, pair in sizes:
            shape[axis] = size + extra + sum(pair)
    return tuple(shape)


def _check_shape(its: Wanted, shape: tuple[int, ...], operation: str) -> None:
    right = _local_shape(its)
    if shape != right:
        raise ValueError(
            f"{operation}: {its.record.name} in like has shape {shape}, and what is loaded has {right} on this rank."
        )


def _values(
    comm: MPI.Intracomm,
    state: State,
    wanted: Sequence[Wanted],
    check: Callable[[Exception | None], None],
    operation: str,
) -> list[Any]:
    """The values of the leaves. All ranks call `check` with what this one could not read."""
    readers = _readers(comm, state, wanted, check, operation)
    failure: Exception | None = None
    found: list[Any] = []
    for its, reader in zip(wanted, readers, strict=True):
        values, error = (None, None) if failure else agreement.capture(partial(_read, state, its, reader, operation))
        failure = failure or error
        found.append(values)
    check(failure)
    for i, (its, reader) in enumerate(zip(wanted, readers, strict=True)):
        found[i] = _finished(found[i], its, reader)  # what has been read goes, one after the other
    return found


def _readers(
    comm: MPI.Intracomm,
    state: State,
    wanted: Sequence[Wanted],
    check: Callable[[Exception | None], None],
    operation: str,
) -> list[rows.Reader | None]:
    """The ways of rows to where they are needed, for the leaves that are rows."""
    made: dict[Any, rows.Reader] = {}
    found: list[rows.Reader | None] = []
    for its in wanted:
        if not isinstance(its.division, IndexMap):
            found.append(None)
            continue
        stored, index = state.arrays[its.record.name], its.record.index
        key = its.division, index, stored.chunks[0]
        if key not in made:
            run = rows.run_of(stored.shape[0], comm.size, stored.chunks[0])
            points = rows.interval(run, stored.shape[0], comm.rank)
            indices, failure = agreement.capture(partial(_indices, state, index, points, operation))
            check(failure)
            assert indices is not None
            try:
                made[key] = rows.reader(its.division, indices, points)
            except ValueError as error:
                text = (
                    str(error)
                    .removeprefix("IndexMap: ")
                    .replace("no rank owns", "the file has no rows")
                    .partition(". ")[0]
                )
                raise ValueError(f"{operation}: {its.record.name} and the map have other rows: {text}") from error
        found.append(made[key])
    return found


def _indices(state: State, index: str, points: Interval, operation: str) -> np.ndarray:
    """The global indices of rows of the file."""
    if not index:
        return np.arange(*points)
    with commit.naming(f"{operation}: cannot read", state.path / index):
        return store.read(state.arrays[index], [points]).astype(np.int64)


def _read(state: State, its: Wanted, reader: rows.Reader | None, operation: str) -> Any:
    """This rank's points of a leaf without halo, in the dtype in which they are stored; or what no array has."""
    record = its.record
    if record.value is not None:
        return record.value if record.type == "str" else int(record.value)
    stored = state.arrays[record.name]
    points: list[Interval] = [(0, size) for size in stored.shape]
    if isinstance(its.division, Grid):
        rank = its.division._comm.rank
        for axis, (start, size) in zip(its.axes, its.division._extents(rank, its.staggered), strict=True):
            points[axis] = (start, start + size)
    if reader is not None:
        points[0] = reader.points
    with commit.naming(f"{operation}: cannot read", stored.path):
        return store.read(stored, points)


def _typed(record: Record, stored: np.ndarray) -> Any:
    """Values as what the record says they are."""
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


def _finished(values: Any, its: Wanted, reader: rows.Reader | None) -> Any:
    """The leaf from the values that were read, with halo or ghosts. All ranks call it together."""
    if its.record.value is not None:
        return values
    if reader is not None:
        values = chunks.in_words(values, reader.move)
    if isinstance(its.division, Grid) and any(map(any, its.widths)):
        grid = its.division

        def fill(x: Any) -> Any:
            return grid.exchange(grid.pad(x, its.widths, axes=its.axes), its.widths, axes=its.axes)

        values = chunks.in_words(values, fill)
    leaf = _typed(its.record, values)
    shape, dtype = np.shape(leaf), getattr(leaf, "dtype", None)
    if shape != _local_shape(its) or (its.record.type in ("jax", "numpy", "scalar") and dtype != its.record.dtype):
        raise RuntimeError(f"load: {its.record} has become {dtype} of shape {shape}: this is an error of jaxmpi.")
    return leaf
