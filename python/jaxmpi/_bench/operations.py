"""The operations that are measured: one row for each.

Sizes and bandwidths are defined as in nccl-tests (see the file doc/PERFORMANCE.md there). Let S be the bytes of an
operation. The algorithm bandwidth is S / time. The bus bandwidth is the algorithm bandwidth times a factor, which
depends on the number of ranks: the least rate that the link of a rank must have carried, with any algorithm. If each
rank has a part of an array, S is the size of all parts.

Each row knows where the elements of a result come from, so that they can be checked without the operation.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import jaxmpi
from jaxmpi._grid.grid import Grid
from jaxmpi._grid.redistribute import redistribute
from jaxmpi._unstructured.index_map import IndexMap

WINDOW = 64
"""Messages that `send` sends before it waits for an answer, as osu_bw."""


@dataclass(frozen=True)
class Case:
    """A rank, and the number of elements of each part of the operand."""

    rank: int
    size: int
    elements: int

    def others(self, distance: int) -> int:
        return (self.rank + distance) % self.size


Origin = tuple[Any, Any]
"""Ranks, and the indices of elements in their operands."""


def _own(case: Case, index: Any) -> Origin:
    return case.rank, index


@dataclass(frozen=True)
class Operation:
    """A row of the table."""

    name: str
    call: Callable[[Case, jax.Array], jax.Array]
    """The operation: operand -> result."""

    size: str
    """The array whose size is S. Empty if no data is moved."""

    names: Mapping[str, str] = field(default_factory=dict)
    """The names in other tools, each with a remark if the figures there have another meaning."""

    factor: Callable[[Case], float] = lambda case: 1.0
    """Bus bandwidth over algorithm bandwidth, for two ranks and more."""

    origin: Callable[[Case, Any], Origin] = _own
    """The place where elements of this rank's result come from, by their index."""

    reduced: Callable[[Case], Sequence[int]] = lambda case: ()
    """The ranks whose operands are added up on this one, element by element. `origin` gives the index. If this is
    empty, `origin` gives the ranks, too."""

    parts: Callable[[int], int] = lambda size: 1
    """ranks -> the number of parts of S."""

    stacked: Callable[[Case], int] = lambda case: 0
    """The number of parts in this rank's operand, which is a stack of them. 0: it is one part, and no stack."""

    changed: Callable[[Case], tuple[int, int, int]] = lambda case: (0, 0, case.elements)
    """(a, b, n): before turn i element a + i % n of each part of the operand changes. In this turn element b + i % n of
    the result, or of each part of it, depends on one of these elements."""

    repeats: Callable[[Case], bool] = lambda case: False
    """Whether the result is the next operand here. A read from it then sees the data before the change."""

    blind: Callable[[Case], bool] = lambda case: False
    """Whether the operation may still read the operand here when there is a result."""

    hidden: bool = False
    """Whether a result may be ready before the operation has ended."""

    messages: int = 1
    """The number of messages in a call, one after the other."""

    least: int = 1
    """The least number of ranks."""

    square: bool = False
    """Whether the operand is one part, of two dimensions."""

    def reduces(self, size: int) -> bool:
        """Return whether operands are added up on any of `size` ranks."""
        return any(len(self.reduced(Case(rank, size, 1))) > 0 for rank in (0, size - 1))

    def fit(self, count: int, parts: int) -> int:
        """Return the elements of a part, if `count` elements are asked for."""
        return max(3, math.isqrt(count)) ** 2 if self.square else max(1, count // parts)

    def shape(self, case: Case) -> tuple[int, ...]:
        if self.square:
            return (math.isqrt(case.elements),) * 2
        parts = self.stacked(case)
        return (parts, case.elements) if parts else (case.elements,)


# --- the calls, and where their results come from --------------------------------------------------------------------


def _stack_of_all(case: Case, index: Any) -> Origin:
    return index // case.elements, index % case.elements


def _alltoall(case: Case, index: Any) -> Origin:
    return index // case.elements, case.rank * case.elements + index % case.elements


def _each_one(case: Case) -> list[int]:
    """Return counts: a row for each rank."""
    return [1] * case.size


def _call_exscan(case: Case, x: jax.Array) -> jax.Array:
    y = jaxmpi.exscan(x, MPI.SUM)
    return y if case.rank > 0 else x


def _call_gatherv(case: Case, x: jax.Array) -> jax.Array:
    y = jaxmpi.gatherv(x[None], _each_one(case), 0)
    return y if case.rank == 0 else y[0]


def _call_barrier(case: Case, x: jax.Array) -> jax.Array:
    jaxmpi.barrier()
    return x


def _call_nobody(case: Case, x: jax.Array) -> jax.Array:
    jaxmpi.send(x, MPI.PROC_NULL)
    return x


def _call_pingpong(case: Case, x: jax.Array) -> jax.Array:
    if case.rank == 0:
        jaxmpi.send(x, 1)
        return jaxmpi.recv(x, 1)
    if case.rank == 1:
        y = jaxmpi.recv(x, 0)
        jaxmpi.send(x, 0)
        return y
    return x


def _call_send(case: Case, x: jax.Array) -> jax.Array:
    y = x
    for _ in range(WINDOW if case.rank < 2 else 0):
        if case.rank == 0:
            jaxmpi.send(x, 1)
        else:
            y = jaxmpi.recv(x, 0)
    if case.rank == 0:
        jaxmpi.recv(jnp.zeros(1, x.dtype), 1)
    if case.rank == 1:
        jaxmpi.send(y[:1], 0)
    return y


# --- neighbours in two dimensions ------------------------------------------------------------------------------------


def _dims(size: int) -> tuple[int, int]:
    rows, columns = MPI.Compute_dims(size, 2)
    return rows, columns


@functools.cache
def _cartesian(size: int) -> MPI.Cartcomm:
    return MPI.COMM_WORLD.Create_cart(_dims(size), periods=(True, True))


def _rank_at(case: Case, row: Any, column: Any) -> Any:
    rows, columns = _dims(case.size)
    return row % rows * columns + column % columns


def _neighbors(case: Case) -> np.ndarray:
    """Return the ranks before and behind this rank, along each axis."""
    row, column = divmod(case.rank, _dims(case.size)[1])
    steps = ((-1, 0), (1, 0), (0, -1), (0, 1))
    return np.array([_rank_at(case, row + down, column + right) for down, right in steps])


def _between_neighbors(case: Case, index: Any) -> Origin:
    """Return the part that the neighbour before has sent behind, and the other way round."""
    part, element = np.divmod(index, case.elements)
    return _neighbors(case)[part], (part ^ 1) * case.elements + element


def _other_neighbors(case: Case) -> float:
    return sum(count > 1 for count in _dims(case.size)) / 2


def _side(case: Case) -> int:
    """Return the side of a block, without the halo of one cell."""
    return math.isqrt(case.elements) - 2


@functools.cache
def _grid(size: int, side: int) -> Grid:
    dims = _dims(size)
    return Grid(dims, [count * side for count in dims], periodic=True)


def _call_redistribute(case: Case, x: jax.Array) -> jax.Array:
    shape = (case.size, x.size)
    rows, columns = (Grid(dims, shape) for dims in ((case.size, 1), (1, case.size)))
    return redistribute(x.reshape(1, -1), rows, columns).reshape(x.shape)


@functools.cache
def _ring(rank: int, size: int) -> IndexMap:
    """Make a map in which each rank owns a row, and has the row of the next rank as a ghost."""
    return IndexMap([rank], [(rank + 1) % size])


def _own_and_next(case: Case, index: Any) -> Origin:
    part, element = np.divmod(index, case.elements)
    return (case.rank + part) % case.size, element


def _around(case: Case, index: Any) -> Origin:
    """Return the cell of this or another block from which a cell of the block with halo comes."""
    side = _side(case)
    row, column = np.divmod(index, side + 2)
    own_row, own_column = divmod(case.rank, _dims(case.size)[1])
    # A block before, in this one, or a block behind.
    down, right = (row - 1) // side, (column - 1) // side
    cell = (row - 1 - down * side + 1) * (side + 2) + column - 1 - right * side + 1
    return _rank_at(case, own_row + down, own_column + right), cell


def _first_row(case: Case) -> tuple[int, int, int]:
    """Return the block's first row, which becomes the last one of another halo."""
    side = _side(case)
    return side + 2 + 1, (side + 1) * (side + 2) + 1, side


def _part_of_halo(case: Case) -> float:
    """Return the part of the array that comes from other ranks."""
    side = _side(case)
    own = [side + 2 if count == 1 else side for count in _dims(case.size)]
    return 1 - own[0] * own[1] / case.elements


# --- the table -------------------------------------------------------------------------------------------------------


def _but_one(case: Case) -> float:
    """Return the factor if a rank's own part is not moved: (n - 1) / n."""
    return (case.size - 1) / case.size


def _parts_of_osu(name: str, **others: str) -> dict[str, str]:
    return {f"osu_{name}": "OSU's size is that of one part; here it is that of all", **others}


_ROWS = (
    Operation(
        "allreduce",
        lambda case, x: jaxmpi.allreduce(x, MPI.SUM),
        "the array",
        {"osu_allreduce": "", "all_reduce_perf": ""},
        factor=lambda case: 2 * (case.size - 1) / case.size,
        reduced=lambda case: range(case.size),
    ),
    Operation(
        "allgather",
        lambda case, x: jaxmpi.allgather(x),
        "the result, which all ranks have a part of",
        _parts_of_osu("allgather", all_gather_perf=""),
        factor=_but_one,
        origin=_stack_of_all,
        parts=lambda size: size,
    ),
    Operation(
        "alltoall",
        lambda case, x: jaxmpi.alltoall(x),
        "the array, of which each rank gets a part",
        _parts_of_osu("alltoall", alltoall_perf=""),
        factor=_but_one,
        origin=_alltoall,
        parts=lambda size: size,
        stacked=lambda case: case.size,
    ),
    Operation(
        "bcast",
        lambda case, x: jaxmpi.bcast(x, 0),
        "the array",
        {"osu_bcast": "", "broadcast_perf": ""},
        origin=lambda case, index: (0, index),
        repeats=lambda case: True,
    ),
    Operation(
        "exscan",
        _call_exscan,
        "the array",
        {"osu_exscan": ""},
        reduced=lambda case: range(case.rank),
    ),
    Operation(
        "gather",
        lambda case, x: jaxmpi.gather(x, 0),
        "root's result, which all ranks have a part of",
        _parts_of_osu("gather", gather_perf=""),
        factor=_but_one,
        origin=lambda case, index: _stack_of_all(case, index) if case.rank == 0 else _own(case, index),
        parts=lambda size: size,
        repeats=lambda case: case.rank != 0,
        blind=lambda case: case.rank != 0,
    ),
    Operation(
        "reduce",
        lambda case, x: jaxmpi.reduce(x, MPI.SUM, 0),
        "the array",
        {"osu_reduce": "", "reduce_perf": ""},
        reduced=lambda case: range(case.size) if case.rank == 0 else (),
        repeats=lambda case: case.rank != 0,
        blind=lambda case: case.rank != 0,
    ),
    Operation(
        "reduce_scatter",
        lambda case, x: jaxmpi.reduce_scatter(x, MPI.SUM),
        "the array, of whose reduction each rank gets a part",
        {"osu_reduce_scatter": "", "reduce_scatter_perf": ""},
        factor=_but_one,
        origin=lambda case, index: (case.rank, case.rank * case.elements + index),
        reduced=lambda case: range(case.size),
        parts=lambda size: size,
        stacked=lambda case: case.size,
    ),
    Operation(
        "scan",
        lambda case, x: jaxmpi.scan(x, MPI.SUM),
        "the array",
        {"osu_scan": ""},
        reduced=lambda case: range(case.rank + 1),
    ),
    Operation(
        "scatter",
        lambda case, x: jaxmpi.scatter(x, 0),
        "root's array, of which each rank gets a part",
        _parts_of_osu("scatter", scatter_perf=""),
        factor=_but_one,
        origin=lambda case, index: (0, case.rank * case.elements + index),
        parts=lambda size: size,
        stacked=lambda case: case.size if case.rank == 0 else 0,
    ),
    Operation(
        "sendrecv",
        lambda case, x: jaxmpi.sendrecv(x, x, case.others(-1), case.others(1)),
        "the message that each rank sends to the next one, and receives from the one before",
        {
            "osu_bibw": "OSU counts what both ranks send, and has many messages on their way at a time",
            "sendrecv_perf": "",
        },
        origin=lambda case, index: (case.others(-1), index),
    ),
    Operation(
        "pingpong",
        _call_pingpong,
        "the message from rank 0 to rank 1 and back; the time is half of that",
        {"osu_latency": ""},
        origin=lambda case, index: (1 - case.rank if case.rank < 2 else case.rank, index),
        repeats=lambda case: case.rank > 1,
        blind=lambda case: case.rank == 1,
        messages=2,
        least=2,
    ),
    Operation(
        "send",
        _call_send,
        f"a message from rank 0 to rank 1, which answers after {WINDOW} of them",
        {"osu_bw": "OSU's sends do not block, so that many messages are on their way at a time; these do"},
        origin=lambda case, index: (0 if case.rank == 1 else case.rank, index),
        repeats=lambda case: case.rank != 1,
        blind=lambda case: case.rank == 0,
        messages=WINDOW,
        hidden=True,
        least=2,
    ),
    Operation(
        "neighbor_allgather",
        lambda case, x: jaxmpi.neighbor_allgather(x, comm=_cartesian(case.size)),
        "the result: the arrays of four neighbours on a torus of two dimensions",
        _parts_of_osu("neighbor_allgather"),
        factor=_other_neighbors,
        origin=lambda case, index: (_neighbors(case)[index // case.elements], index % case.elements),
        parts=lambda size: 4,
    ),
    Operation(
        "neighbor_alltoall",
        lambda case, x: jaxmpi.neighbor_alltoall(x, comm=_cartesian(case.size)),
        "the array, of which each of four neighbours on a torus of two dimensions gets a part",
        _parts_of_osu("neighbor_alltoall"),
        factor=_other_neighbors,
        origin=_between_neighbors,
        parts=lambda size: 4,
        stacked=lambda case: 4,
    ),
    Operation(
        "grid_exchange",
        lambda case, x: _grid(case.size, _side(case)).exchange(x),
        "a rank's square block, with a halo of one cell, on a torus of two dimensions; the bus carries the halo",
        factor=_part_of_halo,
        origin=_around,
        changed=_first_row,
        repeats=lambda case: True,
        square=True,
    ),
    Operation(
        "redistribute",
        _call_redistribute,
        "a rank's row of a matrix, of which each rank gets its columns",
        factor=_but_one,
        origin=_alltoall,
        parts=lambda size: size,
        stacked=lambda case: case.size,
    ),
    Operation(
        "index_exchange",
        lambda case, x: _ring(case.rank, case.size).exchange(x),
        "a row that the rank owns and a ghost, the row of the next rank; the bus carries one of the two",
        factor=lambda case: 0.5,
        origin=_own_and_next,
        parts=lambda size: 2,
        stacked=lambda case: 2,
        least=2,
    ),
    Operation("barrier", _call_barrier, "", {"osu_barrier": ""}, hidden=True),
)

OPERATIONS = {row.name: row for row in _ROWS}


def _by_counts(of: str, name: str, call: Callable[[Case, jax.Array], jax.Array]) -> Operation:
    """Return the row of an operation by counts, of parts that have the same length here."""
    row = OPERATIONS[of]
    remark = row.names[f"osu_{of}"]
    names = {f"osu_{name}": remark} if remark else {}
    return replace(row, name=name, call=call, size=f"{row.size}, here of the same length", names=names)


OPERATIONS |= {
    row.name: row
    for row in (
        _by_counts("allgather", "allgatherv", lambda case, x: jaxmpi.allgatherv(x[None], _each_one(case))),
        _by_counts("alltoall", "alltoallv", lambda case, x: jaxmpi.alltoallv(x, _each_one(case), _each_one(case))),
        _by_counts("gather", "gatherv", _call_gatherv),
        _by_counts(
            "reduce_scatter",
            "reduce_scatter_counts",
            lambda case, x: jaxmpi.reduce_scatter(x, MPI.SUM, _each_one(case))[0],
        ),
        _by_counts(
            "scatter",
            "scatterv",
            lambda case, x: jaxmpi.scatterv(x if case.rank == 0 else x[None], _each_one(case), 0)[0],
        ),
    )
}

USUAL = ("allreduce", "allgather", "alltoall", "bcast", "sendrecv", "pingpong", "grid_exchange", "barrier")
"""The operations that are measured if the user names none."""

NOBODY = Operation("nobody", _call_nobody, "", hidden=True)
"""A message to nobody, which measures the time that XLA takes for any operation and the code around it."""


def named(name: str) -> Operation | None:
    """Return the row with this name, or with this name in another tool."""
    return next((row for row in OPERATIONS.values() if name == row.name or name in row.names), None)


def all_names() -> Iterator[str]:
    for row in OPERATIONS.values():
        yield row.name
        yield from row.names
