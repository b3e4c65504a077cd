"""Reductions."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from mpi4py import MPI

from jaxmpi._jax.dependence import dependent_zeros
from jaxmpi._mpi import communicators, tags
from jaxmpi._operations.collectives import allgather_p, bcast_p, check_same
from jaxmpi._operations.common import CHECK, SUM, Arrays, Collective, differing_cotangents, sums, typed
from jaxmpi._operations.messages import sendrecv_p
from jaxmpi._primitive import arguments
from jaxmpi._primitive.params import COTANGENT, TANGENT, Common, Divided, Exchanging, Reducing, ReducingTo, Rooted, kept

reducing, _reducing_to = kept(Reducing), kept(ReducingTo)

R = TypeVar("R", bound=Reducing)

_DIFFERENTIABLE = ("SUM", "PROD", "MAX", "MIN")
_BEATS = {"MAX": jnp.greater, "MIN": jnp.less}


def why_reduction_not_differentiable(op: arguments.Reduction) -> str:
    """Return why a reduction has no derivative; empty if it has one."""
    if op.name in _DIFFERENTIABLE:
        return ""
    possible = ", ".join(f"MPI.{name}" for name in _DIFFERENTIABLE)
    return f"the reduction {op.name} has no derivative; those that have one: {possible}."


def _of_sum(params: R) -> R:
    """Return the parameters of a sum of tangents."""
    return dataclasses.replace(params.linear(), op=SUM)


class Reduction(Collective[R]):
    """A reduction. A sum is linear; the tangent of another reduction is made of sums."""

    nondifferentiable_on_all_ranks = True

    def why_not_differentiable(self, params: R) -> str:
        return why_reduction_not_differentiable(params.op)

    def tangent(self, primals: Arrays, tangents: Arrays, results: Arrays, params: R) -> list[Any]:
        if params.op.name == "SUM":
            return super().tangent(primals, tangents, results, params)
        return [self.tangent_of_one(x, t, y, params) for x, t, y in zip(primals, tangents, results, strict=True)]

    def tangent_of_one(self, x: Any, tangent: Any, result: Any, params: R) -> Any:
        """Return the tangent of one array's result, if the reduction is not a sum."""
        return self.apply(_of_sum(params), weight_of(x, params) * tangent)[0]

    def reduce_tree(self, params: R, x: Any) -> Any:
        return self.apply_to_tree(params, x, arguments.reducible, params.op)


class Allreduce(Reduction[Reducing]):
    """The result is replicated and a loss computed from it counts once. So its cotangent is passed on unchanged. The
    transpose of this identity must be the allreduce again: so it is the operation `replicate`."""

    works_in_place = True

    def tangent_of_one(self, x: Any, tangent: Any, result: Any, params: Reducing) -> Any:
        return self.apply(_of_sum(params), weight_of(x, params, result) * tangent)[0]

    def transpose(self, cotangents: Arrays, operands: Arrays, params: Reducing) -> list[Any]:
        if params.line is not None:
            check_same(cotangents, COTANGENT, params.comm, params.line)
        return self.adjoint.apply_to_all(Common(params.comm, derivative=COTANGENT), cotangents)


allreduce_p = Allreduce("allreduce")


def allreduce(x: Any, op: MPI.Op, *, comm: MPI.Comm | None = None) -> Any:
    """Reduce the arrays of all ranks element by element; all ranks get the result (MPI_Allreduce).

    Args:
      x: array of any shape, or a pytree of arrays; the same shape and dtype on all ranks.
      op: a predefined operation that is defined for the dtype, or a user-made `MPI.Op`, which must live as long as
        functions that were compiled with it are called.
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.

    Returns:
      The result has the shape and dtype of `x`. For `MPI.SUM`, `PROD`, `MAX` and `MIN` it can be
      differentiated: the result counts as one replicated value, so with SUM each rank gets the cotangent unchanged.

    Raises:
      TypeError: `op` is not defined for the dtype, or an argument is of the wrong type. ValueError: a freed `comm` or
      `op`. Both while tracing, before anything is sent; other ranks then wait.
    """
    params = reducing(communicators.resolve(comm, "allreduce"), arguments.reduction(op, "allreduce"))
    if CHECK:
        params = dataclasses.replace(params, line=differing_cotangents("allreduce"))
    return allreduce_p.reduce_tree(params, x)


class Reduce(Reduction[ReducingTo]):
    """Root reduces all operands; on any other rank the result is the operand. The adjoint of a sum is `bcast`."""

    works_in_place = True
    root_receives = True

    def tangent_of_one(self, x: Any, tangent: Any, result: Any, params: ReducingTo) -> Any:
        total = super().tangent_of_one(x, tangent, result, params)
        return total if params.on_root else tangent + dependent_zeros([total], tangent)

    def transpose(self, cotangents: Arrays, operands: Arrays, params: ReducingTo) -> list[Any]:
        parts = self.adjoint.apply_to_all(Rooted(params.comm, params.root, derivative=COTANGENT), cotangents)
        return parts if params.on_root else sums(parts, cotangents)


reduce_p = Reduce("reduce", adjoint=bcast_p)


def reduce(x: Any, op: MPI.Op, root: int, *, comm: MPI.Comm | None = None) -> Any:
    """Reduce the arrays of all ranks element by element; root gets the result (MPI_Reduce).

    Args:
      x, op, comm: as in `allreduce`.
      root: rank that receives, static.

    Returns:
      The reduction on root; on other ranks `x` itself.

    Raises:
      As `allreduce`; ValueError: `root` is not a rank; TypeError: it is traced.
    """
    resolved = communicators.resolve(comm, "reduce")
    root = arguments.rank(root, resolved, "reduce", "root")
    return reduce_p.reduce_tree(_reducing_to(resolved, arguments.reduction(op, "reduce"), root), x)


class ReduceScatter(Reduction[Reducing]):
    """The adjoint of a sum is `allgather`."""

    def result(self, aval: Any, params: Reducing) -> Any:
        return typed(aval.shape[1:], aval.dtype)

    def batch_at(self, params: Reducing) -> tuple[int, int]:
        return 1, 0

    def transpose(self, cotangents: Arrays, operands: Arrays, params: Reducing) -> list[Any]:
        return self.adjoint.apply_to_all(Common(params.comm, derivative=COTANGENT), cotangents)


reduce_scatter_p = ReduceScatter("reduce_scatter", adjoint=allgather_p)


class Scan(Reduction[Reducing]):
    """The adjoint of the sum over the ranks up to this one is the sum over the ranks from this one on."""

    works_in_place = True

    def tangent_of_one(self, x: Any, tangent: Any, result: Any, params: Reducing) -> Any:
        name, x = params.op.name, jnp.asarray(x)
        if name == "PROD":
            for distance in _distances(params):
                exists, (earlier, earlier_tangent) = _shifted(distance, params, x, tangent)
                if exists:
                    x, tangent = earlier * x, earlier_tangent * x + earlier * tangent
            return tangent
        count = jnp.ones(x.shape, jnp.int32)  # of the ranks so far with the extreme value, which share the tangent
        for distance in _distances(params):
            exists, (earlier, earlier_count, earlier_tangent) = _shifted(distance, params, x, count, tangent)
            if not exists:
                continue
            wins, ties = _BEATS[name](earlier, x), earlier == x
            share = jnp.where(ties, _ratio(earlier_count, earlier_count + count, x), jnp.where(wins, 1, 0))
            share = share.astype(x.dtype)
            tangent = jnp.where(share > 0, share * earlier_tangent, 0) + jnp.where(share < 1, (1 - share) * tangent, 0)
            count = jnp.where(ties, earlier_count + count, jnp.where(wins, earlier_count, count))
            x = jnp.where(wins, earlier, x)
        return tangent

    def transpose(self, cotangents: Arrays, operands: Arrays, params: Reducing) -> list[Any]:
        summing = Reducing(params.comm, SUM, derivative=COTANGENT)
        backwards = [_reverse(ct, summing) for ct in cotangents]
        return [_reverse(y, summing) for y in self.apply_to_all(summing, backwards)]


scan_p = Scan("scan")


def scan(x: Any, op: MPI.Op, *, comm: MPI.Comm | None = None) -> Any:
    """Reduce over the ranks up to this one: rank i gets the reduction over ranks 0 to i (MPI_Scan).

    Args:
      x, op, comm: as in `allreduce`.

    Returns:
      Same shape and dtype as `x`.

    Raises:
      As `allreduce`.
    """
    return scan_p.reduce_tree(reducing(communicators.resolve(comm, "scan"), arguments.reduction(op, "scan")), x)


class Exscan(Scan):
    """As `Scan`, without the operand of this rank."""

    def tangent_of_one(self, x: Any, tangent: Any, result: Any, params: Reducing) -> Any:
        return _shifted(1, params, super().tangent_of_one(x, tangent, result, params))[1][0]


exscan_p = Exscan("exscan")


def exscan(x: Any, op: MPI.Op, *, comm: MPI.Comm | None = None) -> Any:
    """Reduce over the ranks before this one: rank i gets the reduction over ranks 0 to i - 1 (MPI_Exscan).

    Args:
      x, op, comm: as in `allreduce`.

    Returns:
      Same shape and dtype as `x`. Rank 0, whose result the standard leaves undefined, gets the identity
      element: 0 for SUM, 1 for PROD, the least value for MAX and so on; zeros for a user-made `op`.

    Raises:
      As `allreduce`.
    """
    params = reducing(communicators.resolve(comm, "exscan"), arguments.reduction(op, "exscan"))
    result = exscan_p.reduce_tree(params, x)
    if params.comm.rank > 0 or params.op.name not in arguments.NOT_FROM_ZERO:
        return result
    leaves, structure = jax.tree.flatten(arguments.only_arrays(result))
    return jax.tree.unflatten(structure, _changing_nothing(params.op.name, leaves))


@functools.partial(jax.jit, static_argnums=0)
def _changing_nothing(name: str, zeros: Any) -> Any:
    """Return the identity of a reduction in the place of zeros, which the core makes on rank 0. A constant of a program
    needs no transfer to a device."""
    return jax.tree.map(lambda x: x + arguments.identity(name, x.dtype), zeros)


# --- the derivatives of products and extremes ------------------------------------------------------------------------


def weight_of(x: Any, params: Reducing | Divided, extreme: Any = None) -> Any:
    """Return the derivative of a reduction over all ranks with respect to this rank's array. For an extreme it is
    1 / (number of ranks with the extreme value) where this rank has it, else 0. `extreme`: the value, if it is known.
    """
    if params.op.name == "PROD":
        return _product_of_others(x, params)
    if extreme is None:
        extreme = _reduced_everywhere(x, params.op, params)
    mine = x == extreme
    count = _reduced_everywhere(mine.astype(jnp.int32), SUM, params)
    return jnp.where(jnp.isnan(extreme), jnp.nan, jnp.where(mine, _ratio(1, count, x), 0)).astype(x.dtype)


def _reduced_everywhere(x: Any, op: arguments.Reduction, params: Common) -> Any:
    return allreduce_p.apply(Reducing(params.comm, op, derivative=TANGENT), x)[0]


def _move(x: Any, source: int, dest: int, params: Common) -> Any:
    moving = Exchanging(params.comm, source, dest, tags.OF_RULES, tags.OF_RULES, derivative=params.derivative)
    return sendrecv_p.apply(moving, x, jnp.zeros_like(x))[0]


def _reverse(x: Any, params: Common) -> Any:
    """Return the array of the rank `size - 1 - rank`."""
    opposite = params.comm.size - 1 - params.comm.rank
    return _move(x, opposite, opposite, params)


def _shifted(distance: int, params: Common, *arrays: Any) -> tuple[bool, list[Any]]:
    """Return whether a rank is `distance` before this one (after, if negative), and the arrays of that rank; zeros if
    there is none."""
    rank, size = params.comm.rank, params.comm.size
    source, dest = rank - distance, rank + distance
    exists = 0 <= source < size
    source, dest = (r if 0 <= r < size else MPI.PROC_NULL for r in (source, dest))
    return exists, [_move(x, source, dest, Common(params.comm, derivative=TANGENT)) for x in arrays]


def _distances(params: Common) -> Iterator[int]:
    """Yield 1, 2, 4, ... below the number of ranks: the steps of a prefix reduction by doubling."""
    return (1 << i for i in range((params.comm.size - 1).bit_length()))


def _product_of_others(x: Any, params: Common) -> Any:
    """Return the product of all other ranks' arrays; correct for zeros too, unlike a division of the whole product."""
    product = jnp.ones_like(x)
    for direction in (1, -1):
        exists, (before,) = _shifted(direction, params, x)
        part = before if exists else jnp.ones_like(x)
        for distance in _distances(params):
            exists, (before,) = _shifted(direction * distance, params, part)
            part = part * before if exists else part
        product = product * part
    return product


def _ratio(a: Any, b: Any, like: Any) -> Any:
    """Return a / b of integers, as precise as `like`, unlike JAX's division of integers."""
    precise = like.dtype if like.dtype.itemsize >= 4 else jnp.float32
    return jnp.asarray(a, precise) / jnp.asarray(b, precise)
