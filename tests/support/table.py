"""One row per operation: how to call it, and what NumPy says the result is, given the inputs of all ranks."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from mpi4py import MPI

import jaxmpi

NEW_JAX = tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 7)
"""Whether JAX keeps in derivatives what has no result that is used."""

REPLICATED = ("allreduce", "iallreduce")
"""Whose result is one array that all ranks have, with the same cotangent."""
UFUNCS = {
    "SUM": np.add,
    "PROD": np.multiply,
    "MAX": np.maximum,
    "MIN": np.minimum,
    "LAND": np.logical_and,
    "LOR": np.logical_or,
    "LXOR": np.logical_xor,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}
"""The reductions, by NumPy."""


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)


def draw(shape, dtype, rank, seed=0):
    """Reproducible data of a rank; small integers, so that sums are exact in every dtype."""
    numbers = np.random.default_rng([seed, rank]).integers(0, 4, size=shape)
    return np.asarray(numbers).astype(dtype)


def raised(call):
    """The text of the error that a call raises at run time; empty without one."""
    try:
        jax.block_until_ready(call())
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class Case:
    name: str
    call: Callable[..., Any]
    """(x, comm, root) -> result"""
    expected: Callable[..., Any]
    """(inputs of all ranks, rank, root) -> result of this rank"""
    rooted: bool = False
    stacked_on_root: bool = False
    stacked: bool = False
    moves: bool = True
    """The values are moved, not reduced."""
    variant: bool = False
    """Another way to call an operation, for which the tests that take long need not be repeated."""
    messages: bool = False
    """A pytree is a message for each leaf."""
    rows: Callable[..., int] | None = None
    """(rank, size, root) -> length of an additional first axis, where that differs from rank to rank."""

    def __str__(self):
        return self.name

    def shape(self, shape, rank, size, root):
        """Shape of the input where one entry has `shape`."""
        if self.rows is not None:
            return (self.rows(rank, size, root), *shape)
        stacked = self.stacked or (self.stacked_on_root and rank == root)
        return (size, *shape) if stacked else shape

    def inputs(self, shape, dtype, size, root, seed=0):
        return [draw(self.shape(shape, r, size, root), dtype, r, seed) for r in range(size)]

    def roots(self, size):
        return range(size) if self.rooted else [0]


def _accumulate(xs, last):
    return np.sum(np.stack([np.asarray(x) for x in xs[: last + 1]]), axis=0, dtype=xs[0].dtype)


def _right(comm):
    return (comm.rank + 1) % comm.size


def _left(comm):
    return (comm.rank - 1) % comm.size


def _zeros(x):
    return jax.tree.map(jnp.zeros_like, x)


def _exchange(x, comm, root):
    return jaxmpi.sendrecv(x, _zeros(x), _left(comm), _right(comm), sendtag=3, recvtag=3, comm=comm)


def _send_recv(x, comm, root):
    """Round the ring, even ranks send first. One rank alone sends to nobody and receives nothing, which is zero.

    The template is x itself: a message is received as a batch where the template is one.
    """
    if comm.size == 1:
        jaxmpi.send(x, MPI.PROC_NULL, comm=comm)
        return jaxmpi.recv(x, MPI.PROC_NULL, comm=comm)
    if comm.rank % 2 == 0:
        jaxmpi.send(x, _right(comm), tag=5, comm=comm)
        return jaxmpi.recv(x, _left(comm), tag=5, comm=comm)
    y = jaxmpi.recv(x, _left(comm), tag=5, comm=comm)
    jaxmpi.send(x, _right(comm), tag=5, comm=comm)
    return y


def exchange_at_run_time(comm):
    """The ranks and tags are known at run time, some of them."""

    @jax.jit
    def call(x, left, right, tag):
        tags = {"sendtag": tag, "recvtag": 7 if comm.rank % 2 else tag}
        return jaxmpi.sendrecv(x, _zeros(x), left, right, **tags, comm=comm)

    return lambda x: call(x, _left(comm), _right(comm), 7)


def send_recv_at_run_time(comm):
    if comm.size == 1:
        left = right = MPI.PROC_NULL
    else:
        left, right = _left(comm), _right(comm)

    @jax.jit
    def call(x, left, right, tag):
        if comm.rank % 2 == 0:
            jaxmpi.send(x, right, tag=tag, comm=comm)
            return jaxmpi.recv(x, left, tag=5, comm=comm)
        y = jaxmpi.recv(x, left, tag=tag, comm=comm)
        jaxmpi.send(x, right, tag=5, comm=comm)
        return y

    return lambda x: call(x, left, right, 5)


# Started and waited for: all the tests of an operation are tests of it then.


def _started_message(x, comm, root):
    """Round the ring; one rank alone sends to itself."""
    receive = jaxmpi.irecv(x, _left(comm), tag=4, comm=comm)
    send = jaxmpi.isend(x, _right(comm), tag=4, comm=comm)
    y, _ = jaxmpi.waitall([receive, send])
    return y


def _started(of, call):
    """The case of the blocking operation, whose result is the same."""
    return replace(next(case for case in _AT_ONCE if case.name == of), name=f"i{of}", call=call)


# Arrays divided by rows.

CAPACITY = 3
"""Rows of an array of which as many count as are known at run time."""


def counts_of(size):
    return [(5 * r + 2) % 4 for r in range(size)]  # 2, 3, 0, 1, ...


def between(size):
    """Entry [i][j]: the rows from rank i to rank j."""
    return [[(i + 2 * j + 1) % 3 for j in range(size)] for i in range(size)]


def _sent(size, rank):
    return between(size)[rank]


def _received(size, rank):
    return [sent[rank] for sent in between(size)]


def _padded(rows, like, capacity):
    result = np.zeros((capacity, *like.shape[1:]), like.dtype)
    result[: len(rows)] = rows
    return result


def _first_rows(xs):
    return np.concatenate([x[:count] for x, count in zip(xs, counts_of(len(xs)), strict=True)])


def _part(x, size, rank):
    counts = counts_of(size)
    return x[sum(counts[:rank]) : sum(counts[: rank + 1])]


def _parts_for(xs, rank):
    parts = []
    for i, x in enumerate(xs):
        sent = between(len(xs))[i]
        parts.append(x[sum(sent[:rank]) : sum(sent[: rank + 1])])
    return np.concatenate(parts)


def _traced(values):
    return jnp.asarray(values, jnp.int32)


REDUCING = {
    "allreduce": lambda x, op, comm, root: jaxmpi.allreduce(x, op, comm=comm),
    "exscan": lambda x, op, comm, root: jaxmpi.exscan(x, op, comm=comm),
    "iallreduce": lambda x, op, comm, root: jaxmpi.wait(jaxmpi.iallreduce(x, op, comm=comm)),
    "reduce": lambda x, op, comm, root: jaxmpi.reduce(x, op, root, comm=comm),
    "reduce_scatter": lambda x, op, comm, root: jaxmpi.reduce_scatter(x, op, comm=comm),
    "reduce_scatter_counts": lambda x, op, comm, root: jaxmpi.reduce_scatter(x, op, counts_of(comm.size), comm=comm),
    "reduce_scatter_traced": lambda x, op, comm, root: jaxmpi.reduce_scatter(
        x, op, _traced(counts_of(comm.size)[comm.rank]), rows=4, comm=comm
    )[0],
    "scan": lambda x, op, comm, root: jaxmpi.scan(x, op, comm=comm),
}
"""Operations with a reduction, which the table calls with SUM."""


def _reducing(name):
    return lambda x, comm, root: REDUCING[name](x, MPI.SUM, comm, root)


_OF_COUNTS = [
    Case(
        "allgatherv",
        lambda x, c, r: jaxmpi.allgatherv(x, counts_of(c.size), comm=c),
        lambda xs, rank, root: np.concatenate(xs),
        rows=lambda rank, size, root: counts_of(size)[rank],
    ),
    Case(
        "allgatherv_traced",
        lambda x, c, r: jaxmpi.allgatherv(x, _traced(counts_of(c.size)[c.rank]), comm=c)[0],
        lambda xs, rank, root: _padded(_first_rows(xs), xs[0], CAPACITY * len(xs)),
        rows=lambda rank, size, root: CAPACITY,
        variant=True,
    ),
    Case(
        "alltoallv",
        lambda x, c, r: jaxmpi.alltoallv(x, _sent(c.size, c.rank), _received(c.size, c.rank), comm=c),
        lambda xs, rank, root: _parts_for(xs, rank),
        rows=lambda rank, size, root: sum(_sent(size, rank)),
    ),
    Case(
        "alltoallv_traced",
        lambda x, c, r: jaxmpi.alltoallv(x, _traced(_sent(c.size, c.rank)), rows=2 * c.size + 1, comm=c)[0],
        lambda xs, rank, root: _padded(_parts_for(xs, rank), xs[0], 2 * len(xs) + 1),
        rows=lambda rank, size, root: sum(_sent(size, rank)) + 1,
        variant=True,
    ),
    Case(
        "gatherv",
        lambda x, c, r: jaxmpi.gatherv(x, counts_of(c.size), r, comm=c),
        lambda xs, rank, root: np.concatenate(xs) if rank == root else xs[rank],
        rooted=True,
        rows=lambda rank, size, root: counts_of(size)[rank],
    ),
    Case(
        "gatherv_traced",
        lambda x, c, r: jaxmpi.gatherv(x, _traced(counts_of(c.size)[c.rank]), r, rows=3 * c.size + 1, comm=c)[0],
        lambda xs, rank, root: _padded(_first_rows(xs), xs[0], 3 * len(xs) + 1) if rank == root else xs[rank],
        rooted=True,
        rows=lambda rank, size, root: CAPACITY,
        variant=True,
    ),
    Case(
        "reduce_scatter",
        _reducing("reduce_scatter"),
        lambda xs, rank, root: _accumulate(xs, len(xs))[rank],
        stacked=True,
        moves=False,
    ),
    Case(
        "reduce_scatter_counts",
        _reducing("reduce_scatter_counts"),
        lambda xs, rank, root: _part(_accumulate(xs, len(xs)), len(xs), rank),
        rows=lambda rank, size, root: sum(counts_of(size)),
        moves=False,
        variant=True,
    ),
    Case(
        "reduce_scatter_traced",
        _reducing("reduce_scatter_traced"),
        lambda xs, rank, root: _padded(_part(_accumulate(xs, len(xs)), len(xs), rank), xs[0], 4),
        rows=lambda rank, size, root: sum(counts_of(size)) + 1,
        moves=False,
        variant=True,
    ),
    Case(
        "scatterv",
        lambda x, c, r: jaxmpi.scatterv(x, counts_of(c.size), r, comm=c),
        lambda xs, rank, root: _part(xs[root], len(xs), rank),
        rooted=True,
        rows=lambda rank, size, root: sum(counts_of(size)) if rank == root else counts_of(size)[rank],
    ),
    Case(
        "scatterv_traced",
        lambda x, c, r: jaxmpi.scatterv(x, _traced(counts_of(c.size)) if c.rank == r else None, r, rows=4, comm=c)[0],
        lambda xs, rank, root: _padded(_part(xs[root], len(xs), rank), xs[root], 4),
        rooted=True,
        rows=lambda rank, size, root: sum(counts_of(size)) if rank == root else CAPACITY,
        variant=True,
    ),
]

_AT_ONCE = [
    Case("allgather", lambda x, c, r: jaxmpi.allgather(x, comm=c), lambda xs, rank, root: np.stack(xs)),
    Case("allreduce", _reducing("allreduce"), lambda xs, rank, root: _accumulate(xs, len(xs)), moves=False),
    Case(
        "alltoall",
        lambda x, c, r: jaxmpi.alltoall(x, comm=c),
        lambda xs, rank, root: np.stack([x[rank] for x in xs]),
        stacked=True,
    ),
    Case("bcast", lambda x, c, r: jaxmpi.bcast(x, r, comm=c), lambda xs, rank, root: xs[root], rooted=True),
    Case(
        "exscan",
        _reducing("exscan"),
        lambda xs, rank, root: _accumulate(xs, rank - 1) if rank > 0 else np.zeros_like(xs[0]),
        moves=False,
    ),
    Case(
        "gather",
        lambda x, c, r: jaxmpi.gather(x, r, comm=c),
        lambda xs, rank, root: np.stack(xs) if rank == root else xs[rank],
        rooted=True,
    ),
    Case(
        "reduce",
        _reducing("reduce"),
        lambda xs, rank, root: _accumulate(xs, len(xs)) if rank == root else xs[rank],
        rooted=True,
        moves=False,
    ),
    Case("scan", _reducing("scan"), lambda xs, rank, root: _accumulate(xs, rank), moves=False),
    Case(
        "scatter",
        lambda x, c, r: jaxmpi.scatter(x, r, comm=c),
        lambda xs, rank, root: xs[root][rank],
        rooted=True,
        stacked_on_root=True,
    ),
    Case("sendrecv", _exchange, lambda xs, rank, root: xs[rank - 1], messages=True),
    Case(
        "send_recv",
        _send_recv,
        lambda xs, rank, root: xs[rank - 1] if len(xs) > 1 else np.zeros_like(xs[0]),
        messages=True,
    ),
]

CASES = [
    *_OF_COUNTS,
    Case("irecv", _started_message, lambda xs, rank, root: xs[rank - 1], messages=True),
    _started("allreduce", _reducing("iallreduce")),
    _started("alltoall", lambda x, c, r: jaxmpi.wait(jaxmpi.ialltoall(x, comm=c))),
    _started("bcast", lambda x, c, r: jaxmpi.wait(jaxmpi.ibcast(x, r, comm=c))),
    *_AT_ONCE[:-1],
    replace(_AT_ONCE[-2], name="sendrecv_traced", call=lambda x, c, r: exchange_at_run_time(c)(x), variant=True),
    _AT_ONCE[-1],
    replace(_AT_ONCE[-1], name="send_recv_traced", call=lambda x, c, r: send_recv_at_run_time(c)(x), variant=True),
]
