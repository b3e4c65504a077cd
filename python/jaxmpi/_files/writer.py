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
from types import TracebackType
from typing import Any

import jax
import numpy as np
from mpi4py import MPI

from jaxmpi._files import chunks as tiles
from jaxmpi._files import commit, layout, metadata, records, saving, sharing, store, trees
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
        names = None if fields is None else _names(fields, operation)
        resume = checks.truth(resume, operation, "resume")
        overwrite = checks.truth(overwrite, operation, "overwrite")
        if resume and overwrite:
            raise ValueError(f"{operation}: resume=True goes on with a file, overwrite=True replaces it: pass one.")
        if not resume and not overwrite:
            _check_absent(self._path, operation)
        compressors = store.codecs(compressor, operation)
        self._options = Arguments(
            grid,
            comm,
            names,
            Options(width, axes, chunks, dims, coords, attrs),
            compressors,
            resume,
            overwrite,
            self._every,
            _positive(time_chunk, operation, "time_chunk"),
        )
        self._calls = 0
        self._series: _Series | None = None
        self._worker = _Worker()
        self._over = ""

    def append(self, time: float, tree: Any) -> None:
        """Add a step. All ranks call it, with the same time.

        Args:
          time: of the step, a number that is larger than the time of the step before.
          tree: this rank's fields, as in `save`. Names, shapes and dtypes are the same in each append. Arrays may be
            donated or overwritten afterwards.

        Raises:
          TypeError, ValueError: the fields do not fit, or differ from those before; or the time does not grow. On all
            ranks; no more can be appended then.
          OSError: this step or one before could not be written. On all ranks; no more can be appended then.
        """
        operation = "Writer.append"
        internals.check_outside(operation)
        if self._over:
            raise ValueError(f"{operation}: the writer of {self._path} {self._over}.")
        self._calls += 1
        if (self._calls - 1) % self._every:
            return
        with self._ends_by_errors():
            if self._series is None:
                self._series = _open(operation, self._path, self._options, time, tree)
            self._worker.wait_for_room(self._behind)
            with self._series.failing(operation):
                self._series.append(operation, self._worker, time, tree)

    @contextlib.contextmanager
    def _ends_by_errors(self) -> Iterator[None]:
        """Stop the thread after an error. Then nothing is written in the background, and others may write there."""
        try:
            yield
        except BaseException:
            self._over = "has failed before"
            try:
                self._worker.stop()
            finally:
                self._release()
            raise

    def flush(self) -> None:
        """Wait until all appended steps are written and can be read. All ranks call it.

        Call it before `jaxmpi.io.checkpoint`, so that the file is complete up to the state. A job that continues from
        this state then finds all steps that it does not compute again.

        Raises:
          OSError: a step could not be written. On all ranks; no more can be appended then.
          ValueError: the writer is closed, or has failed.
        """
        operation = "Writer.flush"
        internals.check_outside(operation)
        if self._over:
            raise ValueError(f"{operation}: the writer of {self._path} {self._over}.")
        with self._ends_by_errors():
            self._worker.drain()
            if self._series is not None:
                with self._series.failing(operation):
                    self._series.commit_all(operation, self._worker)

    def close(self) -> None:
        """Wait until all steps are written and can be read. All ranks call it; a `with` block does so at its end.

        If an exception leaves the block, wait for this rank's files alone, because other ranks may never come. Then the
        last steps, at most `behind` and two, may be missing in the file.

        Raises:
          OSError: a step could not be written. On all ranks.
        """
        over, self._over = self._over, self._over or "is closed"
        if over:
            return
        try:
            self._worker.finish()
            if self._series is not None:
                with self._series.failing("Writer.close"):
                    self._series.commit_all("Writer.close", self._worker)
        finally:
            self._release()

    def _release(self) -> None:
        if self._series is not None:
            self._series.lock.release()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif not self._over:
            self._over = "is closed"
            try:
                self._worker.finish()
            finally:
                self._release()

    def __del__(self) -> None:
        if not getattr(self, "_over", "never made") and self._series is not None:
            warnings.warn(f"the writer of {self._path} was not closed: its last steps are lost", ResourceWarning, 2)

    def __repr__(self) -> str:
        count = self._series.appended if self._series else 0
        return f"Writer({str(self._path)!r}, {count} steps appended{f', {self._over}' if self._over else ''})"


@dataclass(frozen=True)
class Arguments:
    """The arguments of a writer, from which the file is made."""

    grid: Any
    comm: Any
    names: tuple[str, ...] | None
    options: Options
    compressors: tuple[Any, ...]
    resume: bool
    overwrite: bool
    every: int
    time_chunk: int


def _positive(value: Any, operation: str, name: str) -> int:
    number = arguments.integer(value, operation, name)
    if number < 1:
        raise ValueError(f"{operation}: {name} is {number}: pass 1 or more.")
    return number


def _check_absent(path: Path, operation: str) -> None:
    """Raise FileExistsError if something of this name exists."""
    if commit.is_there(path) or commit.is_there(commit.replaced(path)):
        raise FileExistsError(
            f"{operation}: {path} exists: resume=True goes on with it, overwrite=True replaces it; or choose another "
            "path."
        )


def _names(fields: Any, operation: str) -> tuple[str, ...]:
    listed = (fields,) if isinstance(fields, str) else tuple(fields)
    if not listed or not all(isinstance(name, str) for name in listed):
        raise TypeError(f'{operation}: fields is {fields!r:.80}: pass names of leaves, such as ("h", "state.u").')
    return listed


# --- the thread -------------------------------------------------------------------------------------------------------


class _Worker:
    """A thread that does jobs in order. After an error it does no more."""

    def __init__(self) -> None:
        self._jobs: collections.deque[tuple[Callable[[], None], bool]] = collections.deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ends = False
        self._waiting = 0
        self._unfinished = 0
        self.failure: Exception | None = None

    def submit(self, job: Callable[[], None], is_step: bool) -> None:
        """Add a step, or a job that is done before the waiting steps."""
        with self._changed:
            (self._jobs.append if is_step else self._jobs.appendleft)((job, is_step))
            self._waiting += is_step
            self._unfinished += 1
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="jaxmpi.io.Writer", daemon=True)
            self._thread.start()

    def wait_for_room(self, most: int) -> None:
        """Wait until fewer than `most` steps are waiting, or a job has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting < most or self.failure is not None)

    def drain(self) -> None:
        """Wait until all jobs are done, or one has failed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unfinished or self.failure is not None)

    def finish(self) -> None:
        """Wait until all jobs are done, and end the thread."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def stop(self) -> None:
        """Wait until the thread has done its current job, and end it."""
        with self._changed:
            self._jobs.clear()
        self.finish()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._ends)
                if not self._jobs:
                    return
                job, is_step = self._jobs.popleft()
            failure = None
            if self.failure is None:
                _, failure = agreement.capture(job)
            job = None  # type: ignore[assignment]  # it holds the arrays of a step
            with self._changed:
                self.failure = self.failure or failure
                self._waiting -= is_step
                self._unfinished -= 1
                self._changed.notify_all()


# --- the file ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Signature:
    """The leaves of a tree that are written, with types and shapes. Equal signatures mean equal arrays of a step."""

    structure: Any
    chosen: tuple[int, ...]
    """The positions of the leaves that are written, in the order of names, like the stored arrays."""
    records: tuple[records.Record, ...]
    """The record of each leaf before it is divided."""

    @staticmethod
    def from_tree(tree: Any, arguments: Arguments, operation: str) -> "_Signature":
        names, leaves = trees.leaves(tree, operation)
        written = [at for at, name in enumerate(names) if arguments.names is None or _is_among(name, arguments.names)]
        chosen = tuple(sorted(written, key=lambda at: names[at]))
        described = tuple(_described(names[at], leaves[at], operation) for at in chosen)
        return _Signature(jax.tree.structure(tree), chosen, described)

    def leaves(self, tree: Any, operation: str) -> list[Any] | None:
        """Return the leaves of a tree that are written, or None if it has another signature."""
        leaves, structure = jax.tree.flatten(tree)
        if structure != self.structure:
            return None
        chosen = [leaves[at] for at in self.chosen]
        same = all(
            _described(record.name, x, operation) == record for record, x in zip(self.records, chosen, strict=True)
        )
        return chosen if same else None


def _described(name: str, x: Any, operation: str) -> records.Record:
    return _of_series(records.describe(name, x, operation))


def _of_series(record: records.Record) -> records.Record:
    """Return the record without facts that a series does not keep: whether a value is JAX's, NumPy's or Python's."""
    same = record.type in ("key", "index", "str")
    return record if same else dataclasses.replace(record, type="array", weak="")


@dataclass
class _Series:
    """The file, as this rank writes it."""

    path: Path
    comm: MPI.Intracomm
    known: communicators.Communicator
    arguments: Arguments
    parts: list[StoredArray]
    """The arrays of each step, computed once, with the sources of this rank's regions."""
    signature: _Signature
    """The signature of trees with these arrays."""
    metas: dict[str, Any]
    """The metadata of all arrays."""
    plan: saving.Plan
    """The content of the root without the arrays."""
    times: list[float]
    """The times of all steps, including steps that are not yet written."""
    committed: int
    """The number of steps that rank 0's thread has made visible."""
    records: list[Any] = field(default_factory=list)
    lock: commit.Lock = field(default_factory=commit.Lock)
    """The lock that rank 0 holds while it writes to the folder."""
    appended: int = 0
    filled: int = 0
    """The number of steps that are written, or in `buffers`."""
    written: int = 0
    """The number of steps that this rank has written."""
    buffers: list[np.ndarray] = field(default_factory=list)
    """The steps of the chunk that is being filled, for each array."""

    def failing(self, operation: str) -> contextlib.AbstractContextManager[None]:
        """Make a context in which errors of MPI that mean a death become ProcessFailed."""
        return survival.failing(self.known.mpi, f"io.{operation}")

    def append(self, operation: str, worker: _Worker, time: Any, tree: Any) -> None:
        values, failure = agreement.capture(lambda: self._values(operation, time, tree))
        done = self._agree(operation, worker, failure, time, values)
        assert values is not None
        regions: list[Any] = []
        for part, value in zip(self.parts, values, strict=True):  # each may communicate, so go on after an error
            region, error = agreement.capture(partial(_copy, part, value))
            regions.append(region)
            failure = failure or error
        if failure is not None:
            worker.failure = worker.failure or failure  # the next append or close raises it on all ranks
            return
        step = len(self.times)
        self.times.append(float(time))
        self.appended += 1
        worker.submit(lambda: self._write(step, regions), True)
        if self.comm.rank == 0 and done > self.committed:
            worker.submit(lambda: self.commit(done), False)

    def commit_all(self, operation: str, worker: _Worker) -> None:
        """Make all steps visible. Nothing is left for the thread to do."""
        self._finish_chunks(worker)
        done = self._agree(operation, worker, None, 0.0, [])
        agreement.on_root(self.comm, operation, lambda: self.commit(done))

    def commit(self, count: int) -> None:
        """Make `count` steps visible, unless more are: the thread may do a later commit first."""
        if count > self.committed:
            self.show(count)

    def show(self, count: int) -> None:
        """Make `count` steps visible, and no others."""
        if count != self.committed:
            write_steps(self.path, self.metas, self.plan, self.times[:count], self.committed)
            self.committed = count

    def _agree(self, operation: str, worker: _Worker, failure: Exception | None, time: Any, values: Any) -> int:
        """Return how many steps all ranks have written. Raise an error of any rank, or an error for different times."""
        with_thread = failure or worker.failure
        if self.comm == MPI.COMM_NULL:
            raise ValueError(f"{operation}: the communicator has been freed: free it after the writer is closed.")
        number = 0.0 if with_thread else float(time)
        digest = 0.0 if with_thread else self._digest(values)
        reduced = np.array([self.written, -(with_thread is not None), number, -number, digest, -digest], np.float64)
        with waiting(self.known, f"io.{operation}"):
            with failures.confirmed(self.comm):
                self.comm.Allreduce(MPI.IN_PLACE, reduced, MPI.MIN)
            written, failed, first, minus_last, least, minus_most = reduced.tolist()
            if failed or first != -minus_last or least != -minus_most:
                self._save_what_is_complete(worker)
        if failed:
            agreement.sums(self.comm, operation, with_thread)
        if first != -minus_last:
            raise ValueError(f"{operation}: ranks have passed other times, from {first!r} to {-minus_last!r}.")
        if least != -minus_most:
            raise ValueError(
                f"{operation}: a value that is not divided differs between ranks. It must be the same to the last bit: "
                "say with grid= that it is a field, send it from rank 0 (jaxmpi.bcast), or leave it out with fields=."
            )
        return int(written)

    def _save_what_is_complete(self, worker: _Worker) -> None:
        """Make the steps visible that all ranks have written, before all ranks raise an error."""
        worker.finish()
        self._finish_chunks(worker)
        done = self.comm.allreduce(self.written, MPI.MIN)
        if self.comm.rank == 0:
            agreement.capture(lambda: self.commit(done))

    def _digest(self, values: Sequence[Any]) -> float:
        """Return a number for the values that must be the same on all ranks."""
        whole = [
            records.digest(tiles.values_of(x))
            for part, x in zip(self.parts, values, strict=False)
            if isinstance(part.source, Whole)
        ]
        return float(int(records.digest(np.frombuffer("".join(whole).encode(), np.uint8))[:12], 16)) if whole else 0.0

    def _values(self, operation: str, time: Any, tree: Any) -> list[Any]:
        check_time(operation, time, self.times)
        for division in layout.divided(self.arguments.grid):
            division._check_alive(operation)
        leaves = self.signature.leaves(tree, operation)
        if leaves is None:
            leaves = self._leaves_of_another(tree, operation)
        return [records.array(part.record, x) for part, x in zip(self.parts, leaves, strict=True)]

    def _leaves_of_another(self, tree: Any, operation: str) -> list[Any]:
        """Return the leaves of a tree of another signature. Raise ValueError if its arrays differ."""
        arrays = _parts(self.comm, self.arguments, tree, _kept(self.metas), operation)
        now = [part.record for part in arrays]
        if now != self.records:
            changed = next((a, b) for a, b in itertools.zip_longest(self.records, now) if a != b)
            raise ValueError(
                f"{operation}: the fields are not those of the steps before: {changed[0]}, and now {changed[1]}. Pass "
                "the same names, shapes and dtypes each time."
            )
        self.signature = _Signature.from_tree(tree, self.arguments, operation)
        return [part.value for part in _of_steps(arrays)]

    def _write(self, step: int, regions: list[np.ndarray]) -> None:
        """Add a step to the chunk that is being filled. Write the chunk when it is full."""
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

    def _finish_chunks(self, worker: _Worker) -> None:
        """Write the chunk that is being filled as it is."""
        if worker.failure is None and self.filled > self.written:
            _, worker.failure = agreement.capture(self._write_chunks)

    def _write_chunks(self) -> None:
        last = (self.filled - 1) // self.time_chunk
        for part, values in zip(self.parts, self.buffers, strict=True):
            assert part.source is not None
            with commit.naming("Writer: cannot write", self.path / part.record.name):
                stored = self._stored(part, self.filled)
                store.write(stored, part.source.region, values, (last,), anew=self.time_chunk > 1)
        self.written = self.filled

    def _stored(self, part: StoredArray, steps: int) -> store.Stored:
        """Return the array of a leaf as if it already had `steps` steps."""
        meta = self.metas[part.record.name]
        return store.Stored.from_meta(self.path / part.record.name, {**meta, "shape": [steps, *meta["shape"][1:]]})

    def continue_at(self, step: int) -> None:
        """Read the steps of the last chunk from the file, if it is not full."""
        self.filled = self.written = step
        begun = step % self.time_chunk
        for part in self.parts if begun else ():
            assert part.source is not None
            region, stored = part.source.region, self._stored(part, step)
            shape = [high - low for low, high in region.points]
            buffer = np.zeros((self.time_chunk, *shape), stored.dtype)
            if not region.nothing:
                buffer[:begun] = store.read(stored, [(step - begun, step), *region.points])
            self.buffers.append(buffer)

    @property
    def time_chunk(self) -> int:
        return int(self.arguments.time_chunk)


def _copy(part: StoredArray, value: Any) -> np.ndarray:
    assert part.source is not None
    return np.array(part.source.take(value))


def check_time(operation: str, time: Any, times: Sequence[float]) -> None:
    try:
        number = float(time)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{operation}: time must be a number, got {time!r:.60} of {type(time).__name__}.") from error
    if not math.isfinite(number):
        raise ValueError(f"{operation}: time is {number}: pass a number that is finite.")
    if times and not number > times[-1]:
        raise ValueError(f"{operation}: time is {number}, and that of the step before {times[-1]}: it must grow.")


def _parts(
    comm: MPI.Intracomm, arguments: Arguments, tree: Any, kept: Mapping[str, tuple[int, ...]], operation: str
) -> list[StoredArray]:
    """Return the arrays of the leaves that are written."""
    names, leaves = trees.leaves(tree, operation)
    divisions = trees.spread(arguments.grid, tree, operation)
    widths = trees.spread_width(arguments.options.width, tree, operation)
    chosen = names if arguments.names is None else [name for name in names if _is_among(name, arguments.names)]
    if arguments.names is not None:
        for name in arguments.names:
            if not any(_is_among(leaf, (name,)) for leaf in names):
                raise ValueError(f"{operation}: fields has {name!r}, and the tree has {', '.join(names) or 'nothing'}.")
    if arguments.options.dims is not None and TIME in arguments.options.dims:
        raise ValueError(f"{operation}: dims has {TIME!r}, as the axis of time is called: pass another name.")
    if TIME in chosen:
        raise ValueError(f"{operation}: a leaf is called {TIME!r}, as the axis of time is: rename it.")

    def flat(values: Sequence[Any]) -> dict[str, Any]:
        return {name: value for name, value in zip(names, values, strict=True) if name in chosen}

    options = dataclasses.replace(arguments.options, width=flat(widths), kept=kept)
    arrays = layout.parts(flat(leaves), flat(divisions), comm, options, operation)
    for part in arrays:
        part.record = _of_series(part.record)
        if part.source is None:
            raise TypeError(
                f"{operation}: {part.record.name} is {part.value!r:.60}: steps have arrays and numbers; texts are for "
                'attrs={"": {...}}.'
            )
    return arrays


def _is_among(name: str, chosen: Sequence[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in chosen)


# --- making a file, or continuing one ---------------------------------------------------------------------------------


def _open(operation: str, path: Path, arguments: Arguments, time: Any, tree: Any) -> _Series:
    """Make the file, or open an existing one. All ranks call it."""
    with layout.together(arguments.grid, arguments.comm, operation) as comm, commit.Lock() as lock:
        known = communicators.resolve(layout.communicator(arguments.grid, arguments.comm, operation), operation)
        old = agreement.on_root(comm, operation, lambda: _old(path, arguments, operation, lock))
        more: dict[str, Any] = {
            "resume": arguments.resume,
            "overwrite": arguments.overwrite,
            "every": arguments.every,
            "time_chunk": arguments.time_chunk,
            "fields": arguments.names,
        }
        more["time"], _ = agreement.capture(lambda: float(time))
        make = lambda: _plan(comm, path, arguments, time, tree, old, operation)  # noqa: E731
        plan = saving.agreed(comm, make, operation, **more)
        steps = _of_steps(plan.parts)
        constant = [part for part in plan.arrays() if all(part is not step for step in steps)]
        fields = [part.record for part in plan.parts]
        signature = _Signature.from_tree(tree, arguments, operation)
        series = _Series(path, comm, known, arguments, steps, signature, {}, plan, [], 0, fields)
        if old is None:
            series.metas, series.lock = _make(operation, series, plan, constant)
            return series
        series.arguments = dataclasses.replace(arguments, time_chunk=_time_chunk(old[1]))
        _continue(operation, series, constant, old, time)
        series.lock = lock.moved()
        return series


def _of_steps(parts: Sequence[StoredArray]) -> list[StoredArray]:
    """Return the arrays of each step. The indices of rows are stored once."""
    return [part for part in parts if part.record.type != "index"]


def _grows(meta: Mapping[str, Any]) -> bool:
    """Return whether an array with these metadata has the axis of time."""
    return list(meta["dimension_names"][:1]) == [TIME]


def _old(path: Path, arguments: Arguments, operation: str, lock: commit.Lock) -> Any:
    """Lock a file to continue, and return its metadata, on rank 0. None if it does not exist."""
    if not arguments.resume:
        return None
    if commit.is_there(commit.replaced(path)) or commit.is_there(commit.partial(path)):
        commit.settle(path, operation)
    with commit.naming(f"{operation}: cannot write", path):
        try:
            lock.take(path, operation)
            data = store.root(path)
        except FileNotFoundError:
            if not commit.is_there(path):
                return None
        except NotADirectoryError:
            pass
        else:
            return _parsed(path, data, operation)
    raise ValueError(f"{operation}: {path} is no series of a jaxmpi.io.Writer: choose another path.")


def _parsed(path: Path, data: bytes, operation: str) -> tuple[list[records.Record], dict[str, Any], list[float]]:
    """Return the fields, the metadata of the arrays and the times of a series."""
    root = metadata.decode(path, data, operation)
    if root is None or "series" not in root.text:
        raise ValueError(f"{operation}: {path} is no series of a jaxmpi.io.Writer: choose another path.")

    def parse() -> tuple[list[records.Record], store.Stored]:
        fields = [_of_series(records.Record.from_json(content)) for content in root.text["leaves"]]
        arrays = {name: store.Stored.from_meta(path / name, meta) for name, meta in root.arrays.items()}
        for name, meta in root.arrays.items():
            if _grows(meta) and arrays[name].shape[0] != arrays[TIME].shape[0]:
                raise ValueError(f"{name} has {arrays[name].shape[0]} steps of {arrays[TIME].shape[0]}")
        return fields, arrays[TIME]

    fields, times = metadata.parsed(path, parse, operation)
    return fields, root.arrays, store.read(times, [(0, times.shape[0])]).tolist()


def _plan(
    comm: MPI.Intracomm, path: Path, arguments: Arguments, time: Any, tree: Any, old: Any, operation: str
) -> saving.Plan:
    kept = {} if old is None else _kept(old[1])
    check_time(operation, time, [])
    parts = _parts(comm, arguments, tree, kept, operation)
    coordinates = layout.coordinates(parts, arguments.options.coords, comm, operation)
    of_time = StoredArray(records.Record(TIME, "float"), None, None)
    attributes = layout.attributes([*parts, *coordinates, of_time], arguments.options.attrs, operation)
    more = {"series": True}
    plan = saving.Plan(path, parts, coordinates, None, attributes, arguments.compressors, more, of_time.attributes)
    if old is not None:
        theirs = {name: meta for name, meta in old[1].items() if name != TIME}
        mine = [part.record for part in parts]
        if mine != old[0]:
            here, there = (", ".join(map(str, listed)) for listed in (mine, old[0]))
            raise ValueError(
                f"{operation}: the fields are not those of {path}: {here}; and there {there}. Pass the same names, "
                "shapes and dtypes, or choose another path."
            )
        grows = {part.record.name for part in _of_steps(parts)}
        for part in plan.arrays():
            name = part.record.name
            dims = [*([TIME] if name in grows else []), *part.dims]
            if name not in theirs or theirs[name]["dimension_names"] != dims:
                raise ValueError(
                    f"{operation}: {name} has dimensions {dims} here, and others in {path}: pass the same dims and "
                    "coords, or choose another path."
                )
    return plan


def _kept(metas: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of a chunk of a step, by array."""
    return {
        name: tuple(meta["chunk_grid"]["configuration"]["chunk_shape"][1:])
        for name, meta in metas.items()
        if _grows(meta) and name != TIME
    }


def _time_chunk(metas: Mapping[str, Any]) -> int:
    """Return how many steps a chunk has."""
    grown = [meta for name, meta in metas.items() if _grows(meta) and name != TIME]
    return int(grown[0]["chunk_grid"]["configuration"]["chunk_shape"][0]) if grown else 1


def _make(operation: str, series: _Series, plan: saving.Plan, constant: list[StoredArray]) -> tuple[Any, commit.Lock]:
    """Make a file without steps, on all ranks together. Return the metadata of its arrays, and its lock."""
    of_time = store.Entry(TIME, (0,), (_TIMES_IN_CHUNK,), np.dtype("<f8"), (TIME,), plan.of_time)
    entries = [saving.entry(part) for part in constant]
    for part in series.parts:
        entry = saving.entry(part)
        entries.append(
            dataclasses.replace(
                entry, shape=(0, *entry.shape), chunks=(series.time_chunk, *entry.chunks), dims=(TIME, *entry.dims)
            )
        )

    def make(folder: Path) -> dict[str, Any]:
        return store.make(folder, [of_time], store.codecs(None, operation)) | store.make(
            folder, entries, plan.compressors
        )

    return saving.publish(series.comm, plan, constant, make, operation, series.arguments.overwrite)


def _continue(operation: str, series: _Series, constant: list[StoredArray], old: Any, time: Any) -> None:
    """Continue a file. Drop steps that the program will write again. All ranks call it."""
    _, series.metas, times = old

    def begin() -> sharing.Sign:
        with commit.naming(f"{operation}: cannot write", series.path):
            return sharing.leave(series.path)

    sharing.check(series.comm, operation, agreement.on_root(series.comm, operation, begin))
    for part in constant:
        values = agreement.run_on_all(series.comm, operation, partial(_copy, part, part.value))
        agreement.run_on_all(series.comm, operation, partial(_check_constant, operation, series, part, values))
    kept = sum(known < float(time) for known in times)
    series.times, series.committed = times[:kept], len(times)
    agreement.run_on_all(series.comm, operation, lambda: series.continue_at(kept))
    agreement.on_root(series.comm, operation, lambda: series.show(kept))


def _check_constant(operation: str, series: _Series, part: StoredArray, values: np.ndarray) -> None:
    stored = store.Stored.from_meta(series.path / part.record.name, series.metas[part.record.name])
    assert part.source is not None
    region = part.source.region
    there = store.read(stored, region.points) if not region.nothing else values
    if not np.array_equal(there, values, equal_nan=values.dtype.kind in "fc"):
        raise ValueError(
            f"{operation}: {part.record.name} differs from the one in {series.path}: pass the same rows and "
            "coordinates, or choose another path."
        )


def write_steps(path: Path, metas: dict[str, Any], plan: saving.Plan, times: Sequence[float], before: int) -> None:
    """Make the steps of these times visible, and no others."""
    count = len(times)
    for meta in metas.values():
        if _grows(meta):
            meta["shape"] = [count, *meta["shape"][1:]]
    with commit.naming("Writer: cannot write", path):
        if count < before:
            store.finish(path, metas, plan.attributes, plan.text())
        for number in range(min(before, count) // _TIMES_IN_CHUNK, -(-count // _TIMES_IN_CHUNK)):
            chunk = np.zeros(_TIMES_IN_CHUNK)
            part = times[number * _TIMES_IN_CHUNK :][:_TIMES_IN_CHUNK]
            chunk[: len(part)] = part
            file = store.Stored.from_meta(path / TIME, metas[TIME]).file((number,))
            file.parent.mkdir(exist_ok=True)
            store.replace(file, store.checked(chunk.astype("<f8")))
        for name, meta in metas.items():
            if _grows(meta):
                store.replace(path / name / store.META, json.dumps(meta, allow_nan=False).encode())
        store.finish(path, metas, plan.attributes, plan.text())
