"""Every private name of JAX that the package uses, each with the versions it was tried on.

Tried on JAX 0.6.0, 0.10.2 and 0.12.0.1. A version that moves one of these names needs a change here and nowhere else.
"""

import contextlib
import threading
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import array, core, dispatch, effects
from jax._src.interpreters import partial_eval
from jax._src.lib.mlir.dialects import hlo
from jax.extend.core import Primitive as Primitive
from jax.ffi import ffi_lowering as ffi_lowering
from jax.interpreters import ad as ad
from jax.interpreters import batching as batching
from jax.interpreters import mlir as mlir

Effect = effects.Effect
ShapedArray = core.ShapedArray
Tracer = core.Tracer
abstract_token = core.abstract_token

# What an ordered effect must be allowed to do so that it passes through every transformation and control flow.
_PERMISSIONS = (
    effects.lowerable_effects,
    effects.ordered_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
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


def jit_disabled() -> bool:
    return jax.config.jax_disable_jit  # type: ignore[attr-defined]


trace_state_clean = core.trace_state_clean
jaxpr_as_fun = core.jaxpr_as_fun
ConcreteArray = array.ArrayImpl
create_token = hlo.create_token


def _first_array() -> Any:
    return jax.device_put(np.zeros(0, np.bool_))


def _new_link(effect: Effect, tokens: dict[Effect, Any]) -> Any:
    """Makes the runtime token of this thread one whose array can be an operand of compiled code.

    A token that JAX makes holds an array too, but on some versions with the layout of an XLA token; so ours are marked.
    After a computation of JAX's own kind the next one of ours waits for it, therefore.
    """
    if effect in tokens:
        _failed(tokens[effect])
    link: Any = core.Token(_first_array())
    link.is_link = True
    _of_threads[threading.get_ident()] = tokens[effect] = link
    return link


def link_runtime_tokens(effect: Effect, compute: Callable[..., tuple[Any, Any]], args: Any, kwargs: Any) -> Any:
    """Runs `compute(link, *args, **kwargs) -> (link, result)` in the order of an effect, as JAX orders its own.

    Between two computations with an ordered effect JAX keeps an empty array, one per thread, that the first returns
    and the second takes as an operand. The same is done here; a computation of JAX's own kind after this one is linked
    by the array.
    """
    tokens = dispatch.runtime_tokens.current_tokens
    token = tokens.get(effect)
    if token is None or not hasattr(token, "is_link"):
        token = _new_link(effect, tokens)
    if token._buf.is_ready() and _failed(token):
        token._buf = _first_array()
    token._buf, result = compute(token._buf, *args, **kwargs)
    return result


def _failed(token: core.Token) -> bool:
    """Waits for what a token stands for; whether it failed, which is a warning here: its results are what raises.

    JAX would let what comes next fail too, unexecuted, while the other ranks wait for it.
    """
    try:
        token.block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        warnings.warn(f"jaxmpi: an earlier computation failed: {error}", RuntimeWarning, stacklevel=4)
        return True
    return False


# The last link of each thread that has made one: JAX knows only those of the thread that asks.
_of_threads: dict[int, core.Token] = {}


def wait_for_all_threads() -> None:
    """Waits for the computations that were linked in any thread; errors are those of their results."""
    while _of_threads:
        _, token = _of_threads.popitem()
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            token.block_until_ready()


def zero_tangent(x: Any) -> Any:
    """The symbolic zero that stands for the tangent of `x`."""
    return ad.Zero(ShapedArray(x.shape, x.dtype).to_tangent_aval())


def is_tracer(x: Any) -> bool:
    return isinstance(x, Tracer)
