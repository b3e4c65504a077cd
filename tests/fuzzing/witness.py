"""Computes a program for all ranks in one process: a value is a list of arrays, one per rank.

Nothing of jaxmpi, and none of JAX's structure: loops are Python's, functions are called, branches are taken.
Derivatives are JAX's own of this one function. Its conventions for what is the same on all ranks are in two pairs of
linear maps, each the other's transpose: `total` and the identity `replicate`; the identity `invariant` and `share`.
"""

import functools
import itertools
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad

from fuzzing import vectors
from fuzzing.programs import LENGTH, LINEAR_RULES, LOOPS, RETURNED, RULES, Call, Comm, Local, Wait

_total, _replicate, _invariant, _share = map(Primitive, ("total", "replicate", "invariant", "share"))
for _map, _compute, _transposed in (
    (_total, lambda xs: jnp.broadcast_to(jnp.sum(xs, axis=0), xs.shape), _replicate),
    (_replicate, lambda xs: xs, _total),
    (_invariant, lambda xs: xs, _share),
    (_share, lambda xs: xs / len(xs), _invariant),
):
    _map.def_impl(_compute)
    _map.def_abstract_eval(lambda xs: xs)
    ad.deflinear2(_map, lambda cotangent, _, transposed=_transposed: [transposed.bind(cotangent)])


def total(xs):
    """The sum on all ranks, whose transpose hands each rank's cotangent on."""
    return list(_total.bind(jnp.stack(xs)))


def replicate(xs):
    """The identity, whose transpose adds up the cotangents of all ranks."""
    return list(_replicate.bind(jnp.stack(xs)))


# --- reductions of several arrays ----------------------------------------------------------------------------------


def _extreme(xs, pick):
    """Linear in the arrays that have the extreme value, which share its derivative."""
    shares = _shares(xs, pick)
    return lax.stop_gradient(pick(jnp.stack(xs), axis=0)) + sum(
        share * (x - lax.stop_gradient(x)) for share, x in zip(shares, xs, strict=True)
    )


def _shares(xs, pick):
    stacked = lax.stop_gradient(jnp.stack(xs))
    have = (stacked == pick(stacked, axis=0)).astype(float)
    return list(have / jnp.sum(have, axis=0))


REDUCTIONS = {
    "SUM": lambda xs: functools.reduce(operator.add, xs),
    "PROD": lambda xs: functools.reduce(operator.mul, xs),
    "MAX": lambda xs: _extreme(xs, jnp.max),
    "MIN": lambda xs: _extreme(xs, jnp.min),
}


def _others(xs, rank):
    return functools.reduce(operator.mul, [x for i, x in enumerate(xs) if i != rank], jnp.ones_like(xs[0]))


@jax.custom_jvp
def _product(xs):
    return [REDUCTIONS["PROD"](xs)] * len(xs)


@_product.defjvp
def _(primals, tangents):
    (xs,), (dots,) = primals, tangents
    return _product(xs), total([_others(xs, rank) * dot for rank, dot in enumerate(dots)])


def allreduce(xs, op):
    """On all ranks; the derivative is the `total` of the ranks' parts."""
    if op == "SUM":
        return total(xs)
    if op == "PROD":
        return _product(xs)
    pick = {"MAX": jnp.max, "MIN": jnp.min}[op]
    moved = total([s * (x - lax.stop_gradient(x)) for s, x in zip(_shares(xs, pick), xs, strict=True)])
    return [lax.stop_gradient(pick(jnp.stack(xs), axis=0)) + move for move in moved]


# --- programs ------------------------------------------------------------------------------------------------------


class Witness:
    def __init__(self, size):
        self.size = size
        self.ranks = range(size)

    def __call__(self, program, xs, number):
        """Results of all ranks; `xs` has the inputs of each."""
        return self.run(program.body, [list(values) for values in zip(*xs, strict=True)], number)[0]

    def run(self, body, values, number, given=()):
        """The result, and what is in flight: the operation, and its result that nobody has seen yet."""
        values = list(values)
        flying = {-1 - i: its for i, its in enumerate(given)}
        for statement in body.statements:
            values.append(self.step(statement, values, flying, number))
        result = values[body.result]
        if body.everything:
            result = [vectors.with_everything(result[r], [v[r] for v in values]) for r in self.ranks]
        return result, [flying[key] for key in body.returned]

    def step(self, statement, values, flying, number):
        match statement:
            case Local("constant"):
                return [self.constant(rank, len(values)) for rank in self.ranks]
            case Local("stop", (i,), ranks):
                return self.on(ranks, lax.stop_gradient, values[i])
            case Local(kind, operands):
                return [vectors.LOCAL[kind](*(values[i][r] for i in operands)) for r in self.ranks]
            case Comm():
                xs = self.constants(statement.constant_on, values[statement.operand], len(values))
                ys = self.communicate(statement, [vectors.tie(x) if statement.ties else x for x in xs])
                if statement.also >= 0:
                    others = self.constants(statement.also_constant_on, values[statement.also], len(values) + 1)
                    ys = [y + 0.5 * z for y, z in zip(ys, self.communicate(statement, others), strict=True)]
                if not statement.starts:
                    return self.seen(statement, ys, values)
                flying[len(values)] = (statement, ys)
                return values[statement.operand]
            case Wait(keys):
                results = [self.seen(*flying[key], values) for key in keys]
                never = statement.forgotten_on
                return [values[0][r] if r in never else vectors.together([ys[r] for ys in results]) for r in self.ranks]
            case Call():
                ys, returned = self.call(statement, values, flying, number)
                flying |= {len(values) + RETURNED * i: its for i, its in enumerate(returned)}
                without = statement.dropped_on + statement.silent_on
                return [values[0][r] if r in without else ys[r] for r in self.ranks]

    def seen(self, comm, ys, values):
        """What a program makes of the result of an operation."""
        ys = [jnp.tanh(y) for y in ys] if comm.squash else ys
        return [values[0][r] if r in comm.dropped_on else ys[r] for r in self.ranks]

    def constant(self, rank, salt):
        return jnp.asarray(vectors.constant(rank, salt))

    def constants(self, ranks, xs, salt):
        return [self.constant(r, salt) if r in ranks else xs[r] for r in self.ranks]

    def on(self, ranks, function, xs):
        return [function(xs[r]) if r in ranks else xs[r] for r in self.ranks]

    def communicate(self, comm, xs):
        xs = self.on(comm.integer_on, lambda x: lax.stop_gradient(jnp.round(4 * x)), xs)
        ys = getattr(self, f"_{comm.name}")(comm, xs)
        if comm.name == "sendrecv":
            sent_integers = [(r - comm.peer) % self.size for r in self.ranks]
            scaled = [r for r in self.ranks if sent_integers[r] in comm.integer_on]
        elif comm.name == "pair" and self.size > 1:
            scaled = [r for r in comm.integer_on if r != comm.peer]
            scaled += [comm.peer] if comm.root in comm.integer_on else []
        else:
            scaled = comm.integer_on
        return self.on(scaled, lambda y: y / 4, ys)

    def _allgather(self, comm, xs):
        return [vectors.combine(xs) for _ in self.ranks]

    def _allreduce(self, comm, xs):
        return allreduce(xs, comm.op)

    def _alltoall(self, comm, xs):
        return [vectors.combine([x * (r + 1) for x in xs]) for r in self.ranks]

    def _exchange(self, comm, xs):
        after = [*xs[1:], xs[0]]
        return [jnp.concatenate([xs[r - 1][-2:-1], xs[r][1:-1], after[r][1:2]]) for r in self.ranks]

    def _neighbors(self, comm, xs):
        after = [*xs[1:], xs[0]]
        return [vectors.combine([2 * xs[r - 1], after[r]]) for r in self.ranks]

    def _barrier(self, comm, xs):
        return xs

    def _bcast(self, comm, xs):
        return [xs[comm.root]] * self.size

    def _gather(self, comm, xs):
        return [vectors.combine(xs) if r == comm.root else xs[r] for r in self.ranks]

    def _pair(self, comm, xs):
        if self.size == 1:
            return [jnp.zeros(LENGTH)]
        return [xs[comm.root] if r == comm.peer else xs[r] for r in self.ranks]

    def _reduce(self, comm, xs):
        return [REDUCTIONS[comm.op](xs) if r == comm.root else xs[r] for r in self.ranks]

    def _invariant(self, comm, xs):
        return list(_invariant.bind(jnp.stack(xs)))

    def _replicate(self, comm, xs):
        return replicate(xs)

    def _reduce_scatter(self, comm, xs):
        return [REDUCTIONS[comm.op]([x * (r + 1) for x in xs]) for r in self.ranks]

    def _exscan(self, comm, xs):
        return [sum(xs[:r], jnp.zeros_like(xs[0])) for r in self.ranks]

    def _rows(self, comm, xs):
        return jnp.concatenate([x[: vectors.rows(r, comm.root)] for r, x in enumerate(xs)])

    def _allgatherv(self, comm, xs):
        return [vectors.combine_rows(self._rows(comm, xs), self.size) for _ in self.ranks]

    def _alltoallv(self, comm, xs):
        parts = [[xs[i][: vectors.rows(i + 2 * j, comm.root)] * (j + 1) for i in self.ranks] for j in self.ranks]
        return [vectors.combine_rows(jnp.concatenate(part), self.size) for part in parts]

    def _gatherv(self, comm, xs):
        whole = vectors.combine_rows(self._rows(comm, xs), self.size)
        own = [x[: vectors.rows(r, comm.root)] if comm.ring else x for r, x in enumerate(xs)]
        return [whole if r == comm.root else vectors.padded(own[r], LENGTH) for r in self.ranks]

    def _scatterv(self, comm, xs):
        parts = [(xs[comm.root] * (r + 1))[: vectors.rows(r, comm.root)] for r in self.ranks]
        return [vectors.padded(part, LENGTH) for part in parts]

    def _owners_rows(self, rows):
        """Where each row of a map is copied from, among the rows of all ranks; and how many rows each rank has."""
        owner = {row: rank for rank in self.ranks for row in rows.of(rank)[0]}
        local = []
        for rank in self.ranks:
            owned, ghosts = rows.of(rank)
            others = {row for row in ghosts if owner[row] != rank}
            local.append([*owned, *sorted(others, key=lambda row: (owner[row], row))])
        first = [sum(map(len, local[:rank])) for rank in self.ranks]
        at = {row: first[rank] + i for rank in self.ranks for i, row in enumerate(rows.of(rank)[0])}
        return np.array([at[row] for its in local for row in its], int), [len(its) for its in local]

    def _with_rows(self, comm, xs, compute):
        """What is computed of the rows of all ranks, and of where each is copied from."""
        sources, counts = self._owners_rows(comm.map)
        rows = jnp.concatenate([vectors.as_rows(x, self.size, n) for x, n in zip(xs, counts, strict=True)])
        results = jnp.split(compute(rows, sources), np.cumsum(counts)[:-1])
        return [vectors.combine_rows(y, self.size) for y in results]

    def _index_exchange(self, comm, xs):
        return self._with_rows(comm, xs, lambda rows, sources: rows[sources])

    def _index_accumulate(self, comm, xs):
        return self._with_rows(comm, xs, lambda rows, sources: jnp.zeros_like(rows).at[sources].add(rows))

    def _migrate(self, comm, xs):
        owners = [vectors.owners(r, comm.root, comm.peer, self.size) for r in self.ranks]
        own = [
            [x[i] for x, its in zip(xs, owners, strict=True) for i, owner in enumerate(its) if owner == r]
            for r in self.ranks
        ]
        return [vectors.combine_rows(jnp.stack([*its, jnp.zeros(())])[: len(its)], self.size) for its in own]

    def _boxes(self, blocks):
        """Where the block of each rank lies in the whole array."""
        along = []
        for sizes in blocks:
            ends = np.cumsum(sizes).tolist()
            along.append([slice(end - size, end) for size, end in zip(sizes, ends, strict=True)])
        return list(itertools.product(*along))

    def _redistribute(self, comm, xs):
        source, target = comm.division.widths
        whole = jnp.zeros([sum(sizes) for sizes in comm.division.source])
        for x, box in zip(xs, self._boxes(comm.division.source), strict=True):
            shape = [its.stop - its.start + 2 * source for its in box]
            block = vectors.as_rows(x, self.size, int(np.prod(shape))).reshape(shape)
            whole = whole.at[box].set(block[tuple(slice(source, size - source) for size in shape)])
        results = [jnp.pad(whole[box], target) for box in self._boxes(comm.division.target)]
        return [vectors.combine_rows(y.ravel(), self.size) for y in results]

    def _scan(self, comm, xs):
        return [REDUCTIONS[comm.op](xs[: r + 1]) for r in self.ranks]

    def _scatter(self, comm, xs):
        return [xs[comm.root] * (r + 1) for r in self.ranks]

    def _sendrecv(self, comm, xs):
        exists = [comm.ring or r - comm.peer >= 0 for r in self.ranks]
        return [xs[(r - comm.peer) % self.size] if exists[r] else jnp.zeros(LENGTH) for r in self.ranks]

    # --- structure, taken apart ------------------------------------------------------------------------------------

    def call(self, call, values, flying, number):
        operands = [values[i] for i in call.operands + call.closed]
        operands = [self.constants(call.constant_on, xs, len(values) + i) for i, xs in enumerate(operands)]
        quantize = lambda x: lax.stop_gradient(jnp.round(4 * x)) / 4  # noqa: E731
        args, closed = operands[: len(call.operands)], operands[len(call.operands) :]
        args = [self.on(call.integer_in, quantize, xs) for xs in args]
        ys, returned = self.result(call, args, closed, number, [flying[key] for key in call.given])
        return self.on(call.integer_out, quantize, self.on(call.stopped_on, lax.stop_gradient, ys)), returned

    def result(self, call, args, closed, number, given):
        if call.kind in LOOPS:
            return self.loop(call, args, closed, given)
        if call.kind in ("solve", "symmetric", "root"):
            return self.solve(call, *args), []
        if call.kind == "hand_jvp":
            ys, _ = self.run(call.bodies[0], [[jnp.sin(x) for x in args[0]]], 0)
            return [jnp.tanh(y) for y in ys], []
        if call.kind in LINEAR_RULES:  # the value of the operand, with the derivative of the operation
            stop = jax.lax.stop_gradient
            ys, _ = self.run(call.bodies[0], args, 0)
            return [stop(x) + y - stop(y) for x, y in zip(args[0], ys, strict=True)], []
        number = 0 if call.kind in RULES else number
        chosen = {"cond": (number + call.offset) % 2, "switch": (number + call.offset) % 3}.get(call.kind, 0)
        return self.run(call.bodies[chosen], [*args, *closed], number, given)

    def loop(self, call, args, closed, flying):
        carry, *more = args
        length = call.length
        rows = [[vectors.rows_of(x, length) for x in xs] for xs in more]
        order = range(length)
        if call.kind == "scan" and call.reverse:
            order = reversed(order)
        seen = [jnp.zeros(LENGTH) for _ in self.ranks]
        stacked = {}
        for i in order:
            here = [[row[i] for row in rank] for rank in rows] if call.kind == "scan" else more
            carry, flying = self.run(call.bodies[0], [carry, *here, *closed], i, [] if call.stacks else flying)
            stacked[i] = flying
            seen = [s + jnp.sin(y) for s, y in zip(seen, carry, strict=True)]
        if call.stacks:
            flying = [its for i in range(length) for its in stacked[i]]
        if call.kind == "scan":
            carry = [jnp.tanh(c + s) for c, s in zip(carry, seen, strict=True)]
        return carry, flying

    def solve(self, call, bs, ws):
        """The same fixed point, found step by step."""
        ws = [jnp.tanh(w) for w in ws]
        symmetric = call.kind == "symmetric"
        us = [jnp.zeros(LENGTH) for _ in self.ranks]
        for _ in range(vectors.STEPS + 1):
            inner, _ = self.run(call.bodies[0], [[w * u for w, u in zip(ws, us, strict=True)] if symmetric else us], 0)
            if call.kind == "root":
                us = [jnp.sin(b) + vectors.WEAK * w * jnp.tanh(y) for b, w, y in zip(bs, ws, inner, strict=True)]
            else:
                us = [(b - vectors.WEAK * w * y) / 2 for b, w, y in zip(bs, ws, inner, strict=True)]
        return us
