"""Bandwidths of a call, by the names and definitions of nccl-tests (its doc/PERFORMANCE.md and the `GetBw` functions).

The factors are those of `jaxmpi.bench`. With S the bytes that the operation is about and n the number of ranks:

  algbw   algorithm bandwidth, S / time: how fast the caller's data gets done
  busbw   bus bandwidth, algbw times a factor: what each rank's link must at least have carried in that time, whatever
          the algorithm, so that it can be compared with the speed of the hardware and does not fall with n

  operation             S                           factor
  allreduce             the array                   2 (n - 1) / n: every element is collected, then handed out
  allgather, alltoall   the array of all n parts    (n - 1) / n: a rank's own part stays where it is
  bcast                 the array                   1: root sends it all
  pingpong, exchange    the message                 1

The other figures: `latency` is the time of one call in microseconds, and of one message in a ping-pong: half of the
way there and back, as osu_latency has it. A gigabyte is 10^9 bytes. A barrier moves nothing and has no bandwidth.
"""

from jaxmpi._bench.operations import OPERATIONS, Case, Operation

_OTHER_NAMES = {"exchange": "sendrecv"}


def _row(operation: str) -> Operation | None:
    row = OPERATIONS.get(_OTHER_NAMES.get(operation, operation))
    return row if row is not None and row.size else None


def algbw(operation: str, nbytes: int, ranks: int, seconds: float) -> float | None:
    """GB/s, where a message from one rank to another has `nbytes` bytes; None of what moves nothing."""
    row = _row(operation)
    return None if row is None else nbytes * row.parts(ranks) / seconds / 1e9


def busbw(operation: str, nbytes: int, ranks: int, seconds: float) -> float | None:
    """GB/s, as `algbw`."""
    row, speed = _row(operation), algbw(operation, nbytes, ranks, seconds)
    return None if row is None or speed is None else speed * row.factor(Case(0, ranks, 1))
