"""Who owns which row: a directory that is divided over the ranks.

Each global index has a home, a rank that follows from the index alone. A rank tells the homes of its own indices that
it owns them, asks the homes of its ghosts who owns those, and tells each owner which of its rows it wants.

Indices are divided into blocks of consecutive ones, of which a few hold as many as a rank owns on average. A hash
of the block's number is the home of its indices. So a rank with consecutive indices has a few homes, however many
ranks there are; one with scattered indices has at most as many as it has indices, or as there are ranks. Wherever the
indices lie, a rank's part of the directory is about as long as what a rank owns on average.

Time and memory of a rank thus grow with its own indices, its part of the directory, and the number of its messages:
one to each home and one back, and one to each owner. Besides there are three reductions of a few numbers, and a barrier
for each of the two exchanges in which a rank does not know from whom it receives.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from jaxmpi._mpi import agreement
from jaxmpi._unstructured.arguments import Given, Names, some
from jaxmpi._unstructured.connections import Connections
from jaxmpi._unstructured.lookup import Lookup
from jaxmpi._unstructured.messages import by_rank, sparse_exchange

_BLOCKS = 4
"""About how many blocks of consecutive indices hold as many indices as a rank owns on average."""
_ASK, _ANSWER, _WANT = 1, 2, 3
"""Tags of messages on the clone of the communicator."""
_NAMED = 5
"""How many wrong indices a rank tells the others of."""

Faults = dict[str, np.ndarray]
"""Wrong indices, in rows of an array with the ranks that they concern, by what is wrong with them."""


def connect(comm: MPI.Intracomm, names: Names, given: Given, total: int) -> Connections:
    """Finds out which rows this rank sends and receives; `total` are owned by all ranks together. All ranks call it.

    Raises ValueError on all ranks if a ghost has no owner, or an index has two. Of owners that are given it is checked
    whether they own the ghosts, but not whether an index has two owners.
    """
    if given.owners is None:
        owners, faults = _owners(comm, given, _shift(total, comm.size))
        _check(comm, names, faults)
    else:
        owners = given.owners
    order = np.argsort(owners, kind="stable")
    owners, ghosts = owners[order], given.ghosts[order]
    wanted = sparse_exchange(comm, by_rank(owners, ghosts), _WANT)
    rows = {rank: given.lookup.positions(indices) for rank, indices in wanted.items()}
    absent = [_rows(wanted[rank][its < 0], rank, comm.rank) for rank, its in rows.items()]
    faults = {"elsewhere": np.concatenate([_rows([], 0, 0), *absent])}
    signature = _check(comm, names, faults, digest_of(given.owned, ghosts, owners, rank=comm.rank))
    received, counts = np.unique(owners, return_counts=True)
    return Connections(
        len(given.owned),
        ghosts,
        tuple(zip(received.tolist(), counts.tolist(), strict=True)),
        tuple(rows.items()),
        signature,
    )


def _shift(total: int, size: int) -> int:
    """The logarithm of the number of consecutive indices that have the same home."""
    return max(0, (total // (_BLOCKS * size)).bit_length() - 1)


def _homes(indices: np.ndarray, shift: int, size: int) -> np.ndarray:
    """The home of each index: the last steps of MurmurHash3 mix the number of its block."""
    mixed = (indices >> shift).astype(np.uint64)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        mixed ^= mixed >> np.uint64(33)
        mixed *= np.uint64(factor)
    mixed ^= mixed >> np.uint64(33)
    return (mixed % np.uint64(size)).astype(np.int64)


def _rows(indices: Sequence[int] | np.ndarray, *ranks: int | np.ndarray) -> np.ndarray:
    """An array with a row for each index, followed by the ranks."""
    columns = np.broadcast_arrays(np.asarray(indices, np.int64), *ranks)
    return np.stack(columns, axis=1)


def _owners(comm: MPI.Intracomm, given: Given, shift: int) -> tuple[np.ndarray, Faults]:
    """The owner of each ghost, -1 if there is none; what is wrong with ghosts of this rank, or in its part of the
    directory."""
    homes = _homes(given.ghosts, shift, comm.size)
    owned = by_rank(_homes(given.lookup.values, shift, comm.size), given.lookup.values)
    asked = by_rank(homes, given.ghosts)
    none = np.zeros(0, np.int64)
    asks = {
        home: np.concatenate([[len(owned.get(home, none))], owned.get(home, none), asked.get(home, none)])
        for home in sorted({*owned, *asked})
    }
    answers, twice = _answers(sparse_exchange(comm, asks, _ASK))
    replies = {home: np.empty(len(its), np.int64) for home, its in asked.items()}
    pending = [comm.Irecv(its, home, _ANSWER) for home, its in replies.items() if home != comm.rank]
    pending += [comm.Isend(its, rank, _ANSWER) for rank, its in answers.items() if len(its) and rank != comm.rank]
    MPI.Request.Waitall(pending)
    if comm.rank in replies:
        replies[comm.rank] = answers[comm.rank]
    owners = np.empty(len(given.ghosts), np.int64)
    for home, places in by_rank(homes, np.arange(len(homes))).items():
        owners[places] = replies[home]
    return owners, {"twice": twice, "unowned": _rows(given.ghosts[owners < 0], comm.rank)}


def _answers(asks: dict[int, np.ndarray]) -> tuple[dict[int, np.ndarray], np.ndarray]:
    """This rank's part of the directory: the owners of what each rank has asked for, and what has two owners."""
    parts = [its[1 : 1 + its[0]] for its in asks.values()]
    table = Lookup.of(np.concatenate([np.zeros(0, np.int64), *parts]))
    owners = np.repeat(list(asks), [len(part) for part in parts]) if asks else np.zeros(0, np.int64)
    again = table.repeated()
    if len(again):  # sorted, so not in the order of the owners
        assert table.order is not None
        sorted_owners = owners[table.order]
        twice = _rows(table.values[again], sorted_owners[again - 1], sorted_owners[again])
    else:
        twice = _rows([], 0, 0)
    answers = {}
    for rank, its in asks.items():
        at = table.positions(its[1 + its[0] :])
        answers[rank] = np.where(at < 0, -1, owners[np.maximum(at, 0)]) if len(owners) else at
    return answers, twice


def digest_of(*arrays: np.ndarray, rank: int = 0) -> int:
    """A number of 64 bits for arrays, of a rank."""
    digest = hashlib.blake2b(f"{rank} {[len(array) for array in arrays]}".encode(), digest_size=8)
    for array in arrays:
        digest.update(array.tobytes())
    return int.from_bytes(digest.digest(), "little")


def _check(comm: MPI.Intracomm, names: Names, faults: Faults, digest: int = 0) -> int:
    """The sum of the digests. Raises ValueError on all ranks, alike, if any has found faults."""
    count, signature = agreement.sums(comm, names.operation, None, sum(map(len, faults.values())), digest)
    if count == 0:
        return signature
    told = agreement.gather_objects(comm, {name: (len(rows), rows[:_NAMED].tolist()) for name, rows in faults.items()})
    for name in faults:
        number = sum(its[name][0] for its in told)
        if number:
            rows = sorted(tuple(row) for its in told for row in its[name][1])
            raise ValueError(f"{names.operation}: {_TEXTS[name](names, number, rows)}")
    raise AssertionError(told)


def _unowned(names: Names, number: int, rows: list[tuple[int, ...]]) -> str:
    named = [f"{index} ({names.ghosts} of rank {rank})" for index, rank in rows]
    return f"no rank owns {some(named, number)}. {names.unowned}"


def _twice(names: Names, number: int, rows: list[tuple[int, ...]]) -> str:
    named = [f"{index} (by ranks {first} and {second})" for index, first, second in rows]
    return (
        f"indices are owned twice: {some(named, number)}. Leave each out of {names.owned} on all ranks but one; the "
        "others have it among their ghosts."
    )


def _elsewhere(names: Names, number: int, rows: list[tuple[int, ...]]) -> str:
    named = [f"{index} (rank {asker} says that rank {owner} owns it)" for index, asker, owner in rows]
    return f"owners is wrong for {some(named, number)}. Correct it, or leave owners out to have them looked up."


_TEXTS = {"twice": _twice, "unowned": _unowned, "elsewhere": _elsewhere}
