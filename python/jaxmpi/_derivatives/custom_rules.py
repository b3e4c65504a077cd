"""Functions with derivative rules: `jax.custom_jvp` and `jax.custom_vjp`."""

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core
from jax._src.interpreters import ad as private_ad

from jaxmpi._derivatives.inputs import has_tangent, inputs_of, inside_higher_order, make_operands_depend, without_dummy
from jaxmpi._jax import internals, jaxprs, primitives
from jaxmpi._primitive import effect
from jaxmpi._primitive.effect import (
    EFFECT,
    JaxParams,
    Unsupported,
    cannot_be_traced,
    communicates_when_called,
    during,
    forget,
    may_be_request,
    unsupported,
)


@without_dummy
def differentiate_custom_jvp(
    own: Any, trace: Any, primitive: Any, function: Any, rule: Any, tracers: Any, *more: Any, **options: Any
) -> Any:
    """Give all operands tangents, because the rule may communicate each tangent, also a zero that JAX has made.

    If all operands have tangents already, do not trace the rule to see whether it communicates: JAX calls it anyway.
    """

    def with_tangents(*xs: Any) -> Any:
        return *xs, *(x if internals.inexact(x) else np.zeros(x.shape, jax.dtypes.float0) for x in xs)

    def communicates(avals: Any) -> bool:
        return communicates_when_called(function, avals) or communicates_when_called(rule, avals, with_tangents)

    inputs_of(trace)  # closes the list: later values are not differentiated inputs
    possible = internals.inexact_among(tracers)
    lacking = not possible or not all(has_tangent(trace, [tracers[i]]) for i in possible)
    answer = _ask(trace, tracers, (function, rule), communicates) if lacking or inside_higher_order.get() else False
    if answer:
        tracers = make_operands_depend(
            trace, tracers, _refuse_if_none(possible), "a function with jax.custom_jvp", False
        )
    with during(cannot_be_traced, answer is None and lacking):
        return own(trace, primitive, function, rule, tracers, *more, **options)


@without_dummy
def differentiate_custom_vjp(
    own: Any,
    trace: Any,
    primitive: Any,
    function: Any,
    forward: Any,
    backward: Any,
    tracers: Any,
    *more: Any,
    **options: Any,
) -> Any:
    """Give one operand a tangent, so that JAX calls the rules.

    Values that the function closes over are operands, too, but must not have tangents.
    """

    def call(tracers: Any) -> Any:
        return own(trace, primitive, function, forward, backward, tracers, *more, **options)

    def communicates(avals: Any) -> bool:
        out_trees = options["out_trees"] if "out_trees" in options else more[0]
        return communicates_when_called(function, avals) or (
            not called and _backward_communicates(forward, backward, avals, out_trees)
        )

    inputs_of(trace)  # closes the list: later values are not differentiated inputs
    possible = internals.inexact_among(tracers)
    called = has_tangent(trace, tracers)
    answer: bool | None = False
    if not called or inside_higher_order.get():
        answer = _ask(trace, tracers, (function, forward, backward), communicates, called)
    if not answer:
        with during(cannot_be_traced, answer is None and not called):
            return call(tracers)
    _refuse_if_none(possible)
    possible.sort(key=lambda i: (not has_tangent(trace, [tracers[i]]), may_be_request(tracers[i])))
    for i in possible:
        with contextlib.suppress(private_ad.CustomVJPException, *([] if i == possible[-1] else [AssertionError])):
            return call(make_operands_depend(trace, tracers, [i], "a function with jax.custom_vjp", False))
    raise unsupported("a function with jax.custom_vjp that has closed-over values alone")


def _ask(
    trace: Any, tracers: Sequence[Any], functions: Sequence[Any], communicates: Callable[[list[Any]], bool], *also: bool
) -> bool | None:
    """Return whether a function or a rule communicates; None if tracing fails. Cache the answers of `communicates`.

    `also`: facts on which the answer depends beside the types of the operands.
    """
    avals = [jax.typeof(x) for x in tracers]
    answers, key = _answers_for(functions, [*also, *avals])
    if (answer := answers.get(key)) is None:
        with core.set_current_trace(trace.parent_trace):
            try:
                answer = answers[key] = communicates(avals)
            except Exception as error:
                if isinstance(error, Unsupported):
                    raise
    if answer:
        effect.check()
    return answer


def _answers_for(functions: Sequence[Any], operands: Sequence[Any]) -> tuple[Any, Any]:
    """Return the cached answers for a function and the rules, and the key for these operands. Return a new, empty cache
    if the answer may depend on more than the operands and their structure."""
    structure = [x for _, params in functions[0].transforms for x in params]
    if all(type(x) is jax.tree_util.PyTreeDef for x in structure):
        with contextlib.suppress(TypeError):  # some functions cannot be referenced weakly
            *others, last = (function.f for function in functions)
            answers: Any = _answers
            for function in others:
                answers = answers.setdefault(function, weakref.WeakKeyDictionary())
            return answers.setdefault(last, {}), (*structure, *operands)
    return {}, None


_answers: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()
"""The answers, by the function, then by one rule after the other."""


def _refuse_if_none(possible: list[int]) -> list[int]:
    if not possible:
        raise Unsupported(
            "jaxmpi: a function with jax.custom_jvp or jax.custom_vjp communicates and has no floating-point argument, "
            "so its rule is not called in a derivative. Give it one."
        )
    return possible


def _backward_communicates(forward: Any, backward: Any, avals: Sequence[Any], out_trees: Callable[[], Any]) -> bool:
    """Return whether the rules of a `jax.custom_vjp` function communicate."""
    try:
        traced, results = jax.make_jaxpr(
            lambda *xs: forward.call_wrapped(*[y for x in xs for y in (x, False)]), return_shape=True
        )(*avals)
        if EFFECT in traced.effects:
            return True
        _, residual_tree, *forwards = out_trees()
        sources = forwards[0] if forwards else [None] * residual_tree.num_leaves
        count = sum(source is None for source in sources)
        new, outs = iter(results[:count]), results[count:]
        residuals = [next(new) if source is None else avals[source] for source in sources]
        return communicates_when_called(backward, [*residuals, *outs])
    finally:
        forget(forward)


def pullback_communicates(avals: Sequence[Any], params: JaxParams) -> bool:
    """Return whether the primitive for the derivative of a `jax.custom_vjp` function communicates when JAX transposes
    it.

    If so it gets the effect, and JAX transposes it even if nothing depends on it. Return True for a rule that looks at
    values.
    """
    try:
        communicates = communicates_when_called(params["bwd"], [*avals[: params["num_res"]], *params["out_avals"]])
    except jax.errors.JAXTypeError:  # the rule looks at values
        return True
    except Exception:  # raised again where the rule is called
        return False
    if communicates:
        effect.check()
    return communicates


def rules_communicate(around: Any, jaxpr: Any) -> bool:
    """Return whether a computation without communication calls a function with a derivative rule that communicates.

    `around`: a trace in which the rule can be traced, for example the one outside the trace that differentiates.
    """
    return any(rule_communicates(around, jaxpr, i) for i in range(len(jaxpr.eqns)))


def rule_communicates(around: Any, jaxpr: Any, index: int) -> bool:
    """Return whether this equation of the computation calls a function with a derivative rule that communicates."""
    known, equation = _with_rules.setdefault(jaxpr, {}), jaxpr.eqns[index]
    if index not in known:
        if equation.primitive in (primitives.custom_jvp_call_p, primitives.custom_vjp_call_p):
            known[index] = _rule_of_equation_communicates(around, jaxpr, equation)
        else:
            known[index] = derivative_communicates(around, equation.params)
    return known[index]


def derivative_communicates(around: Any, params: JaxParams) -> bool:
    """Return whether the computations inside an equation with these parameters call a rule that communicates."""
    return any(rules_communicate(around, inner) for inner in jaxprs.inner_jaxprs(params))


_with_rules: "weakref.WeakKeyDictionary[Any, dict[int, bool]]" = weakref.WeakKeyDictionary()
"""Whether an equation of a jaxpr, by position, calls a rule that communicates."""


def _rule_of_equation_communicates(around: Any, jaxpr: Any, equation: Any) -> bool:
    alone = jaxprs.of_equation(jaxpr, equation)
    positions = internals.inexact_among(x.aval for x in alone.invars)

    def differentiated(*xs: Any) -> Any:
        def f(*varied: Any) -> Any:
            replaced = dict(zip(positions, varied, strict=True))
            results = jaxprs.evaluate(alone, *(replaced.get(i, x) for i, x in enumerate(xs)))
            return [y for y in results if internals.inexact(y)]

        varied = [xs[i] for i in positions]
        if equation.primitive is primitives.custom_jvp_call_p:
            jax.jvp(f, varied, varied)
        else:
            results, pullback = jax.vjp(f, *varied)
            pullback(results)

    if not positions:
        return False
    with core.set_current_trace(around):
        try:
            return EFFECT in jax.make_jaxpr(differentiated)(*(x.aval for x in alone.invars)).effects
        except Exception:  # raised again where the function is called
            return False
