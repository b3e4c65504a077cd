"""Every private name of JAX that the package uses, each with the versions it was tried on.

Tried on JAX 0.6.0, 0.10.2 and 0.12.0.1. A version that moves one of these names needs a change here and nowhere else.
"""

import contextlib
import functools
import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import ad_checkpoint, config, core, dispatch, effects, pjit, source_info_util
from jax._src.array import ArrayImpl
from jax._src.interpreters import ad as private_ad
from jax._src.interpreters import partial_eval
from jax._src.lib.mlir.dialects import hlo
from jax.extend.core import Literal, primitives
from jax.extend.core import Primitive as Primitive
from jax.ffi import ffi_lowering as ffi_lowering
from jax.interpreters import ad as ad
from jax.interpreters import batching as batching
from jax.interpreters import mlir as mlir

from jaxmpi import _core

Function = Callable[..., Any]
Effect = effects.Effect
ShapedArray = core.ShapedArray
Tracer = core.Tracer
abstract_token = core.abstract_token

KEEPS_EFFECTS = hasattr(effects, "partial_eval_kept_effects")
"""Whether an operation stays in a derivative where nothing uses its result, or it has none. Not so in JAX 0.6."""

# What an ordered effect must be allowed to do so that it passes through every transformation and control flow.
_PERMISSIONS = (
    effects.lowerable_effects,
    effects.ordered_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
    *([effects.partial_eval_kept_effects] if KEEPS_EFFECTS else []),
)


def permit_effect(kind: type) -> None:
    """Lets the effects of this class order computations, inside control flow, custom derivatives and checkpoints."""
    for permission in _PERMISSIONS:
        permission.add_type(kind)


def define_primitive(
    primitive: Primitive, abstract_eval: Callable[..., Any], effectful: bool, implementation: Callable[..., Any]
) -> None:
    """Gives a primitive its abstract evaluation and its eager implementation."""
    if effectful:
        primitive.def_effectful_abstract_eval(abstract_eval)
    else:
        primitive.def_abstract_eval(abstract_eval)
    primitive.def_impl(implementation)


def keep(primitive: Primitive) -> None:
    """Lets dead code elimination leave a primitive alone that has no effect of its own."""
    partial_eval.dce_rules[primitive] = lambda *args: ([True] * len(args[-1].invars), args[-1])


def mind_what_is_known(primitive: Primitive, reads: Callable[[dict[str, Any]], bool]) -> None:
    """What becomes of an operation where JAX divides a computation into a known part, which it executes, and the rest.

    Where a differentiated `lax.scan` moves out of the loop what is the same in each step, an operation stays in: a
    message would be received once for all steps. Where a function is transposed, an operation that does not read its
    operand on this rank (`reads(params)` says so) is refused if that is a constant: it would be executed now, and what
    other ranks send in it may depend on what is transposed.
    """

    def rule(trace, *tracers, **params):
        if all(tracer.is_known() for tracer in tracers):
            doing = _dividing()
            if doing == "hoisting":
                return _stage(trace, primitive, tracers, params)
            if doing == "transposing" and tracers and not reads(params):
                raise NotImplementedError(
                    f"{primitive.name} cannot be transposed (by jax.linear_transpose or custom_linear_solve): its "
                    "template is a constant on this rank. Let it depend on the function's argument, 0 * x for example."
                )
        return trace.default_process_primitive(primitive, tracers, params)

    partial_eval.custom_partial_eval_rules[primitive] = rule


def _dividing() -> str:
    """What JAX divides a computation for: there is no other sign of it than the frames of the functions that do."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        match frame.f_code.co_name:
            case "_scan_known_hoisting":
                return "hoisting"
            case "_scan_partial_eval" | "_scan_partial_eval_custom":
                # It comes after another step of theirs, which these variables divide from it.
                if "num_const_known" in frame.f_locals or "const_pvals" in frame.f_locals:
                    return "hoisting"
            case "linearize_from_jvp":
                return "differentiating"
            case "linear_transpose":
                return "transposing"
        frame = frame.f_back
    return "something else"


def _stage(trace: Any, primitive: Primitive, tracers: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Leaves an operation to the part that is executed later, whatever is known of its operands."""
    if tracers or not KEEPS_EFFECTS:
        return trace.default_process_primitive(primitive, tuple(map(trace.instantiate_const, tracers)), params)
    avals, effects_of_it = primitive.abstract_eval(**params)
    results = [partial_eval.JaxprTracer(trace, partial_eval.PartialVal.unknown(aval), None) for aval in avals]
    source = source_info_util.current()
    equation = partial_eval.new_eqn_recipe(trace, [], results, primitive, params, effects_of_it, source)
    trace.effect_handles.append(partial_eval.EffectHandle([], equation))
    for result in results:
        result.recipe = equation
    return results


def keep_checkpoints_whole(effect: Effect) -> None:
    """Leaves a `jax.checkpoint` with the effect in a differentiated `lax.scan` as it is: see `mind_what_is_known`.

    JAX would divide it by a rule of its own, and move out of the loop what of it depends on constants alone.
    """
    divide = partial_eval.custom_partial_eval_rules[ad_checkpoint.remat_p]

    def rule(trace, *tracers, **params):
        if effect in params["jaxpr"].effects and _dividing() == "hoisting":
            return _stage(trace, ad_checkpoint.remat_p, tracers, params)
        return divide(trace, *tracers, **params)

    partial_eval.custom_partial_eval_rules[ad_checkpoint.remat_p] = rule


def jit_disabled() -> bool:
    return config.disable_jit.value


def platforms() -> str | None:
    """What JAX_PLATFORMS or its configuration says: names separated by commas, or nothing."""
    return config.jax_platforms.value


trace_state_clean = core.trace_state_clean
jaxpr_as_fun = core.jaxpr_as_fun
ConcreteArray = ArrayImpl
create_token = hlo.create_token


def _first_array() -> Any:
    return jax.device_put(np.zeros(0, np.bool_))


def _new_link(effect: Effect) -> Any:
    """Makes the runtime token of this thread one whose array can be an operand of compiled code.

    A token that JAX makes holds an array too, but on some versions with the layout of an XLA token; so ours are marked,
    by the attribute in which link.c keeps whether the computation can have failed since its call returned. After a
    computation of JAX's own kind the next one of ours waits for it, therefore.
    """
    tokens, thread = dispatch.runtime_tokens.current_tokens, threading.get_ident()
    if effect in tokens:
        _failed(tokens[effect])
    if _several_devices():
        _core.set_several_devices()
    link: Any = core.Token(_first_array())
    link.pending = None
    if thread in _of_threads:  # of an ended thread with the same number, if it still runs
        before = [*_of_ended_threads, _of_threads[thread]]
        _of_ended_threads[:] = [token for token in before if not token._buf.is_ready()]
    _of_threads[thread] = tokens[effect] = link
    return link


def _several_devices() -> bool:
    return jax.local_device_count() > 1 or jax.default_backend() != "cpu"


def _heal(token: Any, failed: bool) -> None:
    """Gives a token whose computation has failed a link that has not.

    `failed` says that an operation has failed since the computation was called, though perhaps not its own: then it is
    waited for, as JAX marks the results of a failed computation one after the other. A link that is bound to one of
    several devices, as the operands of its computation were, is replaced too, after waiting: it would bind the next
    computation to the same device.
    """
    bound = _several_devices() and token._buf._committed and not _only_device(token._buf)
    if (failed or bound or token._buf.is_ready()) and (_failed(token) or bound):
        token._buf = _first_array()


def _only_device(array: Any) -> bool:
    """Whether an array lies where JAX would put it by itself, as there is one device of the default kind."""
    devices = jax.local_devices()
    return len(devices) == 1 and array.devices() == set(devices)


def _failed(token: Any) -> bool:
    """Waits for what a token stands for; whether it failed, which is a warning here: its results are what raises.

    JAX would let what comes next fail too, unexecuted, while the other ranks wait for it.
    """
    try:
        token.block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        warnings.warn(f"jaxmpi: an earlier computation failed: {error}", RuntimeWarning, stacklevel=4)
        # Of the last computation on each device JAX keeps another token, which would raise at every barrier.
        of_devices = dispatch.runtime_tokens.output_runtime_tokens
        for device, of_device in list(of_devices.items()):
            try:
                of_device.block_until_ready()
            except jax.errors.JaxRuntimeError:
                del of_devices[device]
        return True
    return False


def linked(effect: Effect, compute: Function, otherwise: Function | None = None) -> Function:
    """`compute(link, *args, **kwargs) -> (link, result)` as a function of the arguments, in the order of an effect.

    Between two computations with an ordered effect JAX keeps an empty array, one per thread, that the first returns
    and the second takes as an operand. The same is done here (in link.c); a computation of JAX's own kind after this
    one is linked by the array. Where there is an `otherwise`, it is called instead inside a trace and with
    `jax.disable_jit`.
    """
    names = ("current_tokens", "_buf", "pending", "is_ready", "_committed")
    run = _core.linker(compute, dispatch.runtime_tokens, effect, lambda: _new_link(effect), _heal, names)
    if otherwise is None:
        return run
    clean, disabled = core.trace_state_clean, config.disable_jit

    def call(*args, **kwargs):
        if not clean() or disabled.value:
            return otherwise(*args, **kwargs)
        return run(*args, **kwargs)

    return call


# The last link of each thread that has made one: JAX knows only those of the thread that asks.
_of_threads: dict[int, Any] = {}
_of_ended_threads: list[Any] = []


def wait_for_all_threads() -> None:
    """Waits for the computations that were linked in any thread; errors are those of their results."""
    for token in [*_of_ended_threads, *_of_threads.values()]:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            token.block_until_ready()


def zero_tangent(x: Any) -> Any:
    """The symbolic zero that stands for the tangent of `x`."""
    return ad.Zero(ShapedArray(x.shape, x.dtype).to_tangent_aval())


_TRACERS = {private_ad.JVPTrace: private_ad.JVPTracer, private_ad.LinearizeTrace: private_ad.LinearizeTracer}


def inexact(x: Any) -> bool:
    """Whether `x` is of a dtype that is differentiated: floating-point or complex."""
    return jax.numpy.issubdtype(jax.typeof(x).dtype, jax.numpy.inexact)


Zeros = Callable[[Sequence[Any], Any], Any]
"""(seeds, like) -> zeros like the second that JAX takes for a linear function of the first."""


def with_tangent(trace: Any, operands: Sequence[Any], zeros: Zeros, start: int = 0) -> Sequence[Any]:
    """The operands; with a zero tangent for the first inexact one from `start` on, if `trace` differentiates and none
    has a tangent."""
    kind = _TRACERS.get(type(trace))
    if kind is None:
        return operands
    pairs = [trace.to_primal_tangent_pair(x) for x in operands]
    possible = [i for i, x in enumerate(operands) if i >= start and inexact(x)]
    if not possible or any(type(tangent) is not ad.Zero for _, tangent in pairs):
        return operands
    seeds = differentiated(trace)
    if not seeds:
        return operands
    first = possible[0]
    primal = pairs[first][0]
    with core.set_current_trace(getattr(trace, "tangent_trace", trace.parent_trace)):
        tangent = zeros([seed.tangent for seed in seeds], jax.typeof(primal))
    return (*operands[:first], kind(trace, primal, tangent), *operands[first + 1 :])


def differentiate_calls(effect: Effect, zeros: Zeros) -> None:
    """Has JAX differentiate nested calls and control flow with the effect, also where no operand has a tangent.

    It takes those for constants, and the operations inside never hear of a derivative. So one operand gets a zero
    tangent; a call that has no operand for it is taken apart.
    """
    for primitive in (_jit_p, ad_checkpoint.remat_p, primitives.scan_p, primitives.cond_p, primitives.while_p):
        own = functools.partial(_bind_call, type(primitive).bind_with_trace, primitive, effect, zeros)
        setattr(primitive, "bind_with_trace", own)  # noqa: B010 (a method, for the type checker)


_jit_p = getattr(primitives, "jit_p", None) or getattr(pjit, "pjit_p")  # noqa: B009 (the name in JAX 0.6)


def _bind_call(bind: Function, primitive: Primitive, effect: Effect, zeros: Zeros, trace: Any, args: Any, *more: Any):
    params = more[-1]
    if type(trace) in _TRACERS and _has_effect(params, effect):
        tangents = [trace.to_primal_tangent_pair(x)[1] for x in args]
        if all(type(tangent) is ad.Zero for tangent in tangents):
            seeded = with_tangent(trace, args, zeros, params.get("cond_nconsts", 0))
            if seeded is args and primitive in (_jit_p, ad_checkpoint.remat_p):
                inner = params["jaxpr"]
                with core.set_current_trace(trace):
                    return core.eval_jaxpr(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), *args)
            args = seeded
    return bind(primitive, trace, args, *more)


def _has_effect(params: dict[str, Any], effect: Effect) -> bool:
    inner = [x for value in params.values() for x in (value if isinstance(value, tuple) else (value,))]
    return any(effect in getattr(x, "effects", ()) for x in inner)


_found: "weakref.WeakKeyDictionary[Any, list[weakref.ref[Any]]]" = weakref.WeakKeyDictionary()
"""The values that each trace differentiates, as far as they were there when it was first asked for them."""


def differentiated(trace: Any) -> list[Any]:
    """Values that `trace` differentiates, those that it has started from among them; none if it does not differentiate.

    JAX keeps no list of them; those it has started from live as long as the trace does.
    """
    kind: Any = _TRACERS.get(type(trace))
    if kind is not None and trace not in _found:
        found = [x for x in gc.get_referrers(trace) if type(x) is kind and type(x.tangent) is not ad.Zero]
        _found[trace] = [weakref.ref(x) for x in found if inexact(x.tangent)]
    living = (reference() for reference in _found.get(trace, ()))
    return [x for x in living if x is not None]


within = core.set_current_trace


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Those of a jaxpr's atoms that are no literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def body(equation: Any, needed: Container[Any]) -> tuple[str, Any, list[bool]] | None:
    """The computation inside a loop or a nested call: its parameter's name, itself, which of its arguments it keeps.

    Kept are what every step of a loop uses, and what is `needed` after a call; a loop's carried values are its own.
    None for anything else.
    """
    params = equation.params
    match equation.primitive.name:
        case "scan":
            name, keep = "jaxpr", [True] * _constants_of_scan(params, len(equation.invars))
        case "while":
            name, keep = "body_jaxpr", [True] * params["body_nconsts"]
        case "pjit" | "jit":  # the older name, the newer one
            name, keep = "jaxpr", [isinstance(x, Literal) or x in needed for x in equation.invars]
        case _:
            return None
    inner = params[name]
    return name, inner, keep + [False] * (len(inner.jaxpr.invars) - len(keep))


def _constants_of_scan(params: dict[str, Any], otherwise: int) -> int:
    """How many of a scan's first operands are the same for each step."""
    if "num_consts" in params:
        return params["num_consts"]
    if "ft_in" in params:  # from 0.12 on: a tree of constants, carried values and rows
        return len(list(params["ft_in"].unpack()[0]))
    return otherwise


def without_constant_folding() -> Any:
    """Within it operations are staged even where all operands are known, `jax.ensure_compile_time_eval` or not."""
    return config.eager_constant_folding(False)


def is_tracer(x: Any) -> bool:
    return isinstance(x, Tracer)
