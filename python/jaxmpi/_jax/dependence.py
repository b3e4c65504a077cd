"""The link: a primitive without cost that JAX treats as a linear function. It makes derivatives depend on the same
values on all ranks."""

import contextvars
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmpi._jax import internals

link_primitive = internals.Primitive("jaxmpi.link")

cotangents: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar("cotangents", default=())
"""A number that depends on all cotangents with which the current transposition was started; empty outside of one."""

solving: contextvars.ContextVar[bool] = contextvars.ContextVar("solving", default=False)
"""Whether the matrix of a linear solve is being transposed, which is a value rather than a derivative."""


def link(value: Any, seeds: Sequence[Any], like: Any, always: bool = False, unless: Sequence[Any] = ()) -> Any:
    """The value, or zeros like the third argument if it is None, which JAX treats as a linear function of the `seeds`
    as well. Costs nothing. `always`: any `vmap` around maps it, except one that maps any of `unless` and none of the
    other operands.
    """
    own = [] if value is None else [value]
    params = {"own": len(own) > 0, "always": always, "unless": len(unless)}
    return link_primitive.bind(*own, *seeds, *unless, **params, shape=tuple(like.shape), dtype=np.dtype(like.dtype))


def linked_zeros(seeds: Sequence[Any], like: Any) -> Any:
    """Zeros of the shape and dtype of `like`, which JAX treats as a linear function of the `seeds`."""
    return link(None, seeds, like)


def zero_cotangent(like: Any) -> Any:
    """Zeros as a missing cotangent, which depend on what the transposition was started with: see
    _derivatives/transposition.py."""
    return link(None, cotangents.get(), like, not solving.get())


def _link_jvp(primals, tangents, *, own, always, **params):
    own_too = own and type(tangents[0]) is not internals.ad.Zero
    given = [t for t in tangents if type(t) is not internals.ad.Zero]
    value = link_primitive.bind(*primals, own=own, always=False, **params)
    return value, link_primitive.bind(*given, own=own_too, always=always, **params)


def _link_transpose(cotangent, *operands, own, always, unless, **params):
    # The result is linear in the seeds; so the cotangents of the seeds are zeros that are linear in its cotangent.
    if type(cotangent) is internals.ad.Zero:
        return [None] * len(operands)
    linear = [internals.ad.is_undefined_primal(x) for x in operands]
    zeros = [
        link(None, [cotangent], x.aval, always) if is_linear else None
        for x, is_linear in zip(operands[own:], linear[own:], strict=True)
    ]
    return [cotangent if is_linear else None for is_linear in linear[:own]] + zeros


def _link_batch(axis, operands, axes, *, own, always, unless, shape, dtype):
    mapped = [at is not None for at in axes]
    excluded = any(mapped[len(mapped) - unless :])
    params = {"own": own, "always": always, "unless": unless, "dtype": dtype}
    if not any(mapped[: len(mapped) - unless]) and (excluded or not always):
        return link_primitive.bind(*operands, shape=shape, **params), None
    if own:
        value = batched(operands[0], axes[0], axis.size, 0)
        operands = [value, *operands[1:]]
    return link_primitive.bind(*operands, shape=(axis.size, *shape), **params), 0


def batched(x, axis_of_x, size, at):
    if axis_of_x is not None:
        return jnp.moveaxis(x, axis_of_x, at)
    return jnp.broadcast_to(jnp.expand_dims(x, at), (*jnp.shape(x)[:at], size, *jnp.shape(x)[at:]))


def _linked(*operands, own, shape, dtype, **params):
    return operands[0] if own else jnp.zeros(shape, dtype)


internals.define_primitive(
    link_primitive, lambda *_, shape, dtype, **params: internals.ShapedArray(shape, dtype), False, _linked
)
internals.mlir.register_lowering(link_primitive, internals.mlir.lower_fun(_linked, multiple_results=False))
internals.ad.primitive_jvps[link_primitive] = _link_jvp
internals.ad.primitive_transposes[link_primitive] = _link_transpose
internals.batching.fancy_primitive_batchers[link_primitive] = _link_batch
