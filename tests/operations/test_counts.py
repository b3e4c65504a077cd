"""Arrays divided by rows: random counts against NumPy, adjoints by dot products, impossible counts; exscan."""

import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from mpi4py import MPI

import jaxmpi
from jaxmpi import notoken
from support import drawing
from support.table import NEW_JAX, draw, dtype_of, raised

pytestmark = pytest.mark.own_errors

NAMES = ("allgatherv", "alltoallv", "gatherv", "reduce_scatter", "scatterv")
MOST = 5


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
    way: str

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
        return np.concatenate([y, np.zeros((self.room(xs, rank) - len(y), *self.row), y.dtype)])

    def room(self, xs, rank):
        """The argument `rows`."""
        need = sum(counts[rank] for counts in self.sent) if self.name == "alltoallv" else sum(self.counts)
        return need + self.spare

    def call(self, x, comm):
        """The result, and the counts that came with it."""
        rank, more = comm.rank, {"comm": comm}
        op = {"op": MPI.SUM} if self.name == "reduce_scatter" else {}
        root = {"root": self.root} if self.name in ("gatherv", "scatterv") else {}
        function = getattr(notoken, self.name)
        if self.known:
            if self.name == "alltoallv":
                received = [counts[rank] for counts in self.sent]
                return function(x, self.sent[rank], np.asarray(received), **more), received
            return function(x, counts=self.counts, **op, **root, **more), self.counts
        more["rows"] = self.room(None, rank)
        if self.name == "alltoallv":
            return function(x, jnp.asarray(self.sent[rank], jnp.int16), **more)
        whole = self.name == "scatterv"
        counts = jnp.asarray(self.counts) if whole else jnp.asarray(self.counts[rank])
        return function(x, counts=counts, **op, **root, **more)

    def told(self, rank):
        return [counts[rank] for counts in self.sent] if self.name == "alltoallv" else self.counts


WAYS = {"eager": lambda f: f, "jit": jax.jit, "jaxmpi.jit": jaxmpi.jit}


def cases(size, dtypes=("float64", "float32", "int8", "bool", "complex64", "bfloat16", "float8_e5m2")):
    def dtype_for(name):
        return st.sampled_from([d for d in dtypes if name != "reduce_scatter" or d not in ("bool", "float8_e5m2")])

    count = st.one_of(st.just(0), st.integers(0, MOST))
    nothing = st.just((0,) * size)
    counts = st.tuples(*[st.one_of(nothing, st.tuples(*[count] * size))] * size)
    return st.sampled_from(NAMES).flatmap(
        lambda name: st.builds(
            Case,
            st.just(name),
            counts,
            st.booleans(),
            st.integers(0, size - 1),
            st.sampled_from([(), (1,), (3,), (0,), (2, 2)]),
            dtype_for(name),
            st.integers(0, 2),
            st.sampled_from(list(WAYS)),
        )
    )


@pytest.mark.seconds(600)
def test_random_counts(comm, rank, size):
    def check(case):
        xs = case.inputs(size)
        y, counts = WAYS[case.way](lambda x: case.call(x, comm))(jnp.asarray(xs[rank]))
        expected = case.expected(xs, rank)
        assert (y.shape, y.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_array_equal(np.asarray(y), expected)
        np.testing.assert_array_equal(counts, case.told(rank))

    drawing.on_all_ranks(comm, cases(size), check, 150)


@pytest.mark.skipif(not NEW_JAX, reason="this JAX has no derivatives of communication")
@pytest.mark.seconds(600)
def test_random_adjoints(comm, rank, size):
    """Dot products, exact since all numbers are small integers; of the adjoint of the adjoint too."""

    def check(case):
        x = jnp.asarray(case.inputs(size)[rank])
        f = lambda x: case.call(x, comm)[0]  # noqa: E731
        y, pull = jax.vjp(f, x)
        u = jnp.asarray(draw(x.shape, np.float64, rank, 5))
        w = jnp.asarray(draw(y.shape, np.float64, rank, 6))
        dy = jax.jvp(f, (x,), (u,))[1]
        (back,) = pull(w)
        again = jax.linear_transpose(lambda w: pull(w)[0], y)(u)[0]
        dots = [float(jnp.vdot(*pair)) for pair in ((dy, w), (u, back))]
        forth, behind = comm.allreduce(np.asarray(dots))
        assert forth == behind
        np.testing.assert_array_equal(again, dy)

    drawing.on_all_ranks(comm, cases(size, ("float64",)), check, 60)


@pytest.mark.skipif(not NEW_JAX, reason="this JAX has no derivatives of communication")
def test_random_batches(comm, rank, size):
    def check(case):
        xs = [case.inputs(size), [2 * x for x in case.inputs(size)]]
        batch = jnp.stack([jnp.asarray(each[rank]) for each in xs], axis=len(case.row))
        ys = jax.vmap(lambda x: case.call(x, comm)[0], in_axes=len(case.row))(batch)
        for each, y in zip(xs, ys, strict=True):
            np.testing.assert_array_equal(y, case.expected(each, rank))

    drawing.on_all_ranks(comm, cases(size, ("float64",)), check, 60)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrong", [-1, 4, 2**31 - 1, 2**40])
@pytest.mark.parametrize("name", ["allgatherv", "gatherv", "reduce_scatter"])
def test_impossible_count(name, wrong, way, comm, rank, size):
    """Of the last rank: an error on all of them, and the next call is right."""
    op = [MPI.SUM] if name == "reduce_scatter" else []
    root = [0] if name == "gatherv" else []
    call = WAYS[way](lambda x, count: getattr(notoken, name)(x, *op, count, *root))
    x = jnp.arange(3.0)
    if name == "reduce_scatter" and size == 1 and wrong == 4:
        wrong = 5
    error = raised(lambda: call(x, jnp.asarray(wrong if rank == size - 1 else 0)))
    assert f"rank {size - 1}" in error or name == "reduce_scatter"
    assert "has passed a count of rows that is negative, or" in error
    y, counts = call(x, jnp.asarray(3 if rank == 0 else 0))
    np.testing.assert_array_equal(counts, [3] + [0] * (size - 1))
    if name == "allgatherv":
        np.testing.assert_array_equal(y, [0, 1, 2] + [0] * 3 * (size - 1))


@pytest.mark.parametrize("wrong", [[-1, 1], [2, 2], [2**31 - 1, 2**31 - 1], [2**32 - 2, 2]])
def test_impossible_counts_of_alltoallv(wrong, comm, rank, size):
    """The sum counts, also where it would wrap."""
    wrong = wrong[:1] + [0] * (size - 2) + wrong[1:] if size > 1 else [4]
    x = jnp.arange(3.0)
    call = jax.jit(lambda x, counts: notoken.alltoallv(x, counts, rows=3 * size))
    error = raised(lambda: call(x, jnp.asarray(wrong if rank == 0 else [0] * size)))
    assert "rank 0" in error
    assert ("(this one)" in error) == (rank == 0)
    y, received = call(x, jnp.asarray([1] + [0] * (size - 1)))
    np.testing.assert_array_equal(received, [1 if rank == 0 else 0] * size)
    assert y.sum() == 0


def test_no_arrays(rank, size):
    """Of an empty pytree the counts are told all the same."""
    counts = [r + 1 for r in range(size)]
    for name, more in (("allgatherv", []), ("gatherv", [0]), ("reduce_scatter", [])):
        op = [MPI.SUM] if name == "reduce_scatter" else []
        tree, told = getattr(notoken, name)((), *op, jnp.asarray(counts[rank]), *more)
        assert tree == ()
        np.testing.assert_array_equal(told, counts)
    np.testing.assert_array_equal(notoken.alltoallv({}, jnp.asarray(counts), rows=3)[1], [rank + 1] * size)
    np.testing.assert_array_equal(notoken.scatterv([], jnp.asarray(counts), 0)[1], counts)
    assert notoken.allgatherv((), counts) == ()


def test_impossible_counts_of_scatterv(comm, rank, size):
    call = jax.jit(lambda x, counts: notoken.scatterv(x, counts, 0))
    for wrong in (-1, 4):
        error = raised(lambda wrong=wrong: call(jnp.arange(3.0), jnp.asarray([wrong] + [0] * (size - 1))))
        assert "rank 0" in error
    np.testing.assert_array_equal(call(jnp.arange(3.0), jnp.asarray([3] + [0] * (size - 1)))[1][0], 3)


@pytest.mark.parametrize("name", NAMES)
def test_too_little_room(name, comm, rank, size):
    """An error where the result is too small; the other ranks go on."""
    x = jnp.arange(2.0 * size)
    op = [MPI.SUM] if name == "reduce_scatter" else []
    root = [0] if name == "gatherv" else [0] if name == "scatterv" else []
    counts = jnp.asarray(2) if name in ("allgatherv", "gatherv", "reduce_scatter") else jnp.full(size, 2)
    small = rank == 0
    full = {"scatterv": 2, "reduce_scatter": 2}.get(name, 2 * size)
    rows = full - 1 if small else full
    error = raised(lambda: getattr(notoken, name)(x, *op, counts, *root, rows=rows))
    assert error == "" if not small else f"rows sent to this rank: {full}; its result has room for {full - 1}" in error
    y, _ = getattr(notoken, name)(x, *op, counts, *root, rows=full)
    assert y.shape == ((full,) if name != "gatherv" or rank == 0 else x.shape)


@pytest.mark.skipif(not NEW_JAX, reason="this JAX has no derivatives of communication")
def test_gradient_of_particles(comm, rank, size):
    """Each rank sends its numbers to where they belong, by destinations that are known at run time only."""

    @jaxmpi.jit
    def energy(x, destination):
        order = jnp.argsort(destination)
        y, _ = notoken.alltoallv(x[order], jnp.bincount(destination, length=size), rows=4 * size)
        return notoken.allreduce(jnp.sum(y**2 * (rank + 1)), MPI.SUM)

    for seed in range(3):
        generator = np.random.default_rng([seed, rank])
        x, destination = jnp.asarray(generator.normal(size=4)), jnp.asarray(generator.integers(0, size, 4))
        value, gradient = jax.value_and_grad(energy)(x, destination)
        np.testing.assert_allclose(gradient, 2 * x * (destination + 1))
        everywhere = comm.allreduce(float(jnp.sum(x**2 * (destination + 1))))
        np.testing.assert_allclose(value, everywhere)


def test_exscan_of_rank_0(rank, size):
    """What changes nothing; of other ranks the reduction of those before."""
    for name, values in {
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
    }.items():
        for x, identity in values:
            with jax.transfer_guard("disallow"):
                y = notoken.exscan(x, getattr(MPI, name))
            assert y.dtype == x.dtype
            if rank == 0:
                assert np.asarray(y, complex if x.dtype == np.complex64 else float) == identity, (name, x.dtype)
            if rank == 1:
                assert y == x, name


@pytest.mark.two_ranks_suffice
@pytest.mark.skipif(not NEW_JAX, reason="this JAX has no derivatives of communication")
@pytest.mark.parametrize("name", ["PROD", "MAX", "MIN"])
@pytest.mark.parametrize("function", ["exscan", "reduce_scatter"])
def test_derivatives_of_other_reductions(function, name, comm, rank, size):
    """Against JAX's own of the same mathematics of all ranks' data, ties and a Python number among them."""
    op, combine = getattr(MPI, name), {"PROD": jnp.prod, "MAX": jnp.max, "MIN": jnp.min}[name]
    xs = np.stack([np.random.default_rng(r).integers(1, 4, (size, 3)) for r in range(size)]).astype(float)
    ws = np.stack([np.random.default_rng(r + 99).integers(1, 4, (size, 3)) for r in range(size)]).astype(float)

    def of_all(xs):
        if function == "exscan":
            return sum(jnp.vdot(ws[r], combine(xs[:r], axis=0)) for r in range(1, size)) + 0 * xs.sum()
        return sum(jnp.vdot(ws[r][0], combine(xs[:, r], axis=0)) for r in range(size))

    def of_this(x):
        y = getattr(notoken, function)(x, op)
        if function == "exscan":
            return jnp.vdot(ws[rank], y) if rank > 0 else 0 * jnp.sum(x)
        return jnp.vdot(ws[rank][0], y)

    np.testing.assert_allclose(jax.grad(of_this)(jnp.asarray(xs[rank])), jax.grad(of_all)(xs)[rank], atol=1e-12)


@pytest.mark.two_ranks_suffice
@pytest.mark.skipif(not NEW_JAX, reason="this JAX has no derivatives of communication")
@pytest.mark.parametrize("function", ["scan", "exscan"])
def test_derivative_of_a_python_number(function, rank, size):
    gradient = jax.grad(lambda x: getattr(notoken, function)(x, MPI.MAX) * (rank > 0))(1.0 + rank)
    assert gradient.shape == ()


TREES_WITHOUT_ROOM = {
    "alltoallv": lambda tree, counts, room: notoken.alltoallv(tree, counts, rows=room(3 * counts.size)),
    "allgatherv": lambda tree, counts, room: notoken.allgatherv(tree, jnp.sum(counts), rows=room(3 * counts.size**2)),
    "gatherv": lambda tree, counts, room: notoken.gatherv(tree, jnp.sum(counts), 0, rows=room(3 * counts.size**2)),
    "scatterv": lambda tree, counts, room: notoken.scatterv(tree, counts, 0, rows=room(3)),
    "reduce_scatter": lambda tree, counts, room: notoken.reduce_scatter(
        tree, MPI.SUM, counts=jnp.int32(3), rows=room(3)
    ),
}


@pytest.mark.parametrize("short", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit, jaxmpi.jit], ids=["eager", "jit", "jaxmpi"])
@pytest.mark.parametrize("name", TREES_WITHOUT_ROOM)
def test_one_rank_has_too_little_room_for_a_tree(name, jit, short, rank, size):
    """It takes part in the communication of all arrays, so that the others get theirs, and what follows is right."""
    short = range(size)[short]
    x = jnp.arange(3.0 * size) + 100 * rank
    tree = {"a": x, "b": -2 * x, "c": jnp.zeros((3 * size, 0)), "d": x.astype(jnp.int32)}
    counts = jnp.full(size, 3)
    call = TREES_WITHOUT_ROOM[name]
    right, _ = call(tree, counts, lambda rows: rows)
    short_here = rank == short and (name != "gatherv" or rank == 0)
    f = jit(lambda tree: call(tree, counts, lambda rows: rows - short_here))
    if short_here:
        with pytest.raises(jax.errors.JaxRuntimeError, match="has room for"):
            jax.block_until_ready(f(tree))
    else:
        jax.tree.map(np.testing.assert_array_equal, f(tree)[0], right)
    y = notoken.alltoallv(jnp.full(size, 7.0 + rank), [1] * size, [1] * size)
    np.testing.assert_array_equal(y, 7.0 + np.arange(size))
