"""Partial evaluation, in which JAX divides a computation into a known and an unknown part. No communication is dropped,
and none counts as known because its operands are known."""

import contextvars
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core
from jax._src.interpreters import partial_eval

from jaxmpi._derivatives import unreported
from jaxmpi._derivatives.custom_rules import rule_communicates
from jaxmpi._derivatives.rewrites import returning, with_results_of
from jaxmpi._jax import internals, jaxprs, primitives
from jaxmpi._jax.dependence import depends_on
from jaxmpi._jax.primitives import Literal
from jaxmpi._primitive import rules
from jaxmpi._primitive.effect import (
    CALLS,
    EFFECT,
    JaxParams,
    Unsupported,
    communicates,
    communicates_when_called,
    during,
    unsupported,
)
from jaxmpi._primitive.operation import is_ours


def keep_equation(
    own: Callable[..., Any], trace: Any, tracers: Any, results: Any, primitive: Any, params: Any, *more: Any
) -> Any:
    """Keep an equation that communicates, even if no result of it is used."""
    equation = own(trace, tracers, results, primitive, params, *more)
    if EFFECT in equation.effects:
        trace.effect_handles.append(partial_eval.EffectHandle(list(tracers), equation))
    return equation


def keep_checkpoint(own: Callable[..., Any], *args: Any) -> Any:
    """Keep a checkpoint with the effect: JAX drops a checkpoint without operands and used results despite effects."""
    inputs, kept = own(*args)
    equation = args[-1]  # before it: which results are used and, since JAX 0.12, which operands are live
    if kept is None and EFFECT in equation.effects:
        return [True] * len(equation.invars), equation
    return inputs, kept


def eliminate_dead_code(own: Callable[..., Any], jaxpr: Any, used: Any, *args: Any, **kwargs: Any) -> Any:
    """Eliminate dead code, but nothing that communicates, nor an equation of which only a derivative communicates: on
    another rank its results may be used, and all ranks must differentiate it again."""
    kept, inputs = own(jaxpr, used, *args, **kwargs)
    if _count(jaxpr) != _count(kept):
        raise unsupported("a primitive that JAX leaves out where nothing depends on it")
    results = {x for equation in kept.eqns for x in equation.outvars}
    unused = [i for i, e in enumerate(jaxpr.eqns) if EFFECT not in e.effects and results.isdisjoint(e.outvars)]
    if which := [i for i in unused if rule_communicates(core.eval_trace, jaxpr, i)]:
        wider, more = with_results_of(jaxpr, which)
        used = [used] * len(jaxpr.outvars) if isinstance(used, bool) else [*used]
        kept, inputs = own(wider, used + [True] * more, *args, **kwargs)
        kept = returning(kept, kept.outvars[: len(kept.outvars) - more])
    return kept, inputs


def _count(jaxpr: Any) -> int:
    return sum(EFFECT in equation.effects for equation in jaxpr.eqns)


_HOISTING, _TRANSPOSITION = "hoisting", "transposition"
"""The purpose of a partial evaluation, where it is not a derivative: loop-invariant computations are taken out of a
loop; a linear function is about to be transposed, and the arguments are the unknown values."""

_purpose: contextvars.ContextVar[str | None] = contextvars.ContextVar("purpose", default=None)

_PURPOSE = "jaxmpi_purpose"
"""Attribute of a trace with a purpose: the purpose, and for a transposition the unknown arguments. These refer to the
trace, so nothing else keeps them."""


def trace_to_jaxpr(own: Callable[..., Any], function: Any, values: Sequence[Any], instantiate: Any = False) -> Any:
    """Guess the purpose for which JAX calls this function. `_contract` tests the guess."""
    transposing = instantiate is True and not any(value.is_known() for value in values)
    with during(_purpose, _TRANSPOSITION if transposing else _HOISTING):
        return own(function, values, instantiate)


def round_real_residuals(own: Callable[..., Any], jaxpr: Any, count: int) -> Any:
    """Round the real residuals of a checkpoint, which are among its last `count` results, to their own precision. JAX
    would round complex numbers as well, for which it has no operation."""
    split = len(jaxpr.outvars) - count
    kept = jaxpr.outvars[split:]
    real = [x for x in kept if not np.issubdtype(getattr(x.aval, "dtype", np.bool_), np.complexfloating)]
    if len(real) == count:
        return own(jaxpr, count)
    others = [x for x in kept if all(x is not y for y in real)]
    return own(jaxpr.replace(outvars=[*jaxpr.outvars[:split], *others, *real]), len(real)).replace(
        outvars=jaxpr.outvars
    )


def partially_evaluate_checkpointed_scan(own: Callable[..., Any], *args: Any) -> Any:
    with during(_purpose, _HOISTING):
        return own(*args)


def start_partial_evaluation(own: Callable[..., None], trace: Any, *args: Any) -> None:
    own(trace, *args)
    if (purpose := _purpose.get()) is not None:
        setattr(trace, _PURPOSE, (purpose, []))
        if purpose == _TRANSPOSITION:
            _purpose.set(None)  # of this trace alone


def new_argument(own: Callable[..., Any], trace: Any, value: Any) -> Any:
    tracer = own(trace, value)
    purpose, inputs = getattr(trace, _PURPOSE, (None, []))
    if purpose == _TRANSPOSITION and not tracer.is_known() and internals.inexact(tracer):
        inputs.append(tracer)
    return tracer


def partially_evaluate(
    own: Callable[..., Any], trace: Any, primitive: Any, tracers: Sequence[Any], params: JaxParams
) -> Any:
    """Keep communication where it stands: out of hoisted computations, and in transposed functions."""
    if not hasattr(trace, _PURPOSE) or not (
        is_ours(primitive) or communicates(params) or unreported.communicates(primitive, tracers, params)
    ):
        return own(trace, primitive, tracers, params)
    purpose, inputs = getattr(trace, _PURPOSE)
    tracers = [trace.to_jaxpr_tracer(x) for x in tracers]
    if purpose == _HOISTING:
        return _stage(trace, primitive, tracers, params)
    if primitive in CALLS:
        with core.set_current_trace(trace):
            return jaxprs.evaluate(jaxprs.called(params), *tracers)
    if is_ours(primitive):
        possible = internals.inexact_among(tracers)
        if possible and inputs and all(tracers[i].is_known() for i in possible):
            with core.set_current_trace(trace):
                for i in rules.dependent_operands(primitive, tracers):
                    tracers[i] = depends_on(tracers[i], inputs)
    else:
        _Dependence.of_equation(primitive, params, [not x.is_known() for x in tracers])
    return own(trace, primitive, tracers, params)


def partially_evaluate_custom_rule(
    own: Callable[..., Any], trace: Any, primitive: Any, function: Any, *more: Any, **options: Any
) -> Any:
    if hasattr(trace, _PURPOSE):
        tracers = next(x for x in more if isinstance(x, (list, tuple)))
        if communicates_when_called(function, [jax.typeof(x) for x in tracers]):
            with core.set_current_trace(trace):
                return function.call_wrapped(*tracers)
    return own(trace, primitive, function, *more, **options)


def _stage(trace: Any, primitive: Any, tracers: Sequence[Any], params: JaxParams) -> list[Any]:
    """Put an equation into the unknown part, which is executed later, even if the operands are known."""
    if tracers:
        return trace.default_process_primitive(primitive, [trace.instantiate_const(x) for x in tracers], params)
    avals, effects = primitive.abstract_eval(**params)
    results = [partial_eval.JaxprTracer(trace, partial_eval.PartialVal.unknown(aval), None) for aval in avals]
    source = internals.current_source()
    equation = partial_eval.new_eqn_recipe(trace, [], results, primitive, params, effects, source)
    for result in results:
        result.recipe = equation
    return results


class _Dependence:
    """The values of a linear computation that depend on the argument. An operation is refused if no operand does.

    JAX would execute that operation while it transposes others, and their messages could match.
    """

    @classmethod
    def of_jaxpr(cls, jaxpr: Any, inputs: Sequence[bool]) -> list[bool]:
        inner = jaxprs.open_jaxpr(jaxpr)
        depends = dict(zip(inner.invars, inputs, strict=True))
        for equation in inner.eqns:
            depend = [not isinstance(x, Literal) and depends.get(x, False) for x in equation.invars]
            results = [any(depend)] * len(equation.outvars)
            if is_ours(equation.primitive):
                cls._refuse_constant(equation, depend)
            elif communicates(equation.params):
                results = cls.of_equation(equation.primitive, equation.params, depend)
            depends.update(zip(equation.outvars, results, strict=True))
        return [not isinstance(x, Literal) and depends.get(x, False) for x in inner.outvars]

    @classmethod
    def of_equation(cls, primitive: Any, params: JaxParams, depend: list[bool]) -> list[bool]:
        if primitive in CALLS:
            return cls.of_jaxpr(jaxprs.called(params), depend)
        if primitive is primitives.cond_p:
            branches = [cls.of_jaxpr(branch, depend[1:]) for branch in params["branches"]]
            return [any(result) for result in zip(*branches, strict=True)]
        if primitive is primitives.scan_p:
            constants, carried = jaxprs.parts_of_scan(params)
            return cls._of_loop(params["jaxpr"], depend, constants, carried)
        if primitive is primitives.while_p:
            return cls._of_loop(params["body_jaxpr"], depend[params["cond_nconsts"] :], params["body_nconsts"], None)
        name = "jax.lax.custom_root" if "Root" in type(params.get("_prim")).__name__ else primitive.name
        raise Unsupported(
            f"jaxmpi: what communicates in {name} cannot be transposed (by a reverse derivative, jax.linear_transpose, "
            "or custom_linear_solve without symmetric=True). Communicate outside of it, or use jax.jvp."
        )

    @classmethod
    def _of_loop(cls, jaxpr: Any, depend: list[bool], constants: int, carried: int | None) -> list[bool]:
        carried = len(depend) - constants if carried is None else carried
        while True:
            results = cls.of_jaxpr(jaxpr, depend)
            carry = [a or b for a, b in zip(depend[constants:], results[:carried], strict=False)]
            if carry == depend[constants : constants + carried]:
                return results
            depend[constants : constants + carried] = carry

    @staticmethod
    def _refuse_constant(equation: Any, depend: Sequence[bool]) -> None:
        if not any(depend) and any(internals.inexact(x.aval) for x in equation.invars):
            raise Unsupported(
                f"{equation.primitive.shown} cannot be transposed (by jax.linear_transpose or custom_linear_solve): "
                "its operand is a constant on this rank. Let it depend on the function's argument, 0 * x for example."
            )
