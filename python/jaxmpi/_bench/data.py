"""The data: small integers, so that sums are exact, which differ by rank, element, turn and run; and the check of it.

Before each turn of a run one element of each part of an operand is changed, and an element of the result is kept that
one of these has become. At the end all kept elements are compared, and the whole result of the last turn, with what
NumPy makes of the same integers. Nothing that they are compared with comes from an operation.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmpi._bench.operations import Case, Operation

_BLOCK = 1 << 16
"""Elements that are made or compared at a time, so that they stay in a cache."""

_MOST = 1 << 16
"""Different integers."""

_GROUPS = 7
"""Where arrays are reduced, ranks so far from each other have the same data: so NumPy adds up that many arrays, however
many ranks there are."""


def _power_of_two(count: int) -> int:
    return 1 << (count.bit_length() - 1)


def _integers(dtype: np.dtype) -> int:
    """Up to here all integers are exact in this dtype."""
    if dtype == np.bool_:
        return 1
    if dtype.kind in "iu":
        return int(jnp.iinfo(dtype).max)
    info = jnp.finfo(dtype)
    return min(2 ** (info.nmant + 1), int(float(info.max)))


def _exponents(dtype: np.dtype) -> int:
    """Up to here all powers of two are exact."""
    if dtype.kind in "iu":
        return int(jnp.iinfo(dtype).max).bit_length() - 1
    return int(jnp.finfo(dtype).maxexp) - 1 if dtype != np.bool_ else 0


@dataclass(frozen=True)
class Numbers:
    """The integers of one dtype, so small that what the operations make of them is exact as well.

    Where they are multiplied they are the exponents of powers of two; and so in a dtype that has nothing else.
    """

    dtype: np.dtype
    powers: bool
    levels: int

    @classmethod
    def of(cls, dtype: np.dtype, reduction: str, ranks: int) -> "Numbers":
        """Numbers for operands of so many ranks, to be reduced so; for "" they are only moved.

        Raises ValueError if they cannot differ and be exact.
        """
        powers = reduction == "prod" or dtype.name == "float8_e8m0fnu"
        most = _exponents(dtype) if powers else _integers(dtype)
        if reduction in ("sum", "prod"):
            most //= ranks
        if most < 1:
            raise ValueError(
                f"the {reduction} over {ranks} ranks of numbers that differ is not exact in {dtype.name}: pass "
                "--op max, or another --dtype"
            )
        return cls(dtype, powers, min(_MOST, _power_of_two(most + 1)))

    def draw(self, run: int, ranks: Any, index: Any, turn: Any) -> np.ndarray:
        """The integers at these indices of the operands of these ranks, which were last changed before this turn; all
        are before the first one, 0."""
        fixed, mixed = 0, np.zeros(1, np.uint32)
        for seed, factor in ((index, 2654435761), (ranks, 2246822519), (turn, 3266489917), (run, 668265263)):
            if isinstance(seed, np.ndarray):
                mixed = mixed + seed.astype(np.uint32) * np.uint32(factor)
            else:
                fixed += int(seed) * factor
        mixed = mixed + np.uint32(fixed % (1 << 32))
        mixed = (mixed ^ (mixed >> np.uint32(15))) * np.uint32(2246822519)
        return (mixed ^ (mixed >> np.uint32(13))) & np.uint32(self.levels - 1)

    def encode(self, integers: np.ndarray) -> np.ndarray:
        if not self.powers:
            return integers.astype(self.dtype)
        if self.dtype.kind in "iu":
            return (np.uint64(1) << integers.astype(np.uint64)).astype(self.dtype)
        return np.ldexp(1.0, integers).astype(self.dtype)


def _blocks(count: int) -> Iterator[np.ndarray]:
    return (np.arange(start, min(start + _BLOCK, count)) for start in range(0, count, _BLOCK))


@dataclass(frozen=True)
class Witness:
    """This rank's data of an operation, and what must become of it."""

    operation: Operation
    case: Case
    numbers: Numbers

    def operand(self, run: int) -> np.ndarray:
        shape = self.operation.shape(self.case)
        x = np.empty(shape, self.numbers.dtype)
        rank = self._group(self.case.rank)
        for index in _blocks(x.size):
            x.reshape(-1)[index[0] : index[-1] + 1] = self.numbers.encode(self.numbers.draw(run, rank, index, 0))
        return x

    def _columns(self, turns: np.ndarray) -> np.ndarray:
        """The element of each part that is changed before each of these turns."""
        first, _, count = self.operation.changed(self.case)
        return first + turns % count

    def _watched(self, turns: np.ndarray, size: int) -> np.ndarray:
        """The element of the result, which has so many, that is kept in each of these turns."""
        elements = self.case.elements
        _, first, count = self.operation.changed(self.case)
        return turns % (size // elements) * elements + first + turns % count

    def changed(self, turns: int) -> np.ndarray:
        """Where in the operand the changes after each turn begin."""
        columns, shape = self._columns(np.arange(turns) + 1), self.operation.shape(self.case)
        index = (
            [np.zeros_like(columns), columns] if self.operation.stacked(self.case) else np.unravel_index(columns, shape)
        )
        return np.stack(index, axis=1).astype(np.uint32)

    def changes(self, run: int, turns: int) -> np.ndarray:
        """What is written there."""
        parts, turn = self.operation.stacked(self.case), np.arange(turns)[:, None] + 1
        index = np.arange(max(1, parts)) * self.case.elements + self._columns(turn)
        made = self.numbers.encode(self.numbers.draw(run, self._group(self.case.rank), index, turn))
        ones = (1,) * (len(self.operation.shape(self.case)) - 1)
        return made.reshape(turns, -1, *ones)

    def watched(self, turns: int, shape: Sequence[int]) -> np.ndarray:
        """Where the element of the result lies that is kept in each turn."""
        index = np.unravel_index(self._watched(np.arange(turns), math.prod(shape)), shape)
        return np.stack(index, axis=1).astype(np.uint32)

    def wrong_kept(self, kept: Any, run: int, turns: int, shape: Sequence[int]) -> int:
        """How many of the elements are wrong that were kept in so many turns."""
        turn = np.arange(turns)
        expected = self._expected(run, self._watched(turn, math.prod(shape)), lambda _: turn)
        return int(np.count_nonzero(np.asarray(kept)[:turns] != expected))

    def wrong(self, result: Any, run: int, turns: int, changed: bool = False) -> tuple[int, int]:
        """How many elements are wrong of the result of the last turn, and how many were compared: not that which has
        been `changed` since then."""
        found = np.asarray(result).reshape(-1)
        before = np.arange(1, turns)
        last = np.zeros(self.case.elements, np.uint32)
        last[self._columns(before)] = before  # of several turns the last one counts
        but = self._columns(np.array([turns])) if changed else np.array([], int)
        wrong = 0
        for index in _blocks(found.size):
            differs = found[index[0] : index[-1] + 1] != self._expected(run, index, self._when(last))
            wrong += int(np.count_nonzero(differs & ~np.isin(index, but)))
        return wrong, found.size - but.size

    def _when(self, last: np.ndarray) -> Callable[[Any], Any]:
        return lambda index: last[index % self.case.elements]

    def _group(self, ranks: Any) -> Any:
        return ranks % _GROUPS if self.operation.reduces(self.case.size) else ranks

    def _expected(self, run: int, index: np.ndarray, when: Callable[[Any], Any]) -> np.ndarray:
        """Elements of the result. `when`: the index of an element of an operand -> in which turn it was changed."""
        case, numbers = self.case, self.numbers
        reduced = Counter(self._group(rank) for rank in self.operation.reduced(case))
        ranks, index = self.operation.origin(case, index)
        if not reduced:
            return numbers.encode(numbers.draw(run, self._group(ranks), index, when(index)))
        drawn = {group: numbers.draw(run, group, index, when(index)) for group in reduced}
        if case.reduction in ("sum", "prod"):
            total = np.zeros(index.shape, np.int64)
            for group, count in reduced.items():
                total += count * drawn[group].astype(np.int64)
            return numbers.encode(total)
        choose = np.maximum if case.reduction == "max" else np.minimum
        return numbers.encode(choose.reduce(list(drawn.values())))
