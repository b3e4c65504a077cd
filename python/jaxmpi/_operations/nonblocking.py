"""Operations that a call starts and a later wait completes."""

import dataclasses
from typing import Any

import numpy as np
from mpi4py import MPI

from jaxmpi._jax.dependence import dependent_zeros
from jaxmpi._mpi import communicators
from jaxmpi._operations.collectives import check_same
from jaxmpi._operations.common import CHECK, SUM, Arrays, Leaf, common, differing_cotangents
from jaxmpi._operations.messages import Recv, Send, back_of_recv, back_of_send
from jaxmpi._operations.reductions import allreduce_p, why_reduction_not_differentiable
from jaxmpi._operations.replication import replicate_p
from jaxmpi._operations.requests import Awaited, Request, Start, Started, store_p
from jaxmpi._primitive import arguments, envelope, keys
from jaxmpi._primitive.params import COTANGENT, TANGENT, VALUE, Common, Receiving, Reducing, ReducingTo, Rooted, Sending


def _start(operation: Start[Any], params: Common, x: Any, check: Leaf, traced: Arrays = ()) -> Request:
    """Check all leaves of `x`, and start the operation on each of them."""
    leaves, _, structure = arguments.leaves(x, operation.core_name, "x", check)
    words = list(map(keys.words, leaves))
    begun = [operation.begin(params, (), x, traced) for x in words]
    pending = tuple(operation.started(params, x) for x in words)
    of_result = (structure, keys.types(leaves)) if operation.has_result else ()
    return Request([*begun, *traced], Awaited(params.comm, pending, *of_result))


class Iallreduce(Start[Reducing]):
    """As `allreduce`. The weights of the tangents are communicated where the operation starts, so the wait of a tangent
    returns a stored value. The cotangent of the operand is stored, too."""

    result_is_stored = True

    def why_not_differentiable(self, params: Reducing) -> str:
        return why_reduction_not_differentiable(params.op)

    def tangent(self, primals: Arrays, tangents: Arrays, results: Arrays, params: Reducing) -> list[Any]:
        if params.op.name == "SUM":
            return super().tangent(primals, tangents, results, params)
        blocking = dataclasses.replace(params, batch=(), derivative=VALUE)
        (value,) = allreduce_p.apply(blocking, primals[0])
        tangent = allreduce_p.tangent_of_one(primals[0], tangents[0], value, blocking)
        return [store_p.begin(Common(params.comm, derivative=TANGENT), params.batch, tangent)]

    def back(self, params: Reducing, traced: Arrays) -> tuple[Start[Any], Common, Arrays]:
        return store_p, Common(params.comm), []

    def cotangent(self, cotangent: Any, params: Reducing, batch_of: Common) -> Any:
        if params.op.name != "SUM":  # the tangent is stored: see `tangent`
            return cotangent
        if params.line is not None:
            check_same([cotangent], COTANGENT, params.comm, params.line)
        return replicate_p.apply(Common(params.comm, derivative=COTANGENT), cotangent)[0]


iallreduce_p = Iallreduce("iallreduce")


def iallreduce(x: Any, op: MPI.Op, *, comm: MPI.Comm | None = None) -> Any:
    """Start to reduce the arrays of all ranks; all ranks get the result from `wait` (MPI_Iallreduce).

    Args:
      x, op, comm: as in `allreduce`. `x` is copied: it may change afterwards.

    Returns:
      A `Request`: `wait(request)` gives the result of `allreduce`. It can be differentiated like that one; derivatives
      of PROD, MAX and MIN are communicated where the operation starts.

    Raises:
      As `allreduce`.
    """
    reduction = arguments.reduction(op, "iallreduce")
    params = Reducing(communicators.resolve(comm, "iallreduce"), reduction)
    if CHECK:
        params = dataclasses.replace(params, line=differing_cotangents("iallreduce"))
    check = lambda leaf, *names: arguments.reducible(leaf, reduction, *names)  # noqa: E731
    return _start(iallreduce_p, params, x, check)


class Ialltoall(Start[Common]):
    """An exchange of blocks. It is self-adjoint."""

    batch_axis = 1

    def back(self, params: Common, traced: Arrays) -> tuple[Start[Any], Common, Arrays]:
        return self, Common(params.comm, derivative=COTANGENT), []


ialltoall_p = Ialltoall("ialltoall")


def ialltoall(x: Any, *, comm: MPI.Comm | None = None) -> Any:
    """Start to send entry `i` of the first axis to rank i (MPI_Ialltoall).

    Args:
      x, comm: as in `alltoall`. `x` is copied.

    Returns:
      A `Request`: `wait(request)` gives the result of `alltoall`.

    Raises:
      As `alltoall`.
    """
    resolved = communicators.resolve(comm, "ialltoall")
    check = lambda leaf, *names: arguments.stacked(leaf, resolved.size, *names)  # noqa: E731
    return _start(ialltoall_p, common(resolved), x, check)


class Ibarrier(Start[Common]):
    has_result = False


ibarrier_p = Ibarrier("ibarrier")


def ibarrier(*, comm: MPI.Comm | None = None) -> Any:
    """Announce that this rank has reached a barrier; `wait` waits until all ranks have reached it (MPI_Ibarrier).

    Args:
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.

    Returns:
      A `Request`: `wait(request)` gives None.
    """
    params = common(communicators.resolve(comm, "ibarrier"))
    started = Started(ibarrier_p, params, (), np.dtype(np.int32))
    return Request(ibarrier_p.apply(params), Awaited(params.comm, (started,)))


class Ibcast(Start[Rooted]):
    """The adjoint is `ireduce` of a sum."""

    root_sends = True

    def back(self, params: Rooted, traced: Arrays) -> tuple[Start[Any], Common, Arrays]:
        return ireduce_p, ReducingTo(params.comm, SUM, params.root, derivative=COTANGENT), []


ibcast_p = Ibcast("ibcast")


class Ireduce(Start[ReducingTo]):
    """The adjoint of `ibcast`."""

    def why_not_differentiable(self, params: ReducingTo) -> str:
        return why_reduction_not_differentiable(params.op)

    def back(self, params: ReducingTo, traced: Arrays) -> tuple[Start[Any], Common, Arrays]:
        return ibcast_p, Rooted(params.comm, params.root, derivative=COTANGENT), []


ireduce_p = Ireduce("ireduce")


def ibcast(x: Any, root: int, *, comm: MPI.Comm | None = None) -> Any:
    """Start to send root's array to all ranks (MPI_Ibcast).

    Args:
      x, root, comm: as in `bcast`. Root's `x` is copied.

    Returns:
      A `Request`: `wait(request)` gives root's array on all ranks.

    Raises:
      As `bcast`.
    """
    resolved = communicators.resolve(comm, "ibcast")
    root = arguments.rank(root, resolved, "ibcast", "root")
    check = arguments.array if resolved.rank == root else arguments.template
    return _start(ibcast_p, Rooted(resolved, root), x, check)


class Irecv(Start[Receiving], Recv):
    """The adjoint is `isend`; ranks and tags that are known at run time stand before the template."""

    def order(self, leaf: Any, traced: Arrays) -> list[Any]:
        return [*traced, leaf]

    def back(self, params: Receiving, traced: Arrays) -> tuple[Start[Any], Common, Arrays]:
        known, traced = back_of_recv(params, traced)
        return isend_p, Sending(params.comm, **known, derivative=COTANGENT), traced

    def transpose(self, cotangents: Arrays, operands: Arrays, params: Receiving) -> list[Any]:
        *traced, template = operands
        self.wait_for_adjoint(params, template, cotangents[0], traced)
        return [dependent_zeros(cotangents, template)]  # the values of the template are not read


irecv_p = Irecv("irecv")


def irecv(x: Any, source: int = MPI.ANY_SOURCE, *, tag: int = MPI.ANY_TAG, comm: MPI.Comm | None = None) -> Any:
    """Start to receive a message (MPI_Irecv).

    Receives match messages in the order in which they are started; blocking `recv` calls are part of this order. Needs
    MPI_THREAD_MULTIPLE, which mpi4py asks for.

    Args:
      x, source, comm: as in `recv`.
      tag: as in `recv`; `MPI.ANY_TAG` does not match tags of the upper half of MPI's tags.

    Returns:
      A `Request`: `wait(request)` gives the message, with the shape and dtype of the template.

    Raises:
      ValueError, TypeError: while tracing, before anything is received.
      jax.errors.JaxRuntimeError: at run time: here, if a traced rank or tag is invalid; in `wait`, if the message is
        longer or shorter than the template. That message is dropped.
    """
    resolved = communicators.resolve(comm, "irecv")
    sender = arguments.one_message(arguments.peer(source, resolved, "irecv", "source"), x, "irecv")
    known, traced = envelope.split({"source": sender, "tag": arguments.tag(tag, "irecv", "tag", (MPI.ANY_TAG,))})
    return _start(irecv_p, Receiving(resolved, **known), x, arguments.template, traced)


class Isend(Start[Sending], Send):
    """The adjoint is `irecv`."""

    has_result = False

    def back(self, params: Sending, traced: Arrays) -> tuple[Start[Any], Common, Arrays]:
        known, traced = back_of_send(params, traced)
        return irecv_p, Receiving(params.comm, **known, derivative=COTANGENT), traced


isend_p = Isend("isend")


def isend(x: Any, dest: int, *, tag: int = 0, comm: MPI.Comm | None = None) -> Any:
    """Start to send a message (MPI_Isend).

    Args:
      x, dest, tag, comm: as in `send`. `x` is copied.

    Returns:
      A `Request`: `wait(request)` gives None, once the message has left this rank.

    Raises:
      As `send`.
    """
    resolved = communicators.resolve(comm, "isend")
    known, traced = envelope.split(
        {"dest": arguments.peer(dest, resolved, "isend", "dest"), "tag": arguments.tag(tag, "isend", "tag")}
    )
    return _start(isend_p, Sending(resolved, **known), x, arguments.array, traced)
