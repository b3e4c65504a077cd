"""Pytrees of messages of which some do not fit: all are received, so what follows is right; an error is raised."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from mpi4py import MPI

import jaxmpi
from jaxmpi._primitive import pytrees
from support import drawing
from support.derivatives import needs_new_jax
from support.table import draw

pytestmark = pytest.mark.usefixtures("own_errors")


@dataclass(frozen=True)
class Case:
    """What each rank sends to the next one in a ring, as shapes and dtypes, and how the templates of one rank differ:
    by how many rows of each leaf."""

    shapes: tuple
    dtypes: tuple
    differ: tuple
    short: int
    accepts: bool  # shorter messages, by a status
    traced: bool
    jit: bool
    apart: bool  # send and recv

    def sent(self, rank):
        return [draw(s, np.dtype(d), rank, i) for i, (s, d) in enumerate(zip(self.shapes, self.dtypes, strict=True))]

    def templates(self, rank):
        differ = self.differ if rank == self.short else [0] * len(self.differ)
        rows = [(max(shape[0] + more, 0), *shape[1:]) for shape, more in zip(self.shapes, differ, strict=True)]
        return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(rows, self.dtypes, strict=True)]

    def misfits(self, rank):
        """The leaves that do not fit."""
        sizes = [(np.prod(t.shape), np.prod(s)) for t, s in zip(self.templates(rank), self.shapes, strict=True)]
        return [i for i, (room, sent) in enumerate(sizes) if (room < sent if self.accepts else room != sent)]


@st.composite
def cases(draw_, size):
    count = draw_(st.integers(2, 5))
    leaf = st.tuples(st.integers(0, 4)) | st.tuples(st.integers(1, 3), st.integers(0, 2))
    return Case(
        tuple(draw_(leaf) for _ in range(count)),
        tuple(draw_(st.sampled_from(("float32", "int32", "float64", "int8"))) for _ in range(count)),
        tuple(draw_(st.integers(-2, 2)) for _ in range(count)),
        draw_(st.integers(0, size - 1)),
        *(draw_(st.booleans()) for _ in range(4)),
    )


def follows(rank, size, comm):
    """What is sent next is not what was left before."""
    before, after = (rank - 1) % size, (rank + 1) % size
    for i, shape in enumerate(((3,), (), (2, 2))):
        x = jnp.full(shape, 70.0 + rank + 10 * i, jnp.float32)
        y = jaxmpi.sendrecv(x, x, before, after, sendtag=1, recvtag=1, comm=comm)
        np.testing.assert_array_equal(y, np.full(shape, 70.0 + before + 10 * i))


def ring(case, rank, size, comm):
    """(the arrays that are sent, ends) -> what is received; and the ends."""
    before, after = (rank - 1) % size, (rank + 1) % size
    status = MPI.Status() if case.accepts else None
    ends = (before, after, 1)

    def exchange(xs, ends):
        before, after, tag = ends
        templates = case.templates(rank)
        if case.apart and size > 1:  # MPICH sends nothing to a rank itself before that receives
            jaxmpi.send(xs, after, tag=tag, comm=comm)
            return jaxmpi.recv(templates, before, tag=tag, comm=comm, status=status)
        return jaxmpi.sendrecv(xs, templates, before, after, sendtag=tag, recvtag=tag, comm=comm, status=status)

    return (exchange if case.traced else lambda xs, _: exchange(xs, ends)), ends


def test_values(rank, size, comm):
    def check(case):
        f, ends = ring(case, rank, size, comm)
        before = (rank - 1) % size
        if case.jit or case.traced:
            f = jaxmpi.jit(f)
        if wrong := case.misfits(rank):
            with pytest.raises(jax.errors.JaxRuntimeError, match=f"elements of {case.dtypes[wrong[0]]}.*template"):
                jax.block_until_ready(f(case.sent(rank), ends))
        else:
            for y, x, template in zip(f(case.sent(rank), ends), case.sent(before), case.templates(rank), strict=True):
                assert y.shape == template.shape
                np.testing.assert_array_equal(np.ravel(y)[: x.size], np.ravel(x))
                assert not np.any(np.ravel(y)[x.size :])
        follows(rank, size, comm)

    drawing.on_all_ranks(comm, cases(size), check, 24)


@needs_new_jax
def test_gradients(rank, size, comm):
    """Templates of one rank are longer: it accepts what comes, but its cotangents do not fit where they belong."""
    before, after = (rank - 1) % size, (rank + 1) % size

    @jax.jit
    @jax.grad
    def square(x):
        return jnp.sum(jaxmpi.sendrecv(x, x, before, after, sendtag=1, recvtag=1, comm=comm) ** 2)

    def check(case):
        case = replace(case, accepts=True, differ=tuple(map(abs, case.differ)))
        f, ends = ring(case, rank, size, comm)
        float_leaves = [i for i, dtype in enumerate(case.dtypes) if dtype.startswith("float")]
        xs = list(map(jnp.asarray, case.sent(rank)))

        def loss(given, ends):
            ys = f([given.get(i, x) for i, x in enumerate(xs)], ends)
            return sum(jnp.sum(ys[i] ** 2) for i in float_leaves) + 0.0

        given = {i: xs[i] for i in float_leaves}
        gradient = (jaxmpi.jit if case.jit else jax.jit)(jax.grad(loss))
        room = [np.prod(template.shape) for template in case.templates(after)]
        if wrong := [i for i in float_leaves if room[i] > xs[i].size]:
            with pytest.raises(jax.errors.JaxRuntimeError, match=f"elements of {case.dtypes[wrong[-1]]}.*template"):
                jax.block_until_ready(gradient(given, ends))
        elif given:
            for i, ct in gradient(given, ends).items():
                np.testing.assert_allclose(ct, 2 * xs[i])
        follows(rank, size, comm)
        x = jnp.full((2,), 3.0 + rank, jnp.float32)
        np.testing.assert_array_equal(square(x), 2 * x)

    drawing.on_all_ranks(comm, cases(size), check, 16)


def exchange(rank, size, comm, x):
    """Two arrays around the ring, of which one rank's first does not fit."""
    before, after = (rank - 1) % size, (rank + 1) % size
    short = jax.ShapeDtypeStruct((2,) if rank == size - 1 else x[0].shape, x[0].dtype)
    second = jax.ShapeDtypeStruct(x[1].shape, x[1].dtype)
    return jaxmpi.sendrecv(x, (short, second), before, after, sendtag=1, recvtag=1, comm=comm)


@pytest.mark.filterwarnings("ignore:jaxmpi. an earlier computation failed")
def test_error_belongs_to_all_arrays(rank, size, comm):
    """An eager call may return before the messages have come: then each array raises that is looked at."""
    late = jax.jit(lambda a: jax.lax.fori_loop(0, 6, lambda i, a: jnp.tanh(a @ a), a)[0, :4])
    a = jnp.ones((500, 500)) / 500
    for look_at in (0, 1):
        y = late(a)
        x = (jnp.full(3, 5 + rank, jnp.int32) + (0 * y[0]).astype(jnp.int32), y)
        if rank == size - 1:
            with pytest.raises(jax.errors.JaxRuntimeError, match=r"3 elements of int32.*template"):
                np.asarray(exchange(rank, size, comm, x)[look_at])
        else:
            result = exchange(rank, size, comm, x)
            np.testing.assert_array_equal(result[0], np.full(3, 5 + (rank - 1) % size))
        follows(rank, size, comm)


@pytest.mark.filterwarnings("ignore:jaxmpi. an earlier computation failed")
def test_checked_for_nan(rank, size, comm):
    """What has not been received is NaN; that is not what is told."""
    jax.config.update("jax_debug_nans", True)
    try:
        if rank == size - 1:
            with pytest.raises(jax.errors.JaxRuntimeError, match=r"3 elements of float32.*template"):
                jax.block_until_ready(exchange(rank, size, comm, (jnp.ones(3, jnp.float32), jnp.ones(4))))
        else:
            jax.block_until_ready(exchange(rank, size, comm, (jnp.ones(3, jnp.float32), jnp.ones(4))))
        follows(rank, size, comm)
    finally:
        jax.config.update("jax_debug_nans", False)


def test_places_of_derivatives():
    """Of derivatives the last is the last that is received: of those of the same operation, in forward and reverse."""
    x, n = jnp.ones(2), jnp.ones(2, int)
    alone, first, middle, last = range(4)

    def of(received, sent):
        return list(zip(*pytrees.places(received, sent), strict=True))

    assert pytrees.places([x], [x]) == [pytrees.ALONE]
    assert of([n, x, x, n], []) == [(first, middle, middle, last), (alone, first, last, alone), (alone,) * 4]
    assert of([], [x, n, x]) == [(first, middle, last), (alone,) * 3, (first, alone, last)]
    assert of([x, n, x, x], [x, x, x, n]) == [(first, middle, middle, last), *[(first, alone, last, alone)] * 2]
    (place,) = {p.tangent for p in pytrees.places([x, n], [x, x])}
    assert place == alone
    backwards = [p.reverse() for p in pytrees.places([x, n, x], [x, x, x])]
    assert [p.tangent for p in backwards] == [last, alone, first]
    assert [p.reverse() for p in backwards] == pytrees.places([x, n, x], [x, x, x])
