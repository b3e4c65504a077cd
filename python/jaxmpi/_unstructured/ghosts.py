"""Exchanges of ghosts: copies of rows of other ranks, which a rank stores behind its own rows.

Let o be the rows that all ranks own together, and g all ghosts. An exchange is the linear map (o, g) -> (o, P o), in
which each row of P has one 1. Its transpose adds the ghosts to the rows of the owners and clears the ghosts: (o, g) ->
(o + P^T g, 0). So each is one operation, and each is the transpose of the other.

A rank sends one message to each rank that has ghosts of its rows, and receives one from each owner of its ghosts. A
message carries all arrays. Contributions to a row are added in the order of the ranks that send them.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxmpi._mpi import plans
from jaxmpi._mpi.plans import Box, Fill, Indices, Move, Plan
from jaxmpi._primitive.params import Pattern
from jaxmpi._unstructured.directory import Connections

Spec = tuple[int, str]
"""The axis of an array that has the rows, from the end; the name of the array, which the ranks compare."""

Which = range | Indices
"""Rows of an array: consecutive ones, or a list of indices."""


@dataclass(frozen=True)
class Ghosts(Pattern):
    """The pattern of an exchange of ghosts on one rank."""

    rank: int
    number: int
    """A number that the ranks of one map have in common. With it they notice calls with different maps."""
    digest: str
    """A hash of `rows`, by which patterns are compared."""
    rows: Connections = dataclasses.field(compare=False, repr=False)
    op: str = "SUM"
    """The reduction by which the adjoint combines ghosts with the rows that they copy."""

    aliases = True

    @property
    def why_not_differentiable(self) -> str:
        if self.op == "SUM":
            return ""
        return (
            f"MPI.{self.op} has no derivative here. Accumulate with MPI.SUM, or use jax.lax.stop_gradient(x) if no "
            "derivative is needed."
        )

    def behind(self, place: Spec, axes: int) -> Spec:
        axis, name = place
        return axis - axes, name

    def batch(self, adjoint: bool) -> tuple[int, int]:
        return 0, 0  # nothing is transposed, and the axis of the rows, counted from the end, remains the same

    def results(self, avals: Sequence[Any], per_array: Any, adjoint: bool) -> Sequence[Any]:
        return avals

    def plan(self, rank: int, avals: tuple[Any, ...], per_array: tuple[Spec, ...], adjoint: bool) -> Plan:
        return _plan(self, avals, per_array, adjoint)


def _which(rows: np.ndarray) -> Which:
    first = int(rows[0]) if rows.size else 0
    return range(first, first + rows.size) if np.all(np.diff(rows) == 1) else Indices(rows)


def pattern(connections: Connections, rank: int) -> Ghosts:
    sends = tuple((other, _which(local)) for other, local in connections.sends)
    sent = [(other, which if isinstance(which, range) else which.digest) for other, which in sends]
    facts = connections.owned, connections.receives, sent
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()
    return Ghosts(rank, connections.signature, digest, dataclasses.replace(connections, sends=sends))


def _box(aval: Any, axis: int, which: Which) -> Box:
    starts, counts = [0] * len(aval.shape), list(aval.shape)
    if isinstance(which, range):
        starts[axis], counts[axis] = which.start, len(which)
        return Box(tuple(starts), tuple(counts), (1,) * len(starts))
    counts[axis] = which.values.size
    return Box(tuple(starts), tuple(counts), (1,) * len(starts), (axis, which))


@plans.cached
def _plan(pattern: Ghosts, avals: tuple[Any, ...], per_array: tuple[Spec, ...], adjoint: bool) -> Plan:
    rank, rows = pattern.rank, pattern.rows
    moves: list[Move] = []
    fills: list[Fill] = []
    facts = []
    for leaf, (aval, (from_end, name)) in enumerate(zip(avals, per_array, strict=True)):
        axis = from_end % len(aval.shape)
        # The other rank alone knows the place there. Sums are in the order of the ranks with ghosts.
        for other, which in rows.sends:
            sent = _box(aval, axis, which)
            moves.append(Move((other,), leaf, rank, sent, other, sent))
        start = rows.owned
        for other, count in rows.receives:
            received = _box(aval, axis, range(start, start + count))
            moves.append(Move((rank,), leaf, other, received, rank, received))
            start += count
        if adjoint and pattern.op == "SUM":
            fills.append(Fill(leaf, _box(aval, axis, range(rows.owned, start))))
        facts.append((aval.shape[:axis], aval.shape[axis + 1 :], np.dtype(aval.dtype).name, name))
    if adjoint:
        moves = [move.reverse() for move in moves]
    combines = pattern.op if adjoint else None
    signature = plans.signature("ghosts", pattern.number, facts, combines)
    return plans.make(rank, avals, moves, fills, combines=combines, signature=signature)
