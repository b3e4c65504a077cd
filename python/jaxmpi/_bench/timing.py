"""The timing of all benchmarks: contenders take turns, and the slowest rank counts.

`jaxmpi.bench` and the programs in benchmarks/ of the repository measure in this way.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from mpi4py import MPI

COMM = MPI.COMM_WORLD

Contender = Callable[[int], tuple[float, int]]
"""turn -> the seconds of one call, and the number of wrong elements, on this rank."""


@dataclass(frozen=True)
class Batch:
    """A contender that makes some calls in each turn, between a barrier and the end of the last call."""

    calls: int
    start: Callable[[int], Any]
    """turn -> the data that the calls start from."""
    run: Callable[[Any], Any]
    """data -> what the calls make of it."""
    wrong: Callable[[int, Any], int] = lambda turn, result: 0
    """(turn, what the calls have made) -> how many elements of it are wrong. Without it nothing is compared."""

    def __call__(self, turn: int) -> tuple[float, int]:
        data = jax.block_until_ready(self.start(turn))
        COMM.Barrier()
        begin = time.perf_counter()
        result = self.run(data)
        seconds = time.perf_counter() - begin
        wrong = self.wrong(turn, result)
        if not is_donated(data):  # the calls pay for the release of the last result, as for that of all others
            begin = time.perf_counter()
            del result
            seconds += time.perf_counter() - begin
        return seconds / self.calls, int(wrong)


def is_donated(data: Any) -> bool:
    """Return whether the calls have put the result into the memory of the data, so that they make and release none."""
    leaves = jax.tree.leaves(data)
    return bool(leaves) and all(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves)


@dataclass(frozen=True)
class Sample:
    """The measurements of one contender."""

    seconds: list[float]
    """The time of one call on the slowest rank, in each turn."""
    wrong: int
    """The number of wrong elements, on all ranks and in all turns."""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def take_turns(contenders: Mapping[Any, Contender], rounds: int) -> dict[Any, Sample]:
    """Measure the contenders in so many rounds, in which all of them take turns. All ranks call it alike.

    One more round comes first, in which they compile. It is checked, but the time does not count. Each round begins
    with another contender, because the first one may find caches and memory in another state.
    """
    names = list(contenders)
    seconds, wrong = np.empty((rounds + 1, len(names))), np.empty((rounds + 1, len(names)), np.int64)
    for turn in range(rounds + 1):
        for place in range(len(names)):
            column = (turn + place) % len(names)
            seconds[turn, column], wrong[turn, column] = contenders[names[column]](turn)
    COMM.Allreduce(MPI.IN_PLACE, seconds, MPI.MAX)
    COMM.Allreduce(MPI.IN_PLACE, wrong, MPI.SUM)
    return {
        name: Sample(seconds[1:, column].tolist(), int(wrong[:, column].sum())) for column, name in enumerate(names)
    }


def ratio(samples: Mapping[Any, Sample], of: Any, to: Any, less: Any = None) -> float | None:
    """Return the median of the ratios of each turn, or None if a contender is missing.

    With `less` the time of that contender is subtracted from both.
    """
    if any(name not in samples for name in (of, to, less) if name is not None):
        return None
    floor = samples[less].seconds if less is not None else [0.0] * len(samples[of].seconds)
    turns = zip(samples[of].seconds, samples[to].seconds, floor, strict=True)
    return statistics.median((value - least) / (base - least) for value, base, least in turns)
