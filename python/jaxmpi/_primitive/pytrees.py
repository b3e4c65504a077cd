"""Arrays of a pytree that are received one by one: the last raises the error of any, so that all of them are received.

XLA executes nothing that follows an operation that fails. Were the rest of a pytree not received, other ranks would
wait, or a later receive would get it, without a word. So each operation carries its place among those of the pytree,
and the core drops what there is no room for and keeps the error until the last one (csrc/core/failure.h).
"""

from collections.abc import Sequence
from typing import Any

from jaxmpi._jax import internals
from jaxmpi._mpi.library import CONSTANTS
from jaxmpi._primitive.communication import DERIVATIVE

Params = dict[str, Any]

LEAF = "leaf"
"""Parameter of an operation on a leaf: its place among the leaves, among those whose tangents are received, and among
those whose cotangents are received, in the order of the leaves. The last two are exchanged, and the order reversed, in
an operation for cotangents."""

_ALONE, _FIRST, _MIDDLE, _LAST = map(CONSTANTS["LEAVES"].index, ("alone", "first", "middle", "last"))


def places(received: Sequence[Any], sent: Sequence[Any]) -> list[Params]:
    """The parameter LEAF of each operation, by what it receives and what it sends; either may be empty.

    An exchange of which one side alone has derivatives has those of a single message, which is alone.
    """
    count = max(len(received), len(sent))
    if count < 2:
        return [{}] * count
    sides = [[internals.inexact(x) for x in side] for side in (received, sent)]
    if all(sides):
        sides = [[all(pair) for pair in zip(*sides, strict=True)]] * 2
    of = [_among(side or [False] * count) for side in ([True] * count, *sides)]
    return [{LEAF: place} for place in zip(*of, strict=True)]


def _among(chosen: Sequence[bool]) -> list[int]:
    which = [i for i, is_chosen in enumerate(chosen) if is_chosen]
    found = [_ALONE] * len(chosen)
    if len(which) > 1:
        for i in which:
            found[i] = _MIDDLE
        found[which[0]], found[which[-1]] = _FIRST, _LAST
    return found


def reversed_(params: Params) -> Params:
    """The parameter, where there is one, for a cotangent."""
    if LEAF not in params:
        return {}
    value, tangent, cotangent = params[LEAF]
    other = {_FIRST: _LAST, _LAST: _FIRST}
    return {LEAF: (value, other.get(cotangent, cotangent), other.get(tangent, tangent))}


def attribute(params: Params) -> int:
    """The place, as the core reads it."""
    value, derivative, _ = params.get(LEAF, (_ALONE,) * 3)
    return derivative if DERIVATIVE in params else value
