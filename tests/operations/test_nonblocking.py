"""Nonblocking operations: starts and waits against the blocking operations, or NumPy on gathered data."""

import functools
import random

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from mpi4py import MPI

import jaxmpi
from jaxmpi import _core
from support import drawing
from support.launch import launch
from support.rows import each, rows
from support.table import NEW_JAX, draw, raised

pytestmark = pytest.mark.skipif(MPI.Query_thread() < MPI.THREAD_MULTIPLE, reason="irecv needs MPI_THREAD_MULTIPLE")
derivatives = pytest.mark.skipif(not NEW_JAX, reason="this JAX has no derivatives of communication")
LARGE = 1 << 18
"""Elements of a float64 array that no library sends before the receiver is ready: 2 MiB."""


@pytest.fixture(autouse=True)
def _nothing_in_flight():
    yield
    try:
        jax.effects_barrier()
    except jax.errors.JaxRuntimeError:  # where computations fail after their calls, an error that the test expects
        if jax.default_backend() == "cpu":
            raise
    assert _core.requests_in_flight() == 0


def left(comm):
    return (comm.rank - 1) % comm.size


def right(comm):
    return (comm.rank + 1) % comm.size


def shifted(x, comm, tag=3, **after):
    """Round the ring, by two requests."""
    receive = jaxmpi.irecv(x, left(comm), tag=tag, comm=comm)
    send = jaxmpi.isend(x, right(comm), tag=tag, comm=comm)
    if after:
        (y, _), after = jaxmpi.waitall([receive, send], **after)
        return y, after
    return jaxmpi.waitall([receive, send])[0]


def blocking_shifted(x, comm, tag=3):
    return jaxmpi.sendrecv(x, x, left(comm), right(comm), sendtag=tag, recvtag=tag, comm=comm)


def numbers(shape, rank, seed=0):
    return jnp.asarray(np.random.default_rng([seed, rank]).normal(size=shape))


WAYS = {
    "message": (shifted, blocking_shifted),
    "iallreduce": (
        lambda x, c: jaxmpi.wait(jaxmpi.iallreduce(x, MPI.SUM, comm=c)),
        lambda x, c: jaxmpi.allreduce(x, MPI.SUM, comm=c),
    ),
    "iallreduce of maxima": (
        lambda x, c: jaxmpi.wait(jaxmpi.iallreduce(x, MPI.MAX, comm=c)),
        lambda x, c: jaxmpi.allreduce(x, MPI.MAX, comm=c),
    ),
    "iallreduce of products": (
        lambda x, c: jaxmpi.wait(jaxmpi.iallreduce(x, MPI.PROD, comm=c)),
        lambda x, c: jaxmpi.allreduce(x, MPI.PROD, comm=c),
    ),
    "ibcast": (
        lambda x, c: jaxmpi.wait(jaxmpi.ibcast(x, c.size - 1, comm=c)),
        lambda x, c: jaxmpi.bcast(x, c.size - 1, comm=c),
    ),
    "ialltoall": (
        lambda x, c: jaxmpi.wait(jaxmpi.ialltoall(jax.tree.map(lambda x: _stack(x, c), x), comm=c)),
        lambda x, c: jaxmpi.alltoall(jax.tree.map(lambda x: _stack(x, c), x), comm=c),
    ),
}


def _stack(x, comm):
    return jnp.stack([x * (i + 1) for i in range(comm.size)])


every_way = rows("ways", WAYS)


def both(call, chosen, *arguments):
    """`call(way, operation, *arguments)` of the started and of the blocking operation of each way chosen, all in one
    program: {way: (ours, theirs)}."""

    def program(*arguments):
        return {way: tuple(call(way, operation, *arguments) for operation in WAYS[way]) for way in chosen}

    return jax.jit(program)(*arguments)


def alike(found, tolerance=0.0):
    each(list(found), lambda name: same(*found[name], tolerance))


def same(ours, theirs, tolerance=0.0):
    for got, wanted in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        np.testing.assert_allclose(
            np.asarray(got, np.complex128), np.asarray(wanted, np.complex128), rtol=tolerance, atol=tolerance
        )


# --- values ----------------------------------------------------------------------------------------------------------


def test_empty_tree(comm):
    assert jaxmpi.wait(jaxmpi.iallreduce([], MPI.SUM)) == []
    assert jaxmpi.wait(jaxmpi.isend([], right(comm))) is None
    assert jaxmpi.waitall([]) == []


@pytest.mark.parametrize("jit", [jax.jit, jaxmpi.jit])
def test_started_in_one_function_and_waited_for_in_another(jit, comm, rank):
    x = numbers((3,), rank)
    starts = {
        "message": lambda x: (jaxmpi.irecv(x, left(comm), tag=1), jaxmpi.isend(x, right(comm), tag=1)),
        "ibcast": lambda x: [jaxmpi.ibcast(x, comm.size - 1)],
        "ialltoall": lambda x: {"a": jaxmpi.ialltoall(_stack(x, comm))},
        "iallreduce": lambda x: jaxmpi.iallreduce(x, MPI.SUM),
        "iallreduce of maxima": lambda x: jaxmpi.iallreduce(x, MPI.MAX),
        "iallreduce of products": lambda x: jaxmpi.iallreduce(x, MPI.PROD),
    }
    flying = jit(lambda x: {way: start(x) for way, start in starts.items()})(x)
    y = jnp.sin(x)
    got, after = jit(lambda requests, y: jaxmpi.waitall(requests, after=y))(flying, y)
    wanted = jax.jit(lambda x: {way: WAYS[way][1](x, comm) for way in starts})(x)
    each(list(starts), lambda way: same([y for y in jax.tree.leaves(got[way]) if y is not None], [wanted[way]]))
    same(after, y)


def test_repr(comm, rank):
    request = jaxmpi.iallreduce(jnp.ones(2), MPI.SUM)
    assert repr(request) == "Request(iallreduce)"
    jax.jit(jaxmpi.wait)(request)


def test_carried_by_loops(comm, rank, size):
    start = lambda x: jaxmpi.iallreduce(x, MPI.MAX)  # noqa: E731
    step = lambda i, request: start(jaxmpi.wait(request) + i)  # noqa: E731
    x = numbers((3,), rank)
    top = np.max([numbers((3,), r) for r in range(size)], axis=0)
    got = jax.jit(lambda x: jaxmpi.wait(lax.fori_loop(0, 4, step, start(x))))(x)
    np.testing.assert_allclose(got, top + 6)

    def loop(x):
        return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, step(c[0], c[1])), (0, start(x)))[1]

    np.testing.assert_allclose(jaxmpi.wait(jax.jit(loop)(x)), top + 3)


def test_stacked_by_scan(comm, rank, size):
    """Requests as results of each step, waited for in another order."""
    x = numbers((3,), rank)

    def f(x, reverse):
        start = lambda i: (jaxmpi.irecv(x, left(comm), tag=1), jaxmpi.isend(i * x, right(comm), tag=1))  # noqa: E731
        _, stacked = lax.scan(lambda c, i: (c, start(i)), 0, jnp.arange(1.0, 4.0), reverse=reverse)
        apart = [jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in (2, 0, 1)]
        return [jaxmpi.waitall(requests)[0] for requests in apart]

    before = numbers((3,), (rank - 1) % size)
    same(jax.jit(lambda x: [f(x, False), f(x, True)])(x), [3 * before, before, 2 * before] * 2, 1e-15)


def test_one_envelope(comm, rank, size):
    """Receives are matched in the order of their starts, whatever the order of the waits."""
    receives = [jaxmpi.irecv(jnp.zeros(2), left(comm), tag=4) for _ in range(5)]
    sends = [jaxmpi.isend(jnp.full(2, 10.0 * rank + i), right(comm), tag=4) for i in range(5)]
    for i in (3, 0, 4, 2, 1):
        np.testing.assert_array_equal(jaxmpi.wait(receives[i]), 10.0 * left(comm) + i)
        jaxmpi.wait(sends[4 - i])


def _kinds(comm, grid):
    """Of each kind a start with a tag, which may be none; what its result gives; and that by NumPy of what all have."""

    def message(x, tag):
        return [jaxmpi.irecv(x, left(comm), tag=tag), jaxmpi.isend(x, right(comm), tag=tag)]

    def exchange(x, tag):
        return grid.start(jnp.broadcast_to(x.sum() + jnp.arange(5.0), (2, 5)))

    def exchanged(xs, tag):
        row = xs[comm.rank].sum() + np.arange(5.0)
        row[0], row[-1] = xs[left(comm)].sum() + 3, xs[right(comm)].sum() + 1
        return np.stack([row, row])

    return {
        "message": (message, lambda xs, tag: [xs[left(comm)], None]),
        "iallreduce": (lambda x, tag: jaxmpi.iallreduce(x, MPI.SUM), lambda xs, tag: sum(xs)),
        "ibcast": (lambda x, tag: jaxmpi.ibcast(x, tag % comm.size), lambda xs, tag: xs[tag % comm.size]),
        "ialltoall": (
            lambda x, tag: jaxmpi.ialltoall(_stack(x, comm)),
            lambda xs, tag: np.stack([x * (comm.rank + 1) for x in xs]),
        ),
        "barrier": (lambda x, tag: jaxmpi.ibarrier(), lambda xs, tag: None),
        "exchange": (exchange, exchanged),
        "blocking": (
            lambda x, tag: (blocking_shifted(x, comm, tag), jaxmpi.allreduce(x, MPI.SUM)),
            lambda xs, tag: (xs[left(comm)], sum(xs)),
        ),
    }


KINDS = ["message", "iallreduce", "ibcast", "ialltoall", "barrier", "exchange", "blocking"]
STEPS = st.tuples(st.sampled_from(KINDS), st.sampled_from([(0,), (1,), (5,), (5000,), (60000,)]), st.integers(0, 2))
ORDERS = st.tuples(st.lists(STEPS, min_size=1, max_size=10), st.integers(0, 1 << 30), st.booleans())


def test_random_order(comm, rank, size):
    """Starts, blocking operations and waits in random order, with tags alike; one function, or call by call."""
    kinds = _kinds(comm, jaxmpi.Grid(size, 3 * size, periodic=True))

    def check(case):
        steps, seed, jitted = case

        def f(xs):
            results, flying, generator = {}, [], random.Random(seed)
            for i, ((kind, _, tag), x) in enumerate(zip(steps, xs, strict=True)):
                started = kinds[kind][0](x, tag)
                if kind == "blocking":
                    results[i] = started
                else:
                    flying.append((i, started))
                while flying and generator.random() < 0.4:
                    at, request = flying.pop(generator.randrange(len(flying)))
                    results[at] = jaxmpi.waitall(request)
            generator.shuffle(flying)
            return results | {at: jaxmpi.waitall(request) for at, request in flying}

        inputs = [[draw(step[1], np.dtype("float64"), r, i) for i, step in enumerate(steps)] for r in range(size)]
        results = (jax.jit(f) if jitted else f)([jnp.asarray(x) for x in inputs[rank]])
        for i, (kind, _, tag) in enumerate(steps):
            same(results[i], kinds[kind][1]([its[i] for its in inputs], tag))
        assert _core.requests_in_flight() == 0

    drawing.on_all_ranks(comm, ORDERS, check, 24)


# --- any source, any tag ---------------------------------------------------------------------------------------------


def test_any_source(comm, rank, size):
    """Each rank gets one message of every rank, from anybody."""
    receives = [jaxmpi.irecv(jnp.zeros(1)) for _ in range(size)]
    sends = [jaxmpi.isend(jnp.full(1, float(rank)), r, tag=rank) for r in range(size)]
    got = sorted(float(jaxmpi.wait(request)[0]) for request in receives)
    jaxmpi.waitall(sends)
    assert got == list(range(size))


def test_any_tag_beside_others(comm, rank):
    """Those with any tag leave the messages of exchanges and derivatives alone, whether they come before or after."""
    grid = jaxmpi.Grid(comm.size, 3 * comm.size, periodic=True)
    x = jnp.arange(5.0) + 10 * rank
    flying = grid.start(x)
    y = jaxmpi.sendrecv(x, x, left(comm), right(comm))
    receive = jaxmpi.irecv(x, left(comm))
    again = grid.start(x + 1)
    send = jaxmpi.isend(x, right(comm), tag=6)
    same(y, jnp.arange(5.0) + 10 * left(comm))
    same(jaxmpi.waitall([receive, send])[0], jnp.arange(5.0) + 10 * left(comm))
    same(grid.finish(again), grid.exchange(x + 1))
    same(grid.finish(flying), grid.exchange(x))


@derivatives
def test_any_tag_in_a_derivative_beside_others(comm, rank):
    """The tangent's message of a sendrecv with any tag, while others are expected."""

    def f(x, start=True):
        if not start:
            return blocking_shifted(x, comm) + blocking_shifted(x, comm)
        receive = jaxmpi.irecv(x, left(comm), tag=7)
        y = jaxmpi.sendrecv(x, x, left(comm), right(comm))
        return jaxmpi.waitall([receive, jaxmpi.isend(x, right(comm), tag=7)])[0] + y

    x = numbers((3,), rank)
    same(
        *jax.jit(lambda x: [(jax.jvp(g, (x,), (x,)), jax.vjp(g, x)[1](x)) for g in (f, lambda x: f(x, False))])(x),
        1e-15,
    )


# --- progress --------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize("jitted", [False, True])
def test_blocking_operations_while_a_message_is_expected(jitted, comm, rank, size):
    """The sender blocks until its large message is received, the receiver where the sender comes later."""
    x = jnp.full(LARGE, 1.0 + rank)

    def receiver(x):
        request = jaxmpi.irecv(x, 0, tag=2)
        total = jaxmpi.allreduce(x[:1], MPI.SUM)
        small = jaxmpi.recv(x[:2], 0, tag=2)
        jaxmpi.send(x[:2], 0, tag=2)
        return jaxmpi.wait(request), total, small

    def sender(x):
        jaxmpi.send(x, 1, tag=2)
        total = jaxmpi.allreduce(x[:1], MPI.SUM)
        jaxmpi.send(x[:2], 1, tag=2)
        return x, total, jaxmpi.recv(x[:2], 1, tag=2)

    others = lambda x: (x, jaxmpi.allreduce(x[:1], MPI.SUM), x[:2])  # noqa: E731
    f = [sender, receiver, others, others][rank]
    large, total, small = (jax.jit(f) if jitted else f)(x)
    same(total, jnp.full(1, float(sum(range(1, size + 1)))))
    same(large, jnp.full(LARGE, 1.0) if rank < 2 else x)
    if rank < 2:
        same(small, jnp.full(2, 2.0 - rank))


def test_many_large_ones(comm, rank, size):
    receives = [jaxmpi.irecv(jnp.zeros(LARGE), r, tag=r) for r in range(size)]
    receives += [jaxmpi.irecv(jnp.zeros(LARGE), r, tag=9) for r in range(size)]
    sends = [jaxmpi.isend(jnp.full(LARGE, 9.0 + rank), r, tag=9) for r in range(size)]
    sends += [jaxmpi.isend(jnp.full(LARGE, 1.0 + rank), r, tag=rank) for r in range(size)]
    total = jaxmpi.iallreduce(jnp.full(LARGE, 1.0), MPI.SUM)
    jaxmpi.barrier()
    jaxmpi.waitall(sends[::-1])
    same(jaxmpi.wait(total), jnp.full(LARGE, float(size)))
    for r in range(size):
        same(jaxmpi.wait(receives[size + r]), jnp.full(LARGE, 9.0 + r))
        same(jaxmpi.wait(receives[r]), jnp.full(LARGE, 1.0 + r))


def test_operand_is_copied(comm, rank):
    """Donated memory is used again while the message is under way."""

    @functools.partial(jaxmpi.jit, donate_argnums=0)
    def f(x):
        receive, send = jaxmpi.irecv(x, left(comm), tag=1), jaxmpi.isend(x, right(comm), tag=1)
        total = jaxmpi.iallreduce(x, MPI.SUM)
        y = x * 0 - 1
        (got, _, total), y = jaxmpi.waitall([receive, send, total], after=y)
        return got, total, y

    got, total, y = f(jnp.full(LARGE, float(rank)))
    same(got, jnp.full(LARGE, float(left(comm))))
    same(total, jnp.full(LARGE, float(sum(range(comm.size)))))
    same(y, jnp.full(LARGE, -1.0))


def test_two_threads(two_threads):
    """The arrays are there before a call, so that all is done in the calling threads: docs/running.md, threads."""

    def work(part, number):
        for i in range(20):
            x = jax.block_until_ready(jnp.asarray(np.full(1000, 1.0 + part.rank + 100 * number + i)))
            flying = jax.block_until_ready(
                [jaxmpi.irecv(x, left(part), tag=1, comm=part), jaxmpi.isend(x, right(part), tag=1, comm=part)]
            )
            total = jax.block_until_ready(jaxmpi.iallreduce(x, MPI.SUM, comm=part))
            jaxmpi.barrier(comm=part)
            sums = part.size * (1.0 + 100 * number + i) + sum(range(part.size))
            np.testing.assert_array_equal(jaxmpi.wait(total), sums)
            np.testing.assert_array_equal(jaxmpi.waitall(flying)[0], 1.0 + left(part) + 100 * number + i)

    two_threads(work)


def test_communicators(comm, rank, size):
    """The same tags on several communicators; one is freed and another takes its place."""
    for _ in range(2):
        other, half = comm.Dup(), comm.Split(rank % 2)
        x = jnp.full(2, float(rank))
        flying = [(c, jaxmpi.irecv(x, left(c), tag=1, comm=c)) for c in (comm, other, half)]
        sends = [jaxmpi.isend(x + 100 * i, right(c), tag=1, comm=c) for i, (c, _) in enumerate(flying)]
        got = [jaxmpi.wait(request) for _, request in flying[::-1]][::-1]
        jaxmpi.waitall(sends)
        np.testing.assert_array_equal(got[0], float(left(comm)))
        np.testing.assert_array_equal(got[1], 100.0 + left(comm))
        np.testing.assert_array_equal(got[2], 200.0 + 2 * left(half) + rank % 2)
        other.Free()
        half.Free()


# --- batches ---------------------------------------------------------------------------------------------------------


def test_batches_wait_for_what_was_started_outside(comm, rank):
    x, ys = numbers((3,), rank), numbers((4, 3), 9)
    for start, blocking in (
        (lambda x: jaxmpi.iallreduce(x, MPI.SUM), lambda x: jaxmpi.allreduce(x, MPI.SUM)),
        (lambda x: jaxmpi.ialltoall(_stack(x, comm)), lambda x: jaxmpi.alltoall(_stack(x, comm))),
        (lambda x: jaxmpi.ibcast(x, 0), lambda x: jaxmpi.bcast(x, 0)),
    ):
        requests, wanted = [start(x), start(x)], blocking(x)

        def once(y, request):
            return jnp.sum(y) + jaxmpi.wait(request)

        def twice(y, request, once=once):
            return jax.vmap(lambda i: once(i * y, request))(jnp.arange(2.0))[1]

        outside = [jax.vmap(f, in_axes=(0, None)) for f in (once, twice)]
        found = jax.jit(lambda ys, rs, fs=outside: [f(ys, r) for f, r in zip(fs, rs, strict=True)])(ys, requests)
        same(found, [jnp.stack([jnp.sum(y) + wanted for y in ys])] * 2, 1e-14)


def test_requests_of_a_batch_leave_together(comm, rank):
    x = numbers((4, 3), rank)
    flying = jax.vmap(lambda x: jaxmpi.ialltoall(_stack(x, comm)))(x)
    with pytest.raises(ValueError, match=r"has left the jax\.vmap"):
        jaxmpi.wait(flying)
    same(jax.vmap(jaxmpi.wait)(flying), jax.vmap(lambda x: jaxmpi.alltoall(_stack(x, comm)))(x))


# --- derivatives -----------------------------------------------------------------------------------------------------


TRANSFORMATIONS = {
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (jnp.cos(x),)),
    "hessian": jax.hessian,
    "jacrev": lambda f: jax.jacrev(jax.grad(f)),
    "forward over forward": lambda f: lambda x: jax.jvp(lambda x: jax.jvp(f, (x,), (x,))[1], (x,), (x,)),
    "batch of grad": lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, 2 * x, x + 1])),
    "jit of grad": lambda f: jaxmpi.jit(jax.value_and_grad(f)),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
}


@derivatives
@every_way
def test_derivatives(ways, comm, rank):
    def chosen(way):
        return TRANSFORMATIONS if way == "message" else ("jvp", "hessian") if "of" in way else ("jvp", "batch of grad")

    def call(way, operation, x):
        def loss(x):
            y = operation(jnp.sin(x), comm)
            return jnp.sum(jnp.cos(y) * (rank + 1.0)) + jnp.sum(operation(x * x, comm) ** 2)

        return {name: TRANSFORMATIONS[name](loss)(x) for name in chosen(way)}

    alike(both(call, ways, numbers((3,), rank)), 1e-11)


@derivatives
@every_way
def test_constant_on_a_rank(ways, comm, rank, size):
    """On one rank nothing depends on what is differentiated, on the others it does."""

    def call(way, operation, x, fixed):
        def f(x, constant):
            return jnp.sum(operation(fixed if rank == constant else x * x, comm) * x)

        last = lambda x: f(x, size - 1)  # noqa: E731
        second = jax.hessian if way in ("message", "iallreduce of products") else jax.grad
        return jax.grad(f)(x, 0), second(last)(x)

    alike(both(call, ways, numbers((3,), rank), numbers((3,), 50)), 1e-12)


@derivatives
def test_derivatives_of_carries(comm, rank):
    """The carry of a scan holds requests."""

    def start(x):
        return [jaxmpi.irecv(x, left(comm), tag=1), jaxmpi.isend(x, right(comm), tag=1)]

    def step(carry, i):
        x, requests = carry
        y = jaxmpi.waitall(requests)[0]
        x = jnp.sin(y) * i + x
        return (x, start(x)), jnp.sum(y)

    def ours(x):
        (x, requests), ys = lax.scan(step, (x, start(x)), jnp.arange(1.0, 4.0))
        return jnp.sum(jaxmpi.waitall(requests)[0] ** 2) + jnp.sum(ys)

    def plain_step(x, i):
        y = blocking_shifted(x, comm)
        return jnp.sin(y) * i + x, jnp.sum(y)

    def plain(x):
        x, ys = lax.scan(plain_step, x, jnp.arange(1.0, 4.0))
        return jnp.sum(blocking_shifted(x, comm) ** 2) + jnp.sum(ys)

    def of_both(x):
        return [[TRANSFORMATIONS[t](f)(x) for t in ("hessian", "batch of grad")] for f in (ours, plain)]

    same(*jax.jit(of_both)(numbers((3,), rank)), 1e-11)


@derivatives
def test_derivatives_across_jit_and_branches(comm, rank):
    x = numbers((3,), rank)
    start, wait = jax.jit(lambda x: jaxmpi.iallreduce(jnp.sin(x), MPI.PROD)), jax.jit(jaxmpi.wait)

    def f(x, first):
        request = lax.cond(first, start, lambda x: jaxmpi.iallreduce(jnp.sin(2 * x), MPI.PROD), x)
        return jnp.sum(wait(request) * x)

    def both(h):
        return jax.jit(lambda x, given: (h(x, given), jax.hessian(h)(x, given)))

    ours, theirs = both(f), both(lambda x, k: jnp.sum(jaxmpi.allreduce(jnp.sin(k * x), MPI.PROD) * x))
    for first, factor in ((True, 1.0), (False, 2.0)):
        same(ours(x, first), theirs(x, factor), 1e-12)


@derivatives
def test_large_derivatives(comm, rank):
    x = numbers((LARGE // 4,), rank)
    f, g = (lambda x, way=way: jnp.sum(way(x * x, comm) * x) for way in WAYS["message"])
    same(jax.grad(f)(x), jax.grad(g)(x), 1e-12)


def _normal_equations(step, times):
    """Solves x + 0.05 S* S x = b, where S is `times` steps."""

    def s(x):
        for _ in range(times):
            x = step(x)
        return x

    def normal(x):
        return x + 0.05 * jax.vjp(s, x)[1](s(x))[0]

    def solve(matvec, b):
        return lax.fori_loop(0, 25, lambda i, u: u + 0.5 * (b - matvec(u)), jnp.zeros_like(b))

    return lambda b: lax.custom_linear_solve(normal, b, solve, symmetric=True)


@derivatives
def test_normal_equations(comm, rank, size):
    """The operator of a linear solve holds derivatives of starts, and is differentiated: with constants that stand in
    them for no request. Against NumPy with the matrix of the blocking operation; one is differentiated once more."""
    n = 4 * size
    halos = jaxmpi.Grid(size, (n - 2) * size, periodic=True, comm=comm)
    maps = {
        "message": WAYS["message"],
        "halo": (lambda x, c: halos.finish(halos.start(x)), lambda x, c: halos.exchange(x)),
    }

    def gradients(name, times, b):
        solved = _normal_equations(lambda x: maps[name][0](x, comm), times)
        gradient = jax.grad(lambda b: jnp.sum(solved(b) ** 2))
        return gradient(b), jax.grad(lambda b: jnp.sum(gradient(b) ** 2))(b) if times == 2 else jnp.zeros(n)

    every = jnp.eye(n * size).reshape(-1, size, n)  # [k][rank of x]
    columns_of = jax.jit(lambda xs: {name: jax.vmap(lambda x, f=f: f(x, comm))(xs) for name, (_, f) in maps.items()})
    columns_of = {
        name: np.concatenate(comm.allgather(np.asarray(y)), axis=1).T for name, y in columns_of(every[:, rank]).items()
    }
    cases, b = [("message", 1), ("halo", 2)], numbers((n,), rank)
    found = jax.jit(lambda b: {name: gradients(name, times, b) for name, times in cases})(b)
    all_b = np.concatenate([numbers((n,), r) for r in range(size)])

    def solved(case):
        name, times = case
        s = np.linalg.matrix_power(columns_of[name], times)
        twice = lambda b: 2 * np.linalg.solve(a, np.linalg.solve(a, b))  # noqa: E731
        a = np.eye(len(s)) + 0.05 * s.T @ s
        mine = slice(n * rank, n * rank + n)
        wanted = (twice(all_b)[mine], 2 * (times - 1) * twice(twice(all_b))[mine])
        np.testing.assert_allclose(found[name], wanted, rtol=1e-5, atol=1e-5)

    each(cases, solved)


ENDS = [("dest", "recvtag"), ("sendtag", "source"), ("dest", "sendtag", "source", "recvtag")]


@derivatives
@rows("cases", ENDS, "-".join)
def test_traced_ends(cases, comm, rank):
    """What is known at run time only gives what is known while tracing gives, in derivatives of each kind as well."""
    known = {"dest": right(comm), "sendtag": 1, "source": left(comm), "recvtag": 1}
    x, v = numbers((3,), rank), numbers((3,), rank, 1)

    def f(x, ends):
        ends = {**known, **ends}
        receive = jaxmpi.irecv([x * x, 2 * x * x], ends["source"], tag=ends["recvtag"])
        send = jaxmpi.isend([x * jnp.sin(x), jnp.cos(x)], ends["dest"], tag=ends["sendtag"])
        first, second = jax.jit(lambda requests: jaxmpi.waitall(requests)[0])([receive, send])
        return (2 * first + 3 * second) * x

    def derivatives(given, every):
        g = lambda x: jnp.sum(jnp.tanh(f(x, given)) ** 2)  # noqa: E731
        few = {"forward over reverse": jax.jvp(jax.grad(g), (x,), (v,))}
        more = {
            "value": lambda: f(x, given),
            "reverse over reverse": lambda: jax.grad(lambda x: jnp.sum(jax.grad(g)(x) ** 2))(x),
            "batch": lambda: jax.vmap(jax.grad(g))(jnp.stack([x, v, x + v])),
            "checkpoint": lambda: jax.grad(jax.checkpoint(g))(x),
        }
        return few | {name: call() for name, call in more.items() if every}

    given = {case: {name: known[name] for name in case} for case in cases}
    found = jax.jit(lambda given: {case: derivatives(given[case], len(case) == 4) for case in cases})(given)
    wanted = jax.jit(lambda: derivatives({}, True))()
    each(cases, lambda case: same(found[case], {name: wanted[name] for name in found[case]}, 1e-13))


@derivatives
@pytest.mark.usefixtures("own_errors")
@pytest.mark.parametrize("tag", [(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) + 1) // 2, -7])
def test_traced_tag_of_no_derivative(tag, comm, rank):
    """Each rank alone: of a tag in the upper half the derivative has none, and a negative one is none."""

    def f(x, tag):
        request = jaxmpi.irecv(x, rank, tag=tag)
        jaxmpi.wait(jaxmpi.isend(x, rank, tag=tag))
        return jnp.sum(jaxmpi.wait(request))

    with pytest.raises(jax.errors.JaxRuntimeError, match="tag"):
        jax.jit(jax.grad(f))(numbers((3,), rank), tag).block_until_ready()


@derivatives
def test_several_exchanges_in_flight(comm, rank, size):
    grid = jaxmpi.Grid(size, 3 * size, periodic=True)
    x = numbers((5,), rank)

    def f(x):
        first = grid.start(x)
        second = grid.start((2 * x, x * x))
        between = grid.exchange(3 * x)
        (a, b), c = grid.finish(second), grid.finish(first)
        return jnp.sum(a * b * c * between)

    def g(x):
        a, b = grid.exchange((2 * x, x * x))
        return jnp.sum(a * b * grid.exchange(x) * grid.exchange(3 * x))

    same(*jax.jit(lambda x: [(h(x), jax.grad(h)(x), jax.hessian(h)(x)) for h in (f, g)])(x), 1e-12)


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
def test_after(jit, comm, rank):
    x = numbers((3,), rank)
    values = (x, {"a": x, "b": [np.arange(3), 2.5, None]}, np.ones(2), 3, jax.random.key(0), ())
    found = jit(lambda x: [jaxmpi.wait(jaxmpi.iallreduce(x, MPI.SUM), after=given) for given in values])(x)
    total = jaxmpi.allreduce(x, MPI.SUM)
    for given, (y, back) in zip(values, found, strict=True):
        same(y, total, 1e-15)
        assert jax.tree.structure(back) == jax.tree.structure(given)
        assert all(jnp.all(a == b) for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(given), strict=True))


def test_tokens(comm, rank):
    token = jaxmpi.tokens.barrier()
    request, token = jaxmpi.tokens.irecv(jnp.zeros(2), left(comm), tag=1, token=token)
    other, token = jaxmpi.tokens.isend(jnp.ones(2), right(comm), tag=1, token=token)
    (y, nothing), token = jaxmpi.tokens.waitall([request, other], token=token)
    assert nothing is None
    request, token = jaxmpi.tokens.ibarrier(token=token)
    nothing, token = jaxmpi.tokens.wait(request, token=token)
    assert nothing is None
    same(y, jnp.ones(2))


# --- errors ----------------------------------------------------------------------------------------------------------


def test_waited_for_twice(comm, rank):
    request = jaxmpi.iallreduce(jnp.ones(2), MPI.SUM)
    jaxmpi.wait(request)
    assert "has been waited for already" in raised(lambda: jaxmpi.wait(request))
    assert "has been waited for already" in raised(lambda: jax.jit(jaxmpi.wait)(request))


def test_no_request(comm, rank):
    request = jaxmpi.iallreduce(jnp.ones(2), MPI.SUM)
    with pytest.raises(TypeError, match=r"wait: a Request is needed, .* got list; several are waited for by waitall"):
        jaxmpi.wait([request])
    with pytest.raises(TypeError, match=r"waitall: a Request is needed, .* got int"):
        jaxmpi.waitall([request, 3])
    with pytest.raises(TypeError, match=r"wait: a Request is needed, .* got \w*Array"):
        jaxmpi.wait(jnp.ones(2))
    zeros = jax.tree.map(jnp.zeros_like, request)
    assert "it was never started" in raised(lambda: jaxmpi.wait(zeros))
    with pytest.raises(TypeError, match="this is not what a start has returned"):
        jaxmpi.wait(jax.tree.map(lambda x: x.astype(int), request))
    jaxmpi.wait(request)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("length", "early", "beside"), [(3, True, True), (5, True, False), (3, False, False), (5, False, True)]
)
def test_message_that_does_not_fit(length, early, beside, comm, rank):
    """It is dropped, and the next one is intact. `early`: it has come before the wait; `beside`: more is expected."""
    if rank == 0:
        request = jaxmpi.isend(jnp.arange(float(length)), 1, tag=1)
        jaxmpi.send(jnp.arange(4.0), 1, tag=1)
        jaxmpi.send(jnp.arange(2.0), 1, tag=2)
        jaxmpi.wait(request)
        comm.barrier()
        return
    if rank > 1:
        comm.barrier()
        return
    receive = jaxmpi.irecv(jnp.zeros(4), 0, tag=1)
    other = jaxmpi.irecv(jnp.zeros(2), 0, tag=2) if beside else None
    if early:
        comm.barrier()
        jaxmpi.barrier(comm=MPI.COMM_SELF)
    why = raised(lambda: jaxmpi.wait(receive))
    assert ("longer" if length > 4 else "shorter") in why or f"{length}" in why
    assert "irecv" in why
    same(jaxmpi.recv(jnp.zeros(4), 0, tag=1), jnp.arange(4.0))
    if beside:
        same(jaxmpi.wait(other), jnp.arange(2.0))
    else:
        same(jaxmpi.recv(jnp.zeros(2), 0, tag=2), jnp.arange(2.0))
    if not early:
        comm.barrier()


@pytest.mark.alone
@pytest.mark.sampled
def test_never_waited_for(script):
    """What has been started is told, and completed while Python is there: later mpi4py would end the job."""
    program = script(
        """
        import time
        import numpy as np
        from jaxmpi import _core

        @jax.jit
        def f(x):
            request = jaxmpi.irecv(x, rank, tag=6)
            return request, jaxmpi.iallreduce(x, MPI.SUM)

        kept = jax.block_until_ready(f(jnp.ones(3)))
        jaxmpi.wait(jaxmpi.ibarrier())
        print("in flight", _core.requests_in_flight())
        grid = jaxmpi.Grid((size,), (4 * size,), periodic=True)
        grid.start(grid.pad(jnp.ones(4)))
        jaxmpi.isend([jnp.ones(3), jnp.ones(4)], rank, tag=6)

        def add(x, y, _):
            np.frombuffer(y, np.float32)[:] += np.frombuffer(x, np.float32)
            print("called", flush=True)

        op = MPI.Op.Create(add, commute=True)
        time.sleep(0.5 * rank)
        jaxmpi.iallreduce(jnp.ones(5, jnp.float32), op)
        """
    )
    done = launch(2, program)
    assert done.stdout.count("in flight 2") == 2
    assert "called" in done.stdout
    assert "ABORT" not in done.stderr
    for rank in (0, 1):
        started = (
            ("irecv", 12), ("iallreduce of 3", 13), ("Grid.start of 6", 19), ("isend of 3", 20), ("isend of 4", 20),
            ("iallreduce of 5 float32, op user-defined", 28),
        )  # fmt: skip
        for what, line in started:
            told = [text for text in done.stderr.splitlines() if f"rank {rank} has never waited for {what}" in text]
            assert len(told) == 1, done.stderr
            assert f"program.py:{line}" in told[0], told


# --- the order of waits in derivatives ------------------------------------------------------------------------------


WAITS = {
    "each first": lambda rs, ss: ([*map(jaxmpi.wait, rs)], jaxmpi.waitall(ss))[0],
    "sends first": lambda rs, ss: ([*map(jaxmpi.wait, ss)], jaxmpi.waitall(rs))[1],
    "at once": lambda rs, ss: jaxmpi.waitall([rs, ss])[0],
    "sends at once": lambda rs, ss: jaxmpi.waitall([ss, rs])[1],
}


@derivatives
@rows("waits", WAITS)
def test_messages_alike_have_their_own_derivatives(waits, comm, rank):
    def plain(x):
        a, b = (blocking_shifted(v, comm, tag) for tag, v in ((1, x), (2, x * x)))
        return jnp.sum(jnp.cos(a) + jnp.arange(1.0, 4.0) * b)

    def with_one_tag(x, wait):
        receives = [jaxmpi.irecv(x, left(comm), tag=1, comm=comm) for _ in range(2)]
        a, b = wait(receives, [jaxmpi.isend(v, right(comm), tag=1, comm=comm) for v in (x, x * x)])
        return jnp.sum(jnp.cos(a) + jnp.arange(1.0, 4.0) * b)

    def derivatives(f, x, t):
        return jax.jvp(f, (x,), (t,)), jax.hessian(f)(x)

    fs = {"expected": plain, **{name: lambda x, name=name: with_one_tag(x, WAITS[name]) for name in waits}}
    found = jax.jit(lambda x, t: {name: derivatives(f, x, t) for name, f in fs.items()})
    found = found(numbers((3,), rank), numbers((3,), rank, 1))
    each(waits, lambda name: same(found[name], found["expected"], 1e-12))


@derivatives
def test_derivatives_of_many_leaves(comm, rank, monkeypatch):
    """More than one operation waits for."""
    monkeypatch.setattr("jaxmpi._operations.requests._MOST", 6)

    def f(xs):
        ys, _ = jaxmpi.waitall(
            [jaxmpi.irecv(xs, left(comm), tag=1, comm=comm), jaxmpi.isend(xs, right(comm), tag=1, comm=comm)]
        )
        return sum(jnp.sum((i + 1) * jnp.sin(y)) for i, y in enumerate(ys))

    x = numbers((7, 2), rank)
    found = jax.jit(lambda xs: {leaves: jax.grad(f)(xs[:leaves]) for leaves in (4, 7)})(list(x))
    for leaves, gradients in found.items():  # round the ring and back
        factors = np.arange(1, leaves + 1)[:, None]
        np.testing.assert_allclose(gradients, factors * np.cos(x[:leaves]), rtol=1e-12)


@derivatives
@rows("operations", ["messages", "iallreduce", "exchange"])
def test_waits_alone_are_differentiated(operations, comm, rank, size):
    """Of what was started outside of what is differentiated, and does not depend on it."""
    x, w = numbers((4,), rank), jnp.arange(1.0, 5.0)
    grid = jaxmpi.Grid(size, 2 * size, periodic=True, comm=comm)  # of 4 elements, with the halo
    message = lambda x: [jaxmpi.irecv(x, left(comm), tag=1), jaxmpi.isend(x, right(comm), tag=1)]  # noqa: E731
    calls = {
        "messages": (message, lambda q: jaxmpi.waitall(q)[0], lambda x: blocking_shifted(x, comm)),
        "iallreduce": (lambda x: jaxmpi.iallreduce(x, MPI.SUM), jaxmpi.wait, lambda x: jaxmpi.allreduce(x, MPI.SUM)),
        "exchange": (grid.start, grid.finish, grid.exchange),
    }
    wraps = {
        "jit": jax.jit,
        "cond": lambda f: lambda q: lax.cond(jnp.asarray(True), f, f, q),
        "checkpoint": jax.checkpoint,
        "scan": lambda f: lambda q: lax.scan(lambda c, _: (c, f(q)), 0.0, None, length=1)[1][0],
    }
    few = ("jit", "scan")
    places = [(operation, wrap) for operation in operations for wrap in (wraps if operation == "messages" else few)]
    begun = jax.jit(lambda x: [calls[operation][0](x) for operation, _ in places])(x)

    def gradients(w, begun):
        fs = [lambda w, q, o=o, wrap=wrap: jnp.sum(w * wraps[wrap](calls[o][1])(q)) for o, wrap in places]
        return [jax.grad(f)(w, q) for f, q in zip(fs, begun, strict=True)]

    found = jax.jit(gradients)(w, begun)
    expected = jax.jit(lambda x: {name: calls[name][2](x) for name in operations})(x)
    each(
        list(zip(places, found, strict=True)),
        lambda row: same(row[1], expected[row[0][0]], 1e-12),
        lambda row: str(row[0]),
    )
    assert _core.requests_in_flight() == 0
    again = jax.grad(lambda x: jnp.sum(jnp.sin(shifted(x, comm, 1))))(x)  # finds no message that was left
    np.testing.assert_allclose(again, np.cos(x), rtol=1e-6)


@derivatives
@pytest.mark.alone
@pytest.mark.sampled
def test_other_orders_are_refused_in_reverse_mode(script):
    """On one rank at least; then that function's communicator is used no more."""
    program = script(
        """
        import numpy as np
        jax.config.update("jax_enable_x64", True)
        left, right = (rank - 1) % size, (rank + 1) % size

        def message(x):
            return jaxmpi.irecv(x, left, tag=0, comm=comm)

        def both_sent(x):
            return jaxmpi.isend(x, right, comm=comm), jaxmpi.isend(x * x, right, comm=comm)

        def receives_turned(x):
            a, b, sent = message(x), message(x), both_sent(x)
            z = jaxmpi.wait(b)
            y = jaxmpi.wait(a)
            jaxmpi.waitall(sent)
            return y + 2 * z

        def sends_turned(x):
            received, sent = [message(x), message(x)], both_sent(x)
            jaxmpi.waitall(sent[::-1])
            y, z = jaxmpi.waitall(received)
            return y + 2 * z

        def a_blocking_one_between(x):
            a, sent = message(x), both_sent(x)
            z = jaxmpi.recv(x, left, tag=0, comm=comm)
            y = jaxmpi.wait(a)
            jaxmpi.waitall(sent)
            return y + 2 * z

        def turned(start, x):
            a, b = start(x), start(x * x)
            z = jaxmpi.wait(b)
            return jaxmpi.wait(a) + 2 * z

        def collectives_turned(x):
            return turned(lambda x: jaxmpi.ibcast(x, 0, comm=comm), x)

        def redistributions_turned(x):
            grid = jaxmpi.Grid((size,), (3 * size,), comm=comm)
            return turned(lambda x: jaxmpi.iredistribute(x, grid, grid), x)

        def ghosts_turned(x):
            return turned(jaxmpi.IndexMap(3 * rank + np.arange(3), [], comm=comm).start, x)

        x = jnp.arange(1.0, 4.0) + rank
        tags, communicator, grids = "tags of their own", "comm.Dup(), for one", "grids or maps on comm.Dup()"
        cases = {
            receives_turned: (left, "", tags),
            sends_turned: (left, "", tags),
            a_blocking_one_between: (left, "", tags),
            collectives_turned: (0, "", communicator),
            redistributions_turned: (rank, "jaxmpi.iredistribute on rank", grids),
            ghosts_turned: (rank, "jaxmpi.IndexMap.start on rank", grids),
        }
        for f, (moved, name, advice) in cases.items():
            comm = MPI.COMM_WORLD.Dup()
            if f in (receives_turned, collectives_turned):
                y, t = jax.jvp(f, (x,), (jnp.ones(3),))
                np.testing.assert_allclose(t, 1 + 4 * (jnp.arange(1.0, 4.0) + moved))
            try:
                jax.block_until_ready(jaxmpi.jit(jax.grad(lambda x: jnp.sum(f(x))))(x))
            except jax.errors.JaxRuntimeError as error:
                assert "must be waited for in the order in which they were started" in str(error), error
                assert name in str(error) and advice in str(error), error
                print("refused", f.__name__, flush=True)
            MPI.COMM_WORLD.Barrier()
        """
    )
    done = launch(2, program)
    names = ("receives", "sends", "collectives", "redistributions", "ghosts")
    each(
        [*(f"{name}_turned" for name in names), "a_blocking_one_between"], lambda name: _is_in(done, f"refused {name}")
    )


def _is_in(done, text):
    assert text in done.stdout, done.stdout + done.stderr


@derivatives
@pytest.mark.alone
@pytest.mark.sampled
def test_what_is_not_waited_for_is_refused_in_reverse_mode(script):
    """Its adjoint would be started by nobody. A sum needs no other rank for its adjoint. What all ranks forget, all
    refuse; what one rank forgets ends the job, since the others communicate. A `vmap` that starts what only some rows
    would wait for is refused as well."""
    program = script(
        """
        from jax import lax

        left, right = (rank - 1) % size, (rank + 1) % size

        def send(x):
            jaxmpi.isend(x, right, tag=2, comm=comm)
            return x * jaxmpi.recv(x, left, tag=2, comm=comm)

        def send_in_checkpoint(x):
            jax.checkpoint(lambda x: (jaxmpi.isend(x, right, tag=2, comm=comm), x)[1])(x)
            return x * jaxmpi.recv(x, left, tag=2, comm=comm)

        def receive(x):
            jaxmpi.irecv(x, left, tag=2, comm=comm)
            jaxmpi.wait(jaxmpi.isend(x, right, tag=2, comm=comm))
            return x * x

        def halo(x):
            grid = jaxmpi.Grid((size,), (4 * size,), periodic=True, comm=comm)
            grid.start(grid.pad(x))
            return x * x

        def sum_of_all(x):
            jaxmpi.iallreduce(x, MPI.SUM, comm=comm)
            return x * x

        def broadcast_on_root(x):
            begun = jaxmpi.ibcast(x, 0, comm=comm)
            return x if rank == 0 else jaxmpi.wait(begun)

        def start(x):
            return jaxmpi.iallreduce(x, MPI.SUM, comm=comm)

        def branches(p, x):
            return jaxmpi.wait(lax.cond(p, start, lambda x: start(-x), x))

        def loop(p, x):
            first = start(x)
            def step(c):
                jaxmpi.wait(c[0])
                return start(2 * x), c[1] + 1
            return jaxmpi.wait(lax.while_loop(lambda c: c[1] < p, step, (first, jnp.zeros((), int)))[0])

        for f in (branches, loop):
            comm = MPI.COMM_WORLD.Dup()
            try:
                print("given", jax.vmap(f)(jnp.array([1, 0]), jnp.ones(2)), flush=True)
            except jax.errors.JaxRuntimeError as error:
                print("refused", f.__name__, rank, flush=True)

        x = jnp.arange(1.0, 5.0) + rank
        for f in (sum_of_all, send, send_in_checkpoint, receive, halo, broadcast_on_root):
            loss = lambda x: jnp.sum(f(x))
            ways = {"gradient": jax.grad(loss), "over": jax.hessian(loss), "twice": jax.jacrev(jax.grad(loss))}
            for how in ways if f is send else ["gradient"]:
                comm = MPI.COMM_WORLD.Dup()
                try:
                    print("came", jax.block_until_ready(jaxmpi.jit(ways[how])(x)), flush=True)
                except (ValueError, jax.errors.JaxRuntimeError) as error:
                    assert "waited for there: gradients would be wrong" in str(error), error
                    print("refused", f.__name__, how, rank, flush=True)
                    if f is broadcast_on_root:
                        raise
        """
    )
    done = launch(2, program, check=False)
    assert done.returncode != 0
    assert "given" not in done.stdout
    assert "came [2. 4. 6. 8.]" in done.stdout
    assert "came [ 4.  6.  8. 10.]" in done.stdout
    wanted = [f"{name} {rank}" for name in ("branches", "loop") for rank in (0, 1)] + ["broadcast_on_root gradient 0"]
    refused = [f"{name} gradient" for name in ("send", "send_in_checkpoint", "receive", "halo")]
    wanted += [f"{what} {rank}" for what in (*refused, "send over", "send twice") for rank in (0, 1)]
    each(wanted, lambda text: _is_in(done, f"refused {text}"))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("elements", [1, 2000, 4000])
def test_this_rank_waits_elsewhere(elements, comm, rank):
    """The sender may wait for the receive, and this rank, in a function that is not ours, for the sender."""
    x = numbers((elements,), rank)
    if rank == 0:
        comm.Ssend(np.asarray(x), 1, 5)
        jax.block_until_ready(jaxmpi.send(x, 1, tag=6, comm=comm))
        comm.Barrier()
    elif rank == 1:
        begun = [jaxmpi.irecv(x, 0, tag=6, comm=comm)]
        jax.effects_barrier()
        got = np.empty(elements)
        comm.Recv(got, 0, 5)
        comm.Barrier()
        np.testing.assert_array_equal(jaxmpi.waitall(begun)[0], got)
    else:
        comm.Barrier()
