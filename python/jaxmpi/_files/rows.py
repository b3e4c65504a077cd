"""Rows with global indices in a file, where they lie in the ascending order of their indices.

If the indices are all numbers from 0 on, the place of a row is its index. Otherwise a further array has the indices.
Each rank writes, and reads, a run of consecutive rows. The exchange of an `IndexMap` brings rows from their owners to
the writer, whose ghosts are the rows of the run. For reading, the map has the rows of the run as owned rows.

With gaps the ranks sort all indices to get the indices of each run, each rank with a part (a sample sort). So time and
memory of a rank grow with its own rows, apart from the samples, of which each rank has a few of every other rank.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mpi4py import MPI

from jaxmpi._files import chunks, dtypes
from jaxmpi._files.chunks import LARGEST, Interval, Region
from jaxmpi._mpi import agreement
from jaxmpi._unstructured.index_map import IndexMap
from jaxmpi._unstructured.messages import by_rank, sparse_exchange

_SORT, _RUN = 11, 12
"""Tags of messages on the clone of the communicator."""
_SAMPLES = 32
"""The largest number of samples that a rank has of another one's indices."""
_EVEN, _LONG = 64, 4096
"""Runs of at least `_LONG` rows are multiples of `_EVEN`, so that they can be cut into equal chunks."""


@dataclass(frozen=True, eq=False)
class Numbering:
    """The order of the rows of a map in files."""

    has_gaps: bool
    transfers: dict[int, "Transfer"] = field(default_factory=dict)
    """The transfers to runs, by the length of a run, once they have been used."""


def learn(comm: MPI.Intracomm, operation: str, find: Callable[[], Sequence[IndexMap]]) -> None:
    """Compute the numberings of the maps that `find` returns, unless all ranks know them. Each map keeps its own.

    Raise an exception on all ranks if `find` raises one on a rank, or if ranks have different numbers of maps.
    """

    def work() -> tuple[Sequence[IndexMap], agreement.Facts]:
        listed = find()
        return listed, [("the function of jaxmpi.io", operation), ("the number of maps in grid", str(len({*listed})))]

    listed = agreement.check_equal(comm, operation, work)
    maps = list(dict.fromkeys(listed))
    if maps and agreement.sums(comm, operation, None, any(map._numbering is None for map in listed))[0]:
        lasts = [comm.allreduce(int(map.owned.max(initial=-1)), MPI.MAX) for map in maps]
        known = {map: Numbering(last + 1 != map._total) for map, last in zip(maps, lasts, strict=True)}
        for map in listed:
            map._numbering = known[map]


def run_of(total: int, ranks: int, size: int | None) -> int:
    """Return how many rows each rank writes: a multiple of the size of a chunk, if the user gives a size."""
    if size is not None:
        return size * max(1, math.ceil(math.ceil(total / size) / ranks))
    run = max(1, math.ceil(total / ranks))
    return run if run < _LONG else math.ceil(run / _EVEN) * _EVEN


def interval(run: int, total: int, rank: int) -> Interval:
    return min(rank * run, total), min((rank + 1) * run, total)


@dataclass(frozen=True, eq=False)
class Transfer:
    """The transfer of rows from their owners to the ranks that write them, or from the readers to those that need
    them."""

    indices: np.ndarray
    """The indices of this rank's run."""
    owned: int
    """How many of the rows that this rank has are transferred."""
    map: IndexMap | None
    """The map with the wanted rows as ghosts. None: each rank writes the rows that it owns, in their order."""
    local: np.ndarray
    """The local numbers of the wanted rows."""

    def move(self, x: Any) -> Any:
        x = x[: self.owned]
        return x if self.map is None else self.map.exchange(self.map.pad(x))[self.local]


def _transfer(comm: MPI.Intracomm, map: IndexMap, run: int) -> Transfer:
    """Return the transfer of the rows of the map to runs of `run` rows. All ranks call it together."""
    known: Numbering = map._numbering
    if run not in known.transfers:
        indices = np.arange(*interval(run, map._total, comm.rank))
        if known.has_gaps:
            indices = _sorted(comm, map.owned, run)
        (some,) = agreement.sums(comm, "save", None, not np.array_equal(indices, map.owned))
        to_runs = IndexMap(map.owned, indices, comm=map.comm) if some else None
        local = indices if to_runs is None else to_runs.to_local(indices)
        known.transfers[run] = Transfer(indices, map.sizes[0], to_runs, local)
    return known.transfers[run]


def _sorted(comm: MPI.Intracomm, owned: np.ndarray, run: int) -> np.ndarray:
    """Return the indices of this rank's run, of all indices in ascending order."""
    mine = np.sort(owned)
    at = np.linspace(0, len(mine), min(_SAMPLES, len(mine)), endpoint=False).astype(np.int64)
    listed = agreement.gather_objects(comm, (mine[at], len(mine) / max(len(at), 1)))
    samples = np.concatenate([values for values, _ in listed])
    weights = np.concatenate([np.full(len(values), weight) for values, weight in listed])
    order = np.argsort(samples, kind="stable")
    samples, before = samples[order], np.cumsum(weights[order]) - weights[order]
    if len(samples) == 0:
        return mine
    shares = before[-1] * np.arange(1, comm.size) / comm.size
    splitters = samples[np.minimum(np.searchsorted(before, shares), len(samples) - 1)]
    received = sparse_exchange(comm, by_rank(np.searchsorted(splitters, mine, side="right"), mine), _SORT)
    part = np.sort(np.concatenate([np.zeros(0, np.int64), *received.values()]))
    first = comm.exscan(len(part)) or 0
    places = np.arange(first, first + len(part)) // run
    return np.concatenate([np.zeros(0, np.int64), *sparse_exchange(comm, by_rank(places, part), _RUN).values()])


@dataclass(frozen=True, eq=False)
class Rows:
    """The source of this rank's run of the rows of an array, or of their indices. All ranks call `take` together."""

    region: Region
    map: IndexMap
    comm: MPI.Intracomm
    run: int
    takes_indices: bool = False

    def take(self, x: Any) -> np.ndarray:
        transfer = _transfer(self.comm, self.map, self.run)
        if self.takes_indices:
            return transfer.indices
        return dtypes.encode(chunks.values_of(chunks.in_words(x, transfer.move)))


def source(map: IndexMap, comm: MPI.Intracomm, shape: Sequence[int], dtype: np.dtype, size: int | None) -> Rows:
    """Return the source of an array with the rows of a map. `size`: the rows of a chunk, if the user has passed it."""
    run = run_of(map._total, comm.size, size)
    parts = min(run, max(1, math.ceil(run * math.prod(shape) * dtype.itemsize / LARGEST)))
    rows = size or run // next(n for n in range(parts, run + 1) if run % n == 0)
    points = [interval(run, map._total, comm.rank), *((0, n) for n in shape)]
    region = Region((map._total, *shape), (rows, *(max(1, n) for n in shape)), tuple(points))
    return Rows(region, map, comm, run)


def reader(map: IndexMap, indices: np.ndarray) -> Transfer:
    """Return the transfer of rows from a file. All ranks call it together, each with the indices of the rows it reads.

    Raise ValueError on all ranks if the map has rows that the file does not have.
    """
    needed = np.concatenate([map.owned, map.ghosts])
    to_readers = IndexMap(indices, needed, comm=map.comm)
    return Transfer(indices, len(indices), to_readers, to_readers.to_local(needed))
