"""Bandwidths of a call, by the names and definitions of nccl-tests (its doc/PERFORMANCE.md and the `GetBw` functions).

With S the bytes that the operation is about and n the number of ranks:

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

from collections.abc import Callable

_FACTORS: dict[str, Callable[[int], float]] = {
    "allreduce": lambda n: 2 * (n - 1) / n,
    "allgather": lambda n: (n - 1) / n,
    "alltoall": lambda n: (n - 1) / n,
    "bcast": lambda n: 1.0,
    "pingpong": lambda n: 1.0,
    "exchange": lambda n: 1.0,
}
_OF_PARTS = ("allgather", "alltoall")


def algbw(operation: str, nbytes: int, ranks: int, seconds: float) -> float | None:
    """GB/s, where a message from one rank to another has `nbytes` bytes; None of what moves nothing."""
    if operation not in _FACTORS:
        return None
    return nbytes * (ranks if operation in _OF_PARTS else 1) / seconds / 1e9


def busbw(operation: str, nbytes: int, ranks: int, seconds: float) -> float | None:
    """GB/s, as `algbw`."""
    speed = algbw(operation, nbytes, ranks, seconds)
    return None if speed is None else speed * _FACTORS[operation](ranks)
