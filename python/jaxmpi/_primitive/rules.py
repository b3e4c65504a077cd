"""How JAX transforms an operation: batching, tangents and cotangents.

Operations communicate tangents and cotangents, too. That works only if all ranks take part. On some rank the operand
may not depend on the differentiated inputs (a constant template above all), or nothing may depend on the result. JAX
leaves these operations out of derivatives. So inside a differentiated function every operation on floating-point arrays
is differentiated: an operand without tangent gets zeros as a tangent, and the effect keeps operations whose results are
not used.
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
    """Whether it takes any number of arrays."""
    starts = False
    """Whether it starts something that a wait completes: its result is a request, an array of two numbers for each
    array of a batch."""
    waits = False
    """Whether the operands are requests. Their tangents are requests, too: it is linear in them. They are not made to
    depend on the differentiated inputs."""

    def __init__(self, name: str) -> None:
        super().__init__(name)

        def evaluate(*avals: Any, call: P) -> Any:
            return [internals.ShapedArray(tuple(x.shape), x.dtype) for x in self.results(avals, call)], {EFFECT}

        def batch(axis: Any, operands: Sequence[Any], axes: Sequence[Any], *, call: P) -> Any:
            # Operands that are not mapped are communicated once. This does not occur in derivatives, where operands
            # depend on all differentiated inputs.
            if any(at is not None for at in axes):
                return self.batch(axis, operands, axes, call)
            results = self.bind(*operands, call=call)
            return results, [None] * len(results)

        def jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: P) -> Any:
            effect.check()  # even if the trace does not know the operation
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
        """Execute the operation outside of any trace."""
        raise NotImplementedError

    # --- what an operation declares ---

    def batch_at(self, params: P) -> tuple[int, int]:
        """Return the position of the batch axis in mapped operands, and then in the results."""
        return 0, 0

    def why_not_differentiable(self, params: P) -> str:
        """Return why no derivative can be taken; empty if one can be taken."""
        return ""

    nondifferentiable_on_all_ranks = False
    """Whether all ranks alike refuse a derivative, and none refuses where the operands have no tangents: then the
    results are constants, as results of integers are."""

    def tangent(self, primals: Sequence[Any], tangents: Sequence[Any], results: Sequence[Any], params: P) -> list[Any]:
        """Return the tangents of the results. Operands without tangent have None. By default the operation is linear in
        the operands that MPI reads."""
        operands = [x if t is None else t for x, t in zip(primals, tangents, strict=True)]
        return self.bind(*operands, call=params.linear())

    some_differentiable = False
    """Whether it has a `tangent_of_some`, for operands and templates of which only some have a differentiable dtype."""

    def tangent_of_some(self, primals: Sequence[Any], tangents: Sequence[Any], params: P) -> Any:
        """Return the tangent of the first result; None if it is zero."""
        raise NotImplementedError

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any], params: P) -> list[Any]:
        """Return the cotangents of the operands in which it is linear; `operands` has only their shape and dtype."""
        raise NotImplementedError

    # --- what follows from the declarations ---

    def is_constant(self, params: P) -> bool:
        """Return whether results are constants for a derivative where the operands have no tangents."""
        return self.nondifferentiable_on_all_ranks and self.why_not_differentiable(params) != ""

    def dependent_operands(self, operands: Iterable[Any]) -> list[int]:
        """Return the operands that must depend on the differentiated inputs, so that the operation is differentiated:
        one, or all of a variadic operation, so that each is mapped on all ranks alike."""
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
        """Return the results, and the positions of their batch axes, where some operands are mapped."""
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
        """Return the parameters for a batch."""
        return params

    def _linear_in(self, roles: Sequence[str], operands: Sequence[Any]) -> list[int]:
        """Return the indices of the operands with tangents: operands that MPI reads, or else the templates."""
        role = "mpi" if "mpi" in roles else "template"
        return [i for i in internals.inexact_among(operands) if roles[i] == role]

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any], params: P) -> tuple[list[Any], list[Any]]:
        """Return the results and their tangents."""
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
        of_operands: list[Any] = [None] * len(primals)
        for i in linear:  # a template without tangent gets zeros, too
            zero = type(tangents[i]) is internals.ad.Zero
            of_operands[i] = dependent_zeros(known, tangents[i].aval) if zero else tangents[i]
        of_results = self.tangent(primals, of_operands, results, params)
        return results, [
            zero_unless(t if internals.inexact(y) else None, y) for t, y in zip(of_results, results, strict=True)
        ]

    def transpose_all(self, cotangents: Sequence[Any], operands: Sequence[Any], params: P) -> list[Any]:
        """Return the cotangents of all operands; None for each operand in which the operation is not linear."""
        linear = [internals.ad.is_undefined_primal(x) for x in operands]
        cotangents = [zero_cotangent(ct.aval) if type(ct) is internals.ad.Zero else ct for ct in cotangents]
        known = [
            jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) if is_linear else x
            for x, is_linear in zip(operands, linear, strict=True)
        ]
        of_linear = self.transpose(cotangents, known, params)
        if self.variadic:
            return [ct if is_linear else None for ct, is_linear in zip(of_linear, linear, strict=True)]
        remaining = iter(of_linear)
        return [next(remaining, None) if is_linear else None for is_linear in linear]


def zero_unless(tangent: Any, result: Any) -> Any:
    return internals.zero_tangent(result) if tangent is None else tangent
