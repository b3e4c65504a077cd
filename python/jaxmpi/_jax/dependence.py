"""The primitive `depends_on`, which makes derivatives depend on the same values on all ranks."""

import contextvars
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi._jax import internals, primitives

depends_on_p = primitives.Primitive("jaxmpi.depends_on")

cotangents: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar("cotangents", default=())
"""A number that depends on all cotangents with which the current transposition started; empty outside of one."""

solving: contextvars.ContextVar[bool] = contextvars.ContextVar("solving", default=False)
"""Whether the matrix of a linear solve is being transposed, which is a value rather than a derivative."""


def depends_on(
    value: Any, inputs: Sequence[Any], *, like: Any = None, always: bool = False, unless: Sequence[Any] = ()
) -> Any:
    """Return a value that JAX treats as a linear function of `value` and of some inputs. It is not computed with them.

    So a tangent of an input gives the result a tangent, and a cotangent of the result gives each input a cotangent.
    These additional tangents and cotangents are zeros.

    Args:
      value: the value; None stands for zeros.
      inputs: the values on which the result depends.
      like: an array or a type with the shape and dtype of the result; needed if the value is None.
      always: every `vmap` around maps the result, also one that maps none of the operands.
      unless: values that limit `always`: a `vmap` that maps one of them, and neither the value nor an input, does not
        map the result.
    """
    like = jax.typeof(value) if like is None else like
    values = [] if value is None else [value]
    params = {"has_value": len(values) > 0, "always": always, "unless": len(unless)}
    dtype = np.dtype(like.dtype)
    if value is None:
        dtype = jax.dtypes.canonicalize_dtype(dtype)  # by whether 64 bits are enabled now
    return depends_on_p.bind(*values, *inputs, *unless, **params, shape=tuple(like.shape), dtype=dtype)


def dependent_zeros(inputs: Sequence[Any], like: Any) -> Any:
    """Return zeros of the shape and dtype of `like`, which JAX treats as a linear function of the inputs."""
    return depends_on(None, inputs, like=like)


def zero_cotangent(like: Any) -> Any:
    """Return zeros as a missing cotangent, which depend on all cotangents with which the transposition started
    (_derivatives/transposition.py)."""
    return depends_on(None, cotangents.get(), like=like, always=not solving.get())


def _jvp(primals: Any, tangents: Any, *, has_value: Any, always: Any, **params: Any) -> Any:
    value_has_tangent = has_value and type(tangents[0]) is not internals.ad.Zero
    nonzero = [t for t in tangents if type(t) is not internals.ad.Zero]
    value = depends_on_p.bind(*primals, has_value=has_value, always=False, **params)
    return value, depends_on_p.bind(*nonzero, has_value=value_has_tangent, always=always, **params)


def _transpose(cotangent: Any, *operands: Any, has_value: Any, always: Any, unless: Any, **params: Any) -> Any:
    # The result is linear in the inputs. So the cotangents of the inputs are zeros, linear in the result's cotangent.
    if type(cotangent) is internals.ad.Zero:
        return [None] * len(operands)
    linear = [internals.ad.is_undefined_primal(x) for x in operands]
    zeros = [
        depends_on(None, [cotangent], like=x.aval, always=always) if is_linear else None
        for x, is_linear in zip(operands[has_value:], linear[has_value:], strict=True)
    ]
    return [cotangent if is_linear else None for is_linear in linear[:has_value]] + zeros


def _batch(
    axis: Any, operands: Any, axes: Any, *, has_value: Any, always: Any, unless: Any, shape: Any, dtype: Any
) -> Any:
    mapped = [at is not None for at in axes]
    limits = len(mapped) - unless
    params = {"has_value": has_value, "always": always, "unless": unless, "dtype": dtype}
    if not any(mapped[:limits]) and (any(mapped[limits:]) or not always):
        return depends_on_p.bind(*operands, shape=shape, **params), None
    if has_value:
        value = batched(operands[0], axes[0], axis.size, 0)
        operands = [value, *operands[1:]]
    return depends_on_p.bind(*operands, shape=(axis.size, *shape), **params), 0


def batched(x: Any, axis_of_x: Any, size: Any, at: Any) -> Any:
    """Return `x` with the batch axis at the position `at`; repeated along a new axis if it has none (None)."""
    if axis_of_x is not None:
        return jnp.moveaxis(x, axis_of_x, at)
    return jnp.broadcast_to(jnp.expand_dims(x, at), (*jnp.shape(x)[:at], size, *jnp.shape(x)[at:]))


def _implementation(*operands: Any, has_value: Any, shape: Any, dtype: Any, **params: Any) -> Any:
    return operands[0] if has_value else jnp.zeros(shape, dtype)


depends_on_p.def_abstract_eval(lambda *_, shape, dtype, **params: internals.ShapedArray(shape, dtype))
depends_on_p.def_impl(_implementation)
internals.mlir.register_lowering(depends_on_p, internals.mlir.lower_fun(_implementation, multiple_results=False))
internals.ad.primitive_jvps[depends_on_p] = _jvp
internals.ad.primitive_transposes[depends_on_p] = _transpose
internals.batching.fancy_primitive_batchers[depends_on_p] = _batch
