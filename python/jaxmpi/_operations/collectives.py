"""Collectives that move data, the barrier, and the comparison with rank 0."""

from typing import Any

import jax
import jax.numpy as jnp
from mpi4py import MPI

from jaxmpi._jax import internals
from jaxmpi._mpi import communicators
from jaxmpi._mpi.strings import Text
from jaxmpi._operations.common import SUM, Arrays, Collective, common, is_opaque, sums, typed, zeros_dependent_on
from jaxmpi._primitive import arguments
from jaxmpi._primitive.operation import Operation, check_p
from jaxmpi._primitive.params import COTANGENT, Common, Comparing, Reducing, ReducingTo, Rooted, kept

_rooted = kept(Rooted)


def stacked(aval: Any, params: Common) -> Any:
    return typed((params.comm.size, *aval.shape), aval.dtype)


class Allgather(Collective[Common]):
    """The adjoint is `reduce_scatter` of a sum."""

    def result(self, aval: Any, params: Common) -> Any:
        return stacked(aval, params)

    def largest(self, aval: Any, params: Common) -> Any:
        return stacked(aval, params)

    def batch_at(self, params: Common) -> tuple[int, int]:
        return 0, 1

    def transpose(self, cotangents: Arrays, operands: Arrays, params: Common) -> list[Any]:
        if any(map(is_opaque, cotangents)):
            back = Common(params.comm, derivative=COTANGENT)
            return [jnp.sum(part, axis=0) for part in alltoall_p.apply_to_all(back, cotangents)]
        return self.adjoint.apply_to_all(Reducing(params.comm, SUM, derivative=COTANGENT), cotangents)


allgather_p = Allgather("allgather")


def allgather(x: Any, *, comm: MPI.Comm | None = None) -> Any:
    """Stack the arrays of all ranks, on all ranks (MPI_Allgather).

    Args:
      x: array of any shape, or a pytree of arrays; the same shape and dtype on all ranks.
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.

    Returns:
      The result has shape `(size, *x.shape)`, entry `i` is rank i's array.

    Raises:
      TypeError, ValueError: while tracing, before anything is sent; other ranks then wait.
    """
    return allgather_p.apply_to_tree(common(communicators.resolve(comm, "allgather")), x, arguments.array)


class Alltoall(Collective[Common]):
    """An exchange of blocks. It is self-adjoint."""

    def batch_at(self, params: Common) -> tuple[int, int]:
        return 1, 1

    def transpose(self, cotangents: Arrays, operands: Arrays, params: Common) -> list[Any]:
        return self.apply_to_all(Common(params.comm, derivative=COTANGENT), cotangents)


alltoall_p = Alltoall("alltoall")
migrate_counts_p = Alltoall("migrate_counts")


def alltoall(x: Any, *, comm: MPI.Comm | None = None) -> Any:
    """Send entry `i` of the first axis to rank i (MPI_Alltoall).

    Args:
      x: array of shape `(size, ...)`, or a pytree of arrays like this; the same shape and dtype on all ranks.
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.

    Returns:
      Same shape; entry `i` of the result comes from rank i.

    Raises:
      ValueError: the first axis is not the number of ranks. Otherwise as `allgather`.
    """
    resolved = communicators.resolve(comm, "alltoall")
    return alltoall_p.apply_to_tree(common(resolved), x, arguments.stacked, resolved.size)


class Barrier(Operation[Common]):
    def results(self, avals: Arrays, params: Common) -> list[Any]:
        return []


barrier_p = Barrier("barrier")


def barrier(*, comm: MPI.Comm | None = None) -> None:
    """Wait until all ranks have reached the barrier (MPI_Barrier).

    It orders communication, not Python: inside and outside `jit` the call may return before the barrier has completed.
    `jax.effects_barrier()` waits for the barrier to complete.

    Args:
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.
    """
    barrier_p.apply(common(communicators.resolve(comm, "barrier")))


class Bcast(Collective[Rooted]):
    """The adjoint is `reduce` of a sum.

    Root's result is its operand. Nevertheless the core returns it, so that computations with it wait until it is sent.
    XLA would otherwise put them before the call, and all other ranks would wait for them. If nothing else needs the
    operand, the result is aliased with it, and a loop need not copy it; otherwise it is copied once it is sent.
    """

    works_in_place = True
    root_sends = True

    def transpose(self, cotangents: Arrays, operands: Arrays, params: Rooted) -> list[Any]:
        totals = self.adjoint.apply_to_all(ReducingTo(params.comm, SUM, params.root, derivative=COTANGENT), cotangents)
        # Other ranks do not read the template, so the cotangent of it is zero.
        return totals if params.on_root else zeros_dependent_on(totals, operands)


bcast_p = Bcast("bcast")


def bcast(x: Any, root: int, *, comm: MPI.Comm | None = None) -> Any:
    """Send root's array to all ranks (MPI_Bcast).

    Args:
      x: on root the data; on other ranks a template of the same shape and dtype, whose values are not read. Or pytrees
        of them. A template may be a `jax.ShapeDtypeStruct`.
      root: rank that sends, static.
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.

    Returns:
      Root's array on all ranks.

    Raises:
      ValueError: `root` is not a rank. TypeError: a static argument is traced, or an argument is of the wrong type.
      Both while tracing, before anything is sent; other ranks then wait.
    """
    resolved = communicators.resolve(comm, "bcast")
    root = arguments.rank(root, resolved, "bcast", "root")
    check = arguments.array if resolved.rank == root else arguments.template
    return bcast_p.apply_to_tree(_rooted(resolved, root), x, check)


class Gather(Collective[Rooted]):
    """Root stacks all operands; on any other rank the result is the operand. The adjoint is `scatter`."""

    def result(self, aval: Any, params: Rooted) -> Any:
        return stacked(aval, params) if params.on_root else aval

    def largest(self, aval: Any, params: Rooted) -> Any:
        return stacked(aval, params)

    root_receives = True

    def batch_at(self, params: Rooted) -> tuple[int, int]:
        return 0, int(params.on_root)

    def transpose(self, cotangents: Arrays, operands: Arrays, params: Rooted) -> list[Any]:
        parts = self.adjoint.apply_to_all(Rooted(params.comm, params.root, derivative=COTANGENT), cotangents)
        return parts if params.on_root else sums(parts, cotangents)


gather_p = Gather("gather")


def gather(x: Any, root: int, *, comm: MPI.Comm | None = None) -> Any:
    """Stack the arrays of all ranks, on root (MPI_Gather).

    Args:
      x, comm: as in `allgather`.
      root: rank that receives, static.

    Returns:
      On root of shape `(size, *x.shape)`, entry `i` from rank i; on other ranks `x` itself.

    Raises:
      As `bcast`.
    """
    resolved = communicators.resolve(comm, "gather")
    root = arguments.rank(root, resolved, "gather", "root")
    return gather_p.apply_to_tree(_rooted(resolved, root), x, arguments.array)


class Scatter(Collective[Rooted]):
    """Other ranks than root have templates, which are not read. The adjoint is `gather`."""

    def result(self, aval: Any, params: Rooted) -> Any:
        return typed(aval.shape[1:], aval.dtype) if params.on_root else aval

    def largest(self, aval: Any, params: Rooted) -> Any:
        return aval if params.on_root else stacked(aval, params)

    root_sends = True

    def batch_at(self, params: Rooted) -> tuple[int, int]:
        return int(params.on_root), 0

    def transpose(self, cotangents: Arrays, operands: Arrays, params: Rooted) -> list[Any]:
        gathered = self.adjoint.apply_to_all(Rooted(params.comm, params.root, derivative=COTANGENT), cotangents)
        return gathered if params.on_root else zeros_dependent_on(gathered, operands)


scatter_p = Scatter("scatter", adjoint=gather_p)


def scatter(x: Any, root: int, *, comm: MPI.Comm | None = None) -> Any:
    """Send entry `i` of root's first axis to rank i (MPI_Scatter).

    Args:
      x: on root an array of shape `(size, ...)`; on other ranks a template of shape `(...)`, whose values are not read.
        Or pytrees of them. A template may be a `jax.ShapeDtypeStruct`.
      root: rank that sends, static.
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.

    Returns:
      This rank's entry, of shape `(...)`.

    Raises:
      ValueError: the first axis on root is not the number of ranks. Otherwise as `bcast`.
    """
    resolved = communicators.resolve(comm, "scatter")
    params = _rooted(resolved, arguments.rank(root, resolved, "scatter", "root"))
    if params.on_root:
        return scatter_p.apply_to_tree(params, x, arguments.stacked, resolved.size)
    return scatter_p.apply_to_tree(params, x, arguments.template)


# --- values that must be the same on all ranks -----------------------------------------------------------------------


def check_same(arrays: Arrays, derivative: str | None, comm: communicators.Communicator, text: Text) -> None:
    """Compare the arrays with rank 0's. A rank where one differs raises an error with the text."""
    of_root = bcast_p.apply_to_all(Rooted(comm, 0, derivative=derivative), arrays)
    if differ := list(map(_differs, arrays, of_root)):
        check_p.apply(Comparing(comm, text), *differ)


def _differs(x: Any, y: Any) -> jax.Array:
    """Return whether two arrays differ by more than rounding."""
    if x.size == 0:
        return jnp.zeros((), bool)
    if not internals.inexact(x):
        return jnp.any(x != y)
    finite = jnp.isfinite(x) & jnp.isfinite(y)
    scale = jnp.max(jnp.where(finite, jnp.abs(y), 0))
    close = jnp.abs(jnp.where(finite, x - y, 0)) <= 100 * jnp.finfo(x.dtype).eps * scale
    return ~jnp.all((finite & close) | (x == y) | (jnp.isnan(x) & jnp.isnan(y)))
