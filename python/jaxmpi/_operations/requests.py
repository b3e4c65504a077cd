"""Requests: what starts an operation, and what waits for it (csrc/core/requests.h).

A request is an array of two numbers, by which the core knows it. To what differentiates it is an array like any other:
its tangent is the request of the tangent's operation, its cotangent that of the cotangent's. So the transpose of a wait
starts the adjoint operation, the transpose of a start waits for it, and derivatives overlap as the function does. Zeros
in the place of a request, where there is no tangent, are a request of nothing.

A rank that only waits inside of what is differentiated has a request without tangent: that of a constant.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxmpi._jax import internals
from jaxmpi._jax.dependence import batched, zero_cotangent
from jaxmpi._mpi import tags
from jaxmpi._mpi.communicators import Communicator
from jaxmpi._mpi.library import DATATYPES
from jaxmpi._operations.common import Arrays, common, typed
from jaxmpi._primitive import arguments, keys
from jaxmpi._primitive.effect import REQUEST, Unsupported
from jaxmpi._primitive.lowering import P
from jaxmpi._primitive.operation import Operation
from jaxmpi._primitive.params import COTANGENT, TANGENT, Common, Waiting

(WIDTH,), _NUMBERS = REQUEST
NOTHING = np.zeros(WIDTH, np.int32)
"""The request of nothing, as a constant. Its numbers are whole, so it has no tangent: that would be a request."""


class Starting(Operation[P]):
    """What starts an operation. Its result is a request: an array of two numbers, for each array of a batch."""

    starts = True

    def results(self, avals: Arrays, params: P) -> list[Any]:
        return [typed((*params.batch, WIDTH), _NUMBERS)]

    def of_batch(self, axis: Any, params: P) -> P:
        if axis.size == 0:
            raise Unsupported(f"{self.shown}: a batch of nothing cannot be started, since no request would be left.")
        return dataclasses.replace(params, batch=(axis.size, *params.batch))

    result_is_stored = False
    """The adjoint communicates nothing where it starts."""

    def transpose_all(self, cotangents: Arrays, operands: Arrays, params: P) -> list[Any]:
        """Raise where it is seen while tracing that nothing waits for the request. A rank might wait for another one
        before it comes to the wait of the transpose, which sees the rest."""
        if type(cotangents[0]) is internals.ad.Zero and not self.result_is_stored:
            raise ValueError(
                f"{self.shown}: it is started in a function that is differentiated, and not waited for there: "
                "gradients would be wrong. Wait for each request inside of that function."
            )
        return super().transpose_all(cotangents, operands, params)


class Start(Starting[P]):
    """Starts an operation on one array, which `wait` waits for."""

    has_result = True
    """Waiting for it gives an array."""
    batch_axis = 0
    """The position of the batch axis in the array."""

    def batch_at(self, params: P) -> tuple[int, int]:
        return self.batch_axis, 0

    def static_attributes(self, avals: Arrays, params: P) -> dict[str, Any]:
        if not avals:
            return {}
        last = avals[-1]
        return {"count": int(np.prod(last.shape)), "dtype": DATATYPES[np.dtype(last.dtype).name].code}

    def order(self, leaf: Any, ends: Arrays) -> list[Any]:
        """Return the operands: the array, and the ranks and tags that are known at run time."""
        return [leaf, *ends]

    def begin(self, params: P, batch: tuple[int, ...], leaf: Any, ends: Arrays = ()) -> Any:
        """Return the request."""
        return self.apply(dataclasses.replace(params, batch=batch), *self.order(leaf, ends))[0]

    def started(self, params: P, x: Any) -> "Started":
        return Started(self, dataclasses.replace(params, batch=()), tuple(x.shape), np.dtype(x.dtype))

    def back(self, params: P, ends: Arrays) -> tuple["Start[Any]", Common, Arrays]:
        """Return the adjoint, its parameters, and what of its ranks and tags is known at run time, as of this
        operation."""
        raise NotImplementedError

    def cotangent(self, cotangent: Any, params: P, batch_of: Common) -> Any:
        """Return what the adjoint is started with, of the cotangent of the result."""
        return cotangent

    def transpose(self, cotangents: Arrays, operands: Arrays, params: P) -> list[Any]:
        """Wait for the adjoint, which the transpose of the wait has started.

        There is no such request if what was started is never waited for in what is differentiated. Other ranks
        communicate with it all the same: so that is an error of this rank, unless this rank alone holds the adjoint.
        """
        template, *ends = operands
        return [self.wait_for_adjoint(params, template, cotangents[0], ends)]

    def wait_for_adjoint(self, params: P, template: Any, request: Any, ends: Arrays) -> Any:
        adjoint, back, ends = self.back(params, ends)
        what = adjoint.started(back, template)
        waiting = Waiting(params.comm, (what,), needed=adjoint is not store_p, derivative=COTANGENT)
        made = wait_p.apply(waiting, request, *ends)
        return made[0] if made else None


@dataclass(frozen=True)
class Started:
    """What a request is of: the operation, its parameters, the shape and dtype of its array."""

    operation: Start[Any]
    params: Any
    shape: tuple[int, ...]
    dtype: Any

    @property
    def has_result(self) -> bool:
        return self.operation.has_result

    @property
    def traced_envelope(self) -> int:
        """How many ranks and tags it has that are known at run time only (`_primitive.envelope`)."""
        return sum(type(value) is int and value == tags.TRACED for value in self.params.values())

    def batched(self, size: int) -> "Started":
        at = self.operation.batch_axis
        return dataclasses.replace(self, shape=(*self.shape[:at], size, *self.shape[at:]))

    def start_adjoint(self, batch: tuple[int, ...], cotangent: Any, waiting: Waiting, ends: Arrays) -> Any:
        adjoint, back, ends = self.operation.back(self.params, ends)
        if self.has_result:
            cotangent = self.operation.cotangent(cotangent, self.params, waiting)
        else:
            cotangent = zero_cotangent(typed(self.shape, self.dtype))
        return adjoint.begin(back, batch, cotangent, ends)


class Store(Start[Common]):
    """A value of this rank, which is handed over by the wait. Its own adjoint."""

    result_is_stored = True

    def back(self, params: Common, ends: Arrays) -> tuple[Start[Any], Common, Arrays]:
        return store_p, Common(params.comm), []


store_p = Store("hold")


class Fence(Operation[Common]):
    """Lets what comes after this in the order of communication begin once the operands have been computed."""

    def results(self, avals: Arrays, params: Common) -> list[Any]:
        return []

    def transpose(self, cotangents: Arrays, operands: Arrays, params: Common) -> list[Any]:
        return []


fence_p = Fence("after")


def request_of_nothing(params: Any, results: int) -> int:
    """Return the attribute `zero` (csrc/core/ops.def): what zeros in the place of a request are. `results`: a bit for
    each request that has a result."""
    if params.needed:
        return -1
    return 0 if params.derivative is None else 1 + results


class Wait(Operation[Waiting]):
    """Waits for any number of requests: operands are these, and then the ranks and tags of all that are known at run
    time. It is linear in the requests."""

    variadic = True
    waits = True

    def results(self, avals: Arrays, params: Waiting) -> list[Any]:
        return [typed(what.shape, what.dtype) for what in params.started if what.has_result]

    def templates(self, params: Waiting) -> int:
        return sum(what.traced_envelope for what in params.started)

    def static_attributes(self, avals: Arrays, params: Waiting) -> dict[str, Any]:
        results = sum(2 << i for i, what in enumerate(params.started) if what.has_result)
        return {"zero": request_of_nothing(params, results)}

    def divide(self, params: Waiting, operands: Arrays) -> tuple[list[Any], list[list[Any]]]:
        """Return the requests, and the ends of each that are known at run time."""
        rest = iter(operands[len(params.started) :])
        return list(operands[: len(params.started)]), [
            [next(rest) for _ in range(w.traced_envelope)] for w in params.started
        ]

    def jvp(self, primals: Arrays, tangents: Arrays, params: Waiting) -> tuple[list[Any], list[Any]]:
        """Return tangents are those of the requests that have one, which have been started where it is taken."""
        params = params.in_derivative()
        results = self.bind(*primals, call=params)
        requests, ends = self.divide(params, primals)
        which = [
            i
            for i, (t, what) in enumerate(zip(tangents[: len(requests)], params.started, strict=True))
            if type(t) is not internals.ad.Zero and internals.inexact(what)
        ]
        given = [*(tangents[i] for i in which), *(end for i in which for end in ends[i])]
        chosen = Waiting(params.comm, tuple(params.started[i] for i in which), derivative=TANGENT)
        made = iter(self.bind(*given, call=chosen) if which else [])
        of_results = [i for i, what in enumerate(params.started) if what.has_result]
        return results, [
            next(made) if i in which else internals.zero_tangent(y) for i, y in zip(of_results, results, strict=True)
        ]

    def transpose(self, cotangents: Arrays, operands: Arrays, params: Waiting) -> list[Any]:
        """Start the adjoints from the last to the first, as separate waits are transposed: so do other ranks."""
        given, begun = list(cotangents), []
        requests, ends = self.divide(params, operands)
        for what, request, its in zip(params.started[::-1], requests[::-1], ends[::-1], strict=True):
            cotangent = given.pop() if what.has_result else None
            begun.append(what.start_adjoint(request.shape[:-1], cotangent, params, its))
        return [*begun[::-1], *[None] * (len(operands) - len(requests))]

    def batch(self, axis: Any, operands: Arrays, axes: Arrays, params: Waiting) -> tuple[list[Any], list[Any]]:
        count = len(params.started)
        requests, ends, axes, at_ends = operands[:count], operands[count:], axes[:count], axes[count:]
        requests = [x if at is None else batched(x, at, axis.size, 0) for x, at in zip(requests, axes, strict=True)]
        # Ranks and tags are the same for all: with others nothing would have been started.
        ends = [
            x if at is None else jax.lax.index_in_dim(x, 0, at, keepdims=False)
            for x, at in zip(ends, at_ends, strict=True)
        ]
        mapped = tuple(
            what if at is None else what.batched(axis.size) for what, at in zip(params.started, axes, strict=True)
        )
        results = self.bind(*requests, *ends, call=dataclasses.replace(params, started=mapped))
        return results, [
            None if at is None else what.operation.batch_axis
            for what, at in zip(mapped, axes, strict=True)
            if what.has_result
        ]


wait_p = Wait("wait")


# --- requests as users see them --------------------------------------------------------------------------------------


class Awaited:
    """What the arrays of a request mean: equal for requests that are waited for alike."""

    def __init__(
        self,
        comm: Communicator,
        pending: tuple[Started, ...],
        structure: Any = None,
        types: tuple[Any, ...] = (),
        fields: Any = None,
    ) -> None:
        self.comm, self.pending, self.fields = comm, pending, fields
        self.structure = structure  # of the result; None: there is none
        self._types = types  # of the result's leaves, by which words become keys again
        self._key = (comm, pending, structure, types, fields)

    @property
    def name(self) -> str:
        return self.pending[0].operation.core_name if self.pending else "nothing"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        """Return the name in JAX's errors about pytrees that differ, as of the branches of a cond."""
        given = [fact for part in self.pending[:1] for fact in part.params.facts()]
        return f"jaxmpi request: {', '.join([self.name, *given])}"

    def requests(self, arrays: Arrays) -> Arrays:
        """Return the arrays that are the numbers of requests."""
        return arrays[: len(self.pending)]

    def finish(self, arrays: Arrays) -> list[Any] | None:
        """Wait for what no other request is waited for with. None: `wait_p` waits for it."""
        return None

    def result(self, values: Arrays) -> Any:
        """Return what `wait` gives, of the arrays that have come."""
        if self.structure is None:
            return None
        leaves = [keys.like(y, x) for y, x in zip(values, self._types, strict=True)]
        return jax.tree.unflatten(self.structure, leaves)


class Request:
    """An operation that has been started and is to be waited for, once, by `wait` or `waitall`.

    A pytree of arrays: it may be an argument or a result of a jitted function, the carry of a loop, or the result of a
    branch. What is in it has no meaning to a program. `jaxmpi.isend` and the other functions whose names begin with i
    make it, and `jaxmpi.Grid.start`.
    """

    __slots__ = ("_arrays", "_of")

    def __init__(self, arrays: Arrays, of: Awaited) -> None:
        self._arrays, self._of = tuple(arrays), of

    def __repr__(self) -> str:
        return f"Request({self._of.name})"


jax.tree_util.register_pytree_node(
    Request, lambda request: (request._arrays, request._of), lambda of, arrays: Request(arrays, of)
)
arguments.never_an_array(Request, "wait for it first, and pass what jaxmpi.wait(request) gives.")


def wait(request: Any, *, after: Any = None) -> Any:
    """Wait until an operation that has been started is done (MPI_Wait).

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
    """Wait for several requests (MPI_Waitall).

    Args:
      requests: a pytree of requests, such as a list.
      after: an array, or a pytree of such: computed before the wait begins, as in `wait`.

    Returns:
      In the place of each request its result. With `after` a pair `(results, after)`.

    Raises:
      As `wait`.
    """
    flat, structure = jax.tree.flatten(requests, is_leaf=lambda x: isinstance(x, Request))
    return _wait_for(flat, after, lambda results: jax.tree.unflatten(structure, results), "waitall")


def _wait_for(requests: Arrays, after: Any, unflatten: Callable[[list[Any]], Any], operation: str) -> Any:
    for request in requests:
        _check(request, operation)
    if requests and after is not None:
        _compute_first(requests[0]._of.comm, after)
    result = unflatten(_wait_for_all(requests))
    return result if after is None else (result, after)


def _compute_first(comm: Communicator, values: Any) -> None:
    """Let what comes after this in the order of communication begin once the values have been computed."""
    if arrays := [keys.words(x) for x in jax.tree.leaves(values) if isinstance(x, jax.Array)]:
        fence_p.apply(common(comm), *arrays)


def _check(request: Any, operation: str) -> None:
    if not isinstance(request, Request):
        several = "; several are waited for by waitall" if isinstance(request, list | tuple) else ""
        raise TypeError(
            f"{operation}: a Request is needed, as isend, irecv, iallreduce and Grid.start make it, got "
            f"{type(request).__name__}{several}."
        )
    for x in request._of.requests(request._arrays):
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
    # Of each communicator: which request, its part, the array and the ends of that.
    groups: dict[Any, list[tuple[int, Started, Any, Arrays]]] = {}
    for i, request in enumerate(requests):
        of = request._of
        begun, ends = request._arrays[: len(of.pending)], request._arrays[len(of.pending) :]
        if of.pending:
            groups.setdefault(of.comm, []).extend((i, *one, ends) for one in zip(of.pending, begun, strict=True))
    values: list[list[Any]] = [[] for _ in requests]
    for comm, group in groups.items():
        for first in range(0, len(group), _MOST):
            some = group[first : first + _MOST]
            operands = [*(begun for _, _, begun, _ in some), *(end for _, _, _, ends in some for end in ends)]
            made = iter(wait_p.apply(Waiting(comm, tuple(part for _, part, _, _ in some)), *operands))
            for i, part, _, _ in some:
                if part.has_result:
                    values[i].append(next(made))
    for i, request in enumerate(requests):
        if (finished := request._of.finish(request._arrays)) is not None:
            values[i] = finished
    return [request._of.result(its) for request, its in zip(requests, values, strict=True)]
