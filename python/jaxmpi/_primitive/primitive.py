"""Turns a row of the operation table into a JAX primitive with all its rules.

Whatever a row leaves out is derived from the core's list of its buffers (csrc/core/ops.def). The operands of a
primitive are the buffers that are read, in that order, then templates, of which only shape and dtype are used. An
operation maps what MPI reads; what the core reads on the host are parameters in the form of arrays.

Tangents and cotangents are communicated by operations of the table as well. That works only if all ranks take part,
also a rank on which the operand does not depend on what is differentiated (a constant template above all), or on which
nothing depends on the result; JAX leaves such operations out of derivatives. So inside a differentiated function every
operation on floating-point arrays is differentiated: an operand without tangent gets zeros as a tangent, and the effect
keeps operations whose results are not used.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from mpi4py import MPI

import jaxmpi._core as _core
from jaxmpi._jax import internals
from jaxmpi._jax.dependence import batched, depends_on, linked_zeros, zero_cotangent
from jaxmpi._mpi import call_sites, communicators, tags, timeline
from jaxmpi._mpi.communicators import Communicator
from jaxmpi._mpi.library import DATATYPES, DEVICES, OPERATIONS
from jaxmpi._mpi.settings import SETTINGS
from jaxmpi._primitive import arguments, communication, keys, pytrees
from jaxmpi._primitive.communication import COTANGENT, DERIVATIVE, TANGENT, VALUE, Operation
from jaxmpi._primitive.order import EFFECT, IN_PLACE, eager

Params = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """Which buffers one rank passes to the core, by its part in the operation. Host buffers are always passed."""

    operands: bool = True
    """The operands that MPI reads are passed; otherwise they are templates, too."""
    results: bool = True
    """The results that MPI writes are passed; otherwise each of them is the operand of the same number."""
    in_place: bool = False
    """A result may alias the operand of the same number if the parameter IN_PLACE is set."""


@dataclass(frozen=True)
class Row:
    """One operation: its results, its part on this rank, its batching and its derivative."""

    name: str

    results: Callable[[Sequence[Any], Params], Sequence[Any]]
    """The types of the results from those of the operands; if `largest` is given, of one result from that of one."""

    largest: Callable[[Any, Params], Any] | None = None
    """The operation takes any number of arrays, each as if it were alone: see `bind_all`. This is the type of the
    largest array that any rank has of it, from the type of the operand here."""

    templates: Callable[[Params], int] = lambda params: 0
    """How many operands are templates, after those that the core has."""

    part: Callable[[Params], Part] = lambda params: Part()

    in_place: bool | None = None
    """The default of the parameter IN_PLACE, which `jit` sets where it can; None: no such parameter."""

    batch: Callable[[Params], tuple[int, int]] = lambda params: (0, 0)
    """The position of the batch axis in mapped operands, and then in the results."""

    refuse: Callable[[Params], str] = lambda params: ""
    """Why no derivative can be taken; empty if one can."""

    tangent: Callable[[Params], Callable[..., Any] | None] = lambda params: None
    """Returns its JVP rule, (operands, tangents, results, params) -> tangents of the results, or None if the operation
    is linear in what MPI reads. Operands without tangent have None."""

    tangent_of_half: Callable[..., Any] | None = None
    """The JVP rule if only some of the operands and templates have a differentiable dtype: (operands, their tangents,
    params) -> tangent of the first result, None if that is zero."""

    transpose: Callable[..., Any] | None = None
    """(cotangents of the results, operands, params) -> cotangents of the operands in which it is linear, of which only
    shape and dtype are given."""

    by_rows: bool = False
    """The first operand is divided among the ranks along its first axis, by counts of rows, which are operands for the
    core. The parameter `rows` is how many of them the result has, and the attribute `row` the elements of each."""

    plan: Callable[[Sequence[Any], Params], Any] | None = None
    """The operation takes any number of arrays of any dtypes in one call, and has a result for each. This is the plan
    of the call (`_mpi.plans`); the parameter `pattern` says whether results alias the operands."""

    starts: bool = False
    """Its result is a request, an array of two numbers for each array of a batch. The parameter `batch` has the sizes
    of the batches (`_operations.request_table`)."""

    waits: bool = False
    """Operands are requests, whose tangents are such as well: it is linear in them, and they are never linked."""

    many: bool = False
    """It takes any number of operands, none of which belongs to another."""

    silent: bool = False
    """The identity; only its transpose does something. The core has no such operation."""

    @property
    def shown(self) -> str:
        """The name that users know."""
        return self.name if self.silent else OPERATIONS[self.name].shown

    @property
    def joined(self) -> bool:
        """Whether it takes any number of arrays, of one dtype."""
        return self.largest is not None

    @property
    def several(self) -> bool:
        """Whether it takes any number of arrays."""
        return self.joined or self.plan is not None or self.many

    def types(self, operands: Sequence[Any], params: Params) -> list[Any]:
        """The types of all results."""
        if self.largest is None:
            return list(self.results(operands, params))
        return [result for operand in operands for result in self.results([operand], params)]

    def roles(self, operands: int, params: Params) -> list[str]:
        """The role of each of `operands` operands: `mpi`, `host` or `template`."""
        if self.silent:
            return ["mpi"] * operands
        templates = self.templates(params)
        return OPERATIONS[self.name].roles(False, operands - templates) + ["template"] * templates


NEEDED = "needed"
"""Parameter of a wait in reverse mode, whose request must not be of nothing (`_operations.request_table`)."""

PRIMITIVES: dict[str, Operation] = {}
"""The primitives made so far, by the names of their rows."""
_ROWS: dict[str, Row] = {}
_DEFAULTS: dict[str, Params] = {}


def bind(name: str, params: Params, *operands: Any) -> Any:
    """Binds an operation. Returns its result, a list if there are several, or None.

    Outside of any trace it calls the operation's compiled program.
    """
    primitive = PRIMITIVES[name]
    if defaults := _DEFAULTS[name]:
        params = defaults | params
    if internals.trace_state_clean():
        results = _call(primitive, params, operands)
    else:
        if params.get(DERIVATIVE) == TANGENT:  # a value that a JVP rule communicates, too
            roles = _ROWS[name].roles(len(operands), params)
            first = next((i for i, role in enumerate(roles) if role != "host"), None)
            operands = tuple(
                depends_on(x, [], always=True) if i == first or primitive.several else x for i, x in enumerate(operands)
            )
        results = primitive.bind(*operands, **params)
    return results if len(results) > 1 else results[0] if results else None


def bind_each(name: str, params: Params, places: Sequence[Params], operands: Sequence[Sequence[Any]]) -> list[Any]:
    """Binds an operation for each leaf of a pytree, with the parameters of its place. Returns the result of each.

    Outside of any trace they are one program: an error of one of them is an error of all their results.
    """
    if keys.among(x for xs in operands for x in xs):
        types = [_types_of(name, params, xs) for xs in operands]
        compare_keys(name, params, [x for xs in operands for x in xs])
        words = bind_each(name, params, places, [list(map(keys.words, xs)) for xs in operands])
        return [keys.like(y, its[0].dtype) if its else None for y, its in zip(words, types, strict=True)]
    if len(operands) < 2 or not internals.trace_state_clean():
        return [bind(name, {**params, **place}, *xs) for place, xs in zip(places, operands, strict=True)]
    each = tuple(tuple(place.items()) for place in places)
    results = _call(PRIMITIVES[name], {**_DEFAULTS[name], **params, _EACH: each}, [x for xs in operands for x in xs])
    return results or [None] * len(places)


_SMALL, _MOST_BYTES, _MOST_ARRAYS = 1 << 15, 1 << 22, 100
"""Arrays of at most that many bytes are communicated together: copying them costs less than an operation for each. And
how many bytes and arrays at most."""


def bind_all(name: str, params: Params, arrays: Sequence[Any]) -> list[Any]:
    """Binds an operation for each of the arrays; one for several small ones of the same dtype. All ranks pass arrays of
    the same sizes and dtypes, so they come to the same groups. Returns the results, in the order of the arrays."""
    row = _ROWS[name]
    if keys.among(arrays):
        types = _types_of(name, params, arrays)
        compare_keys(name, params, arrays)
        words = bind_all(name, params, list(map(keys.words, arrays)))
        return [keys.like(y, its.dtype) for y, its in zip(words, types, strict=True)]
    if len(arrays) == 1 or row.largest is None:
        return [bind(name, params, x) for x in arrays]
    groups: list[list[int]] = []
    unfilled: dict[Any, tuple[list[int], int]] = {}  # of each dtype the last group of small arrays, and its bytes
    for i, x in enumerate(arrays):
        largest = row.largest(jax.typeof(x), params)
        size = math.prod(largest.shape) * np.dtype(largest.dtype).itemsize
        group, filled = unfilled.get(x.dtype, ([], 0))
        if not group or size > _SMALL or filled + size > _MOST_BYTES or len(group) == _MOST_ARRAYS:
            groups.append(group := [])
            filled = 0
        group.append(i)
        if size <= _SMALL:
            unfilled[x.dtype] = (group, filled + size)
    results = [None] * len(arrays)
    for group in groups:
        made = bind(name, params, *(arrays[i] for i in group))
        for i, result in zip(group, made if len(group) > 1 else [made], strict=True):
            results[i] = result
    return results


def bind_by_plan(name: str, params: Params, arrays: Sequence[Any]) -> list[Any]:
    """Binds an operation that has a plan; more than once for very many arrays."""
    if keys.among(arrays):
        types = _types_of(name, params, arrays)
        compare_keys(name, params, arrays)
        words = bind_by_plan(name, *of_words(params, arrays))
        return [keys.like(y, its.dtype) for y, its in zip(words, types, strict=True)]
    results: list[Any] = []
    for first in range(0, len(arrays), _MOST_ARRAYS):
        chosen = slice(first, first + _MOST_ARRAYS)
        made = bind(name, {**params, "places": params["places"][chosen]}, *arrays[chosen])
        results += made if isinstance(made, list) else [made]
    return results


def _types_of(name: str, params: Params, operands: Sequence[Any]) -> list[Any]:
    """The types of the results; of those of keys the types as the user sees them."""
    return _ROWS[name].types(list(map(jax.typeof, operands)), params)


def of_words(params: Params, arrays: Sequence[Any]) -> tuple[Params, list[Any]]:
    """The parameters and the operands of an operation by a plan, of the words of keys among the arrays."""
    more = map(keys.axes, arrays)
    places = tuple(params["pattern"].behind(place, n) for place, n in zip(params["places"], more, strict=True))
    return {**params, "places": places}, list(map(keys.words, arrays))


_MESSAGES = ("recv", "send", "sendrecv", "irecv", "isend")


def compare_keys(name: str, params: Params, arrays: Sequence[Any]) -> None:
    """With JAXMPI_CHECK, raises an error on all ranks if the implementations of their keys differ, whose words may be
    as many. What a message is of is not known to its receiver."""
    if not (communicators.CHECK and keys.among(arrays)) or name in _MESSAGES:
        return
    own = keys.signature(arrays)
    least, most = ~own, own
    comm = {"comm": params["comm"]}
    found = bind("allreduce", {**comm, "op": arguments.reduction(MPI.MAX, name)}, np.array([least, most], np.uint32))
    text = arguments.with_calling_line(
        f"the keys that {name} is called with are not of the same implementations (jax.random.key_impl) on all ranks; "
        f"here they are {', '.join(str(x.dtype) for x in arrays if keys.is_key(x))}. The call is at"
    )
    bind("check", {**comm, "text": text}, found[0] != ~found[1])


_EACH = "each"
"""Parameter of an eager program that binds an operation several times: the parameters in which those differ."""

_TELLS_LINES = communicators.CHECK or timeline.ON or SETTINGS.timeout_action == "raise"
"""Whether the lines of all eager calls are told to the core, which takes some time; else those that start something
are, by which it is named if nobody waits for it."""

_TOLD: set[Any] = set()
_MOST_TOLD = 4096


def _tell_line(primitive: Operation, params: Params, operands: Sequence[Any], program: Any) -> None:
    """Tells the line of an eager call, once of each program and shapes."""
    frame = call_sites.frame()
    code = frame.f_code
    call = (program, code.co_filename, code.co_firstlineno, frame.f_lasti, *((x.shape, x.dtype) for x in operands))
    if call in _TOLD:
        return
    if len(_TOLD) == _MOST_TOLD:
        _TOLD.clear()
    _TOLD.add(call)
    row = _ROWS[primitive.name.removeprefix("jaxmpi.")]
    if not row.silent:
        for its, xs in _each_of(params, tuple(map(jax.typeof, operands))):
            _add_site(row, xs, its, call_sites.of_frame(frame))


def _each_of(params: Params, operands: Sequence[Any]) -> list[tuple[Params, Sequence[Any]]]:
    """The parameters and operands of each operation of an eager program."""
    if _EACH not in params:
        return [(params, operands)]
    common = {name: value for name, value in params.items() if name != _EACH}
    places = params[_EACH]
    width = len(operands) // len(places)
    return [({**common, **dict(place)}, operands[i * width : (i + 1) * width]) for i, place in enumerate(places)]


def _call(primitive: Operation, params: Params, operands: Sequence[Any]) -> Any:
    """Calls the compiled program of an operation, also with `jax.disable_jit`."""
    comm = params["comm"]
    find = comm.programs or _finds_programs_of(comm)
    program = find(primitive, tuple(params), *params.values())
    if primitive.starts or _TELLS_LINES:
        _tell_line(primitive, params, operands, program)
    if not internals.jit_disabled.value:
        return program(*operands)
    with jax.disable_jit(False):
        return program(*operands)


call_sites.makes_eager_calls(_call)


def _finds_programs_of(comm: Communicator) -> Callable[..., Any]:
    """The compiled programs of eager calls on a communicator: one per set of parameters; JAX handles shapes and dtypes.
    4096 at most are kept."""
    communicators.refuse_in_child_of_fork()

    @functools.lru_cache(maxsize=4096)
    def find(primitive: internals.Primitive, names: tuple[str, ...], *values: Any) -> Callable[..., Any]:
        params = dict(zip(names, values, strict=True))
        return eager(lambda *args: [y for its, xs in _each_of(params, args) for y in primitive.bind(*xs, **its)])

    comm.programs = find
    return find


def eager_programs() -> int:
    """How many programs of eager calls are kept."""
    return sum(comm.programs.cache_info().currsize for comm in communicators.known() if comm.programs is not None)


# --- from a row to a primitive -------------------------------------------------------------------------------------


def make_primitive(row: Row) -> Operation:
    """Makes the primitive of a row, which `bind` finds by its name. It always has a list of results."""
    primitive = Operation(row.name, row.shown)

    def abstract_eval(*avals, **params):
        return [internals.ShapedArray(tuple(x.shape), x.dtype) for x in row.types(avals, params)], {EFFECT}

    def implementation(*args, **params):
        return _call(primitive, params, args)

    primitive.traced = functools.partial(_find_site, row)
    primitive.several = row.several
    primitive.starts, primitive.waits = row.starts, row.waits
    internals.define_primitive(primitive, abstract_eval, True, implementation)
    if row.silent:
        internals.mlir.register_lowering(primitive, _lower_silent)
    else:
        for platform in DEVICES.communicated:
            internals.mlir.register_lowering(primitive, make_lowering(row), platform=platform)
        internals.mlir.register_lowering(primitive, _make_refusal(row))
    internals.batching.fancy_primitive_batchers[primitive] = _make_batching(row, primitive)
    internals.ad.primitive_jvps[primitive] = _make_jvp(row, primitive)
    if row.transpose is not None:
        internals.ad.primitive_transposes[primitive] = _make_transpose(row)
    PRIMITIVES[row.name], _ROWS[row.name] = primitive, row
    _DEFAULTS[row.name] = {} if row.in_place is None else {IN_PLACE: row.in_place}
    return primitive


_DERIVATIVES = (None, TANGENT, COTANGENT, VALUE)  # by the core's numbers: see csrc/core/core.h


def _attribute(name: str, kind: str, params: Params, dtype: Any) -> np.int64:
    """An attribute as a 64-bit integer, as the core reads it."""
    match kind:
        case "adjoint":  # or, in a further derivative, perhaps the value of one
            return np.int64(params.get(DERIVATIVE) in (COTANGENT, VALUE))
        case "derivative":
            return np.int64(_DERIVATIVES.index(params.get(DERIVATIVE)))
        case "leaf":
            return np.int64(pytrees.attribute(params))
    value: Any = params[name]
    match kind:
        case "reduction":
            value = value.number_for(DATATYPES[np.dtype(dtype).name])
        case "object" | "object_or_0" | "plan":
            value = 0 if value is None else value.number
        case "rank" if value == tags.TRACED:
            value += DERIVATIVE in params
        case "tag":
            value = tags.sent(value, DERIVATIVE in params)
    return np.int64(value)


def _attributes(row: Row, params: Params, operands: Sequence[Any]) -> dict[str, np.int64]:
    dtype = operands[0].dtype if operands else None
    if row.plan is not None:
        params = {**params, "plan": row.plan(operands, params)}
    if row.by_rows:
        params = {**params, "row": math.prod(operands[0].shape[1:])}
    if row.starts and operands:
        last = operands[-1]
        params = {**params, "count": math.prod(last.shape), "dtype": DATATYPES[np.dtype(last.dtype).name].code}
    if row.waits:
        results = sum(2 << i for i, what in enumerate(params.get("started", ())) if what.has_result)
        zero = -1 if params.get(NEEDED) else 1 + results if DERIVATIVE in params else 0
        params = {**params, "zero": zero}
    return {name: _attribute(name, kind, params, dtype) for name, kind in OPERATIONS[row.name].attributes}


def _passed(
    row: Row, params: Params, operands: int, results: int
) -> tuple[Part, list[str], list[str], list[int], list[int]]:
    """This rank's part, the roles of operands and of results, and the indices of those that are passed to the core."""
    part, roles = row.part(params), row.roles(operands, params)
    passed = [i for i, role in enumerate(roles) if role == "host" or (role == "mpi" and part.operands)]
    written = OPERATIONS[row.name].roles(True, results)
    filled = [i for i, role in enumerate(written) if role == "host" or part.results]
    return part, roles, written, passed, filled


def _find_site(row: Row, operands: Sequence[Any], params: Params) -> None:
    site = None if row.silent else call_sites.of_traceback(internals.traceback())
    if site is not None:
        _add_site(row, [jax.typeof(x) for x in operands], params, site)


def _add_site(row: Row, operands: Sequence[Any], params: Params, site: str) -> None:
    """Tells the core that this line of the program makes a call like this, for reports and the timeline."""
    results = row.types(operands, params)
    _, roles, written, passed, filled = _passed(row, params, len(operands), len(results))
    read = [operands[i] for i in passed if roles[i] == "mpi"]
    arrays = read or [results[i] for i in filled if written[i] == "mpi"]
    code = DATATYPES[np.dtype(arrays[0].dtype).name].code if arrays else -1
    count = sum(math.prod(x.shape) for x in (arrays if row.joined else arrays[:1]))
    _core.add_site(row.name, tuple(map(int, _attributes(row, params, operands).values())), code, count, site)


def _lower_silent(ctx, *operands, **params):
    ctx.set_tokens_out(ctx.tokens_in)
    return operands


def make_lowering(row: Row, target: str = "jaxmpi_{}"):
    """The lowering of a row to a custom call of the core, registered with XLA under the name `target`."""

    def lower(ctx, *operands, **params):
        if (devices := internals.devices_of(ctx)) > 1:
            raise NotImplementedError(f"{row.shown}: the computation is {internals.spread(devices)}")
        part, roles, written, passed, filled = _passed(row, params, len(operands), len(ctx.avals_out))
        aliases = None
        in_place = part.in_place and params[IN_PLACE] and len(operands) == 1
        if in_place or (row.plan is not None and params["pattern"].aliases):
            shared = [i for i in filled if i in passed and roles[i] == written[i] == "mpi"]
            aliases = {passed.index(i): filled.index(i) for i in shared}
        rule = internals.ffi_lowering(
            target.format(row.name),
            has_side_effect=True,
            operand_output_aliases=aliases,
        )
        attributes = _attributes(row, params, ctx.avals_in)
        inner = ctx.replace(
            avals_in=[*(ctx.avals_in[i] for i in passed), internals.abstract_token],
            avals_out=[*(ctx.avals_out[i] for i in filled), internals.abstract_token],
        )
        *results, token = rule(inner, *(operands[i] for i in passed), ctx.tokens_in.get(EFFECT), **attributes)
        ctx.set_tokens_out(internals.mlir.TokenSet({EFFECT: token}))
        given = dict(zip(filled, results, strict=True))
        return [given.get(i, operands[i] if i < len(operands) else None) for i in range(len(ctx.avals_out))]

    return lower


def _make_refusal(row: Row):
    def refuse(ctx, *operands, **params):
        platforms = ctx.module_context.platforms
        reasons = [why for name, why in DEVICES.drivers.items() if name.lower() in platforms and why is not None]
        raise NotImplementedError(
            f"{row.shown}: arrays on {', '.join(platforms)} cannot be communicated"
            f"{''.join(f': {why}' for why in reasons)}. Move them to the CPU with "
            "jax.device_put(x, jax.devices('cpu')[0]), or set JAX_PLATFORMS=cpu"
        )

    return refuse


def _make_batching(row: Row, primitive: internals.Primitive):
    def batch(axis, operands, axes, **params):
        # Operands that are not mapped are communicated once. In derivatives this does not occur: operands are linked.
        if all(at is None for at in axes):
            results = primitive.bind(*operands, **params)
            return results, [None] * len(results)
        if row.plan is not None:  # a batch is one axis more, of those arrays that have one
            place, result_at = row.batch(params)
            operands = [
                x if at is None else batched(x, at, axis.size, place) for x, at in zip(operands, axes, strict=True)
            ]
            if row.starts:
                return primitive.bind(*operands, **_of_batch(row, axis, params)), [0]
            return primitive.bind(*operands, **params), [None if at is None else result_at for at in axes]
        if row.joined and None in axes:
            return _batch_each(batch, axis, operands, axes, params)
        at, result_at = row.batch(params)
        roles = row.roles(len(operands), params)
        hosts = [at is not None for at, role in zip(axes, roles, strict=True) if role == "host"]
        if any(hosts) and set(roles) != {"host"}:
            raise NotImplementedError(
                f"{row.shown}: jax.vmap maps an operand that says how to communicate, and that must be the same for "
                "all of what is mapped. Pass it unmapped (in_axes=None); in a branch of a jax.lax.cond or switch, the "
                "predicate or index as well."
            )
        operands = [
            x if role == "host" else batched(x, axis_of_x, axis.size, at)
            for x, axis_of_x, role in zip(operands, axes, roles, strict=True)
        ]
        if row.starts:
            params = _of_batch(row, axis, params)
        results = primitive.bind(*operands, **params)
        return results, [result_at] * len(results)

    return batch


def _of_batch(row: Row, axis: Any, params: Params) -> Params:
    if axis.size == 0:
        raise NotImplementedError(f"{row.shown}: a batch of nothing cannot be started, since no request would be left.")
    return {**params, "batch": (axis.size, *params["batch"])}


def _batch_each(batch: Callable[..., Any], axis: Any, operands: Sequence[Any], axes: Sequence[Any], params: Params):
    """Arrays that are not mapped, and then those that are."""
    results: list[Any] = [None] * len(operands)
    for mapped in (False, True):
        which = [i for i, at in enumerate(axes) if (at is not None) == mapped]
        made = batch(axis, [operands[i] for i in which], [axes[i] for i in which], **params)
        for i, *result in zip(which, *made, strict=True):
            results[i] = result
    return [x for x, _ in results], [at for _, at in results]


def _linear_in(roles: Sequence[str], operands: Sequence[Any]) -> list[int]:
    """The indices of the operands that have tangents: those that MPI reads, or if there are none the templates."""
    role = "mpi" if "mpi" in roles else "template"
    return [i for i in internals.inexact_among(operands) if roles[i] == role]


def _make_jvp(row: Row, primitive: internals.Primitive):
    def jvp(primals, tangents, **params):
        communication.check()  # even if the trace was not told of the operation
        roles = row.roles(len(primals), params)
        inexact = [internals.inexact(x) for x, role in zip(primals, roles, strict=True) if role != "host"]
        half = row.tangent_of_half is not None and any(inexact) and not all(inexact)
        linear = [] if half else _linear_in(roles, primals)
        if linear and (why_not := row.refuse(params)):
            raise NotImplementedError(f"{row.shown} cannot be differentiated: {why_not}")
        if DERIVATIVE in params:
            params = {**params, DERIVATIVE: VALUE}
        results = primitive.bind(*primals, **params)
        if not linear:
            first = row.tangent_of_half(primals, tangents, params) if half and row.tangent_of_half else None
            return results, [_zero_unless(first if i == 0 else None, y) for i, y in enumerate(results)]
        known = [t for t in tangents if type(t) is not internals.ad.Zero]
        given: list[Any] = [None] * len(primals)
        for i in linear:  # a template without tangent gets zeros, too
            zero = type(tangents[i]) is internals.ad.Zero
            given[i] = linked_zeros(known, tangents[i].aval) if zero else tangents[i]
        if (rule := row.tangent(params)) is not None:
            parts = [([x], [t], [y]) for x, t, y in zip(primals, given, results, strict=True)] if row.joined else []
            of_results = [t for part in parts or [(primals, given, results)] for t in rule(*part, params)]
        else:
            more = {"status": None} if "status" in params else {}
            operands = [x if t is None else t for x, t in zip(primals, given, strict=True)]
            of_results = primitive.bind(*operands, **{**params, **more, DERIVATIVE: TANGENT})
        return results, [
            _zero_unless(t if internals.inexact(y) else None, y) for t, y in zip(of_results, results, strict=True)
        ]

    return jvp


def _zero_unless(tangent: Any, result: Any) -> Any:
    return internals.zero_tangent(result) if tangent is None else tangent


def _make_transpose(row: Row):
    rule: Any = row.transpose

    def transpose(cotangents: Sequence[Any], *operands, **params):
        communication.check()
        linear = [internals.ad.is_undefined_primal(x) for x in operands]
        cotangents = [zero_cotangent(ct.aval) if type(ct) is internals.ad.Zero else ct for ct in cotangents]
        known = [
            jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) if is_linear else x
            for x, is_linear in zip(operands, linear, strict=True)
        ]
        given = rule(cotangents, known, params)
        if row.several:
            return [ct if is_linear else None for ct, is_linear in zip(given, linear, strict=True)]
        given = iter(given)
        return [next(given, None) if is_linear else None for is_linear in linear]

    return transpose
