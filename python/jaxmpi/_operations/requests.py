"""Requests: operations that start something, and operations that wait for it (csrc/requests/table.h).

A request is an array of two numbers, by which the core knows it. Differentiation treats it as any other array: the
tangent of a request is the request of the tangent's operation, and the cotangent is the request of the cotangent's. So
the transpose of a wait starts the adjoint operation, the transpose of a start waits for it, and derivatives overlap as
the function does. Zeros in the place of a request, where there is no tangent, are a request of nothing.

A rank that only waits inside of a differentiated function has a request without tangent: a constant.
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
from jaxmpi._primitive.operation import OfValues, Operation
from jaxmpi._primitive.params import COTANGENT, TANGENT, Common, Waiting

(WIDTH,), _NUMBERS = REQUEST
NOTHING = np.zeros(WIDTH, np.int32)
"""The request of nothing, as a constant. The numbers are integers, so it has no tangent: that would be a request."""


class Starting(Operation[P]):
    """An operation that starts another. Its result is a request: an array of two numbers, for each array of a batch."""

    starts = True

    def results(self, avals: Arrays, params: P) -> list[Any]:
        return [typed((*params.batch, WIDTH), _NUMBERS)]

    def of_batch(self, axis: Any, params: P) -> P:
        if axis.size == 0:
            raise Unsupported(f"{self.shown}: a batch of nothing cannot be started: no request would be left.")
        return dataclasses.replace(params, batch=(axis.size, *params.batch))

    result_is_stored = False
    """Whether the result is stored: the adjoint communicates nothing where it starts."""

    def transpose_all(self, cotangents: Arrays, operands: Arrays, params: P) -> list[Any]:
        """Raise if tracing shows that nothing waits for the request. A rank might wait for another one before it comes
        to the wait of the transpose, which sees all other cases."""
        if type(cotangents[0]) is internals.ad.Zero and not self.result_is_stored:
            raise ValueError(
                f"{self.shown}: it is started in a function that is differentiated, and not waited for there: "
                "gradients would be wrong. Wait for each request inside of that function."
            )
        return super().transpose_all(cotangents, operands, params)


class Start(Starting[P]):
    """Starts an operation on one array, for which `wait` waits."""

    has_result = True
    """Whether the wait gives an array."""
    batch_axis = 0
    """The position of the batch axis in the array."""

    def batch_at(self, params: P) -> tuple[int, int]:
        return self.batch_axis, 0

    def static_attributes(self, avals: Arrays, params: P) -> dict[str, Any]:
        if not avals:
            return {}
        last = avals[-1]
        return {"count": int(np.prod(last.shape)), "dtype": DATATYPES[np.dtype(last.dtype).name].code}

    def order(self, leaf: Any, traced: Arrays) -> list[Any]:
        """Return the operands: the array, and the ranks and tags that are known at run time."""
        return [leaf, *traced]

    def begin(self, params: P, batch: tuple[int, ...], leaf: Any, traced: Arrays = ()) -> Any:
        return self.apply(dataclasses.replace(params, batch=batch), *self.order(leaf, traced))[0]

    def started(self, params: P, x: Any) -> "Started":
        return Started(self, dataclasses.replace(params, batch=()), tuple(x.shape), np.dtype(x.dtype))

    def back(self, params: P, traced: Arrays) -> tuple["Start[Any]", Common, Arrays]:
        """Return the adjoint, the parameters of it, and the ranks and tags that are known at run time, in the order
        of this operation."""
        raise NotImplementedError

    def cotangent(self, cotangent: Any, params: P, batch_of: Common) -> Any:
        """Return the array with which the adjoint starts, from the cotangent of the result."""
        return cotangent

    def transpose(self, cotangents: Arrays, operands: Arrays, params: P) -> list[Any]:
        """Wait for the adjoint, which the transpose of the wait has started.

        There is no request if nothing in the differentiated function waits for the operation. Other ranks communicate
        with it all the same: so that is an error of this rank, unless this rank alone stores the adjoint.
        """
        template, *traced = operands
        return [self.wait_for_adjoint(params, template, cotangents[0], traced)]

    def wait_for_adjoint(self, params: P, template: Any, request: Any, traced: Arrays) -> Any:
        adjoint, back, traced = self.back(params, traced)
        pending = adjoint.started(back, template)
        waiting = Waiting(params.comm, (pending,), needed=adjoint is not store_p, derivative=COTANGENT)
        results = wait_p.apply(waiting, request, *traced)
        return results[0] if results else None


@dataclass(frozen=True)
class Started:
    """The operation that a request stands for: parameters, and the shape and dtype of the array."""

    operation: Start[Any]
    params: Any
    shape: tuple[int, ...]
    dtype: Any

    @property
    def has_result(self) -> bool:
        return self.operation.has_result

    @property
    def traced_envelope(self) -> int:
        """The number of ranks and tags that are known at run time only (`_primitive.envelope`)."""
        return sum(type(value) is int and value == tags.TRACED for value in self.params.values())

    def batched(self, size: int) -> "Started":
        at = self.operation.batch_axis
        return dataclasses.replace(self, shape=(*self.shape[:at], size, *self.shape[at:]))

    def start_adjoint(self, batch: tuple[int, ...], cotangent: Any, waiting: Waiting, traced: Arrays) -> Any:
        adjoint, back, traced = self.operation.back(self.params, traced)
        if self.has_result:
            cotangent = self.operation.cotangent(cotangent, self.params, waiting)
        else:
            cotangent = zero_cotangent(typed(self.shape, self.dtype))
        return adjoint.begin(back, batch, cotangent, traced)


class Store(Start[Common]):
    """A value of this rank, which the wait returns. It is self-adjoint."""

    result_is_stored = True

    def back(self, params: Common, traced: Arrays) -> tuple[Start[Any], Common, Arrays]:
        return store_p, Common(params.comm), []


store_p = Store("hold")


fence_p: Operation[Common] = OfValues("after")
"""A fence: later communication starts only after the operands have been computed."""


def request_of_nothing(params: Any, results: int) -> int:
    """Return the attribute `zero` (csrc/core/ops.def): how the core treats zeros in the place of a request. `results`:
    a bit for each request that has a result."""
    if params.needed:
        return -1
    return 0 if params.derivative is None else 1 + results


class Wait(Operation[Waiting]):
    """Waits for any number of requests. The operands are the requests, and then the ranks and tags that are known at
    run time. It is linear in the requests."""

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
        """Return the requests, and for each the ranks and tags that are known at run time."""
        rest = iter(operands[len(params.started) :])
        return list(operands[: len(params.started)]), [
            [next(rest) for _ in range(w.traced_envelope)] for w in params.started
        ]

    def jvp(self, primals: Arrays, tangents: Arrays, params: Waiting) -> tuple[list[Any], list[Any]]:
        """Return the results and their tangents. The tangents of requests have been started where they were taken."""
        params = params.in_derivative()
        results = self.bind(*primals, call=params)
        requests, traced = self.divide(params, primals)
        which = [
            i
            for i, (t, what) in enumerate(zip(tangents[: len(requests)], params.started, strict=True))
            if type(t) is not internals.ad.Zero and internals.inexact(what)
        ]
        operands = [*(tangents[i] for i in which), *(operand for i in which for operand in traced[i])]
        chosen = Waiting(params.comm, tuple(params.started[i] for i in which), derivative=TANGENT)
        tangents_of_results = iter(self.bind(*operands, call=chosen) if which else [])
        of_results = [i for i, what in enumerate(params.started) if what.has_result]
        return results, [
            next(tangents_of_results) if i in which else internals.zero_tangent(y)
            for i, y in zip(of_results, results, strict=True)
        ]

    def transpose(self, cotangents: Arrays, operands: Arrays, params: Waiting) -> list[Any]:
        """Start the adjoints from the last to the first, as separate waits are transposed: so do other ranks."""
        remaining, begun = list(cotangents), []
        requests, traced = self.divide(params, operands)
        for what, request, of_request in zip(params.started[::-1], requests[::-1], traced[::-1], strict=True):
            cotangent = remaining.pop() if what.has_result else None
            begun.append(what.start_adjoint(request.shape[:-1], cotangent, params, of_request))
        return [*begun[::-1], *[None] * (len(operands) - len(requests))]

    def batch(self, axis: Any, operands: Arrays, axes: Arrays, params: Waiting) -> tuple[list[Any], list[Any]]:
        count = len(params.started)
        requests, traced, axes, at_traced = operands[:count], operands[count:], axes[:count], axes[count:]
        requests = [x if at is None else batched(x, at, axis.size, 0) for x, at in zip(requests, axes, strict=True)]
        # Ranks and tags are the same in all of a batch: otherwise nothing would have been started.
        traced = [
            x if at is None else jax.lax.index_in_dim(x, 0, at, keepdims=False)
            for x, at in zip(traced, at_traced, strict=True)
        ]
        mapped = tuple(
            what if at is None else what.batched(axis.size) for what, at in zip(params.started, axes, strict=True)
        )
        results = self.bind(*requests, *traced, call=dataclasses.replace(params, started=mapped))
        return results, [
            None if at is None else what.operation.batch_axis
            for what, at in zip(mapped, axes, strict=True)
            if what.has_result
        ]


wait_p = Wait("wait")


# --- requests as users see them --------------------------------------------------------------------------------------


@dataclass(unsafe_hash=True)
class Awaited:
    """A description of the arrays of a request. It is equal for requests for which the wait is alike."""

    comm: Communicator
    pending: tuple[Started, ...]
    structure: Any = None
    """The structure of the result; None: there is no result."""
    types: tuple[Any, ...] = ()
    """The types of the result's leaves; words become keys again by them."""
    fields: Any = None

    @property
    def name(self) -> str:
        return self.pending[0].operation.core_name if self.pending else "nothing"

    def __repr__(self) -> str:
        """Return the name in JAX's errors about pytrees that differ, as of the branches of a cond."""
        facts = [fact for started in self.pending[:1] for fact in started.params.facts()]
        return f"jaxmpi request: {', '.join([self.name, *facts])}"

    def requests(self, arrays: Arrays) -> Arrays:
        """Return the arrays that are requests."""
        return arrays[: len(self.pending)]

    def finish(self, arrays: Arrays) -> list[Any] | None:
        """Wait for the request alone, and return the result; None: `wait_p` waits for it together with others."""
        return None

    def result(self, values: Arrays) -> Any:
        """Return the result of `wait`, from the arrays that have arrived."""
        if self.structure is None:
            return None
        leaves = [keys.like(y, x) for y, x in zip(values, self.types, strict=True)]
        return jax.tree.unflatten(self.structure, leaves)


class Request:
    """An operation that has been started; `wait` or `waitall` waits for it, once.

    A pytree of arrays: it may be an argument or a result of a jitted function, the carry of a loop, or the result of a
    branch. Its content has no meaning to a program. `jaxmpi.isend` and the other functions whose names begin with i
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
    """Wait until a started operation is done (MPI_Wait).

    XLA may move a computation between a start and a wait before the start or behind the wait, where nothing overlaps.
    So `after` names the arrays to compute first, while the message is under way.

    Args:
      request: a `Request`. Each is waited for once, on the rank that started it, in any order. In reverse mode, the
        order is that of the starts where MPI cannot distinguish operations (messages with one rank and tag, for
        example).
      after: an array, or a pytree of arrays: computed before the wait begins.

    Returns:
      The result of the blocking operation; None for `isend` and `ibarrier`. With `after` a
      pair `(result, after)`, with `after` as it was passed.

    Raises:
      TypeError: not a request. ValueError: a request that has left a `jax.vmap` in which it was started. Both while
        tracing.
      jax.errors.JaxRuntimeError: at run time: the program has waited for it already; a message does not fit, as in
        `recv`; the request is of reverse mode and out of order; an error of MPI. Also for several requests in the place
        of one.
    """
    return _wait_for([request], after, lambda results: results[0], "wait")


def waitall(requests: Any, *, after: Any = None) -> Any:
    """Wait for several requests (MPI_Waitall).

    Args:
      requests: a pytree of requests, a list for example.
      after: an array, or a pytree of arrays: computed before the wait begins, as in `wait`.

    Returns:
      The pytree with a result in the place of each request. With `after` a pair `(results, after)`.

    Raises:
      As `wait`.
    """
    flat, structure = jax.tree.flatten(requests, is_leaf=lambda x: isinstance(x, Request))
    return _wait_for(flat, after, lambda results: jax.tree.unflatten(structure, results), "waitall")


def _wait_for(requests: Arrays, after: Any, unflatten: Callable[[list[Any]], Any], operation: str) -> Any:
    for request in requests:
        _check(request, operation)
    arrays = [keys.words(x) for x in jax.tree.leaves(after) if isinstance(x, jax.Array)]
    if requests and arrays:
        fence_p.apply(common(requests[0]._of.comm), *arrays)
    result = unflatten(_wait_for_all(requests))
    return result if after is None else (result, after)


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
"""The most requests for which one operation waits."""


def _wait_for_all(requests: Sequence[Request]) -> list[Any]:
    # For each communicator: the position of the request, the operation, the array, and the traced ranks and tags.
    groups: dict[Any, list[tuple[int, Started, Any, Arrays]]] = {}
    for i, request in enumerate(requests):
        of = request._of
        begun, traced = request._arrays[: len(of.pending)], request._arrays[len(of.pending) :]
        if of.pending:
            groups.setdefault(of.comm, []).extend((i, *one, traced) for one in zip(of.pending, begun, strict=True))
    values: list[list[Any]] = [[] for _ in requests]
    for comm, group in groups.items():
        for first in range(0, len(group), _MOST):
            some = group[first : first + _MOST]
            operands = [*(begun for _, _, begun, _ in some), *(end for _, _, _, traced in some for end in traced)]
            results = iter(wait_p.apply(Waiting(comm, tuple(pending for _, pending, _, _ in some)), *operands))
            for i, pending, _, _ in some:
                if pending.has_result:
                    values[i].append(next(results))
    for i, request in enumerate(requests):
        if (finished := request._of.finish(request._arrays)) is not None:
            values[i] = finished
    return [request._of.result(arrays) for request, arrays in zip(requests, values, strict=True)]
