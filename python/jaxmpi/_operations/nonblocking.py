"""The public functions that start an operation, and those that wait for it."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from mpi4py import MPI

from jaxmpi._mpi import communicators
from jaxmpi._operations.request_table import WIDTH, WITHOUT_RESULT, Started, started
from jaxmpi._operations.table import CHECK, LINE
from jaxmpi._primitive import arguments, envelope, keys
from jaxmpi._primitive.primitive import Params, bind, compare_keys, of_words


class _Of:
    """What the arrays of a request mean: equal for requests that are waited for alike."""

    def __init__(
        self,
        comm: Any,
        parts: tuple[Started, ...],
        structure: Any = None,
        types: tuple[Any, ...] = (),
        fields: Params | None = None,
    ) -> None:
        self.comm, self.parts, self.fields = comm, parts, fields
        self.structure = structure  # of the result; None: there is none
        self._types = types  # of the result's leaves, by which words become keys again
        self._key = (comm, parts, structure, types, tuple(sorted((fields or {}).items())))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Of) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        """In JAX's errors about pytrees that differ, as of the branches of a cond."""
        given = [f"{name}={value}" for part in self.parts[:1] for name, value in part.params if name != LINE]
        return f"jaxmpi request: {', '.join([self.name, *given])}"

    def result(self, values: Sequence[Any]) -> Any:
        """What `wait` gives, of the arrays that have come."""
        if self.structure is None:
            return None
        leaves = [keys.like(y, x) for y, x in zip(values, self._types, strict=True)]
        return jax.tree.unflatten(self.structure, leaves)

    @property
    def name(self) -> str:
        return "Grid.start" if self.fields is not None else self.parts[0].operation if self.parts else "nothing"


class Request:
    """An operation that has been started and is to be waited for, once, by `wait` or `waitall`.

    A pytree of arrays: it may be an argument or a result of a jitted function, the carry of a loop, or the result of a
    branch. What is in it has no meaning to a program. `jaxmpi.isend` and the other functions whose names begin with i
    make it, and `jaxmpi.Grid.start`.
    """

    __slots__ = ("_arrays", "_of")

    def __init__(self, arrays: Sequence[Any], of: _Of) -> None:
        self._arrays, self._of = tuple(arrays), of

    def __repr__(self) -> str:
        return f"Request({self._of.name})"


jax.tree_util.register_pytree_node(
    Request, lambda request: (request._arrays, request._of), lambda of, arrays: Request(arrays, of)
)
arguments.never_an_array(Request, "wait for it first, and pass what jaxmpi.wait(request) gives.")


def _start(operation: str, params: Params, x: Any, check: Callable[..., Any], ends: Sequence[Any] = ()) -> Request:
    leaves, _, structure = arguments.leaves(x, operation, "x", check)
    compare_keys(operation, params, leaves)
    words = list(map(keys.words, leaves))
    begun = [_begin(operation, params, x, ends) for x in words]
    parts = tuple(started(operation, params, x) for x in words)
    of_result = () if operation in WITHOUT_RESULT else (structure, keys.types(leaves))
    return Request([*begun, *ends], _Of(params["comm"], parts, *of_result))


def _begin(operation: str, params: Params, leaf: Any, ends: Sequence[Any]) -> Any:
    operands = (*ends, leaf) if operation == "irecv" else (leaf, *ends)
    return bind(operation, {**params, "batch": ()}, *operands)


def iallreduce(x: Any, op: MPI.Op, *, comm: MPI.Comm | None = None) -> Any:
    """Starts to reduce the arrays of all ranks; all ranks get the result from `wait` (MPI_Iallreduce).

    Args:
      x: array of any shape, or a pytree of such; the same shape and dtype on all ranks. It is copied: nothing that
        happens to `x` afterwards matters.
      op: a predefined operation that is defined for the dtype, or a user-made `MPI.Op`.
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.

    Returns:
      A `Request`: `wait(request)` gives what `allreduce` would. It can be differentiated like that; derivatives
      of PROD, MAX and MIN are communicated where the operation starts.

    Raises:
      TypeError, ValueError: as `allreduce`; while tracing, before anything is sent; other ranks then wait.
    """
    resolved = communicators.resolve(comm, "iallreduce")
    reduction = arguments.reduction(op, "iallreduce")
    params: Params = {"comm": resolved, "op": reduction}
    if CHECK:
        params[LINE] = arguments.with_calling_line(
            "the cotangent of an iallreduce differs from that of rank 0, though what is computed from its result must "
            "be the same on all ranks: gradients would be wrong. Pass what the ranks use differently, such as the "
            "parameters of a model, through jaxmpi.replicate first. The iallreduce is at"
        )
    check = lambda leaf, *names: arguments.reducible(leaf, reduction, *names)  # noqa: E731
    return _start("iallreduce", params, x, check)


def ialltoall(x: Any, *, comm: MPI.Comm | None = None) -> Any:
    """Starts to send entry `i` of the first axis to rank i (MPI_Ialltoall).

    Args:
      x: array of shape `(size, ...)`, or a pytree of such; the same shape and dtype on all ranks. It is copied.
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.

    Returns:
      A `Request`: `wait(request)` gives what `alltoall` would.

    Raises:
      ValueError, TypeError: as `alltoall`; while tracing, before anything is sent; other ranks then wait.
    """
    resolved = communicators.resolve(comm, "ialltoall")
    check = lambda leaf, *names: arguments.stacked(leaf, resolved.size, *names)  # noqa: E731
    return _start("ialltoall", {"comm": resolved}, x, check)


def ibarrier(*, comm: MPI.Comm | None = None) -> Any:
    """Tells that this rank has reached a barrier; `wait` waits until all ranks have (MPI_Ibarrier).

    Args:
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.

    Returns:
      A `Request`: `wait(request)` gives None.
    """
    resolved = communicators.resolve(comm, "ibarrier")
    begun = bind("ibarrier", {"comm": resolved, "batch": ()})
    part = Started("ibarrier", (), (), np.dtype(np.int32))
    return Request([begun], _Of(resolved, (part,)))


def ibcast(x: Any, root: int, *, comm: MPI.Comm | None = None) -> Any:
    """Starts to send root's array to all ranks (MPI_Ibcast).

    Args:
      x: on root the data, which is copied; on other ranks a template of the same shape and dtype, whose values are not
        read. Or pytrees of such. A template may be a `jax.ShapeDtypeStruct`.
      root: rank that sends, static.
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.

    Returns:
      A `Request`: `wait(request)` gives root's array on all ranks.

    Raises:
      ValueError, TypeError: as `bcast`; while tracing, before anything is sent; other ranks then wait.
    """
    resolved = communicators.resolve(comm, "ibcast")
    root = arguments.rank(root, resolved, "ibcast", "root")
    check = arguments.array if resolved.rank == root else arguments.template
    return _start("ibcast", {"comm": resolved, "root": root}, x, check)


def irecv(
    x: Any,
    source: int = MPI.ANY_SOURCE,
    *,
    tag: int = MPI.ANY_TAG,
    comm: MPI.Comm | None = None,
) -> Any:
    """Starts to receive a message (MPI_Irecv).

    Messages are received in the order in which the receives are started, those of `recv` among them. Needs
    MPI_THREAD_MULTIPLE, which mpi4py asks for.

    Args:
      x: a template: its shape and dtype are those of the message, its values are not read. A pytree receives one
        message per leaf, in order. May be (or hold) `jax.ShapeDtypeStruct`.
      source: rank that sends; or `MPI.ANY_SOURCE`; or `MPI.PROC_NULL`: nothing is received and the result is zero. A
        pytree of several leaves needs a definite source. An integer, which may be traced.
      tag: tag of the message, or `MPI.ANY_TAG`, which does not match tags of the upper half of MPI's tags. An integer,
        which may be traced.
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.

    Returns:
      A `Request`: `wait(request)` gives the message, with the shape and dtype of the template.

    Raises:
      ValueError, TypeError: while tracing, before anything is received.
      jax.errors.JaxRuntimeError: at run time: of a traced rank or tag that is none, here; in `wait`, if the message is
        longer or shorter than the template, which is then dropped.
    """
    resolved = communicators.resolve(comm, "irecv")
    given = arguments.one_message(arguments.source(source, resolved, "irecv"), x, "irecv")
    params, ends = envelope.split({"source": given, "tag": arguments.tag(tag, "irecv", "tag", (MPI.ANY_TAG,))})
    return _start("irecv", {"comm": resolved, **params}, x, arguments.template, ends)


def isend(x: Any, dest: int, *, tag: int = 0, comm: MPI.Comm | None = None) -> Any:
    """Starts to send a message (MPI_Isend).

    Args:
      x: array of any shape, or a pytree of such, which is one message per leaf, in order. It is copied.
      dest: rank that receives; or `MPI.PROC_NULL`: nothing is sent. An integer, which may be traced.
      tag: tag of the message. An integer, which may be traced.
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.

    Returns:
      A `Request`: `wait(request)` gives None, once the message has left this rank.

    Raises:
      ValueError, TypeError: while tracing, before anything is sent; the receiver then waits.
      jax.errors.JaxRuntimeError: at run time, if a traced `dest` is no rank, or a traced `tag` no tag; nothing is sent.
    """
    resolved = communicators.resolve(comm, "isend")
    params, ends = envelope.split(
        {"dest": arguments.dest(dest, resolved, "isend"), "tag": arguments.tag(tag, "isend", "tag")}
    )
    return _start("isend", {"comm": resolved, **params}, x, arguments.array, ends)


def wait(request: Any, *, after: Any = None) -> Any:
    """Waits until an operation that has been started is done (MPI_Wait).

    XLA may compute what is between a start and a wait before the start or behind the wait, where nothing overlaps. So
    `after` names what is to be computed first, while the message is under way.

    Args:
      request: a `Request`. Each is waited for once, on the rank that started it, in any order; in reverse mode, in the
        order of the starts where MPI cannot tell operations apart (messages with one rank and tag, for example).
      after: an array, or a pytree of such: computed before the wait begins.

    Returns:
      What the blocking operation gives; None of `isend` and `ibarrier`. With `after` a
      pair `(result, after)`, with `after` as it was passed.

    Raises:
      TypeError: not a request. ValueError: a request that has left a `jax.vmap` in which it was started. Both while
        tracing.
      jax.errors.JaxRuntimeError: at run time: it has been waited for already; a message does not fit, as in `recv`; it
        is of reverse mode and out of order; several requests in the place of one; an error of MPI.
    """
    return _wait_for([request], after, lambda results: results[0], "wait")


def waitall(requests: Any, *, after: Any = None) -> Any:
    """Waits for several requests (MPI_Waitall).

    Args:
      requests: a pytree of requests, such as a list.
      after: an array, or a pytree of such: computed before the wait begins, as in `wait`.

    Returns:
      In the place of each request its result. With `after` a pair `(results, after)`.

    Raises:
      As `wait`.
    """
    flat, structure = jax.tree.flatten(requests, is_leaf=lambda x: isinstance(x, Request))
    unflatten = lambda results: jax.tree.unflatten(structure, results)  # noqa: E731
    return _wait_for(flat, after, unflatten, "waitall")


def _wait_for(requests: Sequence[Any], after: Any, unflatten: Callable[..., Any], operation: str) -> Any:
    for request in requests:
        _check(request, operation)
    if requests and after is not None:
        _compute_first(requests[0]._of.comm, after)
    result = unflatten(_wait_for_all(requests))
    return result if after is None else (result, after)


def _compute_first(comm: Any, values: Any) -> None:
    """Lets what comes after this in the order of communication begin once the values have been computed."""
    if arrays := [keys.words(x) for x in jax.tree.leaves(values) if isinstance(x, jax.Array)]:
        bind("after", {"comm": comm}, *arrays)


def _check(request: Any, operation: str) -> None:
    if not isinstance(request, Request):
        several = "; several are waited for by waitall" if isinstance(request, list | tuple) else ""
        raise TypeError(
            f"{operation}: a Request is needed, as isend, irecv, iallreduce and Grid.start make it, got "
            f"{type(request).__name__}{several}."
        )
    of = request._of
    for x in request._arrays[-1:] if of.fields is not None else request._arrays[: len(of.parts)]:
        shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
        if shape == (WIDTH,) and dtype == np.float32:
            continue
        if dtype == np.float32 and shape and shape[-1] == WIDTH:
            raise ValueError(
                f"{operation}: this request is one of several: it has left the jax.vmap or jax.lax.scan in which it "
                "was started. Wait inside, or map the wait as well."
            )
        raise TypeError(f"{operation}: this is not what a start has returned: an array of {dtype} and shape {shape}.")


_MOST = 60
"""Requests that one operation waits for."""


def _wait_for_all(requests: Sequence[Request]) -> list[Any]:
    results: list[Any] = [None] * len(requests)
    # Of each communicator: which request, its part, the array and the ends of that.
    groups: dict[Any, list[tuple[int, Started, Any, Sequence[Any]]]] = {}
    for i, request in enumerate(requests):
        of = request._of
        if of.fields is None:
            begun, ends = request._arrays[: len(of.parts)], request._arrays[len(of.parts) :]
            groups.setdefault(of.comm, []).extend((i, *one, ends) for one in zip(of.parts, begun, strict=True))
    values: list[list[Any]] = [[] for _ in requests]
    for comm, group in groups.items():
        for first in range(0, len(group), _MOST):
            some = group[first : first + _MOST]
            params = {"comm": comm, "started": tuple(part for _, part, _, _ in some)}
            operands = [*(begun for _, _, begun, _ in some), *(end for _, _, _, ends in some for end in ends)]
            made = bind("wait", params, *operands)
            given = iter(made if isinstance(made, list) else [made])
            for i, part, _, _ in some:
                if part.has_result:
                    values[i].append(next(given))
    for i, request in enumerate(requests):
        of = request._of
        if of.fields is not None:
            *arrays, begun = request._arrays
            made = bind("exchange_finish", {"comm": of.comm, **of.fields}, *arrays, begun)
            values[i] = made if isinstance(made, list) else [made]
        results[i] = of.result(values[i])
    return results


def start_exchange(comm: Any, fields: Params, arrays: Sequence[Any], structure: Any) -> Request:
    """The exchange of a grid, with the parameters of `exchange`."""
    compare_keys("exchange", {"comm": comm}, arrays)
    types = keys.types(arrays)
    fields, arrays = of_words(fields, arrays)
    begun = bind("exchange_start", {"comm": comm, **fields, "batch": ()}, *arrays)
    return Request([*arrays, begun], _Of(comm, (), structure, types, fields))


def is_of_grid(request: Any) -> bool:
    return isinstance(request, Request) and request._of.fields is not None
