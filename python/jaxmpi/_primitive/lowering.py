"""How an operation is lowered for XLA and the core: buffers, attributes, results, and the line that calls it.

What an operation does not declare follows from the core's list of its buffers (csrc/core/ops.def). The operands of a
primitive are the buffers that are read, in that order, then templates, of which only shape and dtype are used. An
operation maps the buffers that MPI reads; buffers that the core reads on the host are parameters in the form of arrays.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
import numpy as np

import jaxmpi._core as _core
from jaxmpi._jax import internals, primitives
from jaxmpi._mpi import call_sites, tags
from jaxmpi._mpi.library import CONSTANTS, DATATYPES, DEVICES, OPERATIONS
from jaxmpi._primitive import pytrees
from jaxmpi._primitive.effect import EFFECT, Unsupported
from jaxmpi._primitive.params import COTANGENT, TANGENT, VALUE, Common

P = TypeVar("P", bound=Common)


@dataclass(frozen=True)
class Passed:
    """The buffers that one rank passes to the core; each rank has a part in the operation. Host buffers are always
    passed."""

    operands: bool = True
    """The operands that MPI reads are passed; otherwise they are templates, too."""
    results: bool = True
    """The results that MPI writes are passed; otherwise each of them is the operand of the same number."""


_ALL = Passed()
_NAMES_OF_DERIVATIVES = {None: "value", TANGENT: "tangent", COTANGENT: "cotangent", VALUE: "further"}
_DERIVATIVES = {kind: CONSTANTS["DERIVATIVES"].index(name) for kind, name in _NAMES_OF_DERIVATIVES.items()}


class Lowered(primitives.Primitive, Generic[P]):
    """A primitive that the core executes, always with a list of results. The name is that of its row in ops.def."""

    multiple_results = True

    identity = False
    """Whether it is the identity; only the transpose communicates. The core has no operation for it."""
    works_in_place = False
    """Whether a result may alias the operand of the same number, where `params.in_place` is set and `may_alias`."""

    def __init__(self, name: str) -> None:
        super().__init__(f"jaxmpi.{name}")
        self.core_name = name
        self.shown = name if self.identity else OPERATIONS[name].shown
        """The name that users know."""
        self.lower_to("jaxmpi_{}")

    # --- what an operation declares ---

    def results(self, avals: Sequence[Any], params: P) -> Sequence[Any]:
        """Return the types of the results from the types of the operands: by default the type of the last one."""
        return avals[-1:]

    def templates(self, params: P) -> int:
        """Return how many operands are templates, after the operands that the core has."""
        return 0

    def passes(self, params: P) -> Passed:
        return _ALL

    def may_alias(self, params: P) -> bool:
        """Return whether the result takes the place of the operand, on this rank, where `params.in_place` is set."""
        return self.works_in_place

    def aliases(self, operands: int, params: P) -> bool:
        """Return whether results take the place of their operands."""
        return operands == 1 and self.may_alias(params) and params.in_place  # type: ignore[attr-defined]

    def static_attributes(self, avals: Sequence[Any], params: P) -> dict[str, Any]:
        """Return the attributes that follow from the types of the operands."""
        return {}

    def elements(self, arrays: Sequence[Any]) -> int:
        """Return how many elements of these arrays are communicated, for reports."""
        return sum(math.prod(x.shape) for x in arrays[:1])

    # --- what follows from the declarations ---

    def types(self, operands: Iterable[Any], params: P) -> list[Any]:
        """Return the types of the results of operands; for keys the types as the user sees them."""
        return list(self.results(list(map(jax.typeof, operands)), params))

    def roles(self, operands: int, params: P) -> list[str]:
        """Return the role of each of `operands` operands: `mpi`, `host` or `template`."""
        if self.identity:
            return ["mpi"] * operands
        templates = self.templates(params)
        return OPERATIONS[self.core_name].roles(False, operands - templates) + ["template"] * templates

    def _passed(self, params: P, operands: int, results: int) -> tuple[list[str], list[str], list[int], list[int]]:
        """Return the roles of operands and of results, and the indices of the buffers that are passed to the core."""
        buffers, roles = self.passes(params), self.roles(operands, params)
        passed = [i for i, role in enumerate(roles) if role == "host" or (role == "mpi" and buffers.operands)]
        written = OPERATIONS[self.core_name].roles(True, results)
        filled = [i for i, role in enumerate(written) if role == "host" or buffers.results]
        return roles, written, passed, filled

    def attributes(self, operands: Sequence[Any], params: P) -> dict[str, np.int64]:
        """Return the attributes as the core reads them."""
        from_types = self.static_attributes(operands, params)
        dtype = operands[0].dtype if operands else None
        return {
            name: _attribute(name, kind, params, from_types, dtype)
            for name, kind in OPERATIONS[self.core_name].attributes
        }

    def add_site(self, operands: Sequence[Any], params: P, site: str) -> None:
        """Register with the core that this line of the program makes this call, for reports and the timeline."""
        results = self.results(operands, params)
        roles, written, passed, filled = self._passed(params, len(operands), len(results))
        read = [operands[i] for i in passed if roles[i] == "mpi"]
        arrays = read or [results[i] for i in filled if written[i] == "mpi"]
        code = DATATYPES[np.dtype(arrays[0].dtype).name].code if arrays else -1
        attributes = tuple(map(int, self.attributes(operands, params).values()))
        _core.add_site(self.core_name, attributes, code, self.elements(arrays), site)

    def find_site(self, operands: Sequence[Any], params: P) -> None:
        """Register the line of the program that is being traced."""
        site = None if self.identity else call_sites.of_traceback(internals.traceback())
        if site is not None:
            self.add_site([jax.typeof(x) for x in operands], params, site)

    def lower_to(self, target: str, platforms: Sequence[str] = DEVICES.communicated) -> None:
        """Register the lowering to a custom call of the core, known to XLA under the name `target`."""
        if self.identity:
            internals.mlir.register_lowering(self, _lower_identity)
            return
        for platform in platforms:
            rule = self._lowering(target.format(self.core_name), fenced=platform != "cpu")
            internals.mlir.register_lowering(self, rule, platform=platform)
        internals.mlir.register_lowering(self, self._refuse_platform)

    def _lowering(self, target: str, fenced: bool) -> Callable[..., Any]:
        """Return the rule that makes a custom call. If it is `fenced`, XLA does not fuse the call with slices.

        For a GPU, XLA otherwise puts a call and the slices that it reads and writes into one fusion. The compiler then
        ends the process, because fusions cannot have tokens (XLA of JAX 0.10.2 and later).
        """
        fence = internals.optimization_barrier if fenced else lambda x: x

        def lower(ctx: Any, *operands: Any, call: P) -> list[Any]:
            if (devices := internals.devices_of(ctx)) > 1:
                raise Unsupported(f"{self.shown}: the computation is {internals.spread(devices)}")
            roles, written, passed, filled = self._passed(call, len(operands), len(ctx.avals_out))
            aliases = None
            if self.aliases(len(operands), call):
                shared = [i for i in filled if i in passed and roles[i] == written[i] == "mpi"]
                aliases = {passed.index(i): filled.index(i) for i in shared}
            rule = internals.ffi_lowering(target, has_side_effect=True, operand_output_aliases=aliases)
            attributes = self.attributes(ctx.avals_in, call)
            inner = ctx.replace(
                avals_in=[*(ctx.avals_in[i] for i in passed), internals.abstract_token],
                avals_out=[*(ctx.avals_out[i] for i in filled), internals.abstract_token],
            )
            passed_operands = [fence(operands[i]) for i in passed]
            *results, token = rule(inner, *passed_operands, ctx.tokens_in.get(EFFECT), **attributes)
            ctx.set_tokens_out(internals.mlir.TokenSet({EFFECT: token}))
            written_to = dict(zip(filled, map(fence, results), strict=True))
            return [written_to.get(i, operands[i] if i < len(operands) else None) for i in range(len(ctx.avals_out))]

        return lower

    def _refuse_platform(self, ctx: Any, *operands: Any, call: P) -> Any:
        platforms = ctx.module_context.platforms
        reasons = [why for name, why in DEVICES.drivers.items() if name.lower() in platforms and why is not None]
        raise Unsupported(
            f"{self.shown}: arrays on {', '.join(platforms)} cannot be communicated"
            f"{''.join(f': {why}' for why in reasons)}. Move them to the CPU with "
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
            return np.int64(pytrees.attribute(params.leaf, params.derivative is not None))
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
