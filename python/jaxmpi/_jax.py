"""The private names of JAX that the package uses, but for those of its differentiation: see _derivatives.

Tried on JAX 0.6.0 to `NEWEST_TRIED`. A version that moves one of these names needs a change here and nowhere else.
"""

import contextlib
import functools
import inspect
import re
import threading
import warnings
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax._src import config, core, dispatch, effects, pjit, source_info_util
from jax._src.array import ArrayImpl
from jax._src.interpreters import mlir as private_mlir
from jax._src.interpreters import partial_eval
from jax._src.lib.mlir.dialects import hlo
from jax._src.sharding_impls import UNSPECIFIED as UNSPECIFIED
from jax._src.sharding_impls import UnspecifiedValue
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

NEWEST_TRIED = "0.12.0.1"
"""The newest version of JAX on which the tests were run."""
ADVICE = f"This version of jaxmpi was tried on JAX 0.6.0 to {NEWEST_TRIED}: use one of these, or a newer jaxmpi."

KEEPS_EFFECTS = hasattr(effects, "partial_eval_kept_effects")
"""Whether an operation stays in a derivative where nothing uses its result, or it has none. Not so in JAX 0.6."""

jit_p = getattr(primitives, "jit_p", None) or getattr(pjit, "pjit_p")  # noqa: B009 (the name in JAX 0.6)

# What an ordered effect must be allowed to do so that it passes through every transformation and control flow.
_PERMISSIONS = (
    effects.lowerable_effects,
    effects.ordered_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
    *([effects.partial_eval_kept_effects] if KEEPS_EFFECTS else []),
)


def numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, without what names a build of it."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("dev")[0].partition("+")[0]))


if numbers(jax.__version__) > numbers(NEWEST_TRIED):
    warnings.warn(
        f"jaxmpi was tried on JAX up to {NEWEST_TRIED}, this is {jax.__version__}. What derivatives rely on is checked "
        "before the first one.",
        RuntimeWarning,
        stacklevel=2,
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


def replace(owner: Any, name: str, parameters: str, instead: Function) -> None:
    """Puts `instead(own, ...)` in the place of a function `own(...)` of JAX.

    Args:
      owner: a class or module of JAX.
      name: of the function in it.
      parameters: the names of its parameters, in order, as they were in the versions tried; empty where a function
        does not tell.

    Raises:
      ImportError: there is no such function, or it takes something else.
    """
    own = getattr(owner, name, None)
    own = getattr(own, "jaxmpi_own", own)  # where the package is imported once more
    where = f"{getattr(owner, '__qualname__', owner.__name__)}.{name}"
    if own is None:
        raise ImportError(f"jaxmpi: there is no {where} in JAX {jax.__version__}. {ADVICE}")
    found = " ".join(inspect.signature(own).parameters) if parameters else ""
    if found not in parameters.split(" or "):
        raise ImportError(f"jaxmpi: {where} of JAX {jax.__version__} takes ({found}), not ({parameters}). {ADVICE}")

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        return instead(own, *args, **kwargs)

    call.jaxmpi_own = own  # type: ignore[attr-defined]
    setattr(owner, name, call)


def devices_of(ctx: Any) -> int:
    """The number of devices for which a computation is lowered."""
    context = ctx.module_context.axis_context
    mesh = getattr(context, "mesh", None)
    return mesh.size if mesh is not None else getattr(context, "num_devices", 1)


def no_trace() -> Any:
    """Within it computations are executed or traced as if nothing around them was."""
    return core.set_current_trace(core.eval_trace)


def current_source() -> Any:
    return source_info_util.current()


def lower_calls_inline(effect: Effect) -> None:
    """Has nested calls with the effect lowered as the equations that they hold.

    XLA 0.12 may execute a loop twice, or end the process, where a function with an ordered effect and without array
    operands is called inside another (`tests/test_order.py`). It would inline them itself.
    """
    for primitive in (jit_p, primitives.call_p, primitives.closed_call_p, getattr(core, "eval_jaxpr_p", None)):
        if primitive is not None:
            entry = private_mlir._lowerings[primitive]
            own: Any = getattr(entry, "rule", entry)  # the rule itself in JAX 0.6
            mlir.register_lowering(primitive, functools.partial(_lower_call, own, effect))


def _lower_call(own: Function, effect: Effect, ctx: Any, *args: Any, **params: Any) -> Any:
    inner = called(params)
    placed = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    if effect not in inner.effects or not all(isinstance(x, UnspecifiedValue) for x in placed):
        return own(ctx, *args, **params)
    return mlir.lower_fun(functools.partial(evaluate, inner), multiple_results=True)(ctx, *args)


def called(params: dict[str, Any]) -> Any:
    """The computation inside a nested call with these parameters."""
    return params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]


def inner_jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    """The jaxprs that an equation with these parameters has inside, less their constants."""
    for value in params.values():
        for inner in value if isinstance(value, tuple) else (value,):
            jaxpr = getattr(inner, "jaxpr", inner)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


def alone(jaxpr: Any, equation: Any) -> Any:
    """A jaxpr of one of its equations alone, of all of its operands."""
    operands = [core.Var(jax.typeof(x.val)) if isinstance(x, Literal) else core.Var(x.aval) for x in equation.invars]
    results = [core.Var(x.aval) for x in equation.outvars]
    equation = equation.replace(invars=operands, outvars=results)
    names = jaxpr.debug_info._replace(arg_names=("",) * len(operands), result_paths=("",) * len(results))
    return jaxpr.replace(
        constvars=[], invars=operands, outvars=results, eqns=[equation], debug_info=names, effects=equation.effects
    )


def evaluate(jaxpr: Any, *args: Any) -> list[Any]:
    """The results of a jaxpr, closed or not, in the trace at hand."""
    return core.eval_jaxpr(getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ()), *args)


def without_objects(closed: Any) -> Any:
    """The same computation without the primitives that newer versions of JAX keep as objects until they lower them."""
    high = getattr(closed, "is_high", False) or getattr(getattr(closed, "jaxpr", None), "is_high", False)
    if not high:
        return closed
    lower: Any = getattr(partial_eval, "lower_jaxpr2", partial_eval.lower_jaxpr)
    return lower(closed)


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


def inexact(x: Any) -> bool:
    """Whether `x`, a value or its type, is of a dtype that is differentiated: floating-point or complex."""
    dtype = getattr(x if hasattr(x, "dtype") else jax.typeof(x), "dtype", None)
    return dtype is not None and jax.numpy.issubdtype(dtype, jax.numpy.inexact)


def inexact_among(xs: Iterable[Any]) -> list[int]:
    """The places of those that are differentiated."""
    return [i for i, x in enumerate(xs) if inexact(x)]


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
            name, keep = "jaxpr", [True] * parts_of_scan(params)[0]
        case "while":
            name, keep = "body_jaxpr", [True] * params["body_nconsts"]
        case "pjit" | "jit":  # the older name, the newer one
            name, keep = "jaxpr", [isinstance(x, Literal) or x in needed for x in equation.invars]
        case _:
            return None
    inner = params[name]
    return name, inner, keep + [False] * (len(inner.jaxpr.invars) - len(keep))


def parts_of_scan(params: dict[str, Any]) -> tuple[int, int]:
    """How many of a scan's first operands are the same for each step, and how many after them are carried."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = params["ft_in"].unpack()  # from 0.12 on: a tree of constants, carried values and rows
    return len(list(constants)), len(list(carried))


def without_constant_folding() -> Any:
    """Within it operations are staged even where all operands are known, `jax.ensure_compile_time_eval` or not."""
    return config.eager_constant_folding(False)


def without_leak_checks() -> Any:
    """Within it `jax.checking_leaks` does not count."""
    return config.check_tracer_leaks(False)


def is_tracer(x: Any) -> bool:
    return isinstance(x, Tracer)
