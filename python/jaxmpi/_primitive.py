"""Turns a row of the operation table into a JAX primitive with all its rules.

Tangents and cotangents are communicated by the operations of the table again. That works only if all ranks take part,
also one whose operand does not depend on what is differentiated (a constant template above all), or whose result
nothing depends on; JAX leaves such operations out of derivatives. So inside a differentiated function every operation
on floating-point arrays is differentiated: an operand without tangent gets a zero that counts as one, and the effect
keeps what has no result that is used.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxmpi import _jax
from jaxmpi._arguments import DERIVATIVE_TAGS
from jaxmpi._derivatives import communication
from jaxmpi._derivatives.communication import DERIVATIVE, Operation
from jaxmpi._derivatives.transposition import zero_cotangent
from jaxmpi._devices import PLATFORMS
from jaxmpi._link import batched, linked_zeros
from jaxmpi._native import DATATYPES, DEVICES, OPERATIONS
from jaxmpi._order import EFFECT, IN_PLACE, eager

Params = dict[str, Any]
Shape = tuple[int, ...]


TANGENT, COTANGENT, VALUE = "tangent", "cotangent", "value"  # the last: as an operand of a further derivative


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

    refuse: Callable[[Params], str] = lambda params: ""
    """Why no derivative can be taken; empty where one can."""

    tangent: Callable[[Params], Callable[..., Any] | None] = lambda params: None
    """Its rule, (operands, tangent of operand 0, results, params) -> tangent of the result. None where it is linear."""

    tangent_of_half: Callable[..., Any] | None = None
    """The rule where one of two operands alone is of a dtype that is differentiated: (operands, their tangents, params)
    -> tangent of the result, None where that is zero."""

    transpose: Callable[..., Any] | None = None
    """(cotangent of the result, shape and dtype of operand 0, params) -> cotangent of operand 0."""

    silent: bool = False
    """Only its transpose communicates; the core has no such operation."""


@functools.lru_cache(maxsize=4096)
def eager_program(primitive: _jax.Primitive, names: tuple[str, ...], *values: Any) -> Callable[..., Any]:
    """The compiled program of an eager call, one for equal parameters; shapes and dtypes are JAX's affair."""
    params = dict(zip(names, values, strict=True))
    return eager(lambda *args: primitive.bind(*args, **params))


def eager_programs() -> int:
    """How many programs eager calls have made and kept; 4096 at most."""
    return eager_program.cache_info().currsize


# --- from a row to a primitive -------------------------------------------------------------------------------------


def make_primitive(row: Row) -> _jax.Primitive:
    """The primitive of a row; always with a list of results, which is empty or has one entry."""
    primitive = Operation(f"jaxmpi.{row.name}")

    def abstract_eval(*avals, **params):
        results = []
        if row.shape is not None:
            last = avals[-1]
            results.append(_jax.ShapedArray(tuple(row.shape(last.shape, params)), last.dtype))
        return results, {EFFECT}

    def implementation(*args, **params):
        return eager_program(primitive, tuple(params), *params.values())(*args)

    _jax.define_primitive(primitive, abstract_eval, True, implementation)
    if row.silent:
        _jax.mlir.register_lowering(primitive, _lower_silent)
    else:
        for platform in DEVICES.communicated:
            _jax.mlir.register_lowering(primitive, make_lowering(row), platform=platform)
        _jax.mlir.register_lowering(primitive, _make_refusal(row))
    _jax.batching.fancy_primitive_batchers[primitive] = _make_batching(row, primitive)
    _jax.ad.primitive_jvps[primitive] = _make_jvp(row, primitive)
    if row.transpose is not None:
        _jax.ad.primitive_transposes[primitive] = _make_transpose(row.transpose)
    return primitive


_TAGS = ("tag", "sendtag", "recvtag")
_DERIVATIVES = (None, TANGENT, COTANGENT, VALUE)  # the core's numbers for them: see csrc/compare.c


def _attribute(name: str, params: Params, dtype: Any) -> np.int64:
    """An attribute as the core reads it: always a 64-bit integer."""
    if name == DERIVATIVE:
        return np.int64(_DERIVATIVES.index(params.get(DERIVATIVE)))
    value = params[name]
    if name == "op":
        return np.int64(value.number_for(DATATYPES[np.dtype(dtype).name]))
    if name in ("comm", "status", "text"):
        return np.int64(0 if value is None else value.number)
    if name in _TAGS and value >= 0 and DERIVATIVE in params:
        return np.int64(value + DERIVATIVE_TAGS)
    return np.int64(value)


def _lower_silent(ctx, operand, **params):
    ctx.set_tokens_out(ctx.tokens_in)
    return [operand]


def make_lowering(row: Row, target: str = "jaxmpi_{}"):
    """The lowering of a row to a call of the core, which XLA knows by the name `target`."""

    def lower(ctx, *operands, **params):
        if (devices := _jax.devices_of(ctx)) > 1:
            raise NotImplementedError(
                f"{row.name}: the computation is spread over {devices} devices of this process, and a rank "
                "communicates from one. Gather its operands on one device with jax.device_put(x, jax.devices()[0]), "
                "or start a rank for each device."
            )
        part = row.part(params)
        passed = operands[:1] if part.operand else ()
        avals_in = ctx.avals_in[: len(passed)]
        avals_out = ctx.avals_out if part.result else []
        rule = _jax.ffi_lowering(
            target.format(row.name),
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
        platforms = ctx.module_context.platforms
        reasons = [why for name, why in DEVICES.drivers.items() if PLATFORMS[name] in platforms and why is not None]
        raise NotImplementedError(
            f"{row.name}: arrays on {', '.join(platforms)} cannot be communicated"
            f"{''.join(f': {why}' for why in reasons)}. Move them to the CPU with "
            "jax.device_put(x, jax.devices('cpu')[0]), or set JAX_PLATFORMS=cpu"
        )

    return refuse


def _make_batching(row: Row, primitive: _jax.Primitive):
    def batch(axis, operands, axes, **params):
        # What does not depend on the mapped values is communicated once. Not so derivatives, whose operands are linked.
        if all(at is None for at in axes):
            results = primitive.bind(*operands, **params)
            return results, [None] * len(results)
        at, result_at = row.batch(params)
        operands = [batched(x, axis_of_x, axis.size, at) for x, axis_of_x in zip(operands, axes, strict=True)]
        results = primitive.bind(*operands, **params)
        return results, [result_at] * len(results)

    return batch


def _make_jvp(row: Row, primitive: _jax.Primitive):
    def jvp(primals, tangents, **params):
        communication.check()  # also where JAX has not told the trace of it
        inexact = [_jax.inexact(x) for x in primals]
        if all(inexact) and (why_not := row.refuse(params)):
            raise NotImplementedError(f"{row.name} cannot be differentiated: {why_not}")
        if DERIVATIVE in params:
            params = {**params, DERIVATIVE: VALUE}
        results = primitive.bind(*primals, **params)
        if not all(inexact):
            tangent = row.tangent_of_half(primals, tangents, params) if any(inexact) and row.tangent_of_half else None
            return results, [_jax.zero_tangent(y) if tangent is None else tangent for y in results]
        tangent, *others = tangents
        if type(tangent) is _jax.ad.Zero:  # a template has one
            tangent = linked_zeros([t for t in others if type(t) is not _jax.ad.Zero], tangent.aval)
        if (rule := row.tangent(params)) is not None:
            return results, [rule(primals, tangent, results, params)]
        if "status" in params:
            params = {**params, "status": None}
        return results, primitive.bind(tangent, *primals[1:], **{**params, DERIVATIVE: TANGENT})

    return jvp


def _make_transpose(rule: Callable[..., Any]):
    def transpose(cotangents: Sequence[Any], operand, *templates, **params):
        communication.check()
        cotangent = cotangents[0] if cotangents else None
        if type(cotangent) is _jax.ad.Zero:
            cotangent = zero_cotangent(cotangent.aval)
        template = jax.ShapeDtypeStruct(operand.aval.shape, operand.aval.dtype)
        return [rule(cotangent, template, params), *(None for _ in templates)]

    return transpose
