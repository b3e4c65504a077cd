"""The private names of JAX that the package uses, except the names for jaxprs (jaxprs.py), for the order of calls
(runtime_token.py) and for differentiation (_derivatives).

Tested with JAX 0.6.0 to `NEWEST_TRIED`. If a version moves one of these names, only this file has to change.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax._src import ad_checkpoint, config, core, effects, source_info_util
from jax._src.array import ArrayImpl
from jax._src.interpreters import partial_eval, pxla
from jax._src.lax import lax
from jax._src.lib.mlir.dialects import hlo
from jax._src.sharding_impls import UNSPECIFIED as UNSPECIFIED
from jax.ffi import ffi_lowering as ffi_lowering
from jax.interpreters import ad as ad
from jax.interpreters import batching as batching
from jax.interpreters import mlir as mlir

try:
    from jax._src import hijax as hijax
except ImportError:  # before JAX 0.8
    hijax = None  # type: ignore[assignment]

from jaxmpi._jax.primitives import Primitive
from jaxmpi_launch.versions import NEWEST_TRIED, numbers

Function = Callable[..., Any]
Effect = effects.Effect
ShapedArray = core.ShapedArray
Tracer = core.Tracer
abstract_token = core.abstract_token
DynamicJaxprTrace = partial_eval.DynamicJaxprTrace
remat_p = ad_checkpoint.remat_p

ADVICE = f"This version of jaxmpi was tried on JAX 0.6.0 to {NEWEST_TRIED}: use one of these, or a newer jaxmpi."


def check_outside(operation: str) -> None:
    """Raise TypeError where a function is being traced: the effects would happen once, and not in each call."""
    if not trace_state_clean():
        raise TypeError(
            f"{operation}: it is called in a function that JAX is tracing, for jit, grad or vmap: call it outside, and "
            "pass arrays in or out."
        )


class Unsupported(NotImplementedError):
    """An error for what this package cannot do, or does not do because a derivative would be wrong. All code of the
    package that JAX calls while it differentiates raises it, so that it differs from errors of JAX. To users it is a
    NotImplementedError, by name too."""

    __module__, __qualname__ = "builtins", "NotImplementedError"

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return NotImplementedError, self.args


Unsupported.__name__ = "NotImplementedError"

KEEPS_EFFECTS = hasattr(effects, "partial_eval_kept_effects")
"""Whether an operation stays in a derivative if it has no result or the result is not used. Not in JAX 0.6."""

shard_map: Function
if hasattr(jax, "shard_map"):
    shard_map = jax.shard_map
else:  # JAX 0.6.0
    from jax.experimental import shard_map as _experimental

    shard_map = _experimental.shard_map

# The permissions that an ordered effect needs in transformations and control flow.
_PERMISSIONS = (
    effects.lowerable_effects,
    effects.ordered_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
    effects.shardable_ordered_effects,  # so that an error of ours says why it cannot be lowered for several devices
    *([effects.partial_eval_kept_effects] if KEEPS_EFFECTS else []),
)


if numbers(jax.__version__) > numbers(NEWEST_TRIED):
    warnings.warn(
        f"jaxmpi was tried on JAX up to {NEWEST_TRIED}, this is {jax.__version__}. What derivatives rely on is checked "
        "before the first one.",
        RuntimeWarning,
        stacklevel=2,
    )


def permit_effect(kind: type) -> None:
    """Permit effects of this class to order computations, in control flow, custom derivatives and checkpoints too."""
    for permission in _PERMISSIONS:
        permission.add_type(kind)


def keep(primitive: Primitive) -> None:
    partial_eval.dce_rules[primitive] = lambda *args: ([True] * len(args[-1].invars), args[-1])


def replace(owner: Any, name: str, parameters: str, instead: Function) -> None:
    """Replace a function `own(...)` of JAX, in a class or module, by `instead(own, ...)`.

    `parameters`: the names of the parameters, in order, as in the versions tested; several lists are joined by " or ".
    Empty: not checked. Raise ImportError if there is no function of this name, or the parameters differ.
    """
    own = getattr(owner, name, None)
    own = getattr(own, "jaxmpi_own", own)  # if the package is imported again
    where = f"{getattr(owner, '__qualname__', owner.__name__)}.{name}"
    if own is None:
        raise ImportError(f"jaxmpi: there is no {where} in JAX {jax.__version__}. {ADVICE}")
    actual = " ".join(inspect.signature(own).parameters) if parameters else ""
    if actual not in parameters.split(" or "):
        raise ImportError(f"jaxmpi: {where} of JAX {jax.__version__} takes ({actual}), not ({parameters}). {ADVICE}")

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        return instead(own, *args, **kwargs)

    call.jaxmpi_own = own  # type: ignore[attr-defined]
    setattr(owner, name, call)


def pass_token_when_compiled(effect: Effect) -> None:
    """Make `f.lower(x).compile()` pass on the token of this effect in every call.

    JAX uses its fast path from the second call on, and leaves the token out there. A version of JAX without the method
    that is replaced here calls in another way, and is left as it is.
    """

    def create_cpp_call(own: Function, executable: Any, *args: Any, **kwargs: Any) -> Any:
        if effect in getattr(executable.unsafe_call, "ordered_effects", ()):
            return None  # no fast path
        return own(executable, *args, **kwargs)

    if hasattr(pxla.MeshExecutable, "create_cpp_call"):
        replace(pxla.MeshExecutable, "create_cpp_call", "", create_cpp_call)


def devices_of(ctx: Any) -> int:
    """Return the number of devices for which a computation is lowered."""
    context = ctx.module_context.axis_context
    mesh = getattr(context, "mesh", None)
    return mesh.size if mesh is not None else getattr(context, "num_devices", 1)


def spread(devices: int) -> str:
    """Return what is wrong with a computation, or an array, of several devices, and what to do."""
    if jax.process_count() == 1:
        return (
            f"spread over {devices} devices of this process, and a rank communicates from one. Gather its operands on "
            "one device with jax.device_put(x, jax.devices()[0]), or start a rank for each device."
        )
    return (
        f"spread over {devices} devices of several processes. A rank communicates what it has itself: outside of "
        "shard_map and of programs of sharded arrays, pass its part, x.addressable_data(0). Inside of them use JAX's "
        "own collectives, as jax.lax.psum (docs/sharded.md)."
    )


def devices_of_array(x: Any) -> int:
    """Return the number of devices over which an array is spread that is not traced."""
    sharding = x.sharding
    return 1 if type(sharding) is jax.sharding.SingleDeviceSharding else sharding.num_devices


def no_trace() -> Any:
    """Return a context in which computations are executed or traced as if outside of all traces."""
    return core.set_current_trace(core.eval_trace)


def on_mesh(mesh: jax.sharding.Mesh) -> Any:
    """Return a context in which this is the current mesh, whatever is set around it."""
    name, owner = ("set_mesh", jax) if hasattr(jax, "set_mesh") else ("use_mesh", jax.sharding)  # JAX 0.6
    return getattr(owner, name)(mesh)


current_source = source_info_util.current
"""Returns the source of the operation that is being traced: the original one, if JAX evaluates it once more."""

jit_disabled = config.disable_jit
"""Whether `jax.disable_jit` holds: in the attribute `value`."""


def platforms() -> str | None:
    """Return JAX's setting of JAX_PLATFORMS: names separated by commas, empty, or None."""
    return config.jax_platforms.value


trace_state_clean = core.trace_state_clean
jaxpr_as_fun = core.jaxpr_as_fun
ConcreteArray = ArrayImpl
create_token = hlo.create_token


def optimization_barrier(x: Any) -> Any:
    """Return a value in the text of a computation that equals `x`. XLA does not see how `x` was computed."""
    return hlo.OptimizationBarrierOp([x]).results[0]


def lower_inline(ctx: Any, function: Any, operands: Any, avals_in: Any, avals_out: Any) -> list[Any]:
    """Return the results of a function of arrays that is lowered where an operation is lowered."""
    inner = ctx.replace(primitive=None, avals_in=avals_in, avals_out=avals_out, tokens_out=None)
    return list(mlir.lower_fun(function, multiple_results=True)(inner, *operands))


def zero_tangent(x: Any) -> Any:
    return ad.Zero(ShapedArray(x.shape, x.dtype).to_tangent_aval())


def weak(x: Any) -> Any:
    """Return the array as one that takes the dtype of what it meets, as Python's numbers do."""
    return lax._convert_element_type(x, weak_type=True)


def inexact(x: Any) -> bool:
    """Return whether `x`, a value or a type, has a dtype that can be differentiated: floating-point or complex."""
    dtype = getattr(x if hasattr(x, "dtype") else jax.typeof(x), "dtype", None)
    return dtype is not None and jax.numpy.issubdtype(dtype, jax.numpy.inexact)


def inexact_among(xs: Iterable[Any]) -> list[int]:
    return [i for i, x in enumerate(xs) if inexact(x)]


def without_constant_folding() -> Any:
    """Return a context in which operations are staged even if all operands are known, whatever is set around it."""
    return config.eager_constant_folding(False)


def without_leak_checks() -> Any:
    return config.check_tracer_leaks(False)


def is_tracer(x: Any) -> bool:
    return isinstance(x, Tracer)


def distrust_cached_programs() -> None:
    """Turn off JAX's compilation cache with JAX 0.6: no program is taken from it or written to it from now on.

    With JAX 0.6.0 a loop that communicates returned zeros when it came from the cache; not with 0.7 or newer.
    """
    if not KEEPS_EFFECTS:
        from jax.experimental.compilation_cache import compilation_cache

        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # it may have been looked up before
