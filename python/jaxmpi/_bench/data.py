"""The data of a run and the check of it. The data are small integers, so that sums are exact. They differ by rank,
element, turn and run.

Before each turn of a run one element of each part of an operand changes, and in the turn one element of the result that
depends on it is kept. At the end all kept elements, and the whole result of the last turn, are compared with NumPy's
result for the same integers. The expected values never come from an operation.
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
"""The number of elements that are made or compared at a time, so that they stay in a cache."""

_MOST = 1 << 16
"""The number of different integers."""

_POWERS = "float8_e8m0fnu"
"""The dtype that has only powers of two."""

_GROUPS = 7
"""The number of different arrays in a reduction: ranks at this distance have the same data. So NumPy adds up this many
arrays, however many ranks there are."""


def blocks(count: int) -> Iterator[slice]:
    return (slice(start, min(start + _BLOCK, count)) for start in range(0, count, _BLOCK))


def count_wrong(found: Any, right: np.ndarray, tolerance: float = 0.0, scale: float = 1.0) -> int:
    """Return how many elements differ from `scale` times `right`, by more than this part of the right value.

    An array of another shape or dtype is all wrong.
    """
    found = np.asarray(found)
    if (found.shape, found.dtype) != (right.shape, right.dtype):
        return right.size
    found, right = found.reshape(-1), right.reshape(-1)
    wrong = 0
    for block in blocks(right.size):
        expected = right[block] * right.dtype.type(scale)
        differs = found[block] != expected
        if tolerance and differs.any():
            differs &= ~(np.abs(found[block] - expected) <= tolerance * np.abs(expected))
        wrong += int(np.count_nonzero(differs))
    return wrong


@dataclass(frozen=True)
class Numbers:
    """The integers of one dtype, so small that sums of them are exact as well.

    In a dtype that has only powers of two they are the exponents.
    """

    dtype: np.dtype
    levels: int

    @classmethod
    def for_operands(cls, dtype: np.dtype, added: int) -> "Numbers":
        """Return numbers for operands of which so many are added up. 1: the operation only moves them.

        Raise ValueError if they cannot differ and be exact.
        """
        if dtype == np.bool_:
            most = 1
        elif dtype.kind in "iu":
            most = int(jnp.iinfo(dtype).max)
        elif dtype.name == _POWERS:
            most = int(jnp.finfo(dtype).maxexp) - 1
        else:
            info = jnp.finfo(dtype)
            most = min(2 ** (info.nmant + 1), int(float(info.max)))
        most //= added
        if most < 1:
            raise ValueError(
                f"the sum over {added} ranks of numbers that differ is not exact in {dtype.name}: pass another --dtype"
            )
        return cls(dtype, min(_MOST, 1 << ((most + 1).bit_length() - 1)))

    def draw(self, run: int, ranks: Any, index: Any, turn: Any) -> np.ndarray:
        """Return the integers at these indices of the operands of these ranks, for elements that last changed before
        this turn. All elements are set before turn 0."""
        mixed = np.zeros(1, np.uint32)
        for seed, factor in ((index, 2654435761), (ranks, 2246822519), (turn, 3266489917), (run, 668265263)):
            mixed = mixed + np.atleast_1d(seed).astype(np.uint32) * np.uint32(factor)
        mixed = (mixed ^ (mixed >> np.uint32(15))) * np.uint32(2246822519)
        return (mixed ^ (mixed >> np.uint32(13))) & np.uint32(self.levels - 1)

    def encode(self, integers: np.ndarray) -> np.ndarray:
        values = np.ldexp(1.0, integers) if self.dtype.name == _POWERS else integers
        return values.astype(self.dtype)


@dataclass(frozen=True)
class Oracle:
    """This rank's data of an operation, and the expected result."""

    operation: Operation
    case: Case
    numbers: Numbers

    def operand(self, run: int) -> np.ndarray:
        shape = self.operation.shape(self.case)
        x = np.empty(shape, self.numbers.dtype)
        rank = self._group(self.case.rank)
        for block in blocks(x.size):
            index = np.arange(block.start, block.stop)
            x.reshape(-1)[block] = self.numbers.encode(self.numbers.draw(run, rank, index, 0))
        return x

    def _columns(self, turns: np.ndarray) -> np.ndarray:
        """Return the element of each part that changes before each of these turns."""
        first, _, count = self.operation.changed(self.case)
        return first + turns % count

    def _watched(self, turns: np.ndarray, size: int) -> np.ndarray:
        """Return the element of the result that is kept in each of these turns. `size`: the elements of the result."""
        elements = self.case.elements
        _, first, count = self.operation.changed(self.case)
        return turns % (size // elements) * elements + first + turns % count

    def changed(self, turns: int) -> np.ndarray:
        """Return the place in the operand where the changes after each turn begin."""
        columns, shape = self._columns(np.arange(turns) + 1), self.operation.shape(self.case)
        index = (
            [np.zeros_like(columns), columns] if self.operation.stacked(self.case) else np.unravel_index(columns, shape)
        )
        return np.stack(index, axis=1).astype(np.uint32)

    def changes(self, run: int, turns: int) -> np.ndarray:
        """Return the values that are written at these places."""
        parts, turn = self.operation.stacked(self.case), np.arange(turns)[:, None] + 1
        index = np.arange(max(1, parts)) * self.case.elements + self._columns(turn)
        values = self.numbers.encode(self.numbers.draw(run, self._group(self.case.rank), index, turn))
        ones = (1,) * (len(self.operation.shape(self.case)) - 1)
        return values.reshape(turns, -1, *ones)

    def watched(self, turns: int, shape: Sequence[int]) -> np.ndarray:
        """Return the place of the element of the result that is kept in each turn."""
        index = np.unravel_index(self._watched(np.arange(turns), math.prod(shape)), shape)
        return np.stack(index, axis=1).astype(np.uint32)

    def wrong_kept(self, kept: Any, run: int, turns: int, shape: Sequence[int]) -> int:
        """Return how many of the elements that were kept in these turns are wrong."""
        turn = np.arange(turns)
        expected = self._expected(run, self._watched(turn, math.prod(shape)), lambda _: turn)
        return int(np.count_nonzero(np.asarray(kept)[:turns] != expected))

    def wrong(self, result: Any, run: int, turns: int, changed: bool = False) -> int:
        """Return how many elements of the result of the last turn are wrong. Leave out the element that has `changed`
        after that turn."""
        elements = np.asarray(result).reshape(-1)
        before = np.arange(1, turns)
        last = np.zeros(self.case.elements, np.uint32)
        last[self._columns(before)] = before  # of several turns the last one counts
        but = self._columns(np.array([turns])) if changed else np.array([], int)
        wrong = 0
        for block in blocks(elements.size):
            index = np.arange(block.start, block.stop)
            expected = self._expected(run, index, lambda index: last[index % self.case.elements])
            wrong += int(np.count_nonzero((elements[block] != expected) & ~np.isin(index, but)))
        return wrong

    def _group(self, ranks: Any) -> Any:
        return ranks % _GROUPS if self.operation.reduces(self.case.size) else ranks

    def _expected(self, run: int, index: np.ndarray, when: Callable[[Any], Any]) -> np.ndarray:
        """Return elements of the result. `when`: the index of an element of an operand -> the turn of the change."""
        case, numbers = self.case, self.numbers
        reduced = Counter(self._group(rank) for rank in self.operation.reduced(case))
        ranks, index = self.operation.origin(case, index)
        if not reduced:
            return numbers.encode(numbers.draw(run, self._group(ranks), index, when(index)))
        total = np.zeros(index.shape, np.int64)
        for group, count in reduced.items():
            total += count * numbers.draw(run, group, index, when(index)).astype(np.int64)
        return numbers.encode(total)
