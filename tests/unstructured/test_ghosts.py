"""Exchanges of ghosts by index, against NumPy on a global array, of which all ranks know all.

hypothesis draws a division of rows among some ranks and the ghosts of each. Integers make sums exact; where their order
matters, floats are added by NumPy in the order of the ranks.
"""

import time
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from mpi4py import MPI

import jaxmpi
from support.derivatives import needs_new_jax
from support.divided import WAYS, Rows, derivatives, for_each, on_first_ranks, some_rows, total
from support.rows import each
from support.table import draw, dtype_of

EXAMPLES = 16
DTYPES = ["float32", "float64", "int32", "bool", "complex64", "bfloat16", "complex128", "uint8", "float8_e5m2", "int64"]
SUMMED = ["float32", "float64", "complex64", "complex128", "bfloat16", "float16"]
COMBINED = {
    "SUM": [*SUMMED, "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"],
    "MAX": ["float32", "float64", "bfloat16", "float16", "bool", "int8", "uint16", "int32", "uint64", "int64"],
}
COMBINED["MIN"] = COMBINED["MAX"]


class Map(Rows):
    @property
    def size(self):
        return sum(map(len, self.owned))

    def rows(self, rank):
        """The global index of each local row."""
        return [*self.owned[rank], *self.of(rank)]

    def exchanged(self, blocks):
        """What the arrays of all ranks become."""
        whole = {index: blocks[rank][at] for rank, its in enumerate(self.owned) for at, index in enumerate(its)}
        results = [block.copy() for block in blocks]
        for rank, result in enumerate(results):
            for at, index in enumerate(self.rows(rank)):
                result[at] = whole[index]
        return results

    def accumulated(self, blocks, op="SUM"):
        combine = {"SUM": np.add, "MAX": np.maximum, "MIN": np.minimum}[op]
        results, owner = [block.copy() for block in blocks], self.owner()
        for rank, block in enumerate(blocks):
            owned = len(self.owned[rank])
            for at, index in enumerate(self.of(rank), owned):
                to = results[owner[index]]
                place = self.owned[owner[index]].index(index)
                to[place] = combine(to[place], block[at])
                if op == "SUM":
                    results[rank][at] = 0
        return results


@dataclass(frozen=True)
class Case:
    map: Map
    fields: tuple[tuple[str, tuple[int, ...]], ...]
    """Dtypes, and the shapes of rows."""
    way: str
    op: str
    starts: bool
    seed: int

    @property
    def ranks(self):
        return self.map.ranks

    def exchange(self, local, fields):
        return jaxmpi.wait(local.start(fields)) if self.starts else local.exchange(fields)

    def blocks(self, seed):
        """The arrays of all ranks."""
        return [
            [
                draw((len(self.map.rows(rank)), *row), dtype_of(dtype), rank, 100 * self.seed + 10 * seed + i)
                for i, (dtype, row) in enumerate(self.fields)
            ]
            for rank in range(self.map.ranks)
        ]


@st.composite
def cases(draw, size, dtypes=DTYPES, op=None):
    op = draw(st.sampled_from(list(COMBINED))) if op is None else op
    field = st.tuples(
        st.sampled_from(COMBINED[op] if dtypes is None else dtypes), st.lists(st.integers(0, 5), max_size=2).map(tuple)
    )
    fields = tuple(draw(st.lists(field, min_size=1, max_size=4)))
    way, starts = draw(st.sampled_from(list(WAYS))), draw(st.booleans())
    return Case(Map(*draw(some_rows(size))), fields, way, op, starts, draw(st.integers(0, 1000)))


def equal(found, right, about):
    assert found.dtype == right.dtype, about
    assert found.shape == right.shape, about
    assert np.asarray(found).tobytes() == np.asarray(right).tobytes(), f"{about}\n{found}\n{right}"


def each_field(blocks, of):
    """Applies a map of the arrays of all ranks to each field."""
    return [list(its) for its in zip(*[of(list(field)) for field in zip(*blocks, strict=True)], strict=True)]


def check_values(case, local, call, of):
    blocks = case.blocks(0)
    mine = list(map(jnp.asarray, blocks[local.comm.rank]))
    results = WAYS[case.way](call)(mine)
    for found, expected, operand, before in zip(
        results, each_field(blocks, of)[local.comm.rank], mine, blocks[local.comm.rank], strict=True
    ):
        equal(found, expected, case)
        equal(operand, before, case)


def check_exchange(case, local):
    check_values(case, local, partial(case.exchange, local), case.map.exchanged)


def check_accumulate(case, local):
    op = {"op": getattr(MPI, case.op)}
    check_values(case, local, partial(local.accumulate, **op), partial(case.map.accumulated, op=case.op))


def check_derivatives(case, local):
    """Tangents, cotangents, and cotangents of those, of an exchange and of its adjoint."""
    primals, tangents, cotangents = (case.blocks(seed) for seed in range(3))
    here = lambda blocks: list(map(jnp.asarray, blocks[local.comm.rank]))  # noqa: E731

    exchange = partial(case.exchange, local)

    def everything(*given):
        return [derivatives(call)(*given) for call in (exchange, local.accumulate)]

    ways = (case.map.exchanged, case.map.accumulated), (case.map.accumulated, case.map.exchanged)
    results = WAYS[case.way](everything)(here(primals), here(tangents), here(cotangents))
    for (forth, back), (forward, backward, again) in zip(ways, results, strict=True):
        right = each_field(tangents, forth)[local.comm.rank]
        for found, expected in zip((*forward, *again), (*right, *right), strict=True):
            equal(found, expected, case)
        for found, expected in zip(backward, each_field(cotangents, back)[local.comm.rank], strict=True):
            equal(found, expected, case)
        assert total(local.comm, forward, here(cotangents)) == total(local.comm, here(tangents), backward), case


def check_batches(case, local):
    """A batch of some of the fields, along any axis."""
    first, second = (case.blocks(seed) for seed in range(2))
    ins, where, rights = [], [], []
    for i, pair in enumerate(zip(first[local.comm.rank], second[local.comm.rank], strict=True)):
        mapped = i == 0 or case.seed % (i + 2) == 0
        axis = case.seed % (pair[0].ndim + 1)
        ins.append(jnp.stack(pair, axis=axis) if mapped else jnp.asarray(pair[0]))
        where.append(axis if mapped else None)
        rights.append([[blocks[i] for blocks in (second if j and mapped else first)] for j in range(2)])

    exchange = partial(case.exchange, local)
    accumulate = lambda fields: local.accumulate(fields, getattr(MPI, case.op))  # noqa: E731
    mapped = [jax.vmap(lambda *fields, call=call: call(list(fields)), tuple(where)) for call in (exchange, accumulate)]
    outs = WAYS[case.way](lambda *ins: [call(*ins) for call in mapped])(*ins)
    for results, of in zip(outs, (case.map.exchanged, partial(case.map.accumulated, op=case.op)), strict=True):
        for out, right in zip(results, rights, strict=True):
            for j in range(2):
                equal(out[j], of(right[j])[local.comm.rank], case)


RANDOM = {
    "exchanges": (check_exchange, DTYPES, 1),
    "accumulations": (check_accumulate, None, 1),
    "derivatives": (check_derivatives, SUMMED, 3),
    "batches": (check_batches, None, 3),
}


@pytest.mark.seconds(600)
@for_each(RANDOM)
def test_random(what, comm, size):
    check, dtypes, part = RANDOM[what]
    on_first_ranks(comm, cases(size, dtypes), lambda case, part: check(case, case.map.on(part)), EXAMPLES // part)


def ring(size, rows=4, reach=2):
    """Of a ring of rows each rank has some, in a mixed order, and copies of some before and behind them."""
    whole = np.arange(size * rows)
    owned = [[int(i) for i in np.random.default_rng(rank).permutation(whole[rank * rows : (rank + 1) * rows])]
             for rank in range(size)]  # fmt: skip
    around = [{i % whole.size for i in range(rank * rows - reach, (rank + 1) * rows + reach)} for rank in range(size)]
    return Map(
        tuple(map(tuple, owned)),
        tuple(tuple(sorted(its - set(mine))) for its, mine in zip(around, owned, strict=True)),
    )


def test_sums_are_in_the_order_of_the_ranks(comm, rank, size):
    """All ranks have copies of the rows of rank 0, in numbers whose sum depends on the order."""
    rows = 50
    of = Map((tuple(range(rows)), *[(rows + other,) for other in range(1, size)]),
             ((), *[tuple(range(rows))] * (size - 1)))  # fmt: skip
    local = of.on(comm)
    for dtype in (np.float32, np.float64, np.complex64):
        blocks = [
            np.random.default_rng(other).normal(size=(len(of.rows(other)), 3)).astype(dtype) * dtype(10.0**other)
            for other in range(size)
        ]
        right = of.accumulated(blocks)[rank]
        for turn in range(8):
            time.sleep(0.01 * ((rank * 3 + turn) % 4))
            equal(local.accumulate(jnp.asarray(blocks[rank])), right, f"{dtype} {turn}")


def test_nan_wins(comm, rank, size):
    of = ring(size)
    local = of.on(comm)
    blocks = [draw((len(of.rows(other)), 2), np.float32, other) for other in range(size)]
    for block in blocks:
        block[-1, 0] = np.nan
    for op in ("MAX", "MIN"):
        found = local.accumulate(jnp.asarray(blocks[rank]), getattr(MPI, op))
        np.testing.assert_array_equal(found, of.accumulated(blocks, op)[rank])


def test_long_rows_and_many_of_them(comm, rank, size):
    """Rows of all the lengths that have loops of their own, and others; more than a MiB to a rank."""
    rows = 20000
    mine = np.random.default_rng(rank).permutation(rows)
    of_others = [np.sort(np.random.default_rng([7, rank, other]).choice(rows, rows // 4, replace=False))
                 for other in range(size)]  # fmt: skip
    copies = np.concatenate([of_others[other] + rows * other for other in range(size) if other != rank] or [[]])
    local = jaxmpi.IndexMap(rank * rows + mine, copies.astype(np.int64), comm=comm)
    kinds = [(np.uint8, 1), (np.int16, 1), (np.float32, 1), (np.uint8, 3), (np.float64, 1)]
    kinds += [(np.complex128, 1), (np.float64, 4), (np.float32, 16), (np.float64, 9)]
    blocks, rights = [], []
    for dtype, length in kinds:
        whole = np.random.default_rng(length).integers(0, 200, (size * rows, length)).astype(dtype)
        block = np.concatenate([whole[rank * rows + mine], np.zeros((copies.size, length), dtype)])
        blocks.append(block)
        rights.append(np.concatenate([block[:rows], whole[copies.astype(int)]]))
    found = jax.jit(lambda blocks: [local.exchange(block) for block in blocks])(blocks)
    each([*zip(kinds, found, rights, strict=True)], lambda row: equal(row[1], row[2], row[0]), lambda row: row[0])


def test_nothing_travels(comm, rank, size):
    """Without ghosts, without rows, and with rows without elements."""
    alone = Map(tuple((rank,) for rank in range(size)), ((),) * size).on(comm)
    x = jnp.arange(3.0)[None]
    for found in (alone.exchange(x), alone.accumulate(x), jaxmpi.wait(alone.start(x))):
        equal(found, np.asarray(x), "no ghosts")
    none = Map(((),) * size, ((),) * size).on(comm)
    equal(none.exchange(jnp.ones((0, 2))), np.ones((0, 2)), "no rows")
    of = ring(size)
    local = of.on(comm)
    empty = jnp.ones((len(of.rows(rank)), 0))
    for found in (local.exchange(empty), local.accumulate(empty), jaxmpi.wait(local.start(empty))):
        equal(found, np.asarray(empty), "no elements")
    assert local.exchange([]) == []


def test_one_message_to_each_neighbor(comm, rank, size):
    """The plan has a send for each rank with ghosts; consecutive rows are no list."""
    local = ring(size, rows=4, reach=1).on(comm)
    assert len(local._pattern.rows.sends) == len({(rank - 1) % size, (rank + 1) % size} - {rank})
    pairs = [(2 * other, 2 * other + 1) for other in range(size)]
    order = Map(tuple(pairs), tuple(pairs[(other + 1) % size] if size > 1 else () for other in range(size)))
    assert all(isinstance(which, range) for _, which in order.on(comm)._pattern.rows.sends)


def test_patterns_are_equal_by_what_they_say(comm, rank, size):
    one, two, other = (ring(size, reach=reach).on(comm)._pattern for reach in (2, 2, 1))
    assert one == two
    assert hash(one) == hash(two)
    assert one != other or size == 1


def test_typed_keys(comm, rank, size):
    of = ring(size)
    local = of.on(comm)
    keys = jax.random.split(jax.random.key(3), of.size)
    rows = np.array(of.rows(rank))
    mine = keys[rows].at[len(of.owned[rank]) :].set(jax.random.key(0))
    for found in (local.exchange(mine), jaxmpi.wait(local.start(mine))):
        np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(keys)[rows])


BAD = [
    (lambda local, x: local.exchange(x[:-1]), ValueError, "IndexMap.exchange: tree has shape .* must have this rank's"),
    (lambda local, x: local.exchange({"a": x, "b": x[0, 0]}), ValueError, r"tree\['b'\] has shape \(\)"),
    (lambda local, x: local.exchange(None), TypeError, "IndexMap.exchange: tree is None"),
    (lambda local, x: local.exchange("text"), TypeError, "must hold JAX arrays"),
    (lambda local, x: local.start(x[:-1]), ValueError, "IndexMap.start: tree has shape"),
    (lambda local, x: local.start([x] * 101), ValueError, "at most 100"),
    (lambda local, x: local.accumulate(x, MPI.PROD), ValueError, "op must be MPI.SUM, MPI.MAX, MPI.MIN, got PROD"),
    (lambda local, x: local.accumulate(x, "sum"), TypeError, "op must be an mpi4py operation"),
    (lambda local, x: local.accumulate(x > 0), TypeError, "MPI.SUM is not defined for dtype bool"),
    (lambda local, x: local.accumulate(x + 1j, MPI.MAX), TypeError, "MPI.MAX is not defined for dtype complex128"),
    (lambda local, x: local.accumulate(x.astype("float8_e5m2")), TypeError, "it can be moved, not reduced"),
    (lambda local, x: local.accumulate(x[:-1], MPI.MAX), ValueError, "IndexMap.accumulate: tree has shape"),
]


@pytest.mark.alone
def test_bad_calls(comm):
    of = ring(1)

    def check(row):
        call, error, words = row
        with pytest.raises(error, match=words):
            call(of.on(comm), jnp.ones((len(of.rows(0)), 2)))

    each(BAD, check, lambda row: row[2])


@needs_new_jax
def test_extrema_have_no_derivative(comm, rank, size):
    of = ring(size)
    local = of.on(comm)
    x = jnp.ones(len(of.rows(rank)))
    for way in (lambda f: f, jax.jit):
        with pytest.raises(Exception, match=r"IndexMap.accumulate cannot be differentiated: MPI.MAX has no"):
            way(jax.grad(lambda x: jnp.sum(local.accumulate(x, MPI.MAX))))(x)
    counted = jax.grad(lambda x: jnp.sum(x * local.accumulate(jnp.ones(x.shape, jnp.int32), MPI.MAX)))(x)
    np.testing.assert_array_equal(counted, 1)


@needs_new_jax
@pytest.mark.parametrize("op", ["MAX", "MIN"])
def test_extrema_of_what_is_stopped_are_constants(op, comm, rank, size):
    """As in a softmax over the edges of a graph, whose largest numbers have no derivative by construction."""
    of = ring(size)
    local = of.on(comm)
    xs = [np.asarray(draw((len(of.rows(other)),), np.float64, other)) for other in range(size)]
    extrema = of.accumulated(xs, op)[rank]

    def loss(x):
        most = local.accumulate(jax.lax.stop_gradient(x), getattr(MPI, op))
        return jnp.sum(most * local.exchange(x) ** 2)

    x = jnp.asarray(xs[rank])
    weights = [of.accumulated(xs, op)[other] for other in range(size)]
    exchanged = of.exchanged(xs)
    gradient = of.accumulated([2 * w * y for w, y in zip(weights, exchanged, strict=True)])[rank]
    ones = [np.ones_like(its) for its in xs]
    product = of.accumulated([2 * w * v for w, v in zip(weights, of.exchanged(ones), strict=True)])[rank]

    f = jax.checkpoint(loss) if op == "MIN" else loss
    value, found = jax.value_and_grad(f)(x)
    np.testing.assert_array_equal(value, np.sum(extrema * exchanged[rank] ** 2))
    np.testing.assert_array_equal(found, gradient)
    np.testing.assert_array_equal(jax.jvp(jax.grad(f), (x,), (jnp.ones_like(x),))[1], product)


@pytest.mark.usefixtures("own_errors")
@pytest.mark.ranks(2)
def test_ranks_that_differ_get_an_error(comm, rank, size):
    part = comm.Split(rank // 2)
    if part.size == 2:
        of, fewer = ring(2), ring(2, reach=1)
        local, other = of.on(part), fewer.on(part)
        x = jnp.arange(2.0 * len(of.rows(part.rank))).reshape(-1, 2)
        for call, name in (
            (lambda: local.exchange(x.astype("float32")), "exchange"),
            (lambda: local.exchange((x, x)), "exchange"),
            (lambda: local.exchange(x[:, :1]), "exchange"),
            (lambda: local.exchange(jnp.ones((len(x), 400))), "exchange"),
            (lambda: local.exchange(jnp.ones((len(x), 40_000))), "exchange"),
            (lambda: local.exchange({"another name": x}), "exchange"),
            (lambda: other.exchange(x[: len(fewer.rows(part.rank))]), "exchange"),
            (lambda: local.accumulate(x), r"(exchange|accumulate)"),
        ):
            with pytest.raises(
                jax.errors.JaxRuntimeError, match=rf"IndexMap.{name}.*(has sent something else|the ranks differ)"
            ):
                jax.block_until_ready(call() if part.rank else local.exchange(x))
            right = of.exchanged([np.full((len(of.rows(r)), 2), r) for r in range(2)])[part.rank]
            np.testing.assert_array_equal(local.exchange(jnp.full(x.shape, part.rank)), right)
    part.Free()
