"""Neighbour collectives: what a process exchanges with its neighbours in a communicator's topology.

`neighbor_allgather` says which neighbours these are. Where one process has several edges to another, both match these
edges in the order in which they list them.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from mpi4py import MPI

from jaxmpi._mpi import communicators, plans
from jaxmpi._mpi.plans import Box, Move, Plan
from jaxmpi._operations.by_plan import ByPlan
from jaxmpi._primitive import arguments
from jaxmpi._primitive.params import Pattern, Planned

Edges = tuple[tuple[int, int], ...]
"""The rank of each neighbour, which may be PROC_NULL, and a number by which both ends sort the edges between them."""


@dataclass(frozen=True)
class Neighbors(Pattern):
    """The pattern of a neighbour collective on one rank."""

    sources: Edges
    destinations: Edges
    own_blocks: bool
    """Whether each destination gets a block of its own; otherwise all get the same block."""

    def batch(self, adjoint: bool) -> tuple[int, int]:
        given, received = int(self.own_blocks), 1
        return (received, given) if adjoint else (given, received)

    def results(self, avals: Sequence[Any], per_array: Any, adjoint: bool) -> list[Any]:
        edges = self.destinations if adjoint else self.sources
        stacked = self.own_blocks or not adjoint
        return [
            jax.ShapeDtypeStruct((*((len(edges),) if stacked else ()), *self.block(x, adjoint)), x.dtype) for x in avals
        ]

    def block(self, aval: Any, adjoint: bool) -> tuple[int, ...]:
        """Return the shape of the block that travels along one edge."""
        return aval.shape[1:] if self.own_blocks or adjoint else aval.shape

    def plan(self, rank: int, avals: tuple[Any, ...], per_array: Any, adjoint: bool) -> Plan:
        return _plan(self, rank, avals, adjoint)


@plans.cached
def _plan(pattern: Neighbors, rank: int, avals: tuple[Any, ...], adjoint: bool) -> Plan:
    results = pattern.results(avals, (), adjoint)
    moves: list[Move] = []
    for leaf, aval in enumerate(avals):
        block = pattern.block(aval, adjoint)

        def box(at: int | None, block: tuple[int, ...] = block) -> Box:
            if at is None:
                return Box((0,) * len(block), block, (1,) * len(block))
            return Box((at, *(0,) * len(block)), (1, *block), (1,) * (len(block) + 1))

        # The boxes of the exchange itself; an adjoint goes from the second to the first.
        own = [box(at if pattern.own_blocks else None) for at in range(len(pattern.destinations))]
        slots = [box(at) for at in range(len(pattern.sources))]
        to_itself = {key: own[at] for at, (peer, key) in enumerate(pattern.destinations) if peer == rank}
        for at, (peer, key) in enumerate(pattern.destinations):
            if peer not in (rank, MPI.PROC_NULL):  # the other rank decides where to put it
                moves.append(Move((key,), leaf, rank, own[at], peer, own[at]))
        for at, (peer, key) in enumerate(pattern.sources):
            if peer != MPI.PROC_NULL:
                moves.append(Move((key,), leaf, peer, to_itself.get(key, slots[at]), rank, slots[at]))
    if adjoint:
        moves = [move.reverse() for move in moves]
    facts = [(pattern.block(x, adjoint), np.dtype(x.dtype).name) for x in avals]
    signature = plans.signature("neighbors", pattern.own_blocks, facts, adjoint)
    combines = "SUM" if adjoint and not pattern.own_blocks else None
    return plans.make(rank, avals, moves, results=results, combines=combines, zeroed=True, signature=signature)


def edges_of(comm: Any, operation: str) -> tuple[Edges, Edges]:
    """Return sources and destinations. Raise ValueError for a communicator without neighbours."""
    kind = MPI.UNDEFINED if comm is None else comm.Get_topology()
    if kind == MPI.CART:
        return _of_cartesian(MPI.Cartcomm(comm))
    if kind == MPI.DIST_GRAPH:
        sources, destinations, _ = MPI.Distgraphcomm(comm).Get_dist_neighbors()
        return _numbered(sources), _numbered(destinations)
    if kind == MPI.GRAPH:
        graph = MPI.Graphcomm(comm)
        neighbors = _numbered(graph.Get_neighbors(graph.Get_rank()))
        return neighbors, neighbors
    raise ValueError(
        f"{operation}: comm has no neighbours: pass a communicator made by Create_cart, Create_dist_graph_adjacent, "
        "Create_dist_graph or Create_graph."
    )


def _of_cartesian(comm: MPI.Cartcomm) -> tuple[Edges, Edges]:
    sources, destinations = [], []
    for axis in range(comm.ndim):
        before, behind = comm.Shift(axis, 1)
        destinations += [(before, 2 * axis), (behind, 2 * axis + 1)]
        sources += [(before, 2 * axis + 1), (behind, 2 * axis)]  # by the direction in which it was sent
    return tuple(sources), tuple(destinations)


def _numbered(ranks: Sequence[int]) -> Edges:
    numbers: dict[int, Iterator[int]] = defaultdict(itertools.count)
    return tuple((int(rank), next(numbers[rank])) for rank in ranks)


class NeighborCollective(ByPlan):
    """An operation between neighbours in a communicator's topology."""

    def apply_to_neighbors(self, x: Any, comm: MPI.Comm | None, own_blocks: bool) -> Any:
        resolved = communicators.resolve(comm, self.shown)
        sources, destinations = edges_of(comm, self.shown)
        leaves, names, structure = arguments.leaves(x, self.shown, "x")
        for leaf, name in zip(leaves, names, strict=True) if own_blocks else ():
            if leaf.ndim == 0 or leaf.shape[0] != len(destinations):
                raise ValueError(
                    f"{self.shown}: {name} has shape {leaf.shape}, and its first axis must have a block for each of "
                    f"the {len(destinations)} destinations of this rank."
                )
        pattern = Neighbors(sources, destinations, own_blocks)
        params = Planned(resolved, pattern, ((),) * len(leaves), False)
        return jax.tree.unflatten(structure, self.apply_to_all(params, leaves))


neighbor_allgather_p = NeighborCollective("neighbor_allgather")
neighbor_alltoall_p = NeighborCollective("neighbor_alltoall")


def neighbor_allgather(x: Any, *, comm: MPI.Comm) -> Any:
    """Send an array to all neighbours, and stack the arrays of all neighbours (MPI_Neighbor_allgather).

    The neighbours are those of the communicator's topology, in the order of the MPI standard. In a Cartesian
    communicator they are the ranks before and behind this one along each axis. In a graph they are the sources and the
    destinations, in the order in which the program passed them. All arrays of a pytree travel in one message to each
    neighbour.

    Args:
      x: array of any shape, or a pytree of arrays; the same shapes and dtypes on all ranks.
      comm: a communicator made by `Create_cart`, `Create_dist_graph_adjacent`, `Create_dist_graph` or `Create_graph`.

    Returns:
      Array of shape `(number of sources, *x.shape)`; zero where there is no neighbour (MPI.PROC_NULL),
      beyond the end of an axis that is not periodic.

    Raises:
      ValueError, TypeError: `comm` has no neighbours, or an argument is of the wrong type; while tracing, before
      anything is sent.
      jax.errors.JaxRuntimeError: at run time, on a rank that receives a message of another call.
    """
    return neighbor_allgather_p.apply_to_neighbors(x, comm, own_blocks=False)


def neighbor_alltoall(x: Any, *, comm: MPI.Comm) -> Any:
    """Send a block to each neighbour, and stack the blocks received (MPI_Neighbor_alltoall).

    The neighbours are the neighbours of `neighbor_allgather`. Where a rank is a neighbour twice, as in a periodic axis
    of two, a block that it has sent backwards arrives in the place of the neighbour behind, and the other way round.

    Args:
      x: array of shape `(number of destinations, ...)`, or a pytree of arrays like this; blocks have the same shapes
        and dtypes on all ranks.
      comm: as in `neighbor_allgather`.

    Returns:
      Array of shape `(number of sources, ...)`; zero where there is no neighbour (MPI.PROC_NULL).

    Raises:
      As `neighbor_allgather`; ValueError: `x` has not a block for each destination.
    """
    return neighbor_alltoall_p.apply_to_neighbors(x, comm, own_blocks=True)
