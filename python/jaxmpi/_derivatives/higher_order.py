"""How a trace that differentiates handles operations, and higher-order primitives that communicate.

A higher-order primitive has a computation inside, which JAX differentiates: calls, branches, loops, linear solves.
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
    """Return an operand from `start` to `stop` to make depend on the differentiated inputs: one with a tangent if
    possible; none if no operand can have one. `requests`: also an operand that may be a request, without tangent."""
    possible = [i for i in range(start, len(tracers) if stop is None else stop) if internals.inexact(tracers[i])]
    tangents = tangents_of(trace, tracers)
    others = possible if requests else [i for i in possible if not may_be_request(tracers[i])]
    return [i for i in possible if type(tangents[i]) is not internals.ad.Zero][:1] or others[:1]


def _operand_of_higher_order(trace: Any, tracers: Sequence[Any], params: JaxParams, start: int = 0) -> list[int]:
    """Return an operand of a higher-order primitive to make depend on the differentiated inputs; none if it needs a
    dummy operand.

    The operand is not a request, whose tangent would start the adjoint of the request. A dummy operand is also needed
    if there are derivatives inside, because their values must depend on the differentiated inputs, too.
    """
    if _has_derivatives(params) and _trace_with_dummy.get() is not trace:
        return []
    return _operand_to_differentiate(trace, tracers, start, requests=False)


_trace_with_dummy: contextvars.ContextVar[Any] = contextvars.ContextVar("trace_with_dummy", default=None)
"""The trace that differentiates a loop to which a dummy operand was added."""


def _has_derivatives(params: JaxParams) -> bool:
    """Return whether a computation inside contains derivatives of communication, even if none of them communicates."""
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
    """Return a number without meaning. The number and the tangent depend on the differentiated inputs."""
    (tracer,) = make_operands_depend(trace, [ZERO], [0], "what")
    return make_value_depend(trace, tracer)


def _differentiate_inside(own: Callable[..., Any], *args: Any, place: int | None = None) -> Any:
    """Differentiate a higher-order primitive. `place`: where the dummy operand is among the operands with tangents."""
    with during(inside_higher_order, True), during(place_of_dummy, place):
        return own(*args)


def _differentiate_call(own: Any, trace: Any, primitive: Any, tracers: Any, params: Any) -> Any:
    if which := _operand_of_higher_order(trace, tracers, params):
        return own(trace, primitive, make_operands_depend(trace, tracers, which, primitive.name), params)
    return own(trace, primitive, [_dummy_operand(trace), *tracers], with_parameter_of_call(params), place=0)


def _differentiate_scan(own: Any, trace: Any, primitive: Any, tracers: Any, params: Any) -> Any:
    if which := _operand_of_higher_order(trace, tracers, params):
        tracers, place = make_operands_depend(trace, tracers, which, "scan"), None
        if _trace_with_dummy.get() is trace:  # it is the first carried number
            constants, _ = jaxprs.parts_of_scan(params)
            place = sum(has_tangent(trace, [x]) for x in tracers[:constants])
        return own(trace, primitive, tracers, params, place=place)
    with during(_trace_with_dummy, trace), core.set_current_trace(trace):
        return scan_with_carry(params, _dummy_operand(trace), tracers)[1:]


def _differentiate_cond(own: Any, trace: Any, primitive: Any, tracers: Any, params: Any) -> Any:
    if which := _operand_of_higher_order(trace, tracers, params, 1):
        return own(trace, primitive, make_operands_depend(trace, tracers, which, "cond"), params)
    branches = tuple(map(with_parameter, params["branches"]))
    tracers = [tracers[0], _dummy_operand(trace), *tracers[1:]]
    return own(trace, primitive, tracers, {**params, "branches": branches}, place=0)


def _differentiate_while(own: Any, trace: Any, primitive: Any, tracers: Any, params: Any) -> Any:
    tests, steps = params["cond_nconsts"], params["body_nconsts"]
    if which := _operand_of_higher_order(trace, tracers, params, tests):
        return own(trace, primitive, make_operands_depend(trace, tracers, which, "while_loop"), params)
    body = {"body_jaxpr": with_parameter(params["body_jaxpr"]), "body_nconsts": steps + 1}
    tracers = [*tracers[:tests], _dummy_operand(trace), *tracers[tests:]]
    return own(trace, primitive, tracers, {**params, **body}, place=0)


def _differentiate_linear_solve(own: Any, trace: Any, primitive: Any, tracers: Any, params: Any) -> Any:
    """Make an operand of a linear solve's matrix and one of the right-hand side depend on the differentiated inputs.

    The derivative of a matrix that communicates is communication, even if the matrix depends on nothing here. A `vmap`
    of the derivative maps the solve, and with it the communication of the matrix: see
    `rewrites.that_depends_on_arguments`.
    """
    lengths, parts = params["const_lengths"], params["jaxprs"]
    parts = type(parts)(*map(that_depends_on_arguments, parts, lengths))
    which = _operand_to_differentiate(trace, tracers, sum(lengths))
    if EFFECT in parts.matvec.effects:
        if not _operand_to_differentiate(trace, tracers, 0, lengths.matvec):
            matvec = parts.matvec
            with core.set_current_trace(trace.parent_trace):
                avals = [ZERO, *(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in matvec.in_avals)]
                wider = jax.make_jaxpr(lambda _, *arguments: jaxprs.evaluate(matvec, *arguments))(*avals)
            parts = parts._replace(matvec=wider)
            lengths = lengths._replace(matvec=lengths.matvec + 1)
            tracers, which = [_dummy_operand(trace), *tracers], [i + 1 for i in which]
        which = _operand_to_differentiate(trace, tracers, 0, lengths.matvec) + which
    params = {**params, "const_lengths": lengths, "jaxprs": parts}
    return own(trace, primitive, make_operands_depend(trace, tracers, which, "custom_linear_solve"), params)


def _refuse_custom_vmap(own: Any, trace: Any, primitive: Any, tracers: Any, params: Any) -> None:
    """Refuse the primitive: the user's rule decides what the tangent maps, which may differ from rank to rank."""
    raise unsupported("a function with jax.custom_batching.custom_vmap")


def _differentiate_object(own: Any, trace: Any, primitive: Any, tracers: Any, params: Any) -> Any:
    """Differentiate a primitive represented by an object (JAX 0.9 and later). All operands of a root get tangents,
    because the derivative depends on which of them have some."""
    which = internals.inexact_among(tracers)
    if type(params["_prim"]) not in _OBJECTS or not which:
        raise unsupported(type(params["_prim"]).__name__)
    return own(trace, primitive, make_operands_depend(trace, tracers, which, type(params["_prim"]).__name__), params)


def bind_checkpoint(own: Callable[..., Any], traced: Any, *args: Any) -> Any:
    """Bind the older kind of checkpoint, which carries effects, if the newer kind or the derivative communicates."""
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
    """Make a derivative that is differentiated again a value: see `make_value_depend`."""
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
        which = [i for i in possible if internals.inexact(tracers[i])]
        return own(trace, primitive, make_operands_depend(trace, tracers, which, primitive.name), params)
    return own(trace, primitive, tracers, params)


@without_dummy
def differentiate_call(
    own: Callable[..., Any], trace: Any, primitive: Any, function: Any, tracers: Sequence[Any], params: JaxParams
) -> Any:
    """Differentiate the called function in place of the call. The trace that JAX starts for the call would have only
    the call's operands as differentiated inputs with tangents, and there may be none."""
    inputs_of(trace)
    if not communicates_when_called(function, map(jax.typeof, tracers)):
        return own(trace, primitive, function, tracers, params)
    with core.set_current_trace(trace):
        return function.call_wrapped(*tracers)


def refuse_old(own: Callable[..., Any], trace: Any, primitive: Any, tracers: Sequence[Any], params: JaxParams) -> Any:
    if is_ours(primitive) or communicates(params):
        raise Unsupported(
            f"jaxmpi: derivatives of communication need JAX 0.7 or newer, this is {jax.__version__}: it leaves out of "
            "a derivative what nothing on this rank depends on, though other ranks may."
        )
    return own(trace, primitive, tracers, params)
