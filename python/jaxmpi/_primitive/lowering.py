"""How an operation is lowered for XLA and the core: buffers, attributes, results, and the line that calls it.

What an operation does not declare follows from the core's list of its buffers (csrc/core/ops.def). The operands of a
primitive are the buffers that are read, in that order, then templates, of which only shape and dtype are used. An
operation maps the buffers that MPI reads; buffers that the core reads on the host are parameters in the form of arrays.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

import jaxmpi._core as _core
from jaxmpi._jax import internals
from jaxmpi._mpi import call_sites, tags
from jaxmpi._mpi.library import CONSTANTS, DATATYPES, DEVICES, OPERATIONS
from jaxmpi._primitive.effect import EFFECT, Unsupported
from jaxmpi._primitive.params import COTANGENT, TANGENT, VALUE, Common

P = TypeVar("P", bound=Common)


_NAMES_OF_DERIVATIVES = {None: "value", TANGENT: "tangent", COTANGENT: "cotangent", VALUE: "further"}
_DERIVATIVES = {kind: CONSTANTS["DERIVATIVES"].index(name) for kind, name in _NAMES_OF_DERIVATIVES.items()}


def types(op: Any, operands: Iterable[Any], params: Any) -> list[Any]:
    """Return the types of the results of operands; for keys the types as the user sees them."""
    return list(op.results(list(map(jax.typeof, operands)), params))


def roles_of(op: Any, operands: int, params: Any) -> list[str]:
    """Return the role of each of `operands` operands: `mpi`, `host` or `template`."""
    if op.identity:
        return ["mpi"] * operands
    templates = op.templates(params)
    return OPERATIONS[op.core_name].roles(False, operands - templates) + ["template"] * templates


def _passed(op: Any, params: Any, operands: int, results: int) -> tuple[list[str], list[str], list[int], list[int]]:
    """Return the roles of operands and of results, and the indices of the buffers that are passed to the core."""
    reads, writes = params.on_root or not op.root_sends, params.on_root or not op.root_receives
    roles = roles_of(op, operands, params)
    passed = [i for i, role in enumerate(roles) if role == "host" or (role == "mpi" and reads)]
    written = OPERATIONS[op.core_name].roles(True, results)
    filled = [i for i, role in enumerate(written) if role == "host" or writes]
    return roles, written, passed, filled


def attributes_of(op: Any, operands: Sequence[Any], params: Any) -> dict[str, np.int64]:
    """Return the attributes as the core reads them."""
    from_types = {"function": op.function, **op.static_attributes(operands, params)}
    dtype = operands[0].dtype if operands else None
    return {
        name: _attribute(name, kind, params, from_types, dtype) for name, kind in OPERATIONS[op.core_name].attributes
    }


def add_site(op: Any, operands: Sequence[Any], params: Any, site: str) -> None:
    """Register with the core that this line of the program makes this call, for reports and the timeline."""
    results = op.results(operands, params)
    roles, written, passed, filled = _passed(op, params, len(operands), len(results))
    read = [operands[i] for i in passed if roles[i] == "mpi"]
    arrays = read or [results[i] for i in filled if written[i] == "mpi"]
    attributes = attributes_of(op, operands, params)
    _add_call(op, attributes, arrays, site)
    if DEVICES.platforms and (composed := op.composed(operands, params)) is not None:
        _add_call(op, {**attributes, "plan": composed.plan.number}, [composed.shown], site)


def _add_call(op: Any, attributes: dict[str, Any], arrays: Sequence[Any], site: str) -> None:
    code = DATATYPES[np.dtype(arrays[0].dtype).name].code if arrays else -1
    _core.add_site(op.core_name, tuple(map(int, attributes.values())), code, op.elements(arrays), site)


def find_site(op: Any, operands: Sequence[Any], params: Any) -> None:
    """Register the line of the program that is being traced."""
    site = None if op.identity else call_sites.of_traceback(internals.current_source().traceback)
    if site is not None:
        add_site(op, [jax.typeof(x) for x in operands], params, site)


def lower_to(
    op: Any, target: str, platforms: Sequence[str] = DEVICES.communicated, on_device: bool | None = None
) -> None:
    """Register the lowering to a custom call of the core, known to XLA under the name `target`. `on_device`: whether
    the platforms are devices; None: all but the CPU are."""
    if op.identity:
        internals.mlir.register_lowering(op, _lower_identity)
        return
    for platform in platforms:
        rule = _lowering(op, target.format(op.core_name), platform != "cpu" if on_device is None else on_device)
        internals.mlir.register_lowering(op, rule, platform=platform)
    internals.mlir.register_lowering(op, functools.partial(_refuse_platform, op))


def _lowering(op: Any, target: str, on_device: bool) -> Callable[..., Any]:
    """Return the rule that makes a custom call. `on_device`: XLA composes the messages of plans, and does not fuse the
    call with slices.

    For a GPU, XLA otherwise puts a call and the slices that it reads and writes into one fusion. The compiler then
    ends the process, because fusions cannot have tokens (XLA of JAX 0.10.2 and later).
    """
    fence = internals.optimization_barrier if on_device else lambda x: x

    def make(
        ctx: Any, operands: Sequence[Any], read: Any, written: Any, aliases: Any = None, **attributes: Any
    ) -> list[Any]:
        """Make the custom call."""
        rule = internals.ffi_lowering(target, has_side_effect=True, operand_output_aliases=aliases)
        inner = ctx.replace(avals_in=[*read, internals.abstract_token], avals_out=[*written, internals.abstract_token])
        *results, token = rule(inner, *map(fence, operands), ctx.tokens_in.get(EFFECT), **attributes)
        ctx.set_tokens_out(internals.mlir.TokenSet({EFFECT: token}))
        return list(map(fence, results))

    def lower(ctx: Any, *operands: Any, call: Any) -> list[Any]:
        if (devices := internals.devices_of(ctx)) > 1:
            raise Unsupported(f"{op.shown}: the computation is {internals.spread(devices)}")
        attributes = attributes_of(op, ctx.avals_in, call)
        composed = op.composed(ctx.avals_in, call) if on_device else None
        if composed is not None:
            attributes["plan"] = np.int64(composed.plan.number)
            sent = internals.lower_inline(ctx, composed.pack, operands, ctx.avals_in, composed.operands)
            received = make(ctx, sent, composed.operands, composed.results, **attributes)
            avals = [*ctx.avals_in, *composed.results]
            return internals.lower_inline(ctx, composed.unpack, [*operands, *received], avals, ctx.avals_out)
        roles, written, passed, filled = _passed(op, call, len(operands), len(ctx.avals_out))
        aliases = None
        if op.aliases(len(operands), call):
            shared = [i for i in filled if i in passed and roles[i] == written[i] == "mpi"]
            aliases = {passed.index(i): filled.index(i) for i in shared}
        read = [ctx.avals_in[i] for i in passed]
        results = make(
            ctx, [operands[i] for i in passed], read, [ctx.avals_out[i] for i in filled], aliases=aliases, **attributes
        )
        written_to = dict(zip(filled, results, strict=True))
        return [written_to.get(i, operands[i] if i < len(operands) else None) for i in range(len(ctx.avals_out))]

    return lower


def _refuse_platform(op: Any, ctx: Any, *operands: Any, call: Any) -> Any:
    platforms = ctx.module_context.platforms
    raise Unsupported(
        f"{op.shown}: arrays on {', '.join(platforms)} cannot be communicated"
        f"{''.join(f': {why}' for why in DEVICES.why_not(platforms))}. Move them to the CPU with "
        "jax.device_put(x, jax.devices('cpu')[0]), or set JAX_PLATFORMS=cpu"
    )


def _lower_identity(ctx: Any, *operands: Any, call: Common) -> Sequence[Any]:
    ctx.set_tokens_out(ctx.tokens_in)
    return operands


def _attribute(name: str, kind: str, params: Any, from_types: dict[str, Any], dtype: Any) -> np.int64:
    """Return an attribute as a 64-bit integer, as the core reads it."""
    match kind:
        case "adjoint":  # or, in a further derivative, perhaps the value of one
            return np.int64(params.derivative in (COTANGENT, VALUE))
        case "derivative":
            return np.int64(_DERIVATIVES[params.derivative])
        case "leaf":
            return np.int64(params.leaf.value if params.derivative is None else params.leaf.tangent)
    value: Any = from_types[name] if name in from_types else getattr(params, name)
    match kind:
        case "reduction":
            value = value.number_for(DATATYPES[np.dtype(dtype).name])
        case "object" | "object_or_0" | "plan":
            value = 0 if value is None else value.number
        case "rank" if value == tags.TRACED:
            value += params.derivative is not None
        case "tag":
            value = tags.sent(value, params.derivative is not None)
    return np.int64(value)
