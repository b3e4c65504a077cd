"""Arrays of a pytree that are received one by one: the last raises the error of any, so that all of them are received.

XLA executes nothing that follows a failed operation. If the rest of a pytree were not received, other ranks would wait,
or a later receive would get it, without a word. So each operation carries a position among the leaves of the pytree.
The core drops what does not fit, and keeps the error until the last leaf (csrc/core/failure.h).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxmpi._jax import internals
from jaxmpi._mpi.library import CONSTANTS

_ALONE, _FIRST, _MIDDLE, _LAST = map(CONSTANTS["LEAVES"].index, ("alone", "first", "middle", "last"))


class Leaf(NamedTuple):
    """The place of an operation on a leaf, in the order of the leaves."""

    value: int
    """The place among all leaves."""
    tangent: int
    """The place among the leaves whose tangents are received."""
    cotangent: int
    """The place among the leaves whose cotangents are received."""

    def reverse(self) -> "Leaf":
        """Return the place for a cotangent.

        The order is reversed, and tangents of cotangents are received where cotangents of values are.
        """
        other = {_FIRST: _LAST, _LAST: _FIRST}
        return Leaf(self.value, other.get(self.cotangent, self.cotangent), other.get(self.tangent, self.tangent))


ALONE = Leaf(_ALONE, _ALONE, _ALONE)


def places(received: Sequence[Any], sent: Sequence[Any]) -> list[Leaf]:
    """Return the place of each operation, by what it receives and what it sends; either may be empty.

    If only one side of an exchange has derivatives, these are a single message, which is alone.
    """
    count = max(len(received), len(sent))
    if count < 2:
        return [ALONE] * count
    sides = [[internals.inexact(x) for x in side] for side in (received, sent)]
    if all(sides):
        sides = [[all(pair) for pair in zip(*sides, strict=True)]] * 2
    by_kind = [_among(side or [False] * count) for side in ([True] * count, *sides)]
    return [Leaf(*place) for place in zip(*by_kind, strict=True)]


def of_each(params: Any, received: Sequence[Any], sent: Sequence[Any]) -> list[Any]:
    """Return the parameters of the operation on each leaf."""
    return [dataclasses.replace(params, leaf=leaf) for leaf in places(received, sent)]


def _among(chosen: Sequence[bool]) -> list[int]:
    which = [i for i, is_chosen in enumerate(chosen) if is_chosen]
    result = [_ALONE] * len(chosen)
    if len(which) > 1:
        for i in which:
            result[i] = _MIDDLE
        result[which[0]], result[which[-1]] = _FIRST, _LAST
    return result
