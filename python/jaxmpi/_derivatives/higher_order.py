"""The hooks of a trace that differentiates, for operations and for higher-order primitives that communicate.

A higher-order primitive (a call, branches, a loop, a linear solve) has a computation inside, which JAX differentiates.
"""

import contextvars
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import ad_checkpoint, core, custom_batching
from jax._src.lax.control_flow import solves

from jaxmpi._derivatives import unreported
from jaxmpi._derivatives.custom_rules import derivative_communicates, rules_communicate
from jaxmpi._derivatives.inputs import (
    has_tangent,
    inputs_of,
    inside_higher_order,
    make_operands_depend,
    make_value_depend,
    place_of_dummy,
    tangents_of,
    without_dummy,
)
from jaxmpi._derivatives.rewrites import (
    scan_with_carry,
    that_depends_on_arguments,
    with_parameter,
    with_parameter_of_call,
)
from jaxmpi._jax import internals, jaxprs, primitives
from jaxmpi._jax.dependence import depends_on_p
from jaxmpi._primitive import effect, rules
from jaxmpi._primitive.effect import (
    EFFECT,
    ZERO,
    JaxParams,
    Unsupported,
    communicates,
    communicates_when_called,
    during,
    may_be_request,
    unsupported,
)
from jaxmpi._primitive.operation import is_ours


def _operand_to_differentiate(
    trace: Any, tracers: Sequence[Any], start: int = 0, stop: int | None = None, requests: bool = True
) -> list[int]:
    """Return the position of the operand that must depend on the differentiated inputs, among `start` to `stop`.

    Prefer an operand with a tangent. Return an empty list if no operand can have a tangent. `requests`: an operand
    without a tangent may be a request.
    """
    possible = [i for i in range(start, len(tracers) if stop is None else stop) if internals.inexact(tracers[i])]
    tangents = tangents_of(trace, tracers)
    others = possible if requests else [i for i in possible if not may_be_request(tracers[i])]
    return [i for i in possible if type(tangents[i]) is not internals.ad.Zero][:1] or others[:1]


def _operand_of_higher_order(trace: Any, tracers: Sequence[Any], params: JaxParams, start: int = 0) -> list[int]:
    """Return the position of the operand of a higher-order primitive that must depend on the differentiated inputs.

    Return an empty list if the primitive needs a dummy operand. It needs one if no operand can have a tangent. The
    tangent of a request would start the adjoint of the request, so a request gets no tangent. The primitive also needs
    a dummy operand if there are derivatives inside, because their values must depend on the differentiated inputs, too.
    """
    if _has_derivatives(params) and _trace_with_dummy.get() is not trace:
        return []
    return _operand_to_differentiate(trace, tracers, start, requests=False)


_trace_with_dummy: contextvars.ContextVar[Any] = contextvars.ContextVar("trace_with_dummy", default=None)
"""The trace that differentiates a loop to which a dummy operand was added."""


def _has_derivatives(params: JaxParams) -> bool:
    """Return whether a computation inside contains derivatives of communication, though they may not communicate."""
    return any(map(_contains_derivatives, jaxprs.inner_jaxprs(params)))


def _contains_derivatives(jaxpr: Any) -> bool:
    if jaxpr not in _with_derivatives:
        _with_derivatives[jaxpr] = any(
            (equation.primitive is depends_on_p and equation.params["always"])
            or (is_ours(equation.primitive) and equation.params["call"].derivative is not None)
            or _has_derivatives(equation.params)
            for equation in jaxpr.eqns
        )
    return _with_derivatives[jaxpr]


_with_derivatives: "weakref.WeakKeyDictionary[Any, bool]" = weakref.WeakKeyDictionary()


def _dummy_operand(trace: Any) -> Any:
    """Return a number without meaning that depends, with the tangent, on the differentiated inputs."""
    (tracer,) = make_operands_depend(trace, [ZERO], [0], "what")
    return make_value_depend(trace, tracer)


def _differentiate_inside(own: Callable[..., Any], *args: Any, place: int | None = None) -> Any:
    """Differentiate a higher-order primitive. `place`: where the dummy operand is among the operands with tangents."""
    with during(inside_higher_order, True), during(place_of_dummy, place):
        return own(*args)


def _differentiate_call(own: Any, trace: Any, primitive: Any, tracers: Any, params: Any) -> Any:
    if positions := _operand_of_higher_order(trace, tracers, params):
        return own(trace, primitive, make_operands_depend(trace, tracers, positions, primitive.name), params)
    return own(trace, primitive, [_dummy_operand(trace), *tracers], with_parameter_of_call(params), place=0)


def _differentiate_scan(own: Any, trace: Any, primitive: Any, tracers: Any, params: Any) -> Any:
    if positions := _operand_of_higher_order(trace, tracers, params):
        tracers, place = make_operands_depend(trace, tracers, positions, "scan"), None
        if _trace_with_dummy.get() is trace:  # the dummy operand is the first carried number
            constants, _ = jaxprs.parts_of_scan(params)
            place = sum(has_tangent(trace, [x]) for x in tracers[:constants])
        return own(trace, primitive, tracers, params, place=place)
    with during(_trace_with_dummy, trace), core.set_current_trace(trace):
        return scan_with_carry(params, _dummy_operand(trace), tracers)[1:]


def _differentiate_cond(own: Any, trace: Any, primitive: Any, tracers: Any, params: Any) -> Any:
    if positions := _operand_of_higher_order(trace, tracers, params, 1):
        return own(trace, primitive, make_operands_depend(trace, tracers, positions, "cond"), params)
    branches = tuple(map(with_parameter, params["branches"]))
    tracers = [tracers[0], _dummy_operand(trace), *tracers[1:]]
    return own(trace, primitive, tracers, {**params, "branches": branches}, place=0)


def _differentiate_while(own: Any, trace: Any, primitive: Any, tracers: Any, params: Any) -> Any:
    tests, steps = params["cond_nconsts"], params["body_nconsts"]
    if positions := _operand_of_higher_order(trace, tracers, params, tests):
        return own(trace, primitive, make_operands_depend(trace, tracers, positions, "while_loop"), params)
    body = {"body_jaxpr": with_parameter(params["body_jaxpr"]), "body_nconsts": steps + 1}
    tracers = [*tracers[:tests], _dummy_operand(trace), *tracers[tests:]]
    return own(trace, primitive, tracers, {**params, **body}, place=0)


def _differentiate_linear_solve(own: Any, trace: Any, primitive: Any, tracers: Any, params: Any) -> Any:
    """Make the operands of a linear solve depend on the differentiated inputs: one of the matrix, if the matrix
    communicates, and one of the right-hand side.

    The derivative of a matrix that communicates is communication, even if the matrix depends on no input on this rank.
    A `vmap` of the derivative maps the solve, and with it the communication of the matrix: see
    `rewrites.that_depends_on_arguments`.
    """
    lengths, parts = params["const_lengths"], params["jaxprs"]
    parts = type(parts)(*map(that_depends_on_arguments, parts, lengths))
    positions = _operand_to_differentiate(trace, tracers, sum(lengths))
    if EFFECT in parts.matvec.effects:
        if not _operand_to_differentiate(trace, tracers, 0, lengths.matvec):
            matvec = parts.matvec
            with core.set_current_trace(trace.parent_trace):
                avals = [ZERO, *(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in matvec.in_avals)]
                wider = jax.make_jaxpr(lambda _, *arguments: jaxprs.evaluate(matvec, *arguments))(*avals)
            parts = parts._replace(matvec=wider)
            lengths = lengths._replace(matvec=lengths.matvec + 1)
            tracers, positions = [_dummy_operand(trace), *tracers], [i + 1 for i in positions]
        positions = _operand_to_differentiate(trace, tracers, 0, lengths.matvec) + positions
    params = {**params, "const_lengths": lengths, "jaxprs": parts}
    return own(trace, primitive, make_operands_depend(trace, tracers, positions, "custom_linear_solve"), params)


def _refuse_custom_vmap(own: Any, trace: Any, primitive: Any, tracers: Any, params: Any) -> None:
    """Refuse the primitive, because the user's rule decides what the tangent maps, and ranks may decide differently."""
    raise unsupported("a function with jax.custom_batching.custom_vmap")


def _differentiate_object(own: Any, trace: Any, primitive: Any, tracers: Any, params: Any) -> Any:
    """Differentiate a primitive represented by an object (JAX 0.9 and later). Give all operands of a root tangents,
    because the derivative depends on which operands have tangents."""
    positions, kind = internals.inexact_among(tracers), type(params["_prim"])
    if kind not in _OBJECTS or not positions:
        raise unsupported(kind.__name__)
    return own(trace, primitive, make_operands_depend(trace, tracers, positions, kind.__name__), params)


def bind_checkpoint(own: Callable[..., Any], traced: Any, *args: Any) -> Any:
    """Bind the older kind of checkpoint, which carries effects, if the checkpoint or the derivative communicates."""
    jaxpr = jaxprs.open_jaxpr(traced.jaxpr)
    if EFFECT not in jaxpr.effects and not rules_communicate(core.trace_ctx.trace, jaxpr):
        return own(traced, *args)
    cse = getattr(traced, "prevent_cse", True)
    return ad_checkpoint.remat_p.bind(*args, jaxpr=jaxpr, prevent_cse=cse, differentiated=False, policy=traced.policy)


_HIGHER_ORDER: dict[Any, Callable[..., Any]] = {
    primitives.closed_call_p: _differentiate_call,
    primitives.cond_p: _differentiate_cond,
    primitives.linear_solve_p: _differentiate_linear_solve,
    ad_checkpoint.remat_p: _differentiate_call,
    primitives.scan_p: _differentiate_scan,
    primitives.while_p: _differentiate_while,
    custom_batching.custom_vmap_p: _refuse_custom_vmap,
    primitives.jit_p: _differentiate_call,
    **(
        {internals.hijax.call_hi_primitive_p: _differentiate_object}
        if hasattr(internals.hijax, "call_hi_primitive_p")
        else {}
    ),
}

_OBJECTS = {getattr(solves, name) for name in ("CustomRoot", "_RootLinearMap") if hasattr(solves, name)}


def _differentiate_dependence(
    own: Callable[..., Any], trace: Any, primitive: Any, tracers: Sequence[Any], params: JaxParams
) -> Any:
    """Make the result of `depends_on` a value, when a derivative is differentiated again: see `make_value_depend`."""
    tracers = tracers[: len(tracers) - params["unless"]]
    params = {**params, "always": has_tangent(trace, tracers), "unless": 0}
    return make_value_depend(trace, own(trace, primitive, tracers, params))


@without_dummy
def differentiate(
    own: Callable[..., Any], trace: Any, primitive: Any, tracers: Sequence[Any], params: JaxParams
) -> Any:
    inputs_of(trace)
    if is_ours(primitive):
        effect.check()
        if not rules.is_constant(primitive, params["call"]) or has_tangent(trace, tracers):
            tracers = make_operands_depend(trace, tracers, rules.dependent_operands(primitive, tracers), primitive.name)
        return own(trace, primitive, tracers, params)
    if primitive is depends_on_p and params["always"]:
        return _differentiate_dependence(own, trace, primitive, tracers, params)
    if primitive in _HIGHER_ORDER:
        takes_part = communicates(params) or (
            _has_derivatives(params)
            if has_tangent(trace, tracers)
            else derivative_communicates(trace.parent_trace, params)
        )
        if not takes_part:
            return own(trace, primitive, tracers, params)
        effect.check()
        return _HIGHER_ORDER[primitive](
            functools.partial(_differentiate_inside, own), trace, primitive, tracers, params
        )
    if communicates(params) or unreported.communicates(primitive, tracers, params):
        effect.check()
        if (possible := unreported.differentiated_operands(primitive, params)) is None:
            raise unsupported(primitive.name)
        positions = [i for i in possible if internals.inexact(tracers[i])]
        return own(trace, primitive, make_operands_depend(trace, tracers, positions, primitive.name), params)
    return own(trace, primitive, tracers, params)


@without_dummy
def differentiate_call(
    own: Callable[..., Any], trace: Any, primitive: Any, function: Any, tracers: Sequence[Any], params: JaxParams
) -> Any:
    """Differentiate the called function instead of the call. The trace that JAX starts for a call has only the operands
    with tangents as differentiated inputs, and no operand may have a tangent."""
    inputs_of(trace)
    if not communicates_when_called(function, map(jax.typeof, tracers)):
        return own(trace, primitive, function, tracers, params)
    with core.set_current_trace(trace):
        return function.call_wrapped(*tracers)


def refuse_old(own: Callable[..., Any], trace: Any, primitive: Any, tracers: Sequence[Any], params: JaxParams) -> Any:
    if is_ours(primitive) or communicates(params):
        raise Unsupported(
            f"jaxmpi: derivatives of communication need JAX 0.7 or newer, and this is {jax.__version__}, which leaves "
            "an operation out of a derivative if nothing on this rank depends on it. Other ranks may need it."
        )
    return own(trace, primitive, tracers, params)
