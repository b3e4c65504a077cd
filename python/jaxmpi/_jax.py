"""Every private name of JAX that the package uses, each with the versions it was tried on.

Tried on JAX 0.6.0, 0.10.2 and 0.12.0.1. A version that moves one of these names needs a change here and nowhere else.
"""

from collections.abc import Callable
from typing import Any

from jax._src import core, effects
from jax._src.dispatch import apply_primitive as apply_primitive
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


def define_primitive(primitive: Primitive, abstract_eval: Callable[..., Any], effectful: bool) -> None:
    """Gives a primitive its abstract evaluation and its eager implementation (compiled once per parameters)."""
    if effectful:
        primitive.def_effectful_abstract_eval(abstract_eval)
    else:
        primitive.def_abstract_eval(abstract_eval)
    primitive.def_impl(lambda *args, **params: apply_primitive(primitive, *args, **params))


def is_tracer(x: Any) -> bool:
    return isinstance(x, Tracer)
