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
from jaxmpi._primitive import effect, lowering
from jaxmpi._primitive.effect import EFFECT, Unsupported


def define(op: Any, transposed: bool) -> None:
    """Register the rules of an operation with JAX. `transposed`: it has a transpose."""

    def evaluate(*avals: Any, call: Any) -> Any:
        return [internals.ShapedArray(tuple(x.shape), x.dtype) for x in op.results(avals, call)], {EFFECT}

    def batch(axis: Any, operands: Sequence[Any], axes: Sequence[Any], *, call: Any) -> Any:
        # Operands that are not mapped are communicated once. This does not occur in derivatives, where operands
        # depend on all differentiated inputs.
        if any(at is not None for at in axes):
            return op.batch(axis, operands, axes, call)
        results = op.bind(*operands, call=call)
        return results, [None] * len(results)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: Any) -> Any:
        effect.check()  # even if the trace does not know the operation
        return op.jvp(primals, tangents, call)

    def transpose(cotangents: Sequence[Any], *operands: Any, call: Any) -> Any:
        effect.check()
        return op.transpose_all(cotangents, operands, call)

    op.def_effectful_abstract_eval(evaluate)
    op.def_impl(op.execute)
    internals.batching.fancy_primitive_batchers[op] = batch
    internals.ad.primitive_jvps[op] = jvp
    if transposed:
        internals.ad.primitive_transposes[op] = transpose


def is_constant(op: Any, params: Any) -> bool:
    """Return whether results are constants for a derivative where the operands have no tangents."""
    return op.nondifferentiable_on_all_ranks and op.why_not_differentiable(params) != ""


def dependent_operands(op: Any, operands: Iterable[Any]) -> list[int]:
    """Return the operands that must depend on the differentiated inputs, so that the operation is differentiated:
    one, or all of a variadic operation, so that each is mapped on all ranks alike."""
    possible = [] if op.waits else internals.inexact_among(operands)
    return possible if op.variadic else possible[:1]


def batch(op: Any, axis: Any, operands: Sequence[Any], axes: Sequence[Any], params: Any) -> tuple[list[Any], list[Any]]:
    """Return the results, and the positions of their batch axes, where some operands are mapped."""
    at, result_at = op.batch_at(params)
    roles = lowering.roles_of(op, len(operands), params)
    hosts = [mapped is not None for mapped, role in zip(axes, roles, strict=True) if role == "host"]
    if any(hosts) and set(roles) != {"host"}:
        raise Unsupported(
            f"{op.shown}: jax.vmap maps an operand that says how to communicate, and that must be the same for "
            "all of what is mapped. Pass it unmapped (in_axes=None); in a branch of a jax.lax.cond or switch, the "
            "predicate or index as well."
        )
    operands = [
        x if role == "host" else batched(x, axis_of_x, axis.size, at)
        for x, axis_of_x, role in zip(operands, axes, roles, strict=True)
    ]
    results = op.bind(*operands, call=op.of_batch(axis, params))
    return results, [result_at] * len(results)


def jvp(op: Any, primals: Sequence[Any], tangents: Sequence[Any], params: Any) -> tuple[list[Any], list[Any]]:
    """Return the results and their tangents."""
    roles = lowering.roles_of(op, len(primals), params)
    inexact = [internals.inexact(x) for x, role in zip(primals, roles, strict=True) if role != "host"]
    some = op.some_differentiable and any(inexact) and not all(inexact)
    role = "mpi" if "mpi" in roles else "template"  # of the operands with tangents
    linear = [] if some else [i for i in internals.inexact_among(primals) if roles[i] == role]
    if linear and (why_not := op.why_not_differentiable(params)):
        raise Unsupported(f"{op.shown} cannot be differentiated: {why_not}")
    params = params.in_derivative()
    results = op.bind(*primals, call=params)
    if not linear:
        first = op.tangent_of_some(primals, tangents, params) if some else None
        return results, [zero_unless(first if i == 0 else None, y) for i, y in enumerate(results)]
    known = [t for t in tangents if type(t) is not internals.ad.Zero]
    of_operands: list[Any] = [None] * len(primals)
    for i in linear:  # a template without tangent gets zeros, too
        zero = type(tangents[i]) is internals.ad.Zero
        of_operands[i] = dependent_zeros(known, tangents[i].aval) if zero else tangents[i]
    of_results = op.tangent(primals, of_operands, results, params)
    return results, [
        zero_unless(t if internals.inexact(y) else None, y) for t, y in zip(of_results, results, strict=True)
    ]


def transpose_all(op: Any, cotangents: Sequence[Any], operands: Sequence[Any], params: Any) -> list[Any]:
    """Return the cotangents of all operands; None for each operand in which the operation is not linear."""
    linear = [internals.ad.is_undefined_primal(x) for x in operands]
    cotangents = [zero_cotangent(ct.aval) if type(ct) is internals.ad.Zero else ct for ct in cotangents]
    known = [
        jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) if is_linear else x
        for x, is_linear in zip(operands, linear, strict=True)
    ]
    of_linear = op.transpose(cotangents, known, params)
    if op.variadic:
        return [ct if is_linear else None for ct, is_linear in zip(of_linear, linear, strict=True)]
    remaining = iter(of_linear)
    return [next(remaining, None) if is_linear else None for is_linear in linear]


def zero_unless(tangent: Any, result: Any) -> Any:
    return internals.zero_tangent(result) if tangent is None else tangent
