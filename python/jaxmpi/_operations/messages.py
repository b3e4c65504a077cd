"""Messages between two ranks.

Ranks and tags that are known at run time are one more operand, which the message of the cotangent needs as well.
"""

from typing import Any

import jax
import jax.numpy as jnp
from mpi4py import MPI

from jaxmpi._jax import internals
from jaxmpi._jax.dependence import dependent_zeros, zero_cotangent
from jaxmpi._mpi import communicators, tags
from jaxmpi._operations.common import Arrays, checked
from jaxmpi._primitive import arguments, envelope, pytrees
from jaxmpi._primitive.effect import Unsupported
from jaxmpi._primitive.operation import Operation
from jaxmpi._primitive.params import COTANGENT, TANGENT, Exchanging, Receiving, Sending, kept

_sending, _receiving, _exchanging = kept(Sending), kept(Receiving), kept(Exchanging)


def _refuse_source(params: Any, *names: str) -> str:
    if params.source == MPI.ANY_SOURCE:
        return "with source ANY_SOURCE the way back is unknown; name the source."
    return tags.why_not_differentiable(vars(params), *names)


def back_of_send(params: Any, traced: Arrays) -> tuple[dict[str, Any], list[Any]]:
    """Return rank and tag of the message that carries the cotangent of a message sent: as parameters, and as operands
    where they are known at run time."""
    there = envelope.join(params, traced, "dest", "tag")
    return envelope.split({"source": there["dest"], "tag": there["tag"]})


def back_of_recv(params: Any, traced: Arrays) -> tuple[dict[str, Any], list[Any]]:
    """Return rank and tag of the message that carries the cotangent of a message received."""
    there = envelope.join(params, traced, "source", "tag")
    tag = 0 if params.tag == MPI.ANY_TAG else there["tag"]  # ANY_TAG is only allowed with source PROC_NULL
    return envelope.split({"dest": there["source"], "tag": tag})


class Send(Operation[Sending]):
    """The adjoint is `recv`."""

    def results(self, avals: Arrays, params: Sending) -> list[Any]:
        return []

    def why_not_differentiable(self, params: Sending) -> str:
        return tags.why_not_differentiable(vars(params), "tag")

    def transpose(self, cotangents: Arrays, operands: Arrays, params: Sending) -> list[Any]:
        template, *traced = operands
        known, traced = back_of_send(params, traced)
        back = Receiving(params.comm, **known, leaf=params.leaf.reverse(), derivative=COTANGENT)
        return recv_p.apply(back, *traced, zero_cotangent(template))


send_p = Send("send")


def send(x: Any, dest: int, *, tag: int = 0, comm: MPI.Comm | None = None) -> None:
    """Send a message (MPI_Send).

    Args:
      x: array of any shape, or a pytree of arrays, which is one message per leaf, in order.
      dest: rank that receives; or `MPI.PROC_NULL`: nothing is sent. An integer, which may be traced.
      tag: tag of the message. An integer, which may be traced.
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.

    Raises:
      ValueError, TypeError: while tracing, before anything is sent; the receiver then waits.
      jax.errors.JaxRuntimeError: at run time, if a traced `dest` is no rank, or a traced `tag` no tag; nothing is sent.
    """
    resolved = communicators.resolve(comm, "send")
    known, traced = envelope.split(
        {"dest": arguments.peer(dest, resolved, "send", "dest"), "tag": arguments.tag(tag, "send", "tag")}
    )
    params = _sending(resolved, **known)
    if not traced and type(x) is internals.ConcreteArray:  # as below, but faster
        send_p.apply(params, arguments.array(x, "send", "x"))
        return
    leaves, _ = checked("send", x, arguments.array)
    send_p.apply_to_leaves(pytrees.of_each(params, [], leaves), [(leaf, *traced) for leaf in leaves])


class Recv(Operation[Receiving]):
    """The adjoint is `send`."""

    def templates(self, params: Receiving) -> int:
        return 1

    def why_not_differentiable(self, params: Receiving) -> str:
        if params.tag == MPI.ANY_TAG and params.source != MPI.PROC_NULL:
            return "with tag ANY_TAG the tag of the way back is unknown; name the tag, as the sender does."
        return _refuse_source(params, "tag")

    def transpose(self, cotangents: Arrays, operands: Arrays, params: Receiving) -> list[Any]:
        *traced, template = operands
        known, traced = back_of_recv(params, traced)
        back = Sending(params.comm, **known, leaf=params.leaf.reverse(), derivative=COTANGENT)
        send_p.apply(back, cotangents[0], *traced)
        return [dependent_zeros(cotangents, template)]


recv_p = Recv("recv")


def recv(
    x: Any,
    source: int = MPI.ANY_SOURCE,
    *,
    tag: int = MPI.ANY_TAG,
    comm: MPI.Comm | None = None,
    status: MPI.Status | None = None,
) -> Any:
    """Receive a message (MPI_Recv).

    Args:
      x: a template with the shape and dtype of the message; its values are not read. A pytree receives one
        message per leaf, in order. May be (or hold) `jax.ShapeDtypeStruct`. Under `vmap` a batch of messages is
        received if the template is batched (`x` itself is; `jnp.zeros_like(x)` is not).
      source: rank that sends; or `MPI.ANY_SOURCE`; or `MPI.PROC_NULL`: nothing is received and the result is zero. A
        pytree of several leaves needs a definite source. An integer, which may be traced.
      tag: tag of the message, or `MPI.ANY_TAG`. An integer, which may be traced.
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.
      status: filled when the message arrives; for a pytree it is the status of the last message. Inside `jit` it must
        not be read before the result is ready.

    Returns:
      The message, with the shape and dtype of the template.

    Raises:
      ValueError, TypeError: while tracing, before anything is received.
      jax.errors.JaxRuntimeError: at run time, if the message is longer than the template, or shorter and no `status`
      was passed (with one, the rest of the result is zero). Also, before anything is sent, if a traced rank or tag is
      invalid.
    """
    resolved = communicators.resolve(comm, "recv")
    sender = arguments.one_message(arguments.peer(source, resolved, "recv", "source"), x, "recv")
    known, traced = envelope.split({"source": sender, "tag": arguments.tag(tag, "recv", "tag", (MPI.ANY_TAG,))})
    written = arguments.status(status, "recv")
    params = _receiving(resolved, **known, status=written)
    if not traced and type(x) is internals.ConcreteArray:  # as below, but faster
        result = recv_p.apply(params, arguments.template(x, "recv", "x"))[0]
    else:
        leaves, structure = checked("recv", x, arguments.template)
        received = recv_p.apply_to_leaves(pytrees.of_each(params, leaves, []), [(*traced, leaf) for leaf in leaves])
        result = jax.tree.unflatten(structure, received)
    return _with_status(result, written, status)


class Sendrecv(Operation[Exchanging]):
    """The cotangent travels back: source and dest, and the tags, are exchanged.

    With recvtag ANY_TAG the cotangent is sent with the tag of the message sent, and any tag is accepted from that rank:
    messages between two ranks keep their order.
    """

    some_differentiable = True

    def templates(self, params: Exchanging) -> int:
        return 1

    def why_not_differentiable(self, params: Exchanging) -> str:
        return _refuse_source(params, "sendtag", "recvtag")

    def tangent_of_some(self, primals: Arrays, tangents: Arrays, params: Exchanging) -> Any:
        """Send, or receive, the tangent of the only message that has one."""
        ends = envelope.join(params, primals[1:-1], "dest", "recvtag", "sendtag", "source")
        if sends := internals.inexact(primals[0]):
            known, operands = envelope.split({"dest": ends["dest"], "tag": ends["sendtag"]})
            sending = Sending(params.comm, **known, derivative=TANGENT)
            why_not = send_p.why_not_differentiable(sending)
        else:
            known, operands = envelope.split({"source": ends["source"], "tag": ends["recvtag"]})
            receiving = Receiving(params.comm, **known, derivative=TANGENT)
            why_not = recv_p.why_not_differentiable(receiving)
        if why_not:
            raise Unsupported(f"sendrecv of two kinds of dtypes cannot be differentiated: {why_not}")
        if not sends:
            return recv_p.apply(receiving, *operands, tangents[-1])[0]
        send_p.apply(sending, tangents[0], *operands)
        return None

    def transpose(self, cotangents: Arrays, operands: Arrays, params: Exchanging) -> list[Any]:
        template, *traced, _ = operands
        there = envelope.join(params, traced, "dest", "recvtag", "sendtag", "source")
        any_tag = params.recvtag == MPI.ANY_TAG
        known, traced = envelope.split(
            {
                "source": there["dest"],
                "dest": there["source"],
                "sendtag": there["sendtag"] if any_tag else there["recvtag"],
                "recvtag": MPI.ANY_TAG if any_tag else there["sendtag"],
            }
        )
        back = Exchanging(params.comm, **known, leaf=params.leaf.reverse(), derivative=COTANGENT)
        return self.apply(back, cotangents[0], *traced, jnp.zeros(template.shape, template.dtype))


sendrecv_p = Sendrecv("sendrecv")


def sendrecv(
    sendbuf: Any,
    recvbuf: Any,
    source: int,
    dest: int,
    *,
    sendtag: int = 0,
    recvtag: int = MPI.ANY_TAG,
    comm: MPI.Comm | None = None,
    status: MPI.Status | None = None,
) -> Any:
    """Send one message and receive another, without deadlock (MPI_Sendrecv).

    Args:
      sendbuf, dest, sendtag: as `x`, `dest` and `tag` of `send`.
      recvbuf, source, recvtag: as `x`, `source` and `tag` of `recv`; a pytree has as many leaves as `sendbuf` has.
      comm, status: as in `recv`.

    Returns:
      The message received, with the structure, shape and dtype of `recvbuf`. It can be
      differentiated with respect to `sendbuf`: cotangents travel back, with source and dest, and the tags, exchanged.

    Raises:
      As `recv`.
    """
    resolved = communicators.resolve(comm, "sendrecv")
    values = {
        "source": arguments.peer(source, resolved, "sendrecv", "source"),
        "dest": arguments.peer(dest, resolved, "sendrecv", "dest"),
        "sendtag": arguments.tag(sendtag, "sendrecv", "sendtag"),
        "recvtag": arguments.tag(recvtag, "sendrecv", "recvtag", (MPI.ANY_TAG,)),
    }
    # Most messages are one array: no tree to flatten.
    alone = type(sendbuf) is type(recvbuf) is internals.ConcreteArray
    templates, structure = ([recvbuf], None) if alone else arguments.pytree(recvbuf, "sendrecv", "recvbuf")
    sent = [sendbuf] if alone else arguments.pytree(sendbuf, "sendrecv", "sendbuf")[0]
    sent = [arguments.array(leaf, "sendrecv", "sendbuf") for leaf in sent]
    templates = [arguments.template(leaf, "sendrecv", "recvbuf") for leaf in templates]
    if len(sent) != len(templates):
        raise ValueError(
            f"sendrecv: sendbuf has {len(sent)} arrays and recvbuf {len(templates)}: pass as many of one as of the "
            "other, in the order in which they travel."
        )
    values["source"] = arguments.one_message(values["source"], templates, "sendrecv")
    known, traced = envelope.split(values)
    written = arguments.status(status, "sendrecv")
    params = _exchanging(resolved, **known, status=written)
    if alone and not traced:
        result = sendrecv_p.apply(params, sent[0], templates[0])[0]
    else:
        operands = [(x, *traced, y) for x, y in zip(sent, templates, strict=True)]
        results = sendrecv_p.apply_to_leaves(pytrees.of_each(params, templates, sent), operands)
        result = results[0] if alone else jax.tree.unflatten(structure, results)
    return _with_status(result, written, status)


def _with_status(result: Any, written: arguments.Status | None, users: MPI.Status | None) -> Any:
    """Return the result. Outside of a trace, if the user passes a status, wait for the result and fill the status."""
    if written is not None and users is not None and written.mpi is not users:
        jax.block_until_ready(result)
        written.copy_to(users)
    return result
