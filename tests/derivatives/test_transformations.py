"""Batching of every operation; special cases of derivatives. Their correctness: test_adjoint.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import jaxmpi
from support.rows import each, rows
from support.table import CASES, NEW_JAX


@rows("cases", CASES)
def test_vmap(cases, comm, rank, size):
    """A batched call equals the calls one by one, whichever axis is mapped."""
    calls = [(case, root, axis) for case in cases for axis in (0, 1) for root in case.roots(size)[-1:]]
    batches = [[case.inputs((2, 3), np.float32, size, root, seed) for seed in range(4)] for case, root, _ in calls]

    @jax.jit
    def mapped(xs):
        fs = [lambda x, case=case, root=root: case.call(x, comm, root) for case, root, _ in calls]
        return [jax.vmap(f, in_axes=axis)(x) for f, (_, _, axis), x in zip(fs, calls, xs, strict=True)]

    def check(row):
        (case, root, _), batch, results = row
        for inputs, result in zip(batch, results, strict=True):
            np.testing.assert_array_equal(result, case.expected(inputs, rank, root))

    xs = [np.stack([xs[rank] for xs in batch], axis=axis) for batch, (_, _, axis) in zip(batches, calls, strict=True)]
    each(list(zip(calls, batches, mapped(xs), strict=True)), check, lambda row: " ".join(map(str, row[0])))


def test_vmap_of_one_side(rank, size):
    """A batched message into an unbatched template, and the other way round."""
    left, right = (rank - 1) % size, (rank + 1) % size
    x = jnp.arange(12.0).reshape(4, 3) + rank
    y = jax.vmap(lambda v: jaxmpi.sendrecv(v, jnp.zeros(3), left, right))(x)
    np.testing.assert_array_equal(y, np.arange(12.0).reshape(4, 3) + left)
    z = jax.vmap(lambda t: jaxmpi.sendrecv(jnp.full(3, float(rank)), t, left, right))(jnp.zeros((4, 3)))
    np.testing.assert_array_equal(z, np.full((4, 3), float(left)))


def test_nested_vmap(size, rank):
    x = jnp.arange(24.0).reshape(2, 3, 4) + rank
    y = jax.vmap(jax.vmap(jaxmpi.allgather, in_axes=1), in_axes=0)(x)
    expected = np.stack([np.arange(24.0).reshape(2, 3, 4) + r for r in range(size)])
    np.testing.assert_array_equal(y, np.transpose(expected, (1, 3, 0, 2)))


@rows("cases", [case for case in CASES if not case.name.startswith("send_recv")])
def test_transpose_of_transpose(cases, comm, rank, size):
    """The adjoint's adjoint is the map itself."""
    calls = [(case, root) for case in cases for root in case.roots(size)]
    xs = [np.random.default_rng([7, rank]).normal(size=case.shape((3,), rank, size, root)) for case, root in calls]

    def both(f, x):
        ax, pull = jax.vjp(f, x)
        return ax, jax.linear_transpose(pull, ax)((x,))[0]

    @jax.jit
    def everything(xs):
        fs = [lambda x, case=case, root=root: case.call(x, comm, root) for case, root in calls]
        return [both(f, x) for f, x in zip(fs, xs, strict=True)]

    check = lambda row: np.testing.assert_allclose(*row[1], rtol=1e-12)  # noqa: E731
    each(list(zip(calls, everything(xs), strict=True)), check, lambda row: " ".join(map(str, row[0])))


def test_constant_template_is_constant(rank, size):
    """Neither the values of a template nor its being constant matter to a derivative."""
    left, right = (rank - 1) % size, (rank + 1) % size

    def f(x, template):
        return jnp.sum(jaxmpi.sendrecv(x, template, left, right) * (1.0 + rank))

    x = jnp.ones(3)
    gradient, of_template = jax.grad(f, argnums=(0, 1))(x, jnp.full(3, 5.0))
    np.testing.assert_array_equal(gradient, np.full(3, 1.0 + right))
    np.testing.assert_array_equal(of_template, np.zeros(3))
    np.testing.assert_array_equal(jax.grad(lambda v: f(v, jnp.zeros(3)))(x), gradient)


def test_sendrecv_with_tags(rank, size):
    """The way back exchanges the tags: each rank sends with a tag of its own."""
    left, right = (rank - 1) % size, (rank + 1) % size

    def f(x):
        y = jaxmpi.sendrecv(x, x, left, right, sendtag=rank, recvtag=left)
        return jnp.sum(y * (1.0 + rank))

    np.testing.assert_array_equal(jax.jit(jax.grad(f))(jnp.ones(3)), np.full(3, 1.0 + right))


def test_integers_have_no_derivative(size):
    def f(x, k):
        return jnp.sum(jaxmpi.allreduce(x, MPI.SUM) * jaxmpi.allreduce(k, MPI.SUM))

    gradient = jax.grad(f)(jnp.ones(3), jnp.arange(3))
    np.testing.assert_array_equal(gradient, size * np.arange(3.0))


@pytest.mark.skipif(not NEW_JAX, reason="this JAX has no derivatives of communication")
def test_unknown_way_back(rank):
    with pytest.raises(NotImplementedError, match="ANY_SOURCE"):
        jax.grad(lambda x: jnp.sum(jaxmpi.sendrecv(x, x, MPI.ANY_SOURCE, rank)))(jnp.ones(3))


def test_python_numbers_and_mixed_dtypes(rank, size):
    """Derivatives at Python numbers; a template of integers has no derivative, whatever is sent."""
    value, tangent = jax.jvp(lambda p: jaxmpi.allreduce(p, MPI.SUM), (3.0,), (1.0,))
    assert (value, tangent) == (3.0 * size, size)
    assert jax.grad(lambda p: jaxmpi.allreduce(p, MPI.SUM) * 2)(3.0) == 2
    integer = jax.ShapeDtypeStruct((), jnp.int64)
    f = jax.grad(lambda p: p + 0 * jaxmpi.sendrecv(p, integer, MPI.PROC_NULL, MPI.PROC_NULL))
    assert f(jnp.float64(3)) == 1


@pytest.mark.nightly
def test_search_for_leaked_tracers(size):
    """JAX's search finds its own list of ordered effects where it divides a scan, with or without us: docs say so."""

    def scanned(x):
        step = lambda carry, _: (jnp.sin(jaxmpi.allreduce(carry, MPI.SUM)), None)  # noqa: E731
        return jax.lax.scan(step, x, None, length=3)[0]

    x = np.float32(0.3)
    expected = x
    for _ in range(3):
        expected = np.sin(expected * size)
    with jax.check_tracer_leaks():
        np.testing.assert_allclose(jax.jit(scanned)(x), expected, rtol=1e-5)
        np.testing.assert_allclose(jax.jit(lambda x: jax.jvp(scanned, (x,), (x,)))(x)[0], expected, rtol=1e-5)
        jax.effects_barrier()
        with pytest.raises(Exception, match="Leaked trace JaxprTrace"):
            jax.grad(scanned)(x)
