"""Messages to a few ranks, which do not know the senders: outside of compiled programs, by mpi4py."""

import time

import numpy as np
from mpi4py import MPI

_PATIENCE, _NAP_SECONDS = 1000, 0.0001
"""The number of polls for messages before a rank begins to sleep in between, and the length of a sleep."""


def sparse_exchange(comm: MPI.Intracomm, messages: dict[int, np.ndarray], tag: int) -> dict[int, np.ndarray]:
    """Send int64 to some ranks. Return the messages that others have sent to this one, by rank in ascending order.

    No rank knows beforehand how many messages it gets, because this would take a number from every rank to every other.
    Instead a rank joins a nonblocking barrier when its messages have been received, and receives until all have joined
    (nonblocking consensus: Hoefler, Siebert, Lumsdaine, Scalable communication protocols for dynamic sparse data
    exchange, 2010). The next exchange on this communicator with this tag must not begin before all ranks have left this
    one.
    """
    received = {comm.rank: messages[comm.rank]} if comm.rank in messages else {}
    sends = [comm.Issend(data, dest, tag) for dest, data in messages.items() if dest != comm.rank]
    status = MPI.Status()
    barrier: MPI.Request | None = None
    idle = 0
    while True:
        message = comm.Improbe(MPI.ANY_SOURCE, tag, status)
        if message is not None:
            data = np.empty(status.Get_count(MPI.INT64_T), np.int64)
            received[status.Get_source()] = data
            message.Recv(data)
            idle = 0
        elif barrier is None:
            barrier = comm.Ibarrier() if MPI.Request.Testall(sends) else None
        elif barrier.Test():
            return dict(sorted(received.items()))
        idle += 1
        if idle > _PATIENCE:
            time.sleep(_NAP_SECONDS)


def by_rank(ranks: np.ndarray, values: np.ndarray) -> dict[int, np.ndarray]:
    """Return the values of each rank, in their order, by the ranks in ascending order."""
    if not len(ranks):
        return {}
    narrow = ranks.astype(np.int16) if ranks.max() < 2**15 else ranks  # NumPy sorts int16 by digits
    order = np.argsort(narrow, kind="stable")
    ranks, values = ranks[order], values[order]
    starts = np.flatnonzero(np.concatenate([[True], ranks[1:] != ranks[:-1]]))
    return dict(zip(ranks[starts].tolist(), np.split(values, starts[1:]), strict=True))
