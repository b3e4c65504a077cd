"""Arrays divided by rows: random counts against NumPy, adjoints by dot products, impossible counts; exscan."""

import functools
import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from mpi4py import MPI

import jaxmpi
from support import drawing
from support.rows import each, rows
from support.table import NEW_JAX, draw, dtype_of, raised

pytestmark = pytest.mark.usefixtures("own_errors")

WAYS = {"eager": lambda f: f, "jit": jax.jit, "jaxmpi.jit": jaxmpi.jit}
NAMES = ("allgatherv", "alltoallv", "gatherv", "reduce_scatter", "scatterv")
MOST = 5


def call_of(name, x, counts, root=0, **more):
    """An operation with the arguments that it has beside others."""
    if name == "reduce_scatter":
        more["op"] = MPI.SUM
    if name in ("gatherv", "scatterv"):
        more["root"] = root
    return getattr(jaxmpi, name)(x, counts=counts, **more)


@dataclass(frozen=True)
class Case:
    """One operation. `sent[i][j]`: the rows from rank i to rank j; where all ranks share their counts, sent[0]."""

    name: str
    sent: tuple
    known: bool
    root: int
    row: tuple
    dtype: str
    spare: int

    @property
    def counts(self):
        return self.sent[0]

    def given(self, rank):
        """The rows of a rank's operand that count."""
        if self.name == "alltoallv":
            return sum(self.sent[rank])
        whole = self.name == "reduce_scatter" or (self.name == "scatterv" and rank == self.root)
        return sum(self.counts) if whole else self.counts[rank]

    def inputs(self, size):
        more = 0 if self.known else self.spare
        return [draw((self.given(r) + more, *self.row), dtype_of(self.dtype), r, len(self.row)) for r in range(size)]

    def expected(self, xs, rank):
        parts = list(itertools.accumulate(self.counts, initial=0))
        if self.name == "alltoallv":
            begin = [sum(counts[:rank]) for counts in self.sent]
            rows = [x[at : at + counts[rank]] for x, at, counts in zip(xs, begin, self.sent, strict=True)]
        elif self.name == "reduce_scatter":
            rows = [np.sum(np.stack(xs), axis=0, dtype=xs[0].dtype)[parts[rank] : parts[rank + 1]]]
        elif self.name == "scatterv":
            rows = [xs[self.root][parts[rank] : parts[rank + 1]]]
        elif self.name == "gatherv" and rank != self.root:
            return xs[rank]
        else:
            rows = [x[:count] for x, count in zip(xs, self.counts, strict=True)]
        y = np.concatenate(rows)
        if self.known:
            return y
        return np.concatenate([y, np.zeros((self.room(rank) - len(y), *self.row), y.dtype)])

    def room(self, rank):
        """The argument `rows`."""
        return sum(self.told(rank)) + self.spare

    def call(self, x, comm):
        """The result, and the counts that came with it."""
        rank, more = comm.rank, {"comm": comm} if self.known else {"comm": comm, "rows": self.room(comm.rank)}
        if self.name == "alltoallv" and self.known:
            return jaxmpi.alltoallv(x, self.sent[rank], np.asarray(self.told(rank)), **more), self.told(rank)
        if self.name == "alltoallv":
            return jaxmpi.alltoallv(x, jnp.asarray(self.sent[rank], jnp.int16), **more)
        if self.known:
            return call_of(self.name, x, self.counts, self.root, **more), self.counts
        counts = self.counts if self.name == "scatterv" else self.counts[rank]
        return call_of(self.name, x, jnp.asarray(counts), self.root, **more)

    def told(self, rank):
        return [counts[rank] for counts in self.sent] if self.name == "alltoallv" else self.counts


@st.composite
def cases(draw_, size):
    name = draw_(st.sampled_from(NAMES))
    count = st.one_of(st.just(0), st.integers(0, MOST))
    counts = st.one_of(st.just((0,) * size), st.tuples(*[count] * size))
    moved = () if name == "reduce_scatter" else ("bool", "float8_e5m2")
    return Case(
        name,
        draw_(st.tuples(*[counts] * size)),
        draw_(st.booleans()),
        draw_(st.integers(0, size - 1)),
        draw_(st.sampled_from([(), (1,), (3,), (0,), (2, 2)])),
        draw_(st.sampled_from(["float64", "float32", "int8", "complex64", "bfloat16", *moved])),
        draw_(st.integers(0, 2)),
    )


@pytest.mark.seconds(600)
def test_random_counts(comm, rank, size):
    def check(given):
        way, drawn = given
        xs = [case.inputs(size) for case in drawn]
        call = WAYS[way](lambda arrays: [case.call(x, comm) for case, x in zip(drawn, arrays, strict=True)])
        for case, inputs, (y, counts) in zip(drawn, xs, call([jnp.asarray(x[rank]) for x in xs]), strict=True):
            expected = case.expected(inputs, rank)
            assert (y.shape, y.dtype) == (expected.shape, expected.dtype), case
            np.testing.assert_array_equal(np.asarray(y), expected, err_msg=str(case))
            np.testing.assert_array_equal(counts, case.told(rank), err_msg=str(case))

    together = st.tuples(st.sampled_from(list(WAYS)), st.lists(cases(size), min_size=6, max_size=6))
    drawing.on_all_ranks(comm, together, check, 16)


@rows("names", ["allgatherv", "gatherv", "reduce_scatter"])
def test_impossible_count(names, comm, rank, size):
    """Of the last rank: an error on all of them, and the next call is right."""

    def check(row):
        name, way = row
        call = WAYS[way](lambda x, count: call_of(name, x, count))
        x = jnp.arange(3.0)
        for wrong in [-1, 4, 2**31 - 1, 2**40]:
            if name == "reduce_scatter" and size == 1 and wrong == 4:
                wrong = 5
            error = raised(lambda wrong=wrong: call(x, jnp.asarray(wrong if rank == size - 1 else 0)))
            assert f"rank {size - 1}" in error or name == "reduce_scatter"
            assert "has passed a count of rows that is negative, or" in error
            y, counts = call(x, jnp.asarray(3 if rank == 0 else 0))
            np.testing.assert_array_equal(counts, [3] + [0] * (size - 1))
            if name == "allgatherv":
                np.testing.assert_array_equal(y, [0, 1, 2] + [0] * 3 * (size - 1))

    each([(name, way) for name in names for way in WAYS], check)


def test_impossible_counts_of_alltoallv(comm, rank, size):
    """The sum counts, also where it would wrap."""
    x = jnp.arange(3.0)
    call = jax.jit(lambda x, counts: jaxmpi.alltoallv(x, counts, rows=3 * size))

    def check(wrong):
        wrong = wrong[:1] + [0] * (size - 2) + wrong[1:] if size > 1 else [4]
        error = raised(lambda: call(x, jnp.asarray(wrong if rank == 0 else [0] * size)))
        assert "rank 0" in error
        assert ("(this one)" in error) == (rank == 0)
        y, received = call(x, jnp.asarray([1] + [0] * (size - 1)))
        np.testing.assert_array_equal(received, [1 if rank == 0 else 0] * size)
        assert y.sum() == 0

    each([[-1, 1], [2, 2], [2**31 - 1, 2**31 - 1], [2**32 - 2, 2]], check)


def test_no_arrays(rank, size):
    """Of an empty pytree the counts are told all the same."""
    counts = [r + 1 for r in range(size)]
    for name in ("allgatherv", "gatherv", "reduce_scatter"):
        tree, told = call_of(name, (), jnp.asarray(counts[rank]))
        assert tree == ()
        np.testing.assert_array_equal(told, counts)
    np.testing.assert_array_equal(jaxmpi.alltoallv({}, jnp.asarray(counts), rows=3)[1], [rank + 1] * size)
    np.testing.assert_array_equal(jaxmpi.scatterv([], jnp.asarray(counts), 0)[1], counts)
    assert jaxmpi.allgatherv((), counts) == ()


def test_impossible_counts_of_scatterv(comm, rank, size):
    call = jax.jit(lambda x, counts: jaxmpi.scatterv(x, counts, 0))
    for wrong in (-1, 4):
        error = raised(lambda wrong=wrong: call(jnp.arange(3.0), jnp.asarray([wrong] + [0] * (size - 1))))
        assert "rank 0" in error
    np.testing.assert_array_equal(call(jnp.arange(3.0), jnp.asarray([3] + [0] * (size - 1)))[1][0], 3)


def test_exscan_of_rank_0(rank, size):
    """What changes nothing; of other ranks the reduction of those before."""
    identities = {
        "SUM": [(jnp.int8(3), 0), (jnp.complex64(1j), 0)],
        "PROD": [(jnp.float16(3), 1)],
        "MAX": [(jnp.int16(-3), -(2**15)), (jnp.float32(-3), -np.inf), (jnp.uint8(3), 0), (jnp.bool_(True), False)],
        "MIN": [(jnp.uint32(3), 2**32 - 1), (jnp.bfloat16(3), np.inf), (jnp.bool_(False), True)],
        "LAND": [(jnp.bool_(False), True), (jnp.int32(0), 1)],
        "LOR": [(jnp.bool_(True), False)],
        "LXOR": [(jnp.int32(1), 0)],
        "BAND": [(jnp.int8(0), -1), (jnp.uint8(0), 255), (jnp.bool_(False), True)],
        "BOR": [(jnp.uint16(7), 0)],
        "BXOR": [(jnp.uint16(7), 0)],
    }
    calls = [(name, x, identity) for name, values in identities.items() for x, identity in values]
    xs = [x for _, x, _ in calls]
    scan = lambda xs: [jaxmpi.exscan(x, getattr(MPI, c[0])) for x, c in zip(xs, calls, strict=True)]  # noqa: E731
    with jax.transfer_guard("disallow"):
        found = [jaxmpi.exscan(xs[0], MPI.SUM), *jax.jit(scan)(xs)[1:]]

    def check(row):
        (_, x, identity), y = row
        assert y.dtype == x.dtype
        if rank == 0:
            assert np.asarray(y, complex if x.dtype == np.complex64 else float) == identity
        if rank == 1:
            assert y == x

    each(list(zip(calls, found, strict=True)), check, str)


@pytest.mark.skipif(not NEW_JAX, reason="this JAX has no derivatives of communication")
def test_derivatives_of_other_reductions(comm, rank, size):
    """Against JAX's own of the same mathematics of all ranks' data, ties and a Python number among them."""
    ops = {"PROD": jnp.prod, "MAX": jnp.max, "MIN": jnp.min}
    xs = np.stack([np.random.default_rng(r).integers(1, 4, (size, 3)) for r in range(size)]).astype(float)
    ws = np.stack([np.random.default_rng(r + 99).integers(1, 4, (size, 3)) for r in range(size)]).astype(float)

    def of_all(function, name, xs):
        if function == "exscan":
            return sum(jnp.vdot(ws[r], ops[name](xs[:r], axis=0)) for r in range(1, size)) + 0 * xs.sum()
        return sum(jnp.vdot(ws[r][0], ops[name](xs[:, r], axis=0)) for r in range(size))

    def of_this(function, name, x):
        y = getattr(jaxmpi, function)(x, getattr(MPI, name))
        if function == "exscan":
            return jnp.vdot(ws[rank], y) if rank > 0 else 0 * jnp.sum(x)
        return jnp.vdot(ws[rank][0], y)

    calls = [("exscan", "PROD"), ("exscan", "MAX"), ("reduce_scatter", "PROD"), ("reduce_scatter", "MIN")]
    ours, theirs = (
        jax.jit(lambda x, f=f: [jax.grad(functools.partial(f, *call))(x) for call in calls])(x)
        for f, x in ((of_this, xs[rank]), (of_all, xs))
    )
    for call, got, wanted in zip(calls, ours, theirs, strict=True):
        np.testing.assert_allclose(got, wanted[rank], atol=1e-12, err_msg=str(call))
    for function in ("scan", "exscan"):
        gradient = jax.grad(lambda x, f=function: getattr(jaxmpi, f)(x, MPI.MAX) * (rank > 0))(1.0 + rank)
        assert gradient.shape == ()


def without_room(name, tree, counts, room):
    """A tree of rows, as many to each rank as `counts` says; `room` of what the result needs."""
    size = counts.size
    if name == "alltoallv":
        return jaxmpi.alltoallv(tree, counts, rows=room(3 * size))
    if name in ("scatterv", "reduce_scatter"):
        return call_of(name, tree, counts if name == "scatterv" else jnp.int32(3), rows=room(3))
    return call_of(name, tree, jnp.sum(counts), rows=room(3 * size**2))


@rows("names", NAMES)
def test_one_rank_has_too_little_room_for_a_tree(names, rank, size):
    """It takes part in the communication of all arrays, so that the others get theirs, and what follows is right."""
    x = jnp.arange(3.0 * size) + 100 * rank
    tree = {"a": x, "b": jnp.zeros((3 * size, 0)), "c": x.astype(jnp.int32)}
    counts = jnp.full(size, 3)
    right = jax.jit(lambda tree: {name: without_room(name, tree, counts, lambda rows: rows)[0] for name in names})(tree)

    def check(row):
        name, way, short = row
        short_here = rank == range(size)[short] and (name != "gatherv" or rank == 0)
        f = WAYS[way](lambda tree: without_room(name, tree, counts, lambda rows: rows - short_here))
        if short_here:
            told = r"rows sent to this rank: \d+; its result has room for \d+"
            with pytest.raises(jax.errors.JaxRuntimeError, match=told):
                jax.block_until_ready(f(tree))
        else:
            jax.tree.map(np.testing.assert_array_equal, f(tree)[0], right[name])
        y = jaxmpi.alltoallv(jnp.full(size, 7.0 + rank), [1] * size, [1] * size)
        np.testing.assert_array_equal(y, 7.0 + np.arange(size))

    hows = (("eager", 0), ("jaxmpi.jit", -1))
    each([(name, *hows[NAMES.index(name) % 2]) for name in names], check)
