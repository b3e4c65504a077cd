"""Messages to a few ranks, of which the receivers do not know: outside of compiled programs, by mpi4py."""

import time

import numpy as np
from mpi4py import MPI

_PATIENCE, _NAP_SECONDS = 1000, 0.0001
"""How often a rank looks for messages before it begins to sleep in between."""


def sparse_exchange(comm: MPI.Intracomm, messages: dict[int, np.ndarray], tag: int) -> dict[int, np.ndarray]:
    """Sends int64 to some ranks, and returns what others have sent to this one, by their ranks in ascending order.

    Nobody is told beforehand how many messages it gets, which would take a number from every rank to every other.
    Instead a rank joins a nonblocking barrier once its messages have been received, and receives until all have joined
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
    """The values of each rank, in their order, by the ranks in ascending order."""
    if not len(ranks):
        return {}
    narrow = ranks.astype(np.int16) if ranks.max() < 2**15 else ranks  # NumPy sorts such by their digits
    order = np.argsort(narrow, kind="stable")
    ranks, values = ranks[order], values[order]
    starts = np.flatnonzero(np.concatenate([[True], ranks[1:] != ranks[:-1]]))
    return dict(zip(ranks[starts].tolist(), np.split(values, starts[1:]), strict=True))
