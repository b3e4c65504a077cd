"""The owner of each row, from a directory that is divided over the ranks.

Each global index has a home: a rank that follows from the index alone. A rank sends its own indices to their homes, and
asks the homes of its ghosts for the owners. Then it sends each owner the list of the rows that it wants.

Indices are divided into blocks of consecutive indices. A few blocks hold as many indices as a rank owns on average. A
hash of the number of a block gives the home of the indices in it. So a rank with consecutive indices has a few homes,
however many ranks there are. A rank with scattered indices has at most as many homes as it has indices, or as there are
ranks. For any distribution of indices, a rank's part of the directory is about as long as the rows of an average rank.

So time and memory of a rank grow with its own indices, its part of the directory, and the number of its messages: one
to each home and one back, and one to each owner. In addition there are three reductions of a few numbers, and a barrier
for each of these three exchanges.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from jaxmpi._mpi import agreement
from jaxmpi._unstructured.arguments import LocalRows, Names, some
from jaxmpi._unstructured.lookup import Lookup
from jaxmpi._unstructured.messages import by_rank, sparse_exchange

_BLOCKS = 4
"""The approximate number of blocks that together hold as many indices as a rank owns on average."""
_ASK, _ANSWER, _WANT = 1, 2, 3
"""Tags of messages on the clone of the communicator."""
Faults = dict[str, np.ndarray]
"""Wrong indices by kind of fault, as rows of an array with the ranks that they concern."""


@dataclass(frozen=True, eq=False)
class Connections:
    """One rank's part of a division of rows. The local rows are the owned rows, then the ghosts.

    The ghosts are sorted by owner, and the ghosts of one owner by global index. So the ghosts of one owner are
    consecutive rows.
    """

    owned: int
    """The number of rows that this rank owns."""
    ghosts: np.ndarray
    """The global index of each ghost, int64, in the local order."""
    receives: tuple[tuple[int, int], ...]
    """The owners of ghosts in ascending order, each with the number of ghosts: at least one."""
    sends: tuple[tuple[int, Any], ...]
    """The ranks that have ghosts of this rank, in ascending order, and their rows on this rank, in the order of the
    ghosts on that rank: int64, or in a pattern a range or indices."""
    signature: int = 0
    """A number that is the same on all ranks, and differs for another division of rows. 0: the ranks have not agreed on
    one."""


def connect(comm: MPI.Intracomm, names: Names, local: LocalRows, total: int) -> Connections:
    """Return the rows that this rank sends and receives. `total`: the rows that all ranks own. All ranks call it.

    Raise ValueError on all ranks if a ghost has no owner, or an index has two. If the user has passed owners, check
    that they own the ghosts, but not whether an index has two owners.
    """
    if local.owners is None:
        owners, faults = _owners(comm, local, _shift(total, comm.size))
        _check(comm, names, faults)
    else:
        owners = local.owners
    order = np.argsort(owners, kind="stable")
    owners, ghosts = owners[order], local.ghosts[order]
    wanted = sparse_exchange(comm, by_rank(owners, ghosts), _WANT)
    rows = {rank: local.lookup.positions(indices) for rank, indices in wanted.items()}
    absent = [_rows(wanted[rank][places < 0], rank, comm.rank) for rank, places in rows.items()]
    faults = {"elsewhere": np.concatenate([_rows([], 0, 0), *absent])}
    signature = _check(comm, names, faults, digest_of(local.owned, ghosts, owners, rank=comm.rank))
    received, counts = np.unique(owners, return_counts=True)
    return Connections(
        len(local.owned),
        ghosts,
        tuple(zip(received.tolist(), counts.tolist(), strict=True)),
        tuple(rows.items()),
        signature,
    )


def _shift(total: int, size: int) -> int:
    """Return the logarithm of the number of consecutive indices that have the same home."""
    return max(0, (total // (_BLOCKS * size)).bit_length() - 1)


def _homes(indices: np.ndarray, shift: int, size: int) -> np.ndarray:
    """Return the home of each index: the last steps of MurmurHash3 mix the number of the block."""
    mixed = (indices >> shift).astype(np.uint64)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        mixed ^= mixed >> np.uint64(33)
        mixed *= np.uint64(factor)
    mixed ^= mixed >> np.uint64(33)
    return (mixed % np.uint64(size)).astype(np.int64)


def _rows(indices: Sequence[int] | np.ndarray, *ranks: int | np.ndarray) -> np.ndarray:
    """Return an array with a row for each index, followed by the ranks."""
    columns = np.broadcast_arrays(np.asarray(indices, np.int64), *ranks)
    return np.stack(columns, axis=1)


def _owners(comm: MPI.Intracomm, local: LocalRows, shift: int) -> tuple[np.ndarray, Faults]:
    """Return the owner of each ghost, or -1 if there is none, and the faults in the ghosts of this rank and in its part
    of the directory."""
    homes = _homes(local.ghosts, shift, comm.size)
    owned = by_rank(_homes(local.lookup.values, shift, comm.size), local.lookup.values)
    asked = by_rank(homes, local.ghosts)
    none = np.zeros(0, np.int64)
    asks = {
        home: np.concatenate([[len(owned.get(home, none))], owned.get(home, none), asked.get(home, none)])
        for home in sorted({*owned, *asked})
    }
    answers, twice = _answers(sparse_exchange(comm, asks, _ASK))
    replies = sparse_exchange(comm, {rank: answer for rank, answer in answers.items() if len(answer)}, _ANSWER)
    owners = np.empty(len(local.ghosts), np.int64)
    for home, places in by_rank(homes, np.arange(len(homes))).items():
        owners[places] = replies[home]
    return owners, {"twice": twice, "unowned": _rows(local.ghosts[owners < 0], comm.rank)}


def _answers(asks: dict[int, np.ndarray]) -> tuple[dict[int, np.ndarray], np.ndarray]:
    """Build this rank's part of the directory. Return the owners of the rows that each rank asks for, and the indices
    with two owners."""
    parts = [ask[1 : 1 + ask[0]] for ask in asks.values()]
    table = Lookup.from_list(np.concatenate([np.zeros(0, np.int64), *parts]))
    owners = np.repeat(list(asks), [len(part) for part in parts]) if asks else np.zeros(0, np.int64)
    again = table.repeated()
    if len(again):  # the table is sorted, so it is not in the order of the owners
        assert table.order is not None
        sorted_owners = owners[table.order]
        twice = _rows(table.values[again], sorted_owners[again - 1], sorted_owners[again])
    else:
        twice = _rows([], 0, 0)
    answers = {}
    for rank, ask in asks.items():
        at = table.positions(ask[1 + ask[0] :])
        answers[rank] = np.where(at < 0, -1, owners[np.maximum(at, 0)]) if len(owners) else at
    return answers, twice


def digest_of(*arrays: np.ndarray, rank: int = 0) -> int:
    """Return a number of 64 bits for arrays of a rank."""
    digest = hashlib.blake2b(f"{rank} {[len(array) for array in arrays]}".encode(), digest_size=8)
    for array in arrays:
        digest.update(array.tobytes())
    return int.from_bytes(digest.digest(), "little")


def _check(comm: MPI.Intracomm, names: Names, faults: Faults, digest: int = 0) -> int:
    """Return the sum of the digests. Raise the same ValueError on all ranks if any rank has faults."""
    count, signature = agreement.sums(comm, names.operation, None, sum(map(len, faults.values())), digest)
    if count == 0:
        return signature
    reports = agreement.gather_objects(comm, {name: (len(rows), rows[:5].tolist()) for name, rows in faults.items()})
    texts = {
        "twice": (
            "indices are owned twice: {0}. Leave each out of {1.owned} on all ranks but one. The others may list it "
            "among their ghosts.",
            "{0} (by ranks {1} and {2})",
        ),
        "unowned": ("no rank owns {0}. {1.unowned}", f"{{0}} ({names.ghosts} of rank {{1}})"),
        "elsewhere": (
            "owners is wrong for {0}. Correct it, or leave owners out, and the map finds them.",
            "{0} (rank {1} says that rank {2} owns it)",
        ),
    }
    name, number = next((name, n) for name in faults if (n := sum(report[name][0] for report in reports)))
    text, shown = texts[name]
    named = [shown.format(*row) for row in sorted(tuple(row) for report in reports for row in report[name][1])]
    raise ValueError(f"{names.operation}: {text.format(some(named, number), names)}")
