"""How JAX transforms an operation: batching, tangents and cotangents.

Tangents and cotangents are communicated by operations as well. That works only if all ranks take part, also a rank on
which the operand does not depend on what is differentiated (a constant template above all), or on which nothing depends
on the result; JAX leaves such operations out of derivatives. So inside a differentiated function every operation on
floating-point arrays is differentiated: an operand without tangent gets zeros as a tangent, and the effect keeps
operations whose results are not used.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from jaxmpi._jax import internals
from jaxmpi._jax.dependence import batched, dependent_zeros, zero_cotangent
from jaxmpi._mpi import communicators
from jaxmpi._primitive import effect
from jaxmpi._primitive.effect import EFFECT, Unsupported
from jaxmpi._primitive.lowering import Lowered, P


class Transformed(Lowered[P]):
    """A primitive with the rules by which JAX transforms it."""

    variadic = False
    """It takes any number of arrays."""
    starts = False
    """It starts something that is waited for: its result is a request, an array of two numbers for each array of a
    batch."""
    waits = False
    """Operands are requests, whose tangents are such as well: it is linear in them, and they are never linked."""

    def __init__(self, name: str) -> None:
        super().__init__(name)

        def evaluate(*avals: Any, call: P) -> Any:
            return [internals.ShapedArray(tuple(x.shape), x.dtype) for x in self.results(avals, call)], {EFFECT}

        def batch(axis: Any, operands: Sequence[Any], axes: Sequence[Any], *, call: P) -> Any:
            # Operands that are not mapped are communicated once. In derivatives this does not occur: they are linked.
            if any(at is not None for at in axes):
                return self.batch(axis, operands, axes, call)
            results = self.bind(*operands, call=call)
            return results, [None] * len(results)

        def jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: P) -> Any:
            effect.check()  # even if the trace was not told of the operation
            return self.jvp(primals, tangents, call)

        def transpose(cotangents: Sequence[Any], *operands: Any, call: P) -> Any:
            effect.check()
            return self.transpose_all(cotangents, operands, call)

        internals.define_primitive(self, evaluate, True, self.execute)
        internals.batching.fancy_primitive_batchers[self] = batch
        internals.ad.primitive_jvps[self] = jvp
        if type(self).transpose is not Transformed.transpose:
            internals.ad.primitive_transposes[self] = transpose

    def execute(self, *operands: Any, call: P) -> list[Any]:
        """Executes the operation outside of any trace."""
        raise NotImplementedError

    # --- what an operation says of itself ---

    def batch_at(self, params: P) -> tuple[int, int]:
        """The position of the batch axis in mapped operands, and then in the results."""
        return 0, 0

    def why_not_differentiable(self, params: P) -> str:
        """Why no derivative can be taken; empty if one can."""
        return ""

    nondifferentiable_on_all_ranks = False
    """All ranks refuse a derivative alike, and none if the operands have no tangents: the results then are constants,
    as those of integers are."""

    def tangent(self, primals: Sequence[Any], tangents: Sequence[Any], results: Sequence[Any], params: P) -> list[Any]:
        """The tangents of the results. Operands without tangent have None. By default the operation is linear in what
        MPI reads."""
        operands = [x if t is None else t for x, t in zip(primals, tangents, strict=True)]
        return self.bind(*operands, call=params.linear())

    some_differentiable = False
    """There is a `tangent_of_some`, for operands and templates of which only some have a differentiable dtype."""

    def tangent_of_some(self, primals: Sequence[Any], tangents: Sequence[Any], params: P) -> Any:
        """The tangent of the first result, None if that is zero."""
        raise NotImplementedError

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any], params: P) -> list[Any]:
        """The cotangents of the operands in which it is linear, of which only shape and dtype are given."""
        raise NotImplementedError

    # --- what follows from it ---

    def is_constant(self, params: P) -> bool:
        """Whether results are constants for a derivative where the operands have no tangents."""
        return self.nondifferentiable_on_all_ranks and self.why_not_differentiable(params) != ""

    def dependent_operands(self, operands: Iterable[Any]) -> list[int]:
        """The operands that are linked, so that the operation is differentiated: of one that takes several arrays all
        of them, so that each is mapped on all ranks alike."""
        possible = [] if self.waits else internals.inexact_among(operands)
        return possible if self.variadic else possible[:1]

    def bind_with_trace(self, trace: Any, args: Any, *more: Any) -> Any:
        if type(trace).__name__ == "JetTrace" and any(map(internals.inexact, args)):
            raise Unsupported(
                f"jaxmpi.{self.shown}: jax.experimental.jet has no rule for communication. Nested jax.jvp gives the "
                "same derivatives, on all ranks alike."
            )
        if effect.cannot_be_traced.get():
            raise effect.unsupported("a function with jax.custom_jvp or jax.custom_vjp that looks at values")
        if type(trace) is internals.DynamicJaxprTrace:
            communicators.refuse_in_child_of_fork()
            self.find_site(args, more[-1]["call"])
        return super().bind_with_trace(trace, args, *more)

    def batch(self, axis: Any, operands: Sequence[Any], axes: Sequence[Any], params: P) -> tuple[list[Any], list[Any]]:
        """The results, and the positions of their batch axes, of operands some of which are mapped."""
        at, result_at = self.batch_at(params)
        roles = self.roles(len(operands), params)
        hosts = [mapped is not None for mapped, role in zip(axes, roles, strict=True) if role == "host"]
        if any(hosts) and set(roles) != {"host"}:
            raise Unsupported(
                f"{self.shown}: jax.vmap maps an operand that says how to communicate, and that must be the same for "
                "all of what is mapped. Pass it unmapped (in_axes=None); in a branch of a jax.lax.cond or switch, the "
                "predicate or index as well."
            )
        operands = [
            x if role == "host" else batched(x, axis_of_x, axis.size, at)
            for x, axis_of_x, role in zip(operands, axes, roles, strict=True)
        ]
        results = self.bind(*operands, call=self.of_batch(axis, params))
        return results, [result_at] * len(results)

    def of_batch(self, axis: Any, params: P) -> P:
        """The parameters for a batch."""
        return params

    def _linear_in(self, roles: Sequence[str], operands: Sequence[Any]) -> list[int]:
        """The indices of the operands with tangents: those that MPI reads, or if there are none the templates."""
        role = "mpi" if "mpi" in roles else "template"
        return [i for i in internals.inexact_among(operands) if roles[i] == role]

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any], params: P) -> tuple[list[Any], list[Any]]:
        """The results and their tangents."""
        roles = self.roles(len(primals), params)
        inexact = [internals.inexact(x) for x, role in zip(primals, roles, strict=True) if role != "host"]
        some = self.some_differentiable and any(inexact) and not all(inexact)
        linear = [] if some else self._linear_in(roles, primals)
        if linear and (why_not := self.why_not_differentiable(params)):
            raise Unsupported(f"{self.shown} cannot be differentiated: {why_not}")
        params = params.in_derivative()
        results = self.bind(*primals, call=params)
        if not linear:
            first = self.tangent_of_some(primals, tangents, params) if some else None
            return results, [zero_unless(first if i == 0 else None, y) for i, y in enumerate(results)]
        known = [t for t in tangents if type(t) is not internals.ad.Zero]
        given: list[Any] = [None] * len(primals)
        for i in linear:  # a template without tangent gets zeros, too
            zero = type(tangents[i]) is internals.ad.Zero
            given[i] = dependent_zeros(known, tangents[i].aval) if zero else tangents[i]
        of_results = self.tangent(primals, given, results, params)
        return results, [
            zero_unless(t if internals.inexact(y) else None, y) for t, y in zip(of_results, results, strict=True)
        ]

    def transpose_all(self, cotangents: Sequence[Any], operands: Sequence[Any], params: P) -> list[Any]:
        """The cotangents of all operands, None of those in which the operation is not linear."""
        linear = [internals.ad.is_undefined_primal(x) for x in operands]
        cotangents = [zero_cotangent(ct.aval) if type(ct) is internals.ad.Zero else ct for ct in cotangents]
        known = [
            jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) if is_linear else x
            for x, is_linear in zip(operands, linear, strict=True)
        ]
        made = self.transpose(cotangents, known, params)
        if self.variadic:
            return [ct if is_linear else None for ct, is_linear in zip(made, linear, strict=True)]
        given = iter(made)
        return [next(given, None) if is_linear else None for is_linear in linear]


def zero_unless(tangent: Any, result: Any) -> Any:
    return internals.zero_tangent(result) if tangent is None else tangent
