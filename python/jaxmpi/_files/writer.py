"""`jaxmpi.io.Writer`: steps of fields in one file, written by a thread while the program computes.

A reader sees the steps in the metadata of the root, which are replaced at once. A step appears there when all ranks
have written it. At each append the ranks agree, by one reduction, on the number of steps that all have written. Then
rank 0's thread writes metadata with this number. It writes the metadata of single arrays before, so a reader of those
alone sees no incomplete step either.
"""

import collections
import contextlib
import dataclasses
import itertools
import json
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from jaxmpi._files import chunks as tiles
from jaxmpi._files import commit, layout, metadata, records, saving, store, trees
from jaxmpi._files.chunks import Whole
from jaxmpi._files.layout import Options, StoredArray
from jaxmpi._grid import arguments as checks
from jaxmpi._grid.grid import Width
from jaxmpi._jax import internals
from jaxmpi._mpi import agreement, communicators, failures, survival
from jaxmpi._mpi.watch import waiting
from jaxmpi._primitive import arguments

TIME = "time"
"""The name of the axis that grows, and of its coordinate."""

_TIMES_IN_CHUNK = 1024


class Writer:
    """A file with fields at many times. Each append adds one time.

    The file is a folder in the format Zarr v3: `xarray.open_zarr(path)` reads it, also while it is being written. Its
    arrays have a first axis `time`. An append copies the step once. Then a thread of each rank writes the rank's
    chunks, while the program computes. At most `behind` steps are in memory: an append waits for room if the files are
    slower than the program.

    Readers see a step only when all ranks have written their part of it. The ranks agree on this at the next append
    that writes, and at the end. A program that dies loses the steps on which the ranks have not yet agreed, at most
    `behind` and two, and nothing else.

        with jaxmpi.io.Writer("sea.zarr", grid, width=1, every=10) as out:
            for step in range(1000):
                state = advance(state)
                out.append(step * dt, {"h": state.h, "u": state.u})

    Args:
      path: the folder, which all ranks see. The first append that writes makes it.
      grid: the division of the fields: a `jaxmpi.Grid`, a `jaxmpi.IndexMap`, or a tree of these and None, as in `save`.
      fields: the names of the leaves that are written, for example ("h", "u"). None: all.
      every: the first append is written, and then each `every`-th one. The others return at once. A writer that resumes
        counts from its own first append.
      width, axes, chunks, dims, coords, attrs, compressor: as in `save`, without the axis of time. `attrs["time"]` are
        the attributes of the times, for example {"units": "s"}.
      behind: how many steps may wait for the thread: 1 or more.
      time_chunk: how many steps a chunk has. With more than 1 there are fewer and larger files. This many steps are
        kept in memory. They can be read when the last of them is written, or after a `flush`. `resume` takes the number
        from the file.
      resume: continue with an existing file, which must have the same fields, or make a new one. Steps at or after the
        first time that is appended are dropped first, because the program writes them again. The arrays keep their
        attributes, chunks and compressor.
      overwrite: replace an existing file of jaxmpi.io, at the first append that writes.
      comm: an intra-communicator of the same ranks. None: the communicator of the grid.

    Raises:
      TypeError, ValueError: an argument has a wrong type or value. On this rank; nothing is written.
      FileExistsError: something of this name exists, and neither `resume` nor `overwrite` is True. On this rank;
        nothing is written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        grid: Any = None,
        fields: Sequence[str] | None = None,
        *,
        every: int = 1,
        width: Width | dict[str, Any] = 0,
        axes: Sequence[int] | None = None,
        behind: int = 2,
        time_chunk: int = 1,
        resume: bool = False,
        overwrite: bool = False,
        chunks: int | Sequence[int] | None = None,
        dims: str | Sequence[str] | None = None,
        coords: Any = None,
        attrs: Any = None,
        compressor: Any = None,
        comm: MPI.Comm | None = None,
    ):
        operation = "Writer"
        self._path = Path(commit.place(path, operation))
        self._every, self._behind = _positive(every, operation, "every"), _positive(behind, operation, "behind")
        self._time_chunk = _positive(time_chunk, operation, "time_chunk")
        self._resume = checks.truth(resume, operation, "resume")
        self._overwrite = checks.truth(overwrite, operation, "overwrite")
        if self._resume and self._overwrite:
            raise ValueError(f"{operation}: resume=True goes on with a file, overwrite=True replaces it: pass one.")
        exists = commit.is_there(self._path) or commit.is_there(commit.replaced(self._path))
        if exists and not self._resume and not self._overwrite:
            raise FileExistsError(
                f"{operation}: {self._path} exists: resume=True goes on with it, overwrite=True replaces it; or choose "
                "another path."
            )
        self._fields = (fields,) if isinstance(fields, str) else None if fields is None else tuple(fields)
        if self._fields is not None and not (self._fields and all(isinstance(name, str) for name in self._fields)):
            raise TypeError(f'{operation}: fields is {fields!r:.80}: pass names of leaves, such as ("h", "state.u").')
        self._grid, self._comm = grid, comm
        self._options = Options(width, axes, chunks, dims, coords, attrs, compressor)
        self._compressors = store.codecs(compressor, operation)
        self._calls = 0
        self._series: _Series | None = None
        self._worker, self._lock = _Worker(), commit.Lock()
        self._over = ""

    def append(self, time: float, tree: Any) -> None:
        """Add a step. All ranks call it, with the same time.

        Args:
          time: of the step, a number that is larger than the time of the step before. Files have it as float64.
          tree: this rank's fields, as in `save`. Names, shapes and dtypes are the same in each append. Arrays may be
            donated or overwritten afterwards.

        Raises:
          TypeError, ValueError: the fields do not fit, or differ from those before; or the time does not grow. On all
            ranks; no more can be appended then.
          OSError: this step or one before could not be written. On all ranks; no more can be appended then.
        """
        operation = "Writer.append"
        with self._calling(operation):
            self._calls += 1
            if (self._calls - 1) % self._every:
                return
            if self._series is None:
                self._series = _open(self, operation, time, tree)
            self._worker.wait_for_room(self._behind)
            with survival.failing(self._series.known.mpi, f"io.{operation}"):
                self._series.append(operation, time, tree)

    @contextlib.contextmanager
    def _calling(self, operation: str) -> Iterator[None]:
        """Refuse a call after the end. Stop the thread after an error. Then nothing is written in the background, and
        others may write there."""
        internals.check_outside(operation)
        if self._over:
            raise ValueError(f"{operation}: the writer of {self._path} {self._over}.")
        try:
            yield
        except BaseException:
            self._over = "has failed before"
            try:
                self._worker.finish(drops=True)
            finally:
                self._lock.release()
            raise

    def flush(self) -> None:
        """Wait until all appended steps are written and can be read. All ranks call it.

        Call it before `jaxmpi.io.checkpoint`, so that the file is complete up to the state. A job that continues from
        this state then finds all steps that it does not compute again.

        Raises:
          OSError: a step could not be written. On all ranks; no more can be appended then.
          ValueError: the writer is closed, or has failed.
        """
        with self._calling("Writer.flush"):
            self._finish("Writer.flush")

    def _finish(self, operation: str) -> None:
        self._worker.finish()
        if self._series is not None:
            with survival.failing(self._series.known.mpi, f"io.{operation}"):
                self._series.commit_all(operation)

    def close(self) -> None:
        """Wait until all steps are written and can be read. All ranks call it; a `with` block does so at its end.

        If an exception leaves the block, wait for this rank's files alone, because other ranks may never come. Then the
        last steps, at most `behind` and two, may be missing in the file.

        Raises:
          OSError: a step could not be written. On all ranks.
        """
        self.__exit__(None)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._over:
            return
        self._over = "is closed"
        try:
            self._finish("Writer.close") if kind is None else self._worker.finish()
        finally:
            self._lock.release()

    def __del__(self) -> None:
        if not getattr(self, "_over", "never made") and self._series is not None:
            warnings.warn(f"the writer of {self._path} was not closed: its last steps are lost", ResourceWarning, 2)


def _positive(value: Any, operation: str, name: str) -> int:
    number = arguments.integer(value, operation, name)
    if number < 1:
        raise ValueError(f"{operation}: {name} is {number}: pass 1 or more.")
    return number


# --- the thread -------------------------------------------------------------------------------------------------------


class _Worker:
    """A thread that does jobs in order. After an error it does no more."""

    def __init__(self) -> None:
        self._jobs: collections.deque[Callable[[], None]] = collections.deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ends = False
        self._waiting = 0
        self.failure: Exception | None = None

    def submit(self, job: Callable[[], None]) -> None:
        with self._changed:
            self._jobs.append(job)
            self._waiting += 1
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="jaxmpi.io.Writer", daemon=True)
            self._thread.start()

    def wait_for_room(self, most: int) -> None:
        """Wait until fewer than `most` jobs are waiting, or one has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting < most or self.failure is not None)

    def finish(self, drops: bool = False) -> None:
        """Wait until all jobs are done, and end the thread. `drops`: only the current job is done."""
        with self._changed:
            if drops:
                self._jobs.clear()
            self._ends = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._thread, self._ends = None, False

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._ends)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            failure = None
            if self.failure is None:
                _, failure = agreement.capture(job)
            job = None  # type: ignore[assignment]  # it holds the arrays of a step
            with self._changed:
                self.failure = self.failure or failure
                self._waiting -= 1
                self._changed.notify_all()


# --- the file ---------------------------------------------------------------------------------------------------------


@dataclass
class _Series:
    """The file, as this rank writes it."""

    comm: MPI.Intracomm
    known: communicators.Communicator
    worker: _Worker
    grid: Any
    fields: tuple[str, ...] | None
    time_chunk: int
    described: list[records.Record]
    """The leaves that are written, before they are divided."""
    plan: saving.Plan
    parts: list[StoredArray]
    """The arrays of each step, computed once, with the sources of this rank's regions."""
    metas: dict[str, Any]
    times: list[float] = field(default_factory=list)
    """The times of all steps, including steps that are not yet written."""
    done: int = 0
    """The number of steps that all ranks had written at the last append."""
    committed: int = 0
    """The number of steps that rank 0's thread has made visible."""
    filled: int = 0
    """The number of steps that are written, or in `buffers`."""
    written: int = 0
    """The number of steps that this rank has written."""
    buffers: list[np.ndarray] = field(default_factory=list)
    """The steps of the chunk that is being filled, for each array."""

    def append(self, operation: str, time: Any, tree: Any) -> None:
        values, failure = agreement.capture(lambda: self._values(operation, time, tree))
        self.done = self._agree(operation, failure, time, values or [])
        assert values is not None
        regions: list[Any] = []
        for part, value in zip(self.parts, values, strict=True):  # each may communicate, so go on after an error
            region, error = agreement.capture(partial(_copy, part, value))
            regions.append(region)
            failure = failure or error
        if failure is not None:
            self.worker.failure = self.worker.failure or failure  # the next append or close raises it on all ranks
            return
        step = len(self.times)
        self.times.append(float(time))
        self.worker.submit(lambda: self._write(step, regions))

    def commit_all(self, operation: str) -> None:
        """Make all steps visible. Nothing is left for the thread to do."""
        self._finish_chunks()
        done = self._agree(operation, None, 0.0, [])
        agreement.on_root(self.comm, operation, lambda: self.commit(done))

    def commit(self, count: int) -> None:
        """Make `count` steps visible, and no others."""
        path, plan = self.plan.path, self.plan
        if count == self.committed:
            return
        grown = {name: meta for name, meta in self.metas.items() if _grows(meta)}
        for meta in grown.values():
            meta["shape"] = [count, *meta["shape"][1:]]
        with commit.naming("Writer: cannot write", path):
            if count < self.committed:
                store.finish(path, self.metas, plan.attributes, plan.text())
            for number in range(min(self.committed, count) // _TIMES_IN_CHUNK, -(-count // _TIMES_IN_CHUNK)):
                chunk = np.zeros(_TIMES_IN_CHUNK, "<f8")
                times = self.times[number * _TIMES_IN_CHUNK : count][:_TIMES_IN_CHUNK]
                chunk[: len(times)] = times
                file = store.Stored.from_meta(path / TIME, self.metas[TIME]).file((number,))
                file.parent.mkdir(exist_ok=True)  # an error if somebody has removed the file
                store.write_file(file, store.with_checksum(chunk), anew=True)
            for name, meta in grown.items():
                store.replace(path / name / store.META, json.dumps(meta, allow_nan=False).encode())
            store.finish(path, self.metas, plan.attributes, plan.text())
        self.committed = count

    def _agree(self, operation: str, failure: Exception | None, time: Any, values: Sequence[Any]) -> int:
        """Return how many steps all ranks have written. Raise an error of any rank, or an error for different times or
        values."""
        with_thread = failure or self.worker.failure
        if self.comm == MPI.COMM_NULL:
            raise ValueError(f"{operation}: the communicator has been freed: free it after the writer is closed.")
        facts: list[tuple[str, str]] = []
        if with_thread is None:
            facts.append(("time", repr(float(time))))
            for part, x in zip(self.parts, values, strict=False):
                if isinstance(part.source, Whole):
                    facts.append((f"the value of {part.record.name}", records.digest(tiles.values_of(x))))
        digest = float(int(records.digest(np.frombuffer(repr(facts).encode(), np.uint8))[:12], 16))
        reduced = np.array([self.written, -(with_thread is not None), digest, -digest], np.float64)
        with waiting(self.known, f"io.{operation}"):
            with failures.confirmed(self.comm):
                self.comm.Allreduce(MPI.IN_PLACE, reduced, MPI.MIN)
            if reduced[1] or reduced[2] != -reduced[3]:
                self.worker.finish()  # make the steps visible that all ranks have written, before all raise an error
                self._finish_chunks()
                done = self.comm.allreduce(self.written, MPI.MIN)
                if self.comm.rank == 0:
                    agreement.capture(lambda: self.commit(done))
        if reduced[1]:
            agreement.sums(self.comm, operation, with_thread)
        if reduced[2] != -reduced[3]:
            agreement.check_equal(self.comm, operation, lambda: (None, facts), saving.differs)
        return int(reduced[0])

    def _values(self, operation: str, time: Any, tree: Any) -> list[Any]:
        check_time(operation, time, self.times)
        for division in layout.divided(self.grid):
            division._check_alive(operation)
        leaves = _chosen(tree, self.fields, operation)
        now = [_of_series(records.describe(name, x, operation)) for name, x in leaves.items()]
        if now != self.described:
            before, changed = next((a, b) for a, b in itertools.zip_longest(self.described, now) if a != b)
            raise ValueError(
                f"{operation}: the fields are not those of the steps before: {before}, and now {changed}. Pass the "
                "same names, shapes and dtypes each time."
            )
        return [records.array(part.record, x) for part, x in zip(self.parts, leaves.values(), strict=True)]

    def _write(self, step: int, regions: list[np.ndarray]) -> None:
        """Make steps visible that all ranks have written. Add a step to the chunk that is being filled. Write the chunk
        when it is full."""
        if self.comm.rank == 0:
            self.commit(self.done)
        at = step % self.time_chunk
        if self.time_chunk == 1:
            self.buffers = [region[np.newaxis] for region in regions]
        else:
            if at == 0:
                self.buffers = [np.zeros((self.time_chunk, *region.shape), region.dtype) for region in regions]
            for buffer, region in zip(self.buffers, regions, strict=True):
                buffer[at] = region
        self.filled = step + 1
        if at + 1 == self.time_chunk:
            self._write_chunks()

    def _finish_chunks(self) -> None:
        """Write the chunk that is being filled as it is."""
        if self.worker.failure is None and self.filled > self.written:
            _, self.worker.failure = agreement.capture(self._write_chunks)

    def _write_chunks(self) -> None:
        last = (self.filled - 1) // self.time_chunk
        for part, values in zip(self.parts, self.buffers, strict=True):
            with commit.naming("Writer: cannot write", self.plan.path / part.record.name):
                stored = self._stored(part, self.filled)
                store.write(stored, part.source.region, values, (last,), anew=self.time_chunk > 1)
        self.written = self.filled

    def _stored(self, part: StoredArray, steps: int) -> store.Stored:
        """Return the array of a leaf as if it already had `steps` steps."""
        name, meta = part.record.name, self.metas[part.record.name]
        return store.Stored.from_meta(self.plan.path / name, {**meta, "shape": [steps, *meta["shape"][1:]]})

    def continue_at(self, step: int) -> None:
        """Read the steps of the last chunk from the file, if it is not full."""
        self.filled = self.written = step
        begun = step % self.time_chunk
        for part in self.parts if begun else ():
            region, stored = part.source.region, self._stored(part, step)
            shape = [high - low for low, high in region.points]
            buffer = np.zeros((self.time_chunk, *shape), stored.dtype)
            if not region.nothing:
                buffer[:begun] = store.read(stored, [(step - begun, step), *region.points])
            self.buffers.append(buffer)


def _copy(part: StoredArray, value: Any) -> np.ndarray:
    return np.array(part.source.take(value))


def check_time(operation: str, time: Any, times: Sequence[float]) -> None:
    try:
        number = float(time)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{operation}: time must be a number, got {time!r:.60} of {type(time).__name__}.") from error
    if not math.isfinite(number):
        raise ValueError(f"{operation}: time is {number}: pass a number that is finite.")
    if isinstance(time, (int, np.integer)) and int(time) != number:
        raise ValueError(f"{operation}: time is {time!r:.60}, and a file has {number!r} for it: times are float64.")
    if times and not number > times[-1]:
        raise ValueError(f"{operation}: time is {number}, and that of the step before {times[-1]}: it must grow.")


def _chosen(tree: Any, fields: Sequence[str] | None, operation: str) -> dict[str, Any]:
    """Return the leaves that are written, by name in ascending order, like the stored arrays."""
    leaves = zip(*trees.leaves(tree, operation), strict=True)
    return {name: x for name, x in sorted(leaves, key=lambda leaf: leaf[0]) if fields is None or _is_in(name, fields)}


def _is_in(name: str, fields: Sequence[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in fields)


def _of_series(record: records.Record) -> records.Record:
    """Return the record without facts that a series does not keep: whether a value is JAX's, NumPy's or Python's."""
    same = record.type in ("key", "index", "str")
    return record if same else dataclasses.replace(record, type="array", weak="")


def _parts(comm: MPI.Intracomm, writer: Writer, tree: Any, kept: Mapping[str, Any], operation: str) -> Any:
    names, fields = trees.leaves(tree, operation)[0], writer._fields
    chosen, dims = _chosen(tree, fields, operation), writer._options.dims
    for field_name in fields or ():
        if not any(_is_in(name, (field_name,)) for name in names):
            raise ValueError(
                f"{operation}: fields has {field_name!r}, and the tree has {', '.join(names) or 'nothing'}."
            )
    if dims is not None and TIME in dims:
        raise ValueError(f"{operation}: dims has {TIME!r}, as the axis of time is called: pass another name.")
    if TIME in chosen:
        raise ValueError(f"{operation}: a leaf is called {TIME!r}, as the axis of time is: rename it.")
    divisions = dict(zip(names, trees.spread(writer._grid, tree, operation), strict=True))
    widths = dict(zip(names, trees.spread_width(writer._options.width, tree, operation), strict=True))
    options = dataclasses.replace(writer._options, width={name: widths[name] for name in chosen}, kept=kept)
    arrays = layout.parts(chosen, {name: divisions[name] for name in chosen}, comm, options, operation)
    for part in arrays:
        part.record = _of_series(part.record)
        if part.source is None:
            raise TypeError(
                f"{operation}: {part.record.name} is {part.value!r:.60}: steps have arrays and numbers; texts are for "
                'attrs={"": {...}}.'
            )
    return arrays


# --- making a file, or continuing one ---------------------------------------------------------------------------------


def _open(writer: Writer, operation: str, time: Any, tree: Any) -> _Series:
    """Make the file, or open an existing one. All ranks call it."""
    with layout.together(writer._grid, writer._comm, operation) as comm, contextlib.ExitStack() as stack:
        lock = stack.enter_context(commit.Lock())
        known = communicators.resolve(layout.communicator(writer._grid, writer._comm, operation), operation)
        old = agreement.on_root(comm, operation, lambda: _old(writer, operation, lock))
        fields, metas, _ = old or (None, {}, [])
        grown = [meta["chunk_grid"]["configuration"] for name, meta in metas.items() if _grows(meta) and name != TIME]
        plan = saving.agreed(
            comm,
            lambda: _plan(comm, writer, time, tree, fields, metas, operation),
            operation,
            resume=writer._resume,
            overwrite=writer._overwrite,
            every=writer._every,
            time_chunk=writer._time_chunk,
            fields=writer._fields,
            time=agreement.capture(lambda: float(time))[0],
        )
        time_chunk = int(grown[0]["chunk_shape"][0]) if grown else 1 if old else writer._time_chunk
        leaves = _chosen(tree, writer._fields, operation)
        described = [_of_series(records.describe(name, x, operation)) for name, x in leaves.items()]
        steps = [part for part in plan.parts if part.record.type != "index"]  # indices of rows are stored once
        constant = [part for part in plan.arrays() if all(part is not step for step in steps)]
        chosen = writer._grid, writer._fields, time_chunk
        series = _Series(comm, known, writer._worker, *chosen, described, plan, steps, metas)
        if old is None:
            series.metas, lock = _make(operation, series, constant, writer._overwrite)
        else:
            _continue(operation, series, constant, old[2], time)
        stack.pop_all()
        writer._lock = lock  # rank 0 holds it while it writes to the folder
        return series


def _grows(meta: Mapping[str, Any]) -> bool:
    """Return whether an array with these metadata has the axis of time."""
    return list(meta["dimension_names"][:1]) == [TIME]


def _old(writer: Writer, operation: str, lock: commit.Lock) -> Any:
    """Lock a file to continue, on rank 0. Return the fields, the metadata of arrays and the times, or None if there is
    no file."""
    path, root = writer._path, None
    if not writer._resume:
        return None
    if commit.is_there(commit.replaced(path)) or commit.is_there(commit.partial(path)):
        commit.settle(path, operation)
    with commit.naming(f"{operation}: cannot write", path):
        try:
            lock.take(path, operation)
            root = metadata.decode(path, store.root(path), operation)
        except (FileNotFoundError, NotADirectoryError):
            if not commit.is_there(path):
                return None
    if root is None or "series" not in root[0]:
        raise ValueError(f"{operation}: {path} is no series of a jaxmpi.io.Writer: choose another path.")
    text, metas = root

    def parse() -> tuple[list[records.Record], store.Stored]:
        fields = [_of_series(records.Record.from_json(content)) for content in text["leaves"]]
        arrays = {name: store.Stored.from_meta(path / name, meta) for name, meta in metas.items()}
        for name, meta in metas.items():
            if _grows(meta) and arrays[name].shape[0] != arrays[TIME].shape[0]:
                raise ValueError(f"{name} has {arrays[name].shape[0]} steps of {arrays[TIME].shape[0]}")
        return fields, arrays[TIME]

    fields, times = metadata.parsed(path, parse, operation)
    with commit.naming(f"{operation}: cannot read", path):
        return fields, metas, store.read(times, [(0, times.shape[0])]).tolist()


def _plan(
    comm: MPI.Intracomm, writer: Writer, time: Any, tree: Any, fields: Any, metas: dict[str, Any], operation: str
) -> saving.Plan:
    """Return the plan of this rank. `fields`, `metas`: of the file to continue; None if there is none."""
    check_time(operation, time, [])
    theirs = {name: meta for name, meta in metas.items() if name != TIME}
    chunks = {name: meta["chunk_grid"]["configuration"]["chunk_shape"] for name, meta in theirs.items() if _grows(meta)}
    kept = {name: tuple(shape[1:]) for name, shape in chunks.items()}
    parts, path, options = _parts(comm, writer, tree, kept, operation), writer._path, writer._options
    coordinates = layout.coordinates(parts, options.coords, comm, operation)
    of_time = StoredArray(records.Record(TIME, "float"), None, None)
    attributes = layout.attributes([*parts, *coordinates, of_time], options.attrs, operation)
    more = {"series": True}
    plan = saving.Plan(path, parts, coordinates, None, attributes, writer._compressors, more, of_time.attributes)
    if fields is None:
        return plan
    mine = [part.record for part in parts]
    if mine != fields:
        here, there = (", ".join(map(str, listed)) for listed in (mine, fields))
        raise ValueError(
            f"{operation}: the fields are not those of {path}: {here}; and there {there}. Pass the same names, shapes "
            "and dtypes, or choose another path."
        )
    grows = {part.record.name for part in parts if part.record.type != "index"}
    for part in plan.arrays():
        name = part.record.name
        dims = [*([TIME] if name in grows else []), *part.dims]
        if name not in theirs or theirs[name]["dimension_names"] != dims:
            raise ValueError(
                f"{operation}: {name} has dimensions {dims} here, and others in {path}: pass the same dims and coords, "
                "or choose another path."
            )
    return plan


def _make(
    operation: str, series: _Series, constant: list[StoredArray], overwrite: bool
) -> tuple[dict[str, Any], commit.Lock]:
    """Make a file without steps, on all ranks together. Return the metadata of its arrays, and its lock."""
    plan = series.plan
    of_time = store.entry((0,), (_TIMES_IN_CHUNK,), np.dtype("<f8"), (TIME,), plan.of_time)
    entries = saving.entries(constant)
    for part in series.parts:
        record, region = part.record, part.source.region
        shape, chunks = (0, *region.shape), (series.time_chunk, *region.chunks)
        entries[record.name] = store.entry(shape, chunks, record.stored_dtype, (TIME, *part.dims), part.attributes)

    def make(folder: Path) -> dict[str, Any]:
        metas = store.make(folder, {TIME: of_time}, store.codecs(None, operation))
        return metas | store.make(folder, entries, plan.compressors)

    return saving.publish(series.comm, plan, constant, make, operation, overwrite)


def _continue(operation: str, series: _Series, constant: list[StoredArray], times: Sequence[float], time: Any) -> None:
    """Continue a file with these times. Drop steps that the program will write again. All ranks call it."""
    comm, path = series.comm, series.plan.path

    def begin() -> tuple[Path, str]:
        with commit.naming(f"{operation}: cannot write", path):
            return saving.leave_sign(path)

    saving.check_sign(comm, operation, agreement.on_root(comm, operation, begin))
    for part in constant:
        agreement.run_on_all(comm, operation, partial(_check_constant, operation, series, part))
    kept = sum(known < float(time) for known in times)
    series.times, series.committed = list(times[:kept]), len(times)
    agreement.run_on_all(comm, operation, lambda: series.continue_at(kept))
    agreement.on_root(comm, operation, lambda: series.commit(kept))


def _check_constant(operation: str, series: _Series, part: StoredArray) -> None:
    name, path, region = part.record.name, series.plan.path, part.source.region
    values = part.source.take(part.value)
    there = values
    if not region.nothing:
        there = store.read(store.Stored.from_meta(path / name, series.metas[name]), region.points)
    if not np.array_equal(there, values, equal_nan=values.dtype.kind in "fc"):
        raise ValueError(
            f"{operation}: {name} differs from the one in {path}: pass the same rows and coordinates, or choose "
            "another path."
        )
