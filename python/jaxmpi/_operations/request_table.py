"""The operation table, of what starts an operation and of what waits for it (csrc/core/requests.h).

A request is an array of two numbers, by which the core knows it. To what differentiates it is an array like any other:
its tangent is the request of the tangent's operation, its cotangent that of the cotangent's. So the transpose of a wait
starts the adjoint operation, the transpose of a start waits for it, and derivatives overlap as the function does. Zeros
in the place of a request, where there is no tangent, are a request of nothing.

A rank that only waits inside of what is differentiated has a request without tangent: that of a constant.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from jaxmpi._jax import internals
from jaxmpi._jax.dependence import batched, depends_on, linked_zeros, zero_cotangent
from jaxmpi._mpi import library, tags
from jaxmpi._operations import table
from jaxmpi._operations.table import LINE, SUMMING, check_names, check_same, of_cotangent, of_tangent, on_root
from jaxmpi._primitive import envelope
from jaxmpi._primitive.communication import DERIVATIVE, REQUEST, TANGENT, VALUE
from jaxmpi._primitive.primitive import NEEDED, PRIMITIVES, Params, Part, Row, bind, make_primitive

(WIDTH,), _NUMBERS = REQUEST
_NOTHING = np.zeros(WIDTH, _NUMBERS)

WITHOUT_RESULT = {"isend", "ibarrier"}
_HELD = {"hold", "iallreduce"}
"""Whose adjoints communicate nothing where they start."""
_BATCH_AT = {"ialltoall": 1}


@dataclasses.dataclass(frozen=True)
class Started:
    """What a request is of: the operation, its parameters, the shape and dtype of its array."""

    operation: str
    params: tuple[tuple[str, Any], ...]
    shape: tuple[int, ...]
    dtype: Any

    @property
    def has_result(self) -> bool:
        return self.operation not in WITHOUT_RESULT

    @property
    def ends(self) -> int:
        """How many ranks and tags it has that are known at run time only (`_primitive.envelope`)."""
        return sum(isinstance(value, int) and value == tags.TRACED for _, value in self.params)

    def batched(self, size: int) -> "Started":
        at = _BATCH_AT.get(self.operation, 0)
        return dataclasses.replace(self, shape=(*self.shape[:at], size, *self.shape[at:]))


def started(operation: str, params: Params, x: Any) -> Started:
    given = {name: value for name, value in params.items() if name not in ("comm", "batch")}
    return Started(operation, tuple(sorted(given.items())), tuple(x.shape), np.dtype(x.dtype))


def _request(avals: Sequence[Any], params: Params) -> list[Any]:
    return [jax.ShapeDtypeStruct((*params["batch"], WIDTH), _NUMBERS)]


def _begin(operation: str, params: Params, batch: tuple[int, ...], *operands: Any) -> Any:
    return bind(operation, {**params, "batch": batch}, *operands)


def _wait_for_adjoint(name: str, adjoint: Params, template: Any, params: Params, request: Any, *ends: Any) -> Any:
    """What the transpose of a start waits for: the adjoint, which the transpose of its wait has started.

    There is none if what was started is never waited for in what is differentiated. Other ranks communicate with it all
    the same: so that is an error of this rank, unless the adjoint is held by this rank alone.
    """
    needed = {} if name == "hold" else {NEEDED: True}
    what = started(name, adjoint, template)
    return bind("wait", of_cotangent(params, started=(what,), **needed), request, *ends)


# --- adjoints --------------------------------------------------------------------------------------------------------


def _adjoint(operation: str, given: Params, comm: Any, ends: Sequence[Any]) -> tuple[str, Params, list[Any]]:
    """The adjoint of an operation that starts something: its name, its parameters, and what of its ranks and tags is
    known at run time, as of the operation itself."""
    params = of_cotangent({"comm": comm})
    match operation:
        case "isend":
            there = envelope.join(given, ends, "dest", "tag")
            back, ends = envelope.split({"source": there["dest"], "tag": there["tag"]})
            return "irecv", {**params, **back}, ends
        case "irecv":  # ANY_TAG is only allowed with source PROC_NULL
            there = envelope.join(given, ends, "source", "tag")
            tag = 0 if given["tag"] == MPI.ANY_TAG else there["tag"]
            back, ends = envelope.split({"dest": there["source"], "tag": tag})
            return "isend", {**params, **back}, ends
        case "ibcast":
            return "ireduce", {**params, **SUMMING, "root": given["root"]}, []
        case "ireduce":
            return "ibcast", {**params, "root": given["root"]}, []
        case "ialltoall":
            return "ialltoall", params, []
    return "hold", {"comm": comm}, []  # of an allreduce, whose cotangent is passed on, and of what is held


def _requests_and_ends(started: Sequence[Started], operands: Sequence[Any]) -> tuple[list[Any], list[list[Any]]]:
    """Of the operands of a wait: the requests, and the ends of each that are known at run time."""
    rest = iter(operands[len(started) :])
    return list(operands[: len(started)]), [[next(rest) for _ in range(what.ends)] for what in started]


def _transpose_wait(cotangents, operands, params):
    # From the last to the first, as separate waits are transposed: this order is that of the other ranks.
    given, begun = list(cotangents), []
    requests, ends = _requests_and_ends(params["started"], operands)
    for what, request, its in zip(params["started"][::-1], requests[::-1], ends[::-1], strict=True):
        cotangent = given.pop() if what.has_result else None
        begun.append(_start_adjoint(what, request.shape[:-1], cotangent, params, its))
    return [*begun[::-1], *[None] * (len(operands) - len(requests))]


def _start_adjoint(what: Started, batch: tuple[int, ...], cotangent: Any, params: Params, ends: Sequence[Any]) -> Any:
    given = dict(what.params)
    name, adjoint, ends = _adjoint(what.operation, given, params["comm"], ends)
    if not what.has_result:
        template = zero_cotangent(jax.ShapeDtypeStruct(what.shape, what.dtype))
        return _begin(name, adjoint, batch, *ends, template)
    if what.operation == "iallreduce" and given["op"].name == "SUM":  # others are held: see _tangent_iallreduce
        if LINE in given:
            check_same([cotangent], of_cotangent(params), given[LINE])
        cotangent = bind("replicate", of_cotangent(params), cotangent)
    return _begin(name, adjoint, batch, cotangent, *ends)


def _transpose_start(operation: str):
    def transpose(cotangents, operands, params):
        if operation == "irecv":
            *ends, template = operands
        else:
            template, *ends = operands
        name, adjoint, ends = _adjoint(operation, params, params["comm"], ends)
        result = _wait_for_adjoint(name, adjoint, template, params, cotangents[0], *ends)
        # What was sent back has no result; a template's values are not read.
        return [linked_zeros(cotangents, template) if operation == "irecv" else result]

    return transpose


def _tangent_iallreduce(primals, tangents, results, params):
    # The weights of the tangents are communicated where the operation starts.
    blocking = {name: value for name, value in params.items() if name != "batch"}
    value = bind("allreduce", {**blocking, DERIVATIVE: VALUE}, primals[0])
    (tangent,) = table.tangent_allreduce(primals, tangents, [value], blocking)
    return [_begin("hold", {"comm": params["comm"], DERIVATIVE: TANGENT}, params["batch"], tangent)]


# --- waiting ---------------------------------------------------------------------------------------------------------


def _with_results(params: Params) -> list[Started]:
    return [what for what in params["started"] if what.has_result]


def _waited(avals, params):
    return [jax.ShapeDtypeStruct(what.shape, what.dtype) for what in _with_results(params)]


def _jvp_wait(primals, tangents, **params):
    """Of the requests that have a tangent, which are those that have been started where it is taken."""
    primitive = PRIMITIVES["wait"]
    if DERIVATIVE in params:
        params = {**params, DERIVATIVE: VALUE}
    results = primitive.bind(*primals, **params)
    requests, ends = _requests_and_ends(params["started"], primals)
    which = [
        i
        for i, (t, what) in enumerate(zip(tangents[: len(requests)], params["started"], strict=True))
        if type(t) is not internals.ad.Zero and internals.inexact(what)
    ]
    tangents = [*(tangents[i] for i in which), *(end for i in which for end in ends[i])]
    chosen = tuple(params["started"][i] for i in which)
    tangent = of_tangent(params, started=chosen)
    made = iter(primitive.bind(*tangents, **tangent) if which else [])
    of_results = [i for i, what in enumerate(params["started"]) if what.has_result]
    return results, [
        next(made) if i in which else internals.zero_tangent(y) for i, y in zip(of_results, results, strict=True)
    ]


def _batch_wait(axis, operands, axes, **params):
    requests, _ = _requests_and_ends(params["started"], operands)
    ends, at_ends = operands[len(requests) :], axes[len(requests) :]
    axes = axes[: len(requests)]
    requests = [x if at is None else batched(x, at, axis.size, 0) for x, at in zip(requests, axes, strict=True)]
    # The same for all: with others nothing would have been started.
    ends = [
        x if at is None else jax.lax.index_in_dim(x, 0, at, keepdims=False) for x, at in zip(ends, at_ends, strict=True)
    ]
    mapped = tuple(
        what if at is None else what.batched(axis.size) for what, at in zip(params["started"], axes, strict=True)
    )
    results = PRIMITIVES["wait"].bind(*requests, *ends, **{**params, "started": mapped})
    result_axes = [
        None if at is None else _BATCH_AT.get(what.operation, 0)
        for what, at in zip(mapped, axes, strict=True)
        if what.has_result
    ]
    return results, result_axes


# --- exchanges by plans ----------------------------------------------------------------------------------------------
#
# An exchange is K u + B m: what is left of the fields u, with the boundaries, and what has come, m = P u of all ranks.
# The start is P, the finish is linear in the fields and in the request, which stands for m. The adjoint of each is one
# of the adjoint exchange.


def _plan_of_start(avals, params):
    return table.plan(avals, params)


def _plan_of_finish(avals, params):
    return table.plan(avals[:-1], params)


def _linear_places(params: Params, which: Sequence[int]) -> Params:
    pattern = params["pattern"]
    return {"pattern": pattern, "places": pattern.linear(tuple(params["places"][i] for i in which))}


def _start_of(arrays, which, batch, params, of, adjoint):
    table.refuse_opaque("exchange_start", arrays, which)
    more = _linear_places(params, which)
    return _begin("exchange_start", of(params, **more, adjoint=adjoint), batch, *(arrays[i] for i in which))


def _finish_of(arrays, which, request, params, of, adjoint, **more):
    if not which:
        return [None] * len(arrays)
    table.refuse_opaque("exchange_finish", arrays, which)
    params = of(params, **_linear_places(params, which), adjoint=adjoint, **more)
    fields = [arrays[i] for i in which]
    if request is not _NOTHING:  # whatever maps the request maps them, as where it was started
        fields = [depends_on(x, [request]) for x in fields]
    made = PRIMITIVES["exchange_finish"].bind(*fields, request, **params)
    given = dict(zip(which, made, strict=True))
    return [given.get(i) for i in range(len(arrays))]


def _tangent_exchange_start(primals, tangents, results, params):
    which = [i for i, t in enumerate(tangents) if t is not None]
    return [_start_of(tangents, which, params["batch"], params, of_tangent, params["adjoint"])]


def _transpose_exchange_start(cotangents, templates, params):
    which = internals.inexact_among(templates)
    zeros = [jnp.zeros(x.shape, x.dtype) for x in templates]
    needed = {NEEDED: True}  # as in `_wait_for_adjoint`
    return _finish_of(zeros, which, cotangents[0], params, of_cotangent, not params["adjoint"], **needed)


def _jvp_exchange_finish(primals, tangents, **params):
    primitive = PRIMITIVES["exchange_finish"]
    if DERIVATIVE in params:
        params = {**params, DERIVATIVE: VALUE}
    results = primitive.bind(*primals, **params)
    which = internals.inexact_among(primals[:-1])
    known = [t for t in tangents if type(t) is not internals.ad.Zero]
    if not which or not known:
        return results, [internals.zero_tangent(y) for y in results]
    given = [linked_zeros(known, t.aval) if type(t) is internals.ad.Zero else t for t in tangents[:-1]]
    request = _NOTHING if type(tangents[-1]) is internals.ad.Zero else tangents[-1]
    made = _finish_of(given, which, request, params, of_tangent, params["adjoint"])
    return results, [internals.zero_tangent(y) if t is None else t for t, y in zip(made, results, strict=True)]


def _transpose_exchange_finish(cotangents, operands, params):
    *fields, request = operands
    which = list(range(len(fields)))
    adjoint = not params["adjoint"]
    back: list[Any] = [None] * len(fields)
    begun = None
    if isinstance(request, jax.ShapeDtypeStruct):
        begun = _start_of(cotangents, which, request.shape[:-1], params, of_cotangent, adjoint)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in fields):
        back = _finish_of(cotangents, which, _NOTHING, params, of_cotangent, adjoint)
    return [*back, begun]


def _batch_exchange_finish(axis, operands, axes, **params):
    *fields, request = operands
    *at_fields, at = axes
    place, result_at = params["pattern"].batch(params["adjoint"])
    fields = [x if its is None else batched(x, its, axis.size, place) for x, its in zip(fields, at_fields, strict=True)]
    if at is not None:
        request = batched(request, at, axis.size, 0)
    results = PRIMITIVES["exchange_finish"].bind(*fields, request, **params)
    return results, [None if its is None else result_at for its in at_fields]


# --- the table -------------------------------------------------------------------------------------------------------


def _row_of_start(name: str, *, batch: int = 0, **more: Any) -> Row:
    return Row(name, _request, starts=True, batch=lambda p: (batch, 0), transpose=_transpose_start(name), **more)


ROWS = (
    Row("after", lambda avals, p: [], transpose=lambda *_: []),
    Row(
        "exchange_finish",
        lambda avals, p: p["pattern"].results(avals[:-1], p["adjoint"]),
        plan=_plan_of_finish,
        transpose=_transpose_exchange_finish,
        waits=True,
    ),
    Row(
        "exchange_start",
        _request,
        starts=True,
        plan=_plan_of_start,
        batch=lambda p: p["pattern"].batch(p["adjoint"]),
        tangent=lambda p: _tangent_exchange_start,
        transpose=_transpose_exchange_start,
    ),
    _row_of_start("hold"),
    _row_of_start("iallreduce", refuse=table.refuse_reduction, tangent=table.unless_sum(_tangent_iallreduce)),
    _row_of_start("ialltoall", batch=1),
    Row("ibarrier", _request, starts=True),
    _row_of_start("ibcast", part=lambda p: Part(operands=on_root(p))),
    _row_of_start("irecv", templates=lambda p: 1, refuse=table.refuse_half),
    _row_of_start("ireduce", refuse=table.refuse_reduction),
    _row_of_start("isend", refuse=table.refuse_half),
    Row(
        "wait",
        _waited,
        templates=lambda p: sum(what.ends for what in p["started"]),
        transpose=_transpose_wait,
        waits=True,
        many=True,
    ),
)


def _refuse_forgotten(name: str, transpose: Any) -> Any:
    """The transpose of a start, which raises where it is seen while tracing that nothing waits for it.

    A rank might wait for another one before it comes to `_wait_for_adjoint`, which sees the rest.
    """

    def checked(cotangents: Sequence[Any], *operands: Any, **params: Any) -> Any:
        planned = name == "exchange_start"
        if type(cotangents[0]) is internals.ad.Zero and (planned or name not in _HELD):
            raise ValueError(
                f"{'Grid.start' if planned else name}: it is started in a function that is differentiated, and not "
                "waited for there: gradients would be wrong. Wait for each request inside of that function."
            )
        return transpose(cotangents, *operands, **params)

    return checked


for _row in ROWS:
    _primitive = make_primitive(_row)
    if _row.starts and _row.transpose is not None:
        internals.ad.primitive_transposes[_primitive] = _refuse_forgotten(
            _row.name, internals.ad.primitive_transposes[_primitive]
        )
internals.ad.primitive_jvps[PRIMITIVES["wait"]] = _jvp_wait
internals.batching.fancy_primitive_batchers[PRIMITIVES["wait"]] = _batch_wait
internals.ad.primitive_jvps[PRIMITIVES["exchange_finish"]] = _jvp_exchange_finish
internals.batching.fancy_primitive_batchers[PRIMITIVES["exchange_finish"]] = _batch_exchange_finish

check_names(
    {row.name for row in (*table.ROWS, *ROWS) if not row.silent}, set(library.OPERATIONS) - library.OF_SHARDED_PROGRAMS
)
