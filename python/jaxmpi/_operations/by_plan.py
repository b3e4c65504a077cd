"""Operations by a plan: any number of arrays of any dtypes in one call, with a result for each.

The derivative is a derivative of the arrays that have one.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxmpi._jax import internals
from jaxmpi._jax.dependence import batched
from jaxmpi._mpi.plans import Plan
from jaxmpi._operations.common import MOST_ARRAYS, Arrays, is_opaque, typed
from jaxmpi._operations.composed import Composed
from jaxmpi._primitive import keys, lowering
from jaxmpi._primitive.effect import Unsupported
from jaxmpi._primitive.operation import Operation
from jaxmpi._primitive.params import COTANGENT, TANGENT, Planned


def of_words(params: Planned, arrays: Arrays) -> tuple[Planned, list[Any]]:
    """Return the parameters and the operands with the words of keys in the place of keys."""
    more = map(keys.axes, arrays)
    per_array = tuple(params.pattern.behind(place, n) for place, n in zip(params.per_array, more, strict=True))
    return dataclasses.replace(params, per_array=per_array), list(map(keys.words, arrays))


def plan(avals: Arrays, params: Planned) -> Plan:
    types = tuple(typed(x.shape, x.dtype) for x in avals)
    return params.pattern.plan(params.comm.rank, types, params.per_array, params.adjoint)


class ByPlan(Operation[Planned]):
    variadic = True
    nondifferentiable_on_all_ranks = True

    def results(self, avals: Arrays, params: Planned) -> Sequence[Any]:
        return params.pattern.results(avals, params.per_array, params.adjoint)

    def aliases(self, operands: int, params: Planned) -> bool:
        return params.pattern.aliases

    def static_attributes(self, avals: Arrays, params: Planned) -> dict[str, Any]:
        return {"plan": plan(avals, params)}

    def composed(self, avals: Arrays, params: Planned) -> Composed:
        return Composed(plan(avals, params))

    def why_not_differentiable(self, params: Planned) -> str:
        return params.pattern.why_not_differentiable

    def apply_to_all(self, params: Planned, arrays: Arrays) -> list[Any]:
        """Apply the operation to the arrays; more than once for very many."""
        if keys.among(arrays):
            types = lowering.types(self, arrays, params)
            words = self.apply_to_all(*of_words(params, arrays))
            return [keys.like(y, of_array.dtype) for y, of_array in zip(words, types, strict=True)]
        results: list[Any] = []
        for first in range(0, len(arrays), MOST_ARRAYS):
            chosen = slice(first, first + MOST_ARRAYS)
            results += self.apply(dataclasses.replace(params, per_array=params.per_array[chosen]), *arrays[chosen])
        return results

    def batch(self, axis: Any, operands: Arrays, axes: Arrays, params: Planned) -> tuple[list[Any], list[Any]]:
        """Map some of the arrays: a batch is one more axis of each array that has one."""
        result_at = params.pattern.batch(params.adjoint)[1]
        operands = self.batch_fields(axis, operands, axes, params)
        return self.bind(*operands, call=params), [None if at is None else result_at for at in axes]

    def batch_fields(self, axis: Any, operands: Arrays, axes: Arrays, params: Planned) -> list[Any]:
        place, _ = params.pattern.batch(params.adjoint)
        return [x if at is None else batched(x, at, axis.size, place) for x, at in zip(operands, axes, strict=True)]

    def of_some(self, params: Planned, which: Sequence[int], arrays: Arrays, derivative: str, adjoint: bool) -> Planned:
        """Return the parameters of the linear part of the operation, for some of the arrays."""
        for i in which:
            if adjoint and is_opaque(arrays[i]):
                raise Unsupported(
                    f"{self.shown} cannot be transposed: its transpose adds, and {arrays[i].dtype} cannot be added; "
                    "convert to another dtype first, such as float32."
                )
        per_array = params.pattern.linear(tuple(params.per_array[i] for i in which))
        return Planned(params.comm, params.pattern, per_array, adjoint, derivative=derivative)

    def tangent(self, primals: Arrays, tangents: Arrays, results: Arrays, params: Planned) -> list[Any]:
        which = [i for i, t in enumerate(tangents) if t is not None]
        return self.of_chosen(tangents, which, self.of_some(params, which, tangents, TANGENT, params.adjoint))

    def transpose(self, cotangents: Arrays, operands: Arrays, params: Planned) -> list[Any]:
        which = internals.inexact_among(operands)
        back = self.of_some(params, which, cotangents, COTANGENT, not params.adjoint)
        return self.of_chosen(cotangents, which, back)

    def of_chosen(self, arrays: Arrays, which: Sequence[int], params: Planned, *more: Any) -> list[Any]:
        """Apply the operation to some of the arrays, and to `more`. Return None in the place of the other arrays."""
        at = dict(zip(which, self.bind(*(arrays[i] for i in which), *more, call=params), strict=True))
        return [at.get(i) for i in range(len(arrays))]
