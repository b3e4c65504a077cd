"""Positions of numbers in a list of integers."""

from dataclasses import dataclass

import numpy as np

_IN_CACHE = 1 << 15
"""The largest length of a list in which a search in any order is as fast as in ascending order."""


def distinct(values: np.ndarray) -> np.ndarray:
    """Return the integers in ascending order, each once. NumPy's own function hashes, which takes ten times as long."""
    values = np.sort(values)
    return values[np.concatenate([np.ones(min(1, len(values)), bool), values[1:] != values[:-1]])]


@dataclass(frozen=True, eq=False)
class Lookup:
    """A list of integers, sorted, with their positions."""

    values: np.ndarray
    """The integers in ascending order."""
    order: np.ndarray | None
    """The position of each in the list; None if the list is in ascending order."""

    @staticmethod
    def from_list(listed: np.ndarray) -> "Lookup":
        if (listed[1:] > listed[:-1]).all():
            return Lookup(listed, None)
        order = np.argsort(listed, kind="stable")  # fast for a list that consists of a few ascending ones
        return Lookup(listed[order], order)

    @property
    def consecutive(self) -> bool:
        """Whether the integers are consecutive, if none is there twice."""
        return len(self.values) > 0 and self.values[-1] - self.values[0] == len(self.values) - 1

    def repeated(self) -> np.ndarray:
        """Return the positions in `values` at which the integer is the same as before."""
        return np.flatnonzero(self.values[1:] == self.values[:-1]) + 1

    def positions(self, wanted: np.ndarray) -> np.ndarray:
        """Return the position of each in the list, or -1 if it is absent. The list must have no integer twice."""
        count = len(self.values)
        if count == 0:
            return np.full(wanted.shape, -1)
        if self.consecutive:
            at = wanted - self.values[0]
            absent = (at < 0) | (at >= count)
        else:
            at = np.minimum(self._search(wanted), count - 1)
            absent = self.values[at] != wanted
        if self.order is not None:
            at = self.order[np.where(absent, 0, at)]
        return np.where(absent, -1, at)

    def _search(self, wanted: np.ndarray) -> np.ndarray:
        if len(self.values) <= _IN_CACHE or (wanted[1:] >= wanted[:-1]).all():
            return np.searchsorted(self.values, wanted)
        order = np.argsort(wanted)
        at = np.empty(len(wanted), np.int64)
        at[order] = np.searchsorted(self.values, wanted[order])
        return at
