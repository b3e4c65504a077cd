"""Exchanges by plans, of a grid's halos or of ghosts by index, in one call or in two.

An exchange is K u + B m. K u is what stays of the fields u; m = P u is what arrives from all ranks, with what a rank
copies from itself at walls. The start is P. The finish is linear in the fields and in the request, which stands for m.
The adjoint of the start is a finish of the adjoint exchange, and the other way round.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmpi._jax import internals
from jaxmpi._jax.dependence import batched, dependent_zeros, depends_on
from jaxmpi._operations.by_plan import ByPlan, of_words, plan
from jaxmpi._operations.common import MOST_ARRAYS, Arrays
from jaxmpi._operations.composed import Begun, Composed, Ended
from jaxmpi._operations.requests import NOTHING, Awaited, Request, Starting, request_of_nothing
from jaxmpi._primitive import keys
from jaxmpi._primitive.params import COTANGENT, TANGENT, Planned

exchange_p = ByPlan("exchange")
grid_accumulate_p = ByPlan("grid_accumulate")
redistribute_p = ByPlan("redistribute")
index_exchange_p = ByPlan("index_exchange")
index_accumulate_p = ByPlan("index_accumulate")


class ExchangeStart(Starting[Planned], ByPlan):
    """Sends what the neighbours need."""

    nondifferentiable_on_all_ranks = False  # the operation that waits for it may have tangents

    def composed(self, avals: Arrays, params: Planned) -> Composed:
        return Begun(plan(avals, params), *self.results(avals, params))

    def batch(self, axis: Any, operands: Arrays, axes: Arrays, params: Planned) -> tuple[list[Any], list[Any]]:
        operands = self.batch_fields(axis, operands, axes, params)
        return self.bind(*operands, call=self.of_batch(axis, params)), [0]

    def start(self, arrays: Arrays, which: Sequence[int], params: Planned, batch: tuple[int, ...]) -> Any:
        return self.apply(dataclasses.replace(params, batch=batch), *(arrays[i] for i in which))[0]

    def tangent(self, primals: Arrays, tangents: Arrays, results: Arrays, params: Planned) -> list[Any]:
        which = [i for i, t in enumerate(tangents) if t is not None]
        linear = self.of_some(params, which, tangents, TANGENT, params.adjoint)
        return [self.start(tangents, which, linear, params.batch)]

    def transpose(self, cotangents: Arrays, operands: Arrays, params: Planned) -> list[Any]:
        which = internals.inexact_among(operands)
        # The fields of the adjoint exchange begin as zeros.
        fields = params.pattern.results(operands, params.per_array, params.adjoint)
        zeros = [jnp.zeros(x.shape, x.dtype) for x in fields]
        back = self.of_some(params, which, zeros, COTANGENT, not params.adjoint)
        # `needed`: as in `requests.Start.transpose`
        return self.adjoint.finish(zeros, which, cotangents[0], dataclasses.replace(back, needed=True))


class ExchangeFinish(ByPlan):
    """Fills the halos of the fields with the data of the request, its last operand."""

    waits = True
    nondifferentiable_on_all_ranks = False

    def results(self, avals: Arrays, params: Planned) -> Sequence[Any]:
        return params.pattern.results(avals[:-1], params.per_array, params.adjoint)

    def static_attributes(self, avals: Arrays, params: Planned) -> dict[str, Any]:
        return {"plan": plan(avals[:-1], params), "zero": request_of_nothing(params, 0)}

    def composed(self, avals: Arrays, params: Planned) -> Composed:
        return Ended(plan(avals[:-1], params), avals[-1])

    def finish(self, arrays: Arrays, which: Sequence[int], request: Any, params: Planned) -> list[Any]:
        if not which:
            return [None] * len(arrays)
        if request is not NOTHING:  # whatever maps the request maps the fields, as where it was started
            arrays = [depends_on(x, [request]) if i in which else x for i, x in enumerate(arrays)]
        return self.of_chosen(arrays, which, params, request)

    def jvp(self, primals: Arrays, tangents: Arrays, params: Planned) -> tuple[list[Any], list[Any]]:
        params = params.in_derivative()
        results = self.bind(*primals, call=params)
        which = internals.inexact_among(primals[:-1])
        known = [t for t in tangents if type(t) is not internals.ad.Zero]
        if not which or not known:
            return results, [internals.zero_tangent(y) for y in results]
        of_fields = [dependent_zeros(known, t.aval) if type(t) is internals.ad.Zero else t for t in tangents[:-1]]
        request = NOTHING if type(tangents[-1]) is internals.ad.Zero else tangents[-1]
        linear = self.finish(of_fields, which, request, self.of_some(params, which, of_fields, TANGENT, params.adjoint))
        return results, [internals.zero_tangent(y) if t is None else t for t, y in zip(linear, results, strict=True)]

    def transpose(self, cotangents: Arrays, operands: Arrays, params: Planned) -> list[Any]:
        *fields, request = operands
        which = list(range(len(fields)))
        params = self.of_some(params, which, cotangents, COTANGENT, not params.adjoint)
        back: list[Any] = [None] * len(fields)
        begun = None
        if isinstance(request, jax.ShapeDtypeStruct):
            begun = self.adjoint.start(cotangents, which, params, request.shape[:-1])
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in fields):
            back = self.finish(cotangents, which, NOTHING, params)
        return [*back, begun]

    def batch(self, axis: Any, operands: Arrays, axes: Arrays, params: Planned) -> tuple[list[Any], list[Any]]:
        *fields, request = operands
        *at_fields, at = axes
        fields = self.batch_fields(axis, fields, at_fields, params)
        if at is not None:
            request = batched(request, at, axis.size, 0)
        result_at = params.pattern.batch(params.adjoint)[1]
        return self.bind(*fields, request, call=params), [None if x is None else result_at for x in at_fields]


exchange_start_p = ExchangeStart("exchange_start")
exchange_finish_p = ExchangeFinish("exchange_finish", exchange_start_p)
redistribute_start_p = ExchangeStart("redistribute_start")
redistribute_finish_p = ExchangeFinish("redistribute_finish", redistribute_start_p)
index_start_p = ExchangeStart("index_start")
index_finish_p = ExchangeFinish("index_finish", index_start_p)


class AwaitedExchange(Awaited):
    """A request of an exchange: its arrays are the fields, and the request itself. `fields` has the operation that
    started it, and the parameters."""

    @property
    def name(self) -> str:
        return self.fields[0].shown

    def requests(self, arrays: Arrays) -> Arrays:
        return arrays[-1:]

    def finish(self, arrays: Arrays) -> list[Any]:
        start, params = self.fields
        return start.adjoint.apply(params, *arrays)


def start_exchange(
    function: str, params: Planned, arrays: Arrays, structure: Any, start: ExchangeStart = exchange_start_p
) -> Request:
    """Start an exchange by a plan, with the parameters of the operation in one call, for a public function."""
    if len(arrays) > MOST_ARRAYS:
        raise ValueError(f"{function}: {len(arrays)} arrays; at most {MOST_ARRAYS} are exchanged by one start.")
    types = keys.types(arrays)
    params, arrays = of_words(params, arrays)
    begun = start.apply(params, *arrays)
    return Request([*arrays, *begun], AwaitedExchange(params.comm, (), structure, types, (start, params)))


def is_of_grid(request: Any) -> bool:
    of = request._of if isinstance(request, Request) else None
    return isinstance(of, AwaitedExchange) and of.fields[0] is exchange_start_p
