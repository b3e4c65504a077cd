"""The operation table: the mathematics of each operation, this rank's part in it and its derivative.

Stack the arrays of all ranks into one long vector: then an operation is a map of it. If the map is linear, its tangent
is the same operation on the tangents, and its transpose is the adjoint map. The adjoints are operations of this table
again, so there are derivatives of any order. The one exception is `allreduce` of a sum: see `_transpose_allreduce`.

An operation has a row in csrc/core/ops.def, a body in csrc/mpi/collectives.c, a row here, a public function in
_operations.py, and a row in tests/support/table.py.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from jaxmpi._jax import internals
from jaxmpi._jax.dependence import linked_zeros, zero_cotangent
from jaxmpi._mpi import communicators, tags
from jaxmpi._mpi.library import DATATYPES, OPERATIONS
from jaxmpi._primitive import arguments, envelope, pytrees
from jaxmpi._primitive.communication import COTANGENT, DERIVATIVE, TANGENT
from jaxmpi._primitive.order import IN_PLACE
from jaxmpi._primitive.primitive import PRIMITIVES, Params, Part, Row, bind, bind_all, make_primitive

CHECK = communicators.CHECK
"""Whether ranks compare values that must be the same on all of them."""

LINE = "line"
"""Parameter of an allreduce, with CHECK: the text of the error, with the line of the user's program that called it."""


_SUM = arguments.reduction(MPI.SUM, "reduce")


def of_tangent(params: Params, **more: Any) -> Params:
    """The parameters of another operation on the same communicator, for a tangent."""
    return {"comm": params["comm"], **more, DERIVATIVE: TANGENT}


def of_cotangent(params: Params, **more: Any) -> Params:
    """The parameters of another operation on the same communicator, for a cotangent."""
    return {"comm": params["comm"], **more, DERIVATIVE: COTANGENT}


SUMMING: Params = {"op": _SUM}


# --- shapes and parts --------------------------------------------------------------------------------------------


def _same(avals, params):
    return avals[-1:]


def _none(avals, params):
    return []


def _largest(aval, params):
    return aval


def _largest_stacked(aval, params):
    return _stacked([aval], params)[0]


def _stacked(avals, params):
    return [jax.ShapeDtypeStruct((params["comm"].size, *avals[0].shape), avals[0].dtype)]


def _entry(avals, params):
    return [jax.ShapeDtypeStruct(avals[0].shape[1:], avals[0].dtype)]


def _rows(avals, params):
    return [jax.ShapeDtypeStruct((params["rows"], *avals[0].shape[1:]), avals[0].dtype)]


def on_root(params: Params) -> bool:
    return params["comm"].rank == params["root"]


def _part_of_bcast(params: Params) -> Part:
    # Root's result is its operand. If nothing else needs the operand, the core returns it as an aliased result: so
    # later computations wait until it is sent, and a loop need not copy it.
    if on_root(params):
        return Part(results=params[IN_PLACE], in_place=True)
    return Part(operands=False)


# --- adjoints of the linear operations -----------------------------------------------------------------------------


def _transpose_allgather(cotangents, templates, params):
    if any(DATATYPES[np.dtype(x.dtype).name].kind == "opaque" for x in cotangents):  # which MPI does not reduce
        return [jnp.sum(part, axis=0) for part in bind_all("alltoall", of_cotangent(params), cotangents)]
    return bind_all("reduce_scatter", of_cotangent(params, **SUMMING), cotangents)


def _transpose_reduce_scatter(cotangents, templates, params):
    return bind_all("allgather", of_cotangent(params), cotangents)


# Of arrays divided by rows the counts are operands too, and the cotangent has as many rows as the operand.
def _by_rows(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a transpose rule from one of (cotangent, the array's shape and dtype, counts ..., the adjoint's params)."""

    def transpose(cotangents, operands, params):
        adjoint = of_cotangent(params, rows=operands[0].shape[0])
        if "root" in params:
            adjoint["root"] = params["root"]
        return [rule(cotangents[0], *operands, adjoint)]

    return transpose


@_by_rows
def _transpose_allgatherv(cotangent, template, counts, adjoint):
    return bind("reduce_scatterv", {**adjoint, **SUMMING}, cotangent, counts)


@_by_rows
def _transpose_reduce_scatterv(cotangent, template, counts, adjoint):
    return bind("allgatherv", adjoint, cotangent, counts)


@_by_rows
def _transpose_alltoallv(cotangent, template, sent, received, adjoint):
    return bind("alltoallv", adjoint, cotangent, received, sent)


@_by_rows
def _transpose_gatherv(cotangent, template, counts, adjoint):
    # Root has the rows of all operands; on any other rank the result is its operand.
    part = bind("scatterv", adjoint, cotangent, counts)
    return part if on_root(adjoint) else part + cotangent


@_by_rows
def _transpose_scatterv(cotangent, template, counts, adjoint):
    gathered = bind("gatherv", adjoint, cotangent, counts)
    return gathered if on_root(adjoint) else linked_zeros([gathered], template)


def _transpose_allreduce(cotangents, templates, params):
    # The result is replicated and a loss computed from it counts once, so its cotangent is passed on unchanged. The
    # transpose of this identity must be the allreduce again: that is the operation `replicate`.
    if LINE in params:
        check_same(cotangents, of_cotangent(params), params[LINE])
    return bind_all("replicate", of_cotangent(params), cotangents)


def check_same(arrays: Sequence[Any], params: Params, text: arguments.Text) -> None:
    """Compares the arrays with rank 0's. A rank of which one differs then raises an error with the text."""
    differ = list(map(_differs, arrays, bind_all("bcast", {**params, "root": 0}, arrays)))
    if differ:
        bind("check", {"comm": params["comm"], "text": text}, *differ)


def _differs(x, y):
    """Whether two arrays differ by more than rounding."""
    if x.size == 0:
        return jnp.zeros((), bool)
    if not internals.inexact(x):
        return jnp.any(x != y)
    finite = jnp.isfinite(x) & jnp.isfinite(y)
    scale = jnp.max(jnp.where(finite, jnp.abs(y), 0))
    close = jnp.abs(jnp.where(finite, x - y, 0)) <= 100 * jnp.finfo(x.dtype).eps * scale
    return ~jnp.all((finite & close) | (x == y) | (jnp.isnan(x) & jnp.isnan(y)))


def _transpose_replicate(cotangents, templates, params):
    return bind_all("allreduce", of_cotangent(params, **SUMMING), cotangents)


def _transpose_invariant(cotangents, templates, params):
    # The cotangent of an invariant value is whole on each rank, that of a varying value is each rank's share. `varying`
    # marks the quotient as such shares, so that the transpose of the division is the identity again.
    return bind_all("varying", of_cotangent(params), [ct / params["comm"].size for ct in cotangents])


def _transpose_varying(cotangents, templates, params):
    return [ct * params["comm"].size for ct in bind_all("invariant", of_cotangent(params), cotangents)]


def _transpose_alltoall(cotangents, templates, params):
    return bind_all("alltoall", of_cotangent(params), cotangents)


def _transpose_bcast(cotangents, templates, params):
    totals = bind_all("reduce", of_cotangent(params, **SUMMING, root=params["root"]), cotangents)
    # Other ranks do not read their template, so its cotangent is zero. But the zeros must depend on what was sent, or
    # the transpose of this transpose would not communicate on this rank.
    return totals if on_root(params) else _zeros_linked_to(totals, templates)


def _zeros_linked_to(values, templates):
    return [linked_zeros([value], template) for value, template in zip(values, templates, strict=True)]


def _transpose_reduce(cotangents, templates, params):
    # Root sums all operands; on any other rank the result is its operand.
    parts = bind_all("bcast", of_cotangent(params, root=params["root"]), cotangents)
    return parts if on_root(params) else _sums(parts, cotangents)


def _sums(xs, ys):
    return [x + y for x, y in zip(xs, ys, strict=True)]


def _transpose_gather(cotangents, templates, params):
    # Root stacks all operands; on any other rank the result is its operand.
    parts = bind_all("scatter", of_cotangent(params, root=params["root"]), cotangents)
    return parts if on_root(params) else _sums(parts, cotangents)


def _transpose_scatter(cotangents, templates, params):
    stacked = bind_all("gather", of_cotangent(params, root=params["root"]), cotangents)
    return stacked if on_root(params) else _zeros_linked_to(stacked, templates)


def _transpose_prefix(name: str) -> Callable[..., Any]:
    # The adjoint of the sum over the ranks up to this one is the sum over the ranks from this one on; the same without
    # this one.
    def transpose(cotangents, templates, params):
        summing = of_cotangent(params, **SUMMING)
        reverse = lambda xs: [_reverse(x, summing) for x in xs]  # noqa: E731
        return reverse(bind_all(name, summing, reverse(cotangents)))

    return transpose


# Ranks and tags that are known at run time are one more operand, which the cotangent's message needs as well.


def _transpose_send(cotangents, operands, params):
    template, *ends = operands
    ends = envelope.join(params, ends, "dest", "tag")
    back, ends = envelope.split({"source": ends["dest"], "tag": ends["tag"]})
    reverse = of_cotangent(params, **back, **pytrees.reversed_(params), status=None)
    return [bind("recv", reverse, *ends, zero_cotangent(template))]


def _transpose_recv(cotangents, operands, params):
    *ends, template = operands
    ends = envelope.join(params, ends, "source", "tag")
    tag = 0 if params["tag"] == MPI.ANY_TAG else ends["tag"]  # which is only allowed with source PROC_NULL
    back, ends = envelope.split({"dest": ends["source"], "tag": tag})
    bind("send", of_cotangent(params, **back, **pytrees.reversed_(params)), cotangents[0], *ends)
    return [linked_zeros(cotangents, template)]


def _transpose_sendrecv(cotangents, operands, params):
    # The cotangent travels back: source and dest, and the tags, are exchanged. With recvtag ANY_TAG it is sent with the
    # tag of the message sent, and any tag is accepted from that rank; messages between two ranks keep their order.
    template, *ends, _ = operands
    ends = envelope.join(params, ends, "dest", "recvtag", "sendtag", "source")
    any_tag = params["recvtag"] == MPI.ANY_TAG
    back, ends = envelope.split(
        {
            "source": ends["dest"],
            "dest": ends["source"],
            "sendtag": ends["sendtag"] if any_tag else ends["recvtag"],
            "recvtag": MPI.ANY_TAG if any_tag else ends["sendtag"],
        }
    )
    reverse = of_cotangent(params, **back, **pytrees.reversed_(params), status=None)
    return [bind("sendrecv", reverse, cotangents[0], *ends, jnp.zeros(template.shape, template.dtype))]


def _tangent_of_half_exchange(primals, tangents, params):
    # Only one of the two messages has a tangent, which is sent, or received.
    sends = internals.inexact(primals[0])
    ends = envelope.join(params, primals[1:-1], "dest", "recvtag", "sendtag", "source")
    if sends:
        given, ends = envelope.split({"dest": ends["dest"], "tag": ends["sendtag"]})
        half = of_tangent(params, **given)
    else:
        given, ends = envelope.split({"source": ends["source"], "tag": ends["recvtag"]})
        half = of_tangent(params, **given, status=None)
    if why_not := refuse_half(half):
        raise NotImplementedError(f"sendrecv of two kinds of dtypes cannot be differentiated: {why_not}")
    return bind("send", half, tangents[0], *ends) if sends else bind("recv", half, *ends, tangents[-1])


# --- what goes by a plan: any number of arrays, and its derivative is of those that have one --------------------------


def plan(avals, params):
    types = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals)
    return params["pattern"].plan(params["comm"].rank, types, params["places"], params["adjoint"])


def refuse_opaque(name: str, arrays: Sequence[Any], which: Sequence[int]) -> None:
    """Raises an error if one of those arrays cannot be added."""
    for i in which:
        if DATATYPES[np.dtype(arrays[i].dtype).name].kind == "opaque":
            raise NotImplementedError(
                f"{OPERATIONS[name].shown} cannot be differentiated: it adds, and {arrays[i].dtype} cannot be added; "
                "convert to another dtype first, such as float32."
            )


def _derivative_by_plan(name, arrays, which, params, of: Callable[..., Params], adjoint: bool):
    """The linear part of the operation, of those of the arrays; in the place of others there is None."""
    refuse_opaque(name, arrays, which)
    pattern = params["pattern"]
    places = pattern.linear(tuple(params["places"][i] for i in which))
    params = of(params, pattern=pattern, places=places, adjoint=adjoint)
    made = PRIMITIVES[name].bind(*(arrays[i] for i in which), **params)
    given = dict(zip(which, made, strict=True))
    return [given.get(i) for i in range(len(arrays))]


def _row_by_plan(name: str) -> Row:
    def tangent(primals, tangents, results, params):
        which = [i for i, t in enumerate(tangents) if t is not None]
        return _derivative_by_plan(name, tangents, which, params, of_tangent, params["adjoint"])

    def transpose(cotangents, templates, params):
        which = internals.inexact_among(templates)
        return _derivative_by_plan(name, cotangents, which, params, of_cotangent, not params["adjoint"])

    return Row(
        name,
        lambda avals, p: p["pattern"].results(avals, p["places"], p["adjoint"]),
        plan=plan,
        batch=lambda p: p["pattern"].batch(p["adjoint"]),
        tangent=lambda p: tangent,
        transpose=transpose,
    )


# --- derivatives of the other reductions ---------------------------------------------------------------------------


def _exchange(x, source: int, dest: int, params: Params):
    ends = {"source": source, "dest": dest, "sendtag": tags.OF_RULES, "recvtag": tags.OF_RULES, "status": None}
    return bind("sendrecv", {"comm": params["comm"], **ends, DERIVATIVE: params[DERIVATIVE]}, x, jnp.zeros_like(x))


def _reverse(x, params: Params):
    """The array of the rank `size - 1 - rank`."""
    opposite = params["comm"].size - 1 - params["comm"].rank
    return _exchange(x, opposite, opposite, params)


def _shifted(distance: int, params: Params, *arrays):
    """Whether a rank is `distance` before this one (after, if negative), and its arrays; zeros if there is none."""
    rank, size = params["comm"].rank, params["comm"].size
    source, dest = rank - distance, rank + distance
    exists = 0 <= source < size
    source, dest = (r if 0 <= r < size else MPI.PROC_NULL for r in (source, dest))
    return exists, [_exchange(x, source, dest, of_tangent(params)) for x in arrays]


def _distances(params: Params):
    """1, 2, 4, ... below the number of ranks: the steps of a prefix reduction by doubling."""
    distance = 1
    while distance < params["comm"].size:
        yield distance
        distance *= 2


def _product_of_others(x, params: Params):
    """The product of all other ranks' arrays; correct for zeros too, unlike a division of the whole product."""
    product = jnp.ones_like(x)
    for direction in (1, -1):
        exists, (before,) = _shifted(direction, params, x)
        part = before if exists else jnp.ones_like(x)
        for distance in _distances(params):
            exists, (before,) = _shifted(direction * distance, params, part)
            part = part * before if exists else part
        product = product * part
    return product


def _share_of_extreme(x, extreme, params: Params):
    """1 / (number of ranks with the extreme value) where this rank has it, else 0."""
    mine = x == extreme
    count = bind("allreduce", of_tangent(params, **SUMMING), mine.astype(jnp.int32))
    return jnp.where(jnp.isnan(extreme), jnp.nan, jnp.where(mine, _ratio(1, count, x), 0)).astype(x.dtype)


def _ratio(a, b, like):
    """a / b of integers, as precise as `like`, unlike JAX's division of integers."""
    precise = jnp.promote_types(like.dtype, jnp.float32)
    return jnp.asarray(a, precise) / jnp.asarray(b, precise)


def _weight(x, params: Params, extreme: Callable[[], Any]):
    """The derivative of a reduction over all ranks with respect to this rank's array."""
    if params["op"].name == "PROD":
        return _product_of_others(x, params)
    return _share_of_extreme(x, extreme(), params)


def unless_sum(rule: Callable[..., Any]) -> Callable[[Params], Callable[..., Any] | None]:
    return lambda params: None if params["op"].name == "SUM" else rule


def tangent_allreduce(primals, tangents, results, params):
    weight = _weight(primals[0], params, lambda: results[0])
    line = {LINE: params[LINE]} if LINE in params else {}
    return [bind("allreduce", of_tangent(params, **SUMMING, **line), weight * tangents[0])]


def _tangent_reduce(primals, tangents, results, params):
    x, tangent = primals[0], tangents[0]
    everywhere = of_tangent(params, op=params["op"])
    weight = _weight(x, params, lambda: bind("allreduce", everywhere, x))
    total = bind("reduce", of_tangent(params, **SUMMING, root=params["root"]), weight * tangent)
    return [total if on_root(params) else tangent + linked_zeros([total], tangent)]


def _tangent_reduce_scatter(primals, tangents, results, params):
    everywhere = of_tangent(params, op=params["op"])
    weight = _weight(primals[0], params, lambda: bind("allreduce", everywhere, primals[0]))
    more = {name: params[name] for name in ("rows", pytrees.LEAF) if name in params}
    name = "reduce_scatterv" if "rows" in params else "reduce_scatter"
    return [bind(name, of_tangent(params, **SUMMING, **more), weight * tangents[0], *primals[1:])]


def _tangent_exscan(primals, tangents, results, params):
    (inclusive,) = _tangent_scan(primals, tangents, results, params)
    return _shifted(1, params, inclusive)[1]


def _tangent_scan(primals, tangents, results, params):
    name, x, tangent = params["op"].name, jnp.asarray(primals[0]), tangents[0]
    if name == "PROD":
        for distance in _distances(params):
            exists, (earlier, its_tangent) = _shifted(distance, params, x, tangent)
            if exists:
                x, tangent = earlier * x, its_tangent * x + earlier * tangent
        return [tangent]
    count = jnp.ones(x.shape, jnp.int32)  # of the ranks so far with the extreme value, which share its tangent
    for distance in _distances(params):
        exists, (earlier, its_count, its_tangent) = _shifted(distance, params, x, count, tangent)
        if not exists:
            continue
        wins, ties = (earlier > x if name == "MAX" else earlier < x), earlier == x
        share = jnp.where(ties, _ratio(its_count, its_count + count, x), jnp.where(wins, 1, 0)).astype(x.dtype)
        tangent = jnp.where(share > 0, share * its_tangent, 0) + jnp.where(share < 1, (1 - share) * tangent, 0)
        count = jnp.where(ties, its_count + count, jnp.where(wins, its_count, count))
        x = jnp.where(wins, earlier, x)
    return [tangent]


# --- what has no derivative ----------------------------------------------------------------------------------------

_DIFFERENTIABLE = ("SUM", "PROD", "MAX", "MIN")


def refuse_reduction(params: Params) -> str:
    if params["op"].name in _DIFFERENTIABLE:
        return ""
    possible = ", ".join(f"MPI.{name}" for name in _DIFFERENTIABLE)
    return f"the reduction {params['op'].name} has no derivative; those that have one: {possible}."


def refuse_half(params: Params) -> str:
    """Why a send or a receive has no derivative; empty if it has one."""
    if "dest" in params:
        return tags.refusal(params, "tag")
    if params["tag"] == MPI.ANY_TAG and params["source"] != MPI.PROC_NULL:
        return "with tag ANY_TAG the tag of the way back is unknown; name the tag, as the sender does."
    return _refuse_source(params, "tag")


def _refuse_source(params: Params, *names: str) -> str:
    if params["source"] == MPI.ANY_SOURCE:
        return "with source ANY_SOURCE the way back is unknown; name the source."
    return tags.refusal(params, *names)


def _row_by_counts(name: str, results: Callable[..., Any] = _rows, **more: Any) -> Row:
    """A row of an operation on arrays divided by rows. A batch is an axis behind the first."""
    return Row(name, results, batch=lambda p: (1, 1), by_rows=True, **more)


def _row_of_prefix(name: str, tangent: Callable[..., Any]) -> Row:
    """A row of a reduction over the ranks up to this one, or before it."""
    return Row(
        name,
        _same,
        _largest,
        part=lambda p: Part(in_place=True),
        in_place=True,
        refuse=refuse_reduction,
        tangent=unless_sum(tangent),
        transpose=_transpose_prefix(name),
    )


# --- the table -----------------------------------------------------------------------------------------------------

ROWS = (
    Row("allgather", _stacked, _largest_stacked, batch=lambda p: (0, 1), transpose=_transpose_allgather),
    _row_by_counts("allgatherv", transpose=_transpose_allgatherv),
    Row(
        "allreduce",
        _same,
        _largest,
        part=lambda p: Part(in_place=True),
        in_place=True,
        refuse=refuse_reduction,
        tangent=unless_sum(tangent_allreduce),
        transpose=_transpose_allreduce,
    ),
    Row("alltoall", _same, _largest, batch=lambda p: (1, 1), transpose=_transpose_alltoall),
    _row_by_counts("alltoallv", transpose=_transpose_alltoallv),
    Row("barrier", _none),
    Row("bcast", _same, _largest, part=_part_of_bcast, in_place=False, transpose=_transpose_bcast),
    # Its truth values have no cotangent. But it has an effect, so it is transposed with the computation around it.
    Row("check", _none, transpose=lambda *_: []),
    _row_by_plan("exchange"),
    _row_of_prefix("exscan", _tangent_exscan),
    Row(
        "gather",
        lambda avals, p: _stacked(avals, p) if on_root(p) else avals,
        _largest_stacked,
        part=lambda p: Part(results=on_root(p)),
        batch=lambda p: (0, 1 if on_root(p) else 0),
        transpose=_transpose_gather,
    ),
    _row_by_counts(
        "gatherv",
        lambda avals, p: _rows(avals, p) if on_root(p) else avals[:1],
        part=lambda p: Part(results=on_root(p)),
        transpose=_transpose_gatherv,
    ),
    Row("invariant", _same, _largest, transpose=_transpose_invariant, silent=True),
    _row_by_plan("neighbor_allgather"),
    _row_by_plan("neighbor_alltoall"),
    _row_by_plan("redistribute"),
    Row("recv", _same, templates=lambda p: 1, refuse=refuse_half, transpose=_transpose_recv),
    Row(
        "reduce",
        _same,
        _largest,
        part=lambda p: Part(results=on_root(p), in_place=on_root(p)),
        in_place=True,
        refuse=refuse_reduction,
        tangent=unless_sum(_tangent_reduce),
        transpose=_transpose_reduce,
    ),
    Row(
        "reduce_scatter",
        _entry,
        lambda aval, p: aval,
        batch=lambda p: (1, 0),
        refuse=refuse_reduction,
        tangent=unless_sum(_tangent_reduce_scatter),
        transpose=_transpose_reduce_scatter,
    ),
    _row_by_counts(
        "reduce_scatterv",
        refuse=refuse_reduction,
        tangent=unless_sum(_tangent_reduce_scatter),
        transpose=_transpose_reduce_scatterv,
    ),
    Row("replicate", _same, _largest, transpose=_transpose_replicate, silent=True),
    _row_of_prefix("scan", _tangent_scan),
    Row(
        "scatter",
        lambda avals, p: _entry(avals, p) if on_root(p) else avals,
        lambda aval, p: aval if on_root(p) else _largest_stacked(aval, p),
        part=lambda p: Part(operands=on_root(p)),
        batch=lambda p: (1 if on_root(p) else 0, 0),
        transpose=_transpose_scatter,
    ),
    _row_by_counts(
        "scatterv",
        part=lambda p: Part(operands=on_root(p)),
        transpose=_transpose_scatterv,
    ),
    Row("send", _none, refuse=refuse_half, transpose=_transpose_send),
    Row(
        "sendrecv",
        _same,
        templates=lambda p: 1,
        refuse=lambda p: _refuse_source(p, "sendtag", "recvtag"),
        tangent_of_half=_tangent_of_half_exchange,
        transpose=_transpose_sendrecv,
    ),
    Row("varying", _same, _largest, transpose=_transpose_varying, silent=True),
)

for _row in ROWS:
    make_primitive(_row)


def check_names(table: set[str], core: set[str]) -> None:
    """Raises ImportError if the table and the C core, being of two versions, name different operations."""
    if table != core:
        raise ImportError(
            f"jaxmpi: the Python table and the C core name different operations: {sorted(table ^ core)}. "
            "Reinstall jaxmpi."
        )
