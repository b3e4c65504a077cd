"""Program order without tokens: in control flow, across jit and eager calls, under transformations.

Each pattern would deadlock, or mix up messages, if two operations changed places or one were dropped.
"""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from mpi4py import MPI

import jaxmpi
from jaxmpi._primitive.effect import EFFECT
from support.rows import each, rows

pair = pytest.mark.ranks(2)


def swap(x, rank):
    """Ranks 0 and 1 exchange by a blocking pair: any other order than the program's hangs. Large enough for that."""
    if rank == 0:
        jaxmpi.send(x, 1)
        return jaxmpi.recv(x, 1)
    if rank == 1:
        y = jaxmpi.recv(x, 0)
        jaxmpi.send(x, 0)
        return y
    return x


N = 50_000  # 400 kB: no MPI sends that without a receiver


@pair
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
@rows("places", ["straight", "nested jit", "scan", "while", "fori", "cond"])
def test_pair_of_ranks_in_control_flow(places, wrap, rank):
    def step(x):
        return swap(x, rank) + 1

    def straight(x):
        return step(step(step(x)))

    def nested(x):
        inner = jax.jit(step)
        return inner(jax.jit(lambda v: inner(inner(v)))(x))

    def scanned(x):
        return lax.scan(lambda c, _: (step(c), c[0]), x, None, length=3)[0]

    def loop(x):
        return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, step(s[1])), (0, x))[1]

    def fori(x):
        return lax.fori_loop(0, 3, lambda i, v: step(v), x)

    def branches(x):
        for i in range(3):
            x = lax.cond(x[0] > -1 if i % 2 else x[0] < -1, step, lambda v: swap(v * 1.0, rank) + 1, x)
        return x

    fs = {"straight": straight, "nested jit": nested, "scan": scanned, "while": loop, "fori": fori, "cond": branches}
    call = jax.jit(lambda x: {place: wrap(fs[place])(x) for place in places})
    x = jnp.full(N, 10.0 * rank)
    expected = 10.0 * (1 - rank if rank < 2 else rank) + 3
    for _ in range(2):
        found = call(x)
        each(places, lambda place, found=found: np.testing.assert_array_equal(found[place], np.full(N, expected)))


def test_condition_of_while(rank, size):
    """A loop that goes on until all ranks agree: communication in the condition itself."""

    @jax.jit
    def count(limit):
        def unfinished(state):
            i, _ = state
            return jaxmpi.allreduce(jnp.int32(i < limit), MPI.SUM) > 0

        return lax.while_loop(unfinished, lambda s: (s[0] + 1, s[1] * 2), (jnp.int32(0), jnp.ones(2)))[0]

    assert count(jnp.int32(rank + 3)) == size + 2


@pair
def test_dropped_token_and_result(rank):
    """What nobody uses happens all the same."""

    @jax.jit
    def f(x):
        if rank == 0:
            jaxmpi.send(x, 1)
            jaxmpi.allreduce(x, MPI.SUM)
            return x
        if rank == 1:
            y = jaxmpi.recv(x, 0)
            jaxmpi.allreduce(x, MPI.SUM)
            return y
        jaxmpi.allreduce(x, MPI.SUM)
        return x

    for i in range(3):
        y = f(jnp.full(N, 100.0 * i + rank))
        np.testing.assert_array_equal(y[:2], np.full(2, 100.0 * i + (rank if rank > 1 else 0)))


@pytest.mark.parametrize("outer", [jax.jit, jaxmpi.jit], ids=["jit", "jaxmpi"])
def test_loops_in_calls_without_operands(outer, comm, rank, size):
    """Each happens as often as it is called: XLA 0.12 repeats a loop in a nested call that has no array operand."""

    @jax.jit
    def solve():
        b = jnp.ones(2)

        def step(_, u):
            total = jaxmpi.allreduce(u, MPI.SUM, comm=comm) / size
            return u + (b - 2 * u - 0.5 * total) / 2

        u = lax.fori_loop(0, 60, step, b)
        jaxmpi.allreduce(u, MPI.SUM, comm=comm)
        return u, jnp.cos(u)

    @outer
    def twice(w):
        (u, _), (_, v) = solve(), solve()
        return u * w + v

    if outer is jax.jit:
        text = twice.lower(jnp.ones(2)).compile().as_text()
        assert text.count(" while(") == 2, "two loops are stated"
    np.testing.assert_allclose(twice(jnp.ones(2)), 0.4 + np.cos(np.full(2, 0.4)), rtol=1e-6)
    np.testing.assert_array_equal(jaxmpi.allreduce(jnp.full(1, rank), MPI.SUM, comm=comm), [size * (size - 1) / 2])


def test_compiled_ahead(comm, rank, size):
    """What `compile()` returns is called any number of times, in order with all else."""

    @jax.jit
    def scaled(x, factor):
        moved = jaxmpi.sendrecv(x, x, (rank - 1) % size, (rank + 1) % size, comm=comm)
        return lax.fori_loop(0, 3, lambda i, x: jaxmpi.allreduce(x, MPI.SUM, comm=comm) / size, factor * moved)

    slow = jnp.ones((100, 100))
    operands = jnp.arange(5.0) + rank, slow[0, 0]
    compiled = scaled.lower(*operands).compile()
    gradient = jax.jit(jax.grad(lambda *operands: scaled(*operands).sum())).lower(*operands).compile()
    mean = np.arange(5) + (size - 1) / 2
    for i in range(1, 5):
        factor = jnp.sin(slow @ slow * i).max()  # under way when the program is called
        result = compiled(operands[0], factor)
        total = jaxmpi.allreduce(jnp.full(5, i), MPI.SUM, comm=comm)  # of the same size
        np.testing.assert_allclose(result, factor * mean, rtol=1e-6)
        np.testing.assert_array_equal(total, np.full(5, i * size))
        np.testing.assert_allclose(gradient(operands[0], factor), np.full(5, factor / size**3), rtol=1e-6)


def test_effect_of_another_process():
    """A program from a file has the order of the programs here, since it has their effect."""
    assert pickle.loads(pickle.dumps(EFFECT)) is EFFECT
