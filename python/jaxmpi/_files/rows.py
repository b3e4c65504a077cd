"""Rows with global indices in a file, where they lie in the ascending order of their indices.

If the indices are all numbers from 0 on, the place of a row is its index. Otherwise a further array has the indices.
Each rank writes, and reads, a run of consecutive rows. The exchange of an `IndexMap` brings rows from their owners to
the writer, whose ghosts are the rows of the run. For reading, the map has the rows of the run as owned rows.

With gaps the ranks sort all indices to get the indices of each run, each rank with a part (a sample sort). So time and
memory of a rank grow with its own rows, apart from the samples, of which each rank has a few of every other rank.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
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
    """The properties of a map on all ranks together. It does not hold the map, and lives as long as the map."""

    total: int
    has_gaps: bool
    transfers: dict[int, "Transfer"] = field(default_factory=dict)
    """The transfers to runs, by the length of a run, once they have been used."""

    def transfer(self, comm: MPI.Intracomm, map: IndexMap, run: int) -> "Transfer":
        """Return the transfer of the rows of the map to runs of `run` rows. All ranks call it together."""
        if run not in self.transfers:
            self.transfers[run] = _transfer(comm, map, self, run)
        return self.transfers[run]


_known: dict[int, Numbering] = {}
"""The numberings of maps by `id`, because maps that are equal may live longer or shorter."""


def learn(comm: MPI.Intracomm, operation: str, find: Callable[[], Sequence[IndexMap]]) -> None:
    """Compute the numberings of the maps that `find` returns, unless all ranks know them. Raise an error on all ranks
    if `find` raises one, if ranks have different numbers of maps, or if they call different functions."""

    def work() -> tuple[Sequence[IndexMap], agreement.Facts]:
        listed = find()
        count = str(len(distinct(listed)))
        return listed, [("the function of jaxmpi.io", operation), ("the number of maps in grid", count)]

    listed = agreement.check_equal(comm, operation, work)
    maps = distinct(listed)
    if maps and agreement.sums(comm, operation, None, sum(id(map) not in _known for map in maps)) != [0]:
        for map in maps:
            owned = map.owned
            total = comm.allreduce(len(owned))
            last = comm.allreduce(int(owned.max()) if len(owned) else -1, MPI.MAX)
            _remember(map, Numbering(total, last + 1 != total))
    for map in listed:
        _remember(map, _known[id(maps[maps.index(map)])])


def _remember(map: IndexMap, numbering: Numbering) -> None:
    """Keep the numbering of a map for as long as the map lives."""
    if id(map) not in _known:
        weakref.finalize(map, _known.pop, id(map)).atexit = False
    _known[id(map)] = numbering


def numbering(map: IndexMap) -> Numbering:
    return _known[id(map)]


def run_of(total: int, ranks: int, size: int | None) -> int:
    """Return how many rows each rank writes: a multiple of the size of a chunk, if the user gives a size."""
    if size is not None:
        return size * max(1, math.ceil(math.ceil(total / size) / ranks))
    run = max(1, math.ceil(total / ranks))
    return run if run < _LONG else math.ceil(run / _EVEN) * _EVEN


def chunk_of(run: int, row: int) -> int:
    """Return how many rows of `row` bytes a chunk has: a part of a run."""
    least = min(run, max(1, math.ceil(run * row / LARGEST)))
    return run // next(n for n in range(least, run + 1) if run % n == 0)


def interval(run: int, total: int, rank: int) -> Interval:
    return min(rank * run, total), min((rank + 1) * run, total)


@dataclass(frozen=True, eq=False)
class Transfer:
    """The transfer of rows from their owners to the ranks that write them."""

    indices: np.ndarray
    """The indices of this rank's run."""
    owned: int
    map: IndexMap | None
    """The map with the rows of the run as ghosts. None: each rank writes the rows that it owns, in their order."""
    local: np.ndarray | None

    def move(self, x: Any) -> Any:
        x = x[: self.owned]
        return x if self.map is None else self.map.exchange(self.map.pad(x))


def _transfer(comm: MPI.Intracomm, map: IndexMap, numbering: Numbering, run: int) -> Transfer:
    start, end = interval(run, numbering.total, comm.rank)
    indices = _sorted(comm, map.owned, run) if numbering.has_gaps else np.arange(start, end)
    elsewhere = not np.array_equal(indices, map.owned)
    (some,) = agreement.sums(comm, "save", None, elsewhere)
    if not some:
        return Transfer(indices, len(indices), None, None)
    to_runs = IndexMap(map.owned, indices, comm=map.comm)
    return Transfer(indices, map.sizes[0], to_runs, to_runs.to_local(indices))


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
    """The source of this rank's run of the rows of an array. All ranks call `take` together."""

    region: Region
    map: IndexMap
    numbering: Numbering
    comm: MPI.Intracomm
    run: int

    def take(self, x: Any) -> np.ndarray:
        transfer = self.numbering.transfer(self.comm, self.map, self.run)
        values = chunks.values_of(chunks.in_words(x, transfer.move))
        return dtypes.encode(values if transfer.local is None else values[transfer.local])


@dataclass(frozen=True, eq=False)
class Indices:
    """The source of the indices of this rank's run. All ranks call `take` together."""

    region: Region
    map: IndexMap
    numbering: Numbering
    comm: MPI.Intracomm
    run: int

    def take(self, x: Any) -> np.ndarray:
        return self.numbering.transfer(self.comm, self.map, self.run).indices


def source(
    numbering: Numbering, comm: MPI.Intracomm, shape: Sequence[int], dtype: np.dtype, size: int | None
) -> tuple[Region, int]:
    """Return this rank's region of an array with these rows, and the number of rows in a run."""
    run = run_of(numbering.total, comm.size, size)
    rows = size or chunk_of(run, math.prod(shape) * dtype.itemsize)
    points = [interval(run, numbering.total, comm.rank), *((0, n) for n in shape)]
    return Region((numbering.total, *shape), (rows, *(max(1, n) for n in shape)), tuple(points)), run


@dataclass(frozen=True, eq=False)
class Reader:
    """The transfer of rows from the ranks that read them to the ranks that own them, or have them as ghosts."""

    points: Interval
    """The rows of the file that this rank reads."""
    map: IndexMap
    local: np.ndarray

    def move(self, x: Any) -> Any:
        return self.map.exchange(self.map.pad(x))[self.local]


def reader(map: IndexMap, indices: np.ndarray, points: Interval) -> Reader:
    """Return the transfer of rows from a file. All ranks call it together, each with the indices of the rows it reads.

    Raise ValueError on all ranks if the map has rows that the file does not have.
    """
    needed = np.concatenate([map.owned, map.ghosts])
    to_readers = IndexMap(indices, needed, comm=map.comm)
    return Reader(points, to_readers, to_readers.to_local(needed))


def distinct(maps: Iterable[IndexMap]) -> list[IndexMap]:
    """Return the maps without repetitions of equal ones."""
    unlike: list[IndexMap] = []
    for map in maps:
        if map not in unlike:
            unlike.append(map)
    return unlike
