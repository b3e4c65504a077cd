"""The hooks: functions of JAX, and our functions in their place."""

import functools
from collections.abc import Callable
from typing import Any

from jax._src import ad_checkpoint
from jax._src.interpreters import ad as private_ad
from jax._src.interpreters import partial_eval
from jax._src.lax.control_flow import solves

from jaxmpi._derivatives import unreported
from jaxmpi._derivatives.custom_rules import differentiate_custom_jvp, differentiate_custom_vjp, pullback_communicates
from jaxmpi._derivatives.higher_order import bind_checkpoint, differentiate, differentiate_call, refuse_old
from jaxmpi._derivatives.inputs import record_input
from jaxmpi._derivatives.partial_evaluation import (
    eliminate_dead_code,
    keep_checkpoint,
    keep_equation,
    new_argument,
    partially_evaluate,
    partially_evaluate_checkpointed_scan,
    partially_evaluate_custom_rule,
    round_real_residuals,
    start_partial_evaluation,
    trace_to_jaxpr,
)
from jaxmpi._derivatives.transposition import transpose, transpose_matrix
from jaxmpi._jax import internals, primitives
from jaxmpi._primitive import effect
from jaxmpi._primitive.effect import EFFECT

HAS_NEWER_CHECKPOINT = "jaxpr" in getattr(getattr(ad_checkpoint, "RematTraced", None), "__annotations__", ())


def install(check: Callable[[], None]) -> None:
    """Install the hooks. `check` is called before anything that communicates is differentiated, and may raise."""
    effect.check = check
    for hook in HOOKS if internals.KEEPS_EFFECTS else _REFUSALS:
        internals.replace(*hook)
    if not internals.KEEPS_EFFECTS:
        return
    unreported.report_effects()
    unreported.report_effect_of(private_ad.custom_lin_p, pullback_communicates)
    if hasattr(internals.hijax, "call_hi_primitive_linearized_p"):
        unreported.report_effect_of(
            internals.hijax.call_hi_primitive_linearized_p, lambda _, params: EFFECT in params["_prim"].effects
        )
    _replace_rule(partial_eval.partial_eval_jaxpr_custom_rules, primitives.scan_p, partially_evaluate_checkpointed_scan)
    _replace_rule(partial_eval.dce_rules, ad_checkpoint.remat_p, keep_checkpoint)
    if hasattr(ad_checkpoint, "_insert_reduce_precision"):  # without it JAX refuses complex numbers by a TypeError
        internals.replace(ad_checkpoint, "_insert_reduce_precision", "", round_real_residuals)


def _replace_rule(rules: dict[Any, Any], primitive: Any, instead: Callable[..., Any]) -> None:
    own = getattr(rules[primitive], "jaxmpi_own", rules[primitive])
    rules[primitive] = functools.partial(instead, own)
    rules[primitive].jaxmpi_own = own


_BACKWARD = "backward_pass3" if hasattr(private_ad, "backward_pass3") else "backward_pass"  # the latter in JAX 0.7

_JVP, _LINEARIZE, _PARTIAL_EVALUATION = private_ad.JVPTrace, private_ad.LinearizeTrace, partial_eval.JaxprTrace

_PRIMITIVE = "self primitive tracers params or self primitive args params"

_CUSTOM_JVP = "self primitive fun jvp tracers symbolic_zeros or self prim fun f_jvp tracers symbolic_zeros"

_CUSTOM_VJP = (
    "self primitive fun fwd bwd tracers out_trees symbolic_zeros or "
    "self prim fun fwd bwd tracers out_trees symbolic_zeros"
)

# Functions of JAX, the names of their parameters, and our functions in their place.
HOOKS: tuple[tuple[Any, str, str, Callable[..., Any]], ...] = (
    (private_ad.JVPTracer, "__init__", "self trace primal tangent", record_input),
    (private_ad.LinearizeTracer, "__init__", "self trace primal tangent", record_input),
    (_JVP, "process_primitive", _PRIMITIVE, differentiate),
    (_LINEARIZE, "process_primitive", _PRIMITIVE, differentiate),
    (_JVP, "process_custom_jvp_call", _CUSTOM_JVP, differentiate_custom_jvp),
    (_LINEARIZE, "process_custom_jvp_call", _CUSTOM_JVP, differentiate_custom_jvp),
    (_JVP, "process_custom_vjp_call", _CUSTOM_VJP, differentiate_custom_vjp),
    (_LINEARIZE, "process_custom_vjp_call", _CUSTOM_VJP, differentiate_custom_vjp),
    (
        partial_eval,
        "new_eqn_recipe",
        "trace in_tracers out_tracers primitive params effects source_info ctx",
        keep_equation,
    ),
    (
        partial_eval,
        "dce_jaxpr",
        "jaxpr used_outputs instantiate or jaxpr used_outputs instantiate live_inputs",
        eliminate_dead_code,
    ),
    (private_ad, _BACKWARD, "jaxpr transform_stack consts primals_in cotangents_in", transpose),
    (solves, "_transpose_one_output", "linear_fun primals", transpose_matrix),
    (partial_eval, "trace_to_jaxpr_nounits", "fun pvals instantiate", trace_to_jaxpr),
    (_PARTIAL_EVALUATION, "__init__", "self parent_trace name_stack tag", start_partial_evaluation),
    (_PARTIAL_EVALUATION, "new_arg", "self pval", new_argument),
    (_PARTIAL_EVALUATION, "process_primitive", _PRIMITIVE, partially_evaluate),
    (
        _PARTIAL_EVALUATION,
        "process_custom_jvp_call",
        "self prim fun jvp tracers symbolic_zeros",
        partially_evaluate_custom_rule,
    ),
    (
        _PARTIAL_EVALUATION,
        "process_custom_vjp_call",
        "self prim f fwd bwd tracers out_trees symbolic_zeros",
        partially_evaluate_custom_rule,
    ),
    *(
        (trace, "process_call", "self call_primitive f tracers params", differentiate_call)
        for trace in (_JVP, _LINEARIZE)
        if hasattr(trace, "process_call")  # JAX 0.12 has none
    ),
    *([(ad_checkpoint.RematTraced, "__call__", "self args", bind_checkpoint)] if HAS_NEWER_CHECKPOINT else []),
)

_REFUSALS = tuple(
    (trace, "process_primitive", _PRIMITIVE, refuse_old) for trace in (_JVP, _LINEARIZE, _PARTIAL_EVALUATION)
)
