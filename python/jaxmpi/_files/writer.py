"""`jaxmpi.io.Writer`: steps of fields in one file, written by a thread while the program computes.

What a reader sees is what the metadata of the root say, and these are replaced at once. A step gets there when all
ranks have written it: at each append they agree, by one reduction, how many they have written, and rank 0's thread then
writes metadata with so many. The metadata of single arrays are written before, so whoever reads those alone finds no
step that is not complete either.
"""

import collections
import dataclasses
import json
import math
import operator
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from mpi4py import MPI

from jaxmpi._files import commit, layout, saving, store, trees
from jaxmpi._files.chunks import Region, Whole
from jaxmpi._files.layout import Options, Part
from jaxmpi._grid import arguments as given
from jaxmpi._grid.grid import Width
from jaxmpi._mpi import agreement

TIME = "time"
"""The name of the axis that grows, and of its coordinate."""

_TIMES_IN_CHUNK = 1024
_FOREVER = 1 << 40
"""More steps than a file will have: arrays are written as if they had so many."""


class Writer:
    """Writes fields of many times to one file, of which each append adds one.

    The file is a folder in the format Zarr v3: `xarray.open_zarr(path)` reads it, also while it is being written. Its
    arrays have a first axis `time`. A step is copied once when it is appended; then a thread of each rank writes its
    chunks, while the program computes. At most `behind` steps are in memory: an append waits for room where the files
    are slower than the program.

    A step that is not complete is not there: readers see it when all ranks have written their part of it, which they
    tell each other at the next append that writes, and at the end. A program that dies loses the steps that were not
    yet told, at most `behind` and one, and nothing else.

        with jaxmpi.io.Writer("sea.zarr", grid, width=1, every=10) as out:
            for step in range(1000):
                state = advance(state)
                out.append(step * dt, {"h": state.h, "u": state.u})

    Args:
      path: the folder, which all ranks see. It is made by the first append that writes.
      grid: how the fields are divided: a `jaxmpi.Grid`, a `jaxmpi.IndexMap`, or a tree of these and None, as in `save`.
      fields: the names of those leaves that are written, such as ("h", "u"); None: all.
      every: only the first of so many appends is written, and then each that comes so many later; the others return at
        once.
      width, axes, chunks, dims, coords, attrs, compressor: as in `save`, without the axis of time. `attrs["time"]` are
        those of the times, such as {"units": "s"}.
      behind: the most steps that are not yet written: 1 or more.
      resume: goes on with a file that is there, which must have the same fields; one that is not there is made. Its
        steps at or after the first time that is appended are dropped first, since the program writes them anew.
      comm: an intra-communicator of the same ranks; that of the grid where it is None.

    Raises:
      TypeError, ValueError: an argument is of the wrong type, or has no such value. On this rank; nothing is written.
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
        resume: bool = False,
        chunks: int | Sequence[int] | None = None,
        dims: str | Sequence[str] | None = None,
        coords: Any = None,
        attrs: Any = None,
        compressor: Any = None,
        comm: MPI.Comm | None = None,
    ):
        operation = "Writer"
        self._path = Path(commit.place(path, operation))
        self._every, self._behind = (_positive(value, operation, name) for value, name in ((every, "every"), (behind, "behind")))
        self._resume = given.truth(resume, operation, "resume")
        self._names = None if fields is None else _names(fields, operation)
        self._compressors = store.codecs(compressor, operation)
        self._options = Options(width, axes, chunks, dims, coords, attrs)
        self._grid, self._given_comm = grid, comm
        self._calls = self._appended = 0
        self._file: _File | None = None
        self._worker: _Worker | None = None
        self._state = "new"

    def append(self, time: float, tree: Any) -> None:
        """Adds a step. All ranks call it, with the same time.

        Args:
          time: of the step, a number that is larger than that of the step before.
          tree: this rank's fields, as in `save`; their names, shapes and dtypes are the same in each append. Arrays may
            be donated or overwritten afterwards.

        Raises:
          TypeError, ValueError: the fields do not fit, or are others than before; the time does not grow. OSError: this
            step or one before could not be written. All of these on all ranks, after which no more can be appended.
        """
        operation = "Writer.append"
        if self._state not in ("new", "open"):
            raise ValueError(f"{operation}: the writer of {self._path} {self._state}.")
        self._calls += 1
        if (self._calls - 1) % self._every:
            return
        try:
            self._append(operation, time, tree)
        except BaseException:
            self._stop("has failed", wait=False)
            raise

    def _append(self, operation: str, time: Any, tree: Any) -> None:
        if self._file is None:
            self._file = self._open(operation, time, tree)
            self._worker, self._state = _Worker(), "open"
        file, worker = self._file, self._worker
        assert worker is not None
        worker.wait_for_room(self._behind)
        values, failure = agreement.attempt(lambda: file.leaves_of(operation, time, tree, self._names))
        done = file.agree(operation, worker, failure or worker.failure, time)
        assert values is not None
        regions: list[np.ndarray] = []
        for part, value in zip(file.parts, values, strict=True):  # takes part in all communication, errors or not
            assert part.source is not None
            region, error = agreement.attempt(lambda: np.array(part.source.take(value)))  # noqa: B023
            regions.append(np.empty(0) if region is None else region)
            failure = failure or error
        if failure is not None:
            worker.failure = failure  # which all ranks raise at the next append, or at the end
            return
        step = file.count + self._appended
        self._appended += 1
        file.times.append(float(time))
        worker.submit(lambda: file.write(step, regions), counts=True)
        if file.comm.rank == 0 and file.count + done > file.committed:
            worker.submit(lambda: file.commit(file.count + done), counts=False)

    def close(self) -> None:
        """Waits until all steps are written and can be read. All ranks call it; a `with` block does so at its end.

        A block that is left by an exception waits for this rank's files alone, since others may never come: then the
        last steps, at most `behind` and one, may be missing in the file.

        Raises:
          OSError: a step could not be written: on all ranks.
        """
        if self._state == "open":
            file, worker = self._file, self._worker
            assert file is not None and worker is not None
            try:
                self._stop("is closed", wait=True)
                done = file.agree("Writer.close", worker, worker.failure, None)
                failure = None
                if file.comm.rank == 0:
                    _, failure = agreement.attempt(lambda: file.commit(file.count + done))
                agreement.sums(file.comm, "Writer.close", failure)
            finally:
                self._state = "is closed"
        self._state = "is closed"

    def _stop(self, state: str, wait: bool) -> None:
        self._state = state
        if self._worker is not None:
            self._worker.stop(wait)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif self._state == "open":
            self._stop("is closed", wait=True)

    def __repr__(self) -> str:
        return f"Writer({str(self._path)!r}, {self._appended} steps appended)"

    def _open(self, operation: str, time: Any, tree: Any) -> "_File":
        """The file, which is made, or found. All ranks call it."""
        comm = layout.begin(self._grid, self._given_comm, operation)
        options = dataclasses.replace(self._options, attrs=None)
        attrs = dict(self._options.attrs or {})
        plan, failure = agreement.attempt(lambda: self._plan(comm, tree, options, attrs, operation))
        agreement.sums(comm, operation, failure)
        assert plan is not None
        saving.compare(comm, plan, operation, self._resume, values=False)
        path = Path(comm.bcast(str(self._path)))
        made, failure = None, None
        if comm.rank == 0:
            made, failure = agreement.attempt(lambda: _make(path, plan, self._resume, attrs, time, operation))
        agreement.sums(comm, operation, failure)
        metas, times, chunks = comm.bcast(made)
        plain = store.is_plain(self._compressors)
        return _File(path, comm, plan, metas, times, plain, self._grid)
