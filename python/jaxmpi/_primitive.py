"""Turns a row of the operation table into a JAX primitive with all its rules.

The mathematics of a row: stack the arrays of all ranks into one long vector, then an operation is a linear map of it
(where its row says so). Its tangent is the same operation on the tangents, its transpose the adjoint of that map,
which the row names. Both are communication themselves, so they happen on a rank even where its cotangent is zero.
What a rule cannot help: JAX asks for no tangent of an operation whose operands on this rank do not depend on what is
differentiated, though another rank's may.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi import _jax
from jaxmpi._native import DATATYPES, OPERATIONS
from jaxmpi._order import EFFECT, IN_PLACE, eager

Params = dict[str, Any]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """What one rank hands to the core: which buffers, by its part in the operation."""

    operand: bool = True
    """Operand 0 is passed. Further operands are templates, which are never passed."""
    result: bool = True
    """The core fills a result; otherwise operand 0 is the result as it is."""
    in_place: bool = False
    """The result may take operand 0's memory, where the parameter IN_PLACE says so too."""


@dataclass(frozen=True)
class Row:
    """One operation: its shape, its part on this rank, its batching and its derivative."""

    name: str

    shape: Callable[[Shape, Params], Shape] | None
    """Shape of the result from that of the last operand; None: no result."""

    part: Callable[[Params], Part] = lambda params: Part()

    batch: Callable[[Params], tuple[int, int]] = lambda params: (0, 0)
    """Where the batch axis must stand in the operands, and where it then stands in the result."""

    linear: Callable[[Params], str] = lambda params: "its derivative is not available yet"
    """Empty where the operation is linear in operand 0; otherwise why no derivative can be taken."""

    transpose: Callable[..., Any] | None = None
    """(cotangent of the result, shape and dtype of operand 0, params) -> cotangent of operand 0."""

    communicates: bool = True


@functools.lru_cache(maxsize=4096)
def eager_program(primitive: _jax.Primitive, names: tuple[str, ...], *values: Any) -> Callable[..., Any]:
    """The compiled program of an eager call, one for equal parameters; shapes and dtypes are JAX's affair."""
    params = dict(zip(names, values, strict=True))
    return eager(lambda *args: primitive.bind(*args, **params))


def eager_programs() -> int:
    """How many programs eager calls have made and kept; 4096 at most."""
    return eager_program.cache_info().currsize


def make_primitive(row: Row) -> _jax.Primitive:
    """The primitive of a row; always with a list of results, which is empty or has one entry."""
    primitive = _jax.Primitive(f"jaxmpi.{row.name}")
    primitive.multiple_results = True

    def abstract_eval(*avals, **params):
        results = []
        if row.shape is not None:
            last = avals[-1]
            results.append(_jax.ShapedArray(tuple(row.shape(last.shape, params)), last.dtype))
        return (results, {EFFECT}) if row.communicates else results

    def implementation(*args, **params):
        return eager_program(primitive, tuple(params), *params.values())(*args)

    _jax.define_primitive(primitive, abstract_eval, row.communicates, implementation)
    _jax.mlir.register_lowering(primitive, _make_lowering(row), platform="cpu" if row.communicates else None)
    if row.communicates:
        _jax.mlir.register_lowering(primitive, _make_refusal(row))
    _jax.batching.primitive_batchers[primitive] = _make_batching(row, primitive)
    _jax.ad.primitive_jvps[primitive] = _make_jvp(row, primitive)
    if row.transpose is not None:
        _jax.ad.primitive_transposes[primitive] = _make_transpose(row.transpose)
    return primitive


def _attribute(name: str, params: Params, dtype: Any) -> np.int64:
    """An attribute as the core reads it: always a 64-bit integer."""
    value = params[name]
    if name == "op":
        return np.int64(value.handle_for(DATATYPES[np.dtype(dtype).name]))
    if name in ("comm", "status"):
        return np.int64(0 if value is None else value.number)
    return np.int64(value)


def _make_lowering(row: Row):
    def lower(ctx, *operands, **params):
        part = row.part(params)
        if not row.communicates:
            return [operands[0]]
        passed = operands[:1] if part.operand else ()
        avals_in = ctx.avals_in[: len(passed)]
        avals_out = ctx.avals_out if part.result else []
        rule = _jax.ffi_lowering(
            f"jaxmpi_{row.name}",
            has_side_effect=True,
            operand_output_aliases={0: 0} if part.in_place and params[IN_PLACE] else None,
        )
        dtype = ctx.avals_in[0].dtype if ctx.avals_in else None
        attributes = {name: _attribute(name, params, dtype) for name in OPERATIONS[row.name]}
        inner = ctx.replace(
            avals_in=[*avals_in, _jax.abstract_token],
            avals_out=[*avals_out, _jax.abstract_token],
        )
        *results, token = rule(inner, *passed, ctx.tokens_in.get(EFFECT), **attributes)
        ctx.set_tokens_out(_jax.mlir.TokenSet({EFFECT: token}))
        if row.shape is None or part.result:
            return results
        return [operands[0]]

    return lower


def _make_refusal(row: Row):
    def refuse(ctx, *operands, **params):
        raise NotImplementedError(
            f"{row.name}: arrays on {', '.join(ctx.module_context.platforms)} cannot be communicated yet; move them to "
            "the CPU with jax.device_put(x, jax.devices('cpu')[0]), or set JAX_PLATFORMS=cpu"
        )

    return refuse


def _make_batching(row: Row, primitive: _jax.Primitive):
    def batch(operands, axes, **params):
        (size,) = {x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None}
        at, result_at = row.batch(params)

        def place(x, axis):
            if axis is not None:
                return jnp.moveaxis(x, axis, at)
            return jnp.broadcast_to(jnp.expand_dims(x, at), (*x.shape[:at], size, *x.shape[at:]))

        results = primitive.bind(*map(place, operands, axes), **params)
        return results, [result_at] * len(results)

    return batch


def _make_jvp(row: Row, primitive: _jax.Primitive):
    def jvp(primals, tangents, **params):
        differentiable = all(jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in primals)
        why_not = row.linear(params) if differentiable else ""
        if why_not:
            raise NotImplementedError(f"{row.name} cannot be differentiated: {why_not}")
        results = primitive.bind(*primals, **params)
        if not differentiable:
            return results, [_jax.zero_tangent(y) for y in results]
        if "status" in params:
            params = {**params, "status": None}
        tangent = _jax.ad.instantiate_zeros(tangents[0])
        return results, primitive.bind(tangent, *primals[1:], **params)

    return jvp


def _make_transpose(rule: Callable[..., Any]):
    def transpose(cotangents: Sequence[Any], operand, *templates, **params):
        cotangent = _jax.ad.instantiate_zeros(cotangents[0])
        template = jax.ShapeDtypeStruct(operand.aval.shape, operand.aval.dtype)
        return [rule(cotangent, template, params), *(None for _ in templates)]

    return transpose
