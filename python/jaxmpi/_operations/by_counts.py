"""Collectives of arrays that are divided among the ranks along their first axis, by counts of rows.

The counts are operands that the core reads; a batch is an axis behind the first. The cotangent has as many rows as the
operand.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from jaxmpi._jax.dependence import dependent_zeros
from jaxmpi._mpi import communicators
from jaxmpi._operations.collectives import allgather_p, alltoall_p, bcast_p, migrate_counts_p
from jaxmpi._operations.common import SUM, Arrays, common, typed
from jaxmpi._operations.reductions import reduce_scatter_p, reducing, weight_of, why_reduction_not_differentiable
from jaxmpi._primitive import arguments, pytrees
from jaxmpi._primitive import counts as by_counts
from jaxmpi._primitive.operation import Operation
from jaxmpi._primitive.params import COTANGENT, TANGENT, Divided, Rooted, kept

_divided, _rooted = kept(Divided), kept(Rooted)


class ByCounts(Operation[Divided]):
    """A collective whose first operand is divided; the other operands are counts."""

    def results(self, avals: Arrays, params: Divided) -> list[Any]:
        return [typed((params.rows, *avals[0].shape[1:]), avals[0].dtype)]

    def batch_at(self, params: Divided) -> tuple[int, int]:
        return 1, 1

    def static_attributes(self, avals: Arrays, params: Divided) -> dict[str, Any]:
        return {"row": math.prod(avals[0].shape[1:])}  # the elements of each

    def transpose(self, cotangents: Arrays, operands: Arrays, params: Divided) -> list[Any]:
        template, *counts = operands
        back = Divided(params.comm, template.shape[0], root=params.root, derivative=COTANGENT)
        return [self.transpose_one(cotangents[0], template, counts, back)]

    def transpose_one(self, cotangent: Any, template: Any, counts: Arrays, back: Divided) -> Any:
        """Return the cotangent of the operand, by the adjoint with the parameters `back`."""
        return self.adjoint.apply(back, cotangent, *counts)[0]

    def apply_to_tree(self, params: Divided, leaves: Arrays, structure: Any, *counts: Any) -> Any:
        """Apply the operation to all leaves, with the same counts. At run time there may be too little room."""
        known = isinstance(counts[0], np.ndarray)
        each = [params] * len(leaves) if known else pytrees.of_each(params, leaves, leaves)
        results = self.apply_to_leaves(each, [(leaf, *counts) for leaf in leaves])
        return jax.tree.unflatten(structure, results)


def _exchange_counts(counts: Any, rows: int, comm: communicators.Communicator, operation: str) -> jax.Array:
    """Return the counts of all ranks, each of which knows only one at run time."""
    own = by_counts.possible(by_counts.numbers(counts, (), operation, "counts"), rows)
    return allgather_p.apply(common(comm), own)[0]


class Allgatherv(ByCounts):
    """The adjoint is `reduce_scatterv` of a sum."""

    def transpose_one(self, cotangent: Any, template: Any, counts: Arrays, back: Divided) -> Any:
        return self.adjoint.apply(dataclasses.replace(back, op=SUM), cotangent, *counts)[0]


allgatherv_p = Allgatherv("allgatherv")


def _join_rows(
    operation: ByCounts, comm: communicators.Communicator, root: int | None, x: Any, counts: Any, rows: int | None
) -> Any:
    """Return the rows of all ranks one behind the other; with a count at run time the counts of all ranks, too."""
    name = operation.shown
    leaves, names, structure = arguments.leaves(x, name, "x")
    own = by_counts.rows_of(leaves, names, name)
    known = by_counts.of_all(counts, comm.size, name, "counts")
    if known is not None:
        by_counts.no_room(rows, name)
        by_counts.match(own, known[comm.rank], "counts say that this rank has", name, names)
        params = _divided(comm, sum(known), root=root)
        return operation.apply_to_tree(params, leaves, structure, by_counts.operand(known))
    counts_of_all = _exchange_counts(counts, by_counts.most(leaves, own), comm, name)
    params = _divided(comm, by_counts.room(rows, comm.size * own, name), root=root)
    return operation.apply_to_tree(params, leaves, structure, counts_of_all), counts_of_all


def allgatherv(x: Any, counts: Any, *, rows: int | None = None, comm: MPI.Comm | None = None) -> Any:
    """Put the arrays of all ranks one behind the other, on all ranks (MPI_Allgatherv).

    They are joined along the first axis, whose length may differ from rank to rank; the other axes are the same.

    Args:
      x: array of shape `(n, ...)`, or a pytree of arrays like this, all of the same `n`.
      counts: how many rows of `x` count. Known while tracing: the counts of all ranks, a sequence of integers, the same
        on all ranks; the count of this rank is the `n` of `x`. Known at run time: the count of this rank, a scalar, at
        most `n`.
      rows: of counts at run time, for how many rows the result has room; the number of ranks times `n` if it is None.
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.

    Returns:
      The rows of rank 0, then the rows of rank 1 and so on, of shape `(sum(counts), ...)`. With a count
      at run time a pair `(rows, counts)`: the rows have shape `(rows, ...)` and end with zeros, and `counts` are
      the counts of all ranks, of shape `(size,)` and dtype int32.

    Raises:
      ValueError, TypeError: counts that do not fit `x`, or an argument of the wrong type; while tracing, before
      anything is sent; other ranks then wait.
      jax.errors.JaxRuntimeError: at run time: on all ranks, if a rank's count is negative or more than the `n` of that
      rank; on each rank with more rows than there is room for.
    """
    return _join_rows(allgatherv_p, communicators.resolve(comm, "allgatherv"), None, x, counts, rows)


class ReduceScatterv(ByCounts):
    """The adjoint of a sum is `allgatherv`."""

    def why_not_differentiable(self, params: Divided) -> str:
        return why_reduction_not_differentiable(params.op)

    def tangent(self, primals: Arrays, tangents: Arrays, results: Arrays, params: Divided) -> list[Any]:
        if params.op.name == "SUM":
            return super().tangent(primals, tangents, results, params)
        x, *counts = primals
        summing = dataclasses.replace(params, op=SUM, derivative=TANGENT)
        return self.apply(summing, weight_of(x, params) * tangents[0], *counts)


reduce_scatterv_p = ReduceScatterv("reduce_scatterv", adjoint=allgatherv_p)


def reduce_scatter(
    x: Any, op: MPI.Op, counts: Any = None, *, rows: int | None = None, comm: MPI.Comm | None = None
) -> Any:
    """Reduce the arrays of all ranks element by element; each rank gets a part (MPI_Reduce_scatter_block).

    Args:
      x: array of shape `(size, ...)`, or a pytree of arrays like this; the same shape and dtype on all ranks. With
        `counts` of shape `(n, ...)`, all of the same `n`.
      op, comm: as in `allreduce`.
      counts: None: rank i gets entry `i`. Otherwise how many rows of the reduction each rank gets, the rows of rank 0
        first (MPI_Reduce_scatter). Known while tracing: a sequence of integers, the same on all ranks, whose sum is
        `n`. Known at run time: the count of this rank, a scalar; the sum over all ranks is at most `n`.
      rows: of counts at run time, for how many rows the result has room; `n` if it is None.

    Returns:
      This rank's part, of shape `(...)`; with `counts` of shape `(counts[rank], ...)`. With a count at run time a pair
      `(rows, counts)`, as that of `allgatherv`.

    Raises:
      As `allreduce`; ValueError: the length of the first axis is wrong. At run time as `allgatherv`, and on all ranks
      if the sum of counts is more than `n`.
    """
    resolved = communicators.resolve(comm, "reduce_scatter")
    reduction = arguments.reduction(op, "reduce_scatter")
    if counts is None:
        by_counts.no_room(rows, "reduce_scatter")
        params = reducing(resolved, reduction)
        return reduce_scatter_p.apply_to_tree(params, x, arguments.stacked_reducible, resolved.size, reduction)
    leaves, names, structure = arguments.leaves(
        x, "reduce_scatter", "x", lambda leaf, *names: arguments.reducible(leaf, reduction, *names)
    )
    whole = by_counts.rows_of(leaves, names, "reduce_scatter")
    known = by_counts.of_all(counts, resolved.size, "reduce_scatter", "counts")
    if known is not None:
        by_counts.no_room(rows, "reduce_scatter")
        by_counts.match(whole, sum(known), "the sum of counts is", "reduce_scatter", names)
        divided = _divided(resolved, known[resolved.rank], op=reduction)
        return reduce_scatterv_p.apply_to_tree(divided, leaves, structure, by_counts.operand(known))
    most = by_counts.most(leaves, whole)
    counts_of_all = by_counts.possible(_exchange_counts(counts, most, resolved, "reduce_scatter"), most)
    divided = _divided(resolved, by_counts.room(rows, whole, "reduce_scatter"), op=reduction)
    return reduce_scatterv_p.apply_to_tree(divided, leaves, structure, counts_of_all), counts_of_all


class Alltoallv(ByCounts):
    """An exchange of rows. The adjoint is the same operation with the counts exchanged."""

    def transpose_one(self, cotangent: Any, template: Any, counts: Arrays, back: Divided) -> Any:
        sent, received = counts
        return self.apply(back, cotangent, received, sent)[0]


alltoallv_p = Alltoallv("alltoallv")
migrate_p = Alltoallv("migrate")


def alltoallv(
    x: Any, sendcounts: Any, recvcounts: Any = None, *, rows: int | None = None, comm: MPI.Comm | None = None
) -> Any:
    """Send a number of rows to each rank, and put the rows received one behind the other (MPI_Alltoallv).

    Args:
      x: array of shape `(n, ...)`: first the rows for rank 0, then the rows for rank 1 and so on. Or a pytree of arrays
        like this, all of the same `n`.
      sendcounts: how many rows each rank gets. Known while tracing: a sequence of integers, whose sum is `n`. Known at
        run time: an array of integers of shape `(size,)`, whose sum is at most `n`.
      recvcounts: how many rows each rank sends to this one: a sequence of integers. None: the ranks exchange the counts
        at run time, and `rows` is needed.
      rows: of counts at run time, for how many rows the result has room.
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.

    Returns:
      The rows from rank 0, then the rows from rank 1 and so on, of shape `(sum(recvcounts), ...)`. With counts at run
      time a pair `(rows, recvcounts)`, as that of `allgatherv`.

    Raises:
      As `allgatherv`. Only with `JAXMPI_CHECK=1`, `recvcounts` is compared with the counts that the other ranks send.
    """
    resolved = communicators.resolve(comm, "alltoallv")
    leaves, names, structure = arguments.leaves(x, "alltoallv", "x")
    own = by_counts.rows_of(leaves, names, "alltoallv")
    sent = by_counts.of_all(sendcounts, resolved.size, "alltoallv", "sendcounts")
    if recvcounts is not None:
        by_counts.no_room(rows, "alltoallv")
        received = by_counts.of_all(recvcounts, resolved.size, "alltoallv", "recvcounts")
        if sent is None or received is None:
            raise TypeError(
                "alltoallv: sendcounts and recvcounts must both be sequences of integers, one for each rank; where "
                "counts are known at run time, leave recvcounts out: the ranks exchange them, and rows= makes room."
            )
        by_counts.match(own, sum(sent), "the sum of sendcounts is", "alltoallv", names)
        params = _divided(resolved, sum(received))
        both = by_counts.operand(sent), by_counts.operand(received)
        return alltoallv_p.apply_to_tree(params, leaves, structure, *both)
    room = by_counts.room(rows, None, "alltoallv")
    counts = by_counts.numbers(
        sendcounts if sent is None else jax.numpy.asarray(sent), (resolved.size,), "alltoallv", "sendcounts"
    )
    mine = by_counts.possible(counts, by_counts.most(leaves, own))
    (received,) = alltoall_p.apply(common(resolved), mine)
    return alltoallv_p.apply_to_tree(_divided(resolved, room), leaves, structure, mine, received), received


def migrate_rows(
    comm: communicators.Communicator, leaves: Arrays, structure: Any, counts: jax.Array, room: int, signature: int
) -> tuple[Any, jax.Array]:
    """Send a number of rows of each leaf to each rank, for `migrate`. The ranks exchange these numbers, the `counts`.

    `room`: how many rows the results have. `signature`: an int32 that the ranks compare. Nothing travels between two
    ranks with different ones; both raise. Return the pytree of the rows, and how many come from each rank.
    """
    sent = jnp.stack([counts, jnp.full_like(counts, signature)], axis=1)
    (theirs,) = migrate_counts_p.apply(common(comm), sent)
    same = theirs[:, 1] == signature
    counts, received = jnp.where(same, counts, 0), jnp.where(same, theirs[:, 0], by_counts.OTHER_ARRAYS)
    return migrate_p.apply_to_tree(_divided(comm, room), leaves, structure, counts, received), received


class Gatherv(ByCounts):
    """Root has the rows of all operands; on any other rank the result is the operand. The adjoint is `scatterv`."""

    def results(self, avals: Arrays, params: Divided) -> list[Any]:
        return super().results(avals, params) if params.on_root else [avals[0]]

    root_receives = True

    def transpose_one(self, cotangent: Any, template: Any, counts: Arrays, back: Divided) -> Any:
        part = super().transpose_one(cotangent, template, counts, back)
        return part if back.on_root else part + cotangent


gatherv_p = Gatherv("gatherv")


def gatherv(x: Any, counts: Any, root: int, *, rows: int | None = None, comm: MPI.Comm | None = None) -> Any:
    """Put the arrays of all ranks one behind the other, on root (MPI_Gatherv).

    They are joined along the first axis, whose length may differ from rank to rank; the other axes are the same.

    Args:
      x, counts, comm: as in `allgatherv`.
      root: rank that receives, static.
      rows: as in `allgatherv`, for root's result. Other ranks do not use it.

    Returns:
      On root the rows that `allgatherv` returns; on other ranks `x` itself. With a count at run time a pair
      `(rows, counts)`, as there; `counts`, on all ranks, are the counts of all ranks.

    Raises:
      As `allgatherv`; only root raises if there are more rows than there is room for.
    """
    resolved = communicators.resolve(comm, "gatherv")
    root = arguments.rank(root, resolved, "gatherv", "root")
    return _join_rows(gatherv_p, resolved, root, x, counts, rows)


class Scatterv(ByCounts):
    """Other ranks than root have templates, which are not read. The adjoint is `gatherv`."""

    root_sends = True

    def transpose_one(self, cotangent: Any, template: Any, counts: Arrays, back: Divided) -> Any:
        gathered = super().transpose_one(cotangent, template, counts, back)
        return gathered if back.on_root else dependent_zeros([gathered], template)


scatterv_p = Scatterv("scatterv", adjoint=gatherv_p)


def scatterv(x: Any, counts: Any, root: int, *, rows: int | None = None, comm: MPI.Comm | None = None) -> Any:
    """Send a number of rows of root's array to each rank (MPI_Scatterv).

    Args:
      x: on root an array of shape `(n, ...)`: first the rows for rank 0, then the rows for rank 1 and so on. On other
        ranks a template of shape `(m, ...)`, whose values are not read, and may be a `jax.ShapeDtypeStruct`. Or pytrees
        of them, all of the same `n` or `m`.
      counts: how many rows each rank gets. Known while tracing: a sequence of integers, the same on all ranks, whose
        sum is `n`; on other ranks the count of the rank is `m`. Known at run time: on root an array of integers of
        shape `(size,)`, whose sum is at most `n`; on other ranks an array like this, which is not read, or None.
      root: rank that sends, static.
      rows: of counts at run time, for how many rows the result has room; `n` on root and `m` on other ranks if it is
        None.
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.

    Returns:
      This rank's rows, of shape `(counts[rank], ...)`. With counts at run time a pair `(rows, counts)`, as that of
      `allgatherv`; `counts` are root's.

    Raises:
      As `allgatherv`; at run time on all ranks, if root's counts are negative or more than root's `n`.
    """
    resolved = communicators.resolve(comm, "scatterv")
    root = arguments.rank(root, resolved, "scatterv", "root")
    mine = resolved.rank == root
    leaves, names, structure = arguments.leaves(x, "scatterv", "x", arguments.array if mine else arguments.template)
    own = by_counts.rows_of(leaves, names, "scatterv")
    known = by_counts.of_all(counts, resolved.size, "scatterv", "counts")
    if known is not None:
        by_counts.no_room(rows, "scatterv")
        what = "the sum of counts is" if mine else "counts say that this rank gets"
        by_counts.match(own, sum(known) if mine else known[resolved.rank], what, "scatterv", names)
        params = _divided(resolved, known[resolved.rank], root=root)
        return scatterv_p.apply_to_tree(params, leaves, structure, by_counts.operand(known))
    params = _divided(resolved, by_counts.room(rows, own, "scatterv"), root=root)
    roots_counts = jax.numpy.zeros(resolved.size, jax.numpy.int32)
    if mine:
        roots_counts = by_counts.numbers(counts, roots_counts.shape, "scatterv", "counts")
        roots_counts = by_counts.possible(roots_counts, by_counts.most(leaves, own))
    (counts_of_all,) = bcast_p.apply(_rooted(resolved, root), roots_counts)
    return scatterv_p.apply_to_tree(params, leaves, structure, counts_of_all), counts_of_all
