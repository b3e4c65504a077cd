"""Batching of every operation; special cases of derivatives. Their correctness: test_adjoint.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

from jaxmpi import notoken
from support.derivatives import needs_new_jax
from support.table import CASES, NEW_JAX

pytestmark = pytest.mark.two_ranks_suffice


@pytest.mark.slow("case")
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_vmap(case, axis, comm, rank, size):
    """A batched call equals the calls one by one, whichever axis is mapped."""
    for root in case.roots(size):
        batch = [case.inputs((2, 3), np.float32, size, root, seed) for seed in range(4)]
        x = np.stack([inputs[rank] for inputs in batch], axis=axis)
        result = jax.jit(jax.vmap(lambda v, root=root: case.call(v, comm, root), in_axes=axis))(jnp.asarray(x))
        for got, inputs in zip(result, batch, strict=True):
            np.testing.assert_array_equal(got, case.expected(inputs, rank, root))


def test_vmap_of_one_side(rank, size):
    """A batched message into an unbatched template, and the other way round."""
    left, right = (rank - 1) % size, (rank + 1) % size
    x = jnp.arange(12.0).reshape(4, 3) + rank
    y = jax.vmap(lambda v: notoken.sendrecv(v, jnp.zeros(3), left, right))(x)
    np.testing.assert_array_equal(y, np.arange(12.0).reshape(4, 3) + left)
    z = jax.vmap(lambda t: notoken.sendrecv(jnp.full(3, float(rank)), t, left, right))(jnp.zeros((4, 3)))
    np.testing.assert_array_equal(z, np.full((4, 3), float(left)))


def test_nested_vmap(size, rank):
    x = jnp.arange(24.0).reshape(2, 3, 4) + rank
    y = jax.vmap(jax.vmap(notoken.allgather, in_axes=1), in_axes=0)(x)
    expected = np.stack([np.arange(24.0).reshape(2, 3, 4) + r for r in range(size)])
    np.testing.assert_array_equal(y, np.transpose(expected, (1, 3, 0, 2)))


@pytest.mark.parametrize("case", [case for case in CASES if not case.name.startswith("send_recv")], ids=str)
def test_transpose_of_transpose(case, comm, rank, size):
    """The adjoint's adjoint is the map itself."""
    for root in case.roots(size):
        x = jnp.asarray(np.random.default_rng([7, rank]).normal(size=case.shape((3,), rank, size, root)))

        def f(v, root=root):
            return case.call(v, comm, root)

        ax, pull = jax.vjp(f, x)
        transposed = jax.linear_transpose(pull, ax)
        np.testing.assert_allclose(transposed((x,))[0], ax, rtol=1e-12)


def test_constant_template_is_constant(rank, size):
    """Neither the values of a template nor its being constant matter to a derivative."""
    left, right = (rank - 1) % size, (rank + 1) % size

    def f(x, template):
        return jnp.sum(notoken.sendrecv(x, template, left, right) * (1.0 + rank))

    x = jnp.ones(3)
    gradient, of_template = jax.grad(f, argnums=(0, 1))(x, jnp.full(3, 5.0))
    np.testing.assert_array_equal(gradient, np.full(3, 1.0 + right))
    np.testing.assert_array_equal(of_template, np.zeros(3))
    np.testing.assert_array_equal(jax.grad(lambda v: f(v, jnp.zeros(3)))(x), gradient)


def test_sendrecv_with_tags(rank, size):
    """The way back exchanges the tags: each rank sends with a tag of its own."""
    left, right = (rank - 1) % size, (rank + 1) % size

    def f(x):
        y = notoken.sendrecv(x, x, left, right, sendtag=rank, recvtag=left)
        return jnp.sum(y * (1.0 + rank))

    np.testing.assert_array_equal(jax.jit(jax.grad(f))(jnp.ones(3)), np.full(3, 1.0 + right))


def test_second_derivative(size, rank):
    def loss(x):
        return jnp.sum(notoken.allreduce(x**2, MPI.SUM) ** 2) / 2

    x = jnp.asarray([1.0 + rank, 2.0])
    total = sum(np.asarray([(1.0 + r) ** 2, 4.0]) for r in range(size))
    np.testing.assert_allclose(jax.grad(loss)(x), 2 * x * total)
    hessian = jax.hessian(loss)(x)
    assert hessian.shape == (2, 2)
    assert np.isfinite(hessian).all()


def test_integers_have_no_derivative(size):
    def f(x, k):
        return jnp.sum(notoken.allreduce(x, MPI.SUM) * notoken.allreduce(k, MPI.SUM))

    gradient = jax.grad(f)(jnp.ones(3), jnp.arange(3))
    np.testing.assert_array_equal(gradient, size * np.arange(3.0))


@pytest.mark.skipif(not NEW_JAX, reason="this JAX has no derivatives of communication")
def test_unknown_way_back(rank):
    with pytest.raises(NotImplementedError, match="ANY_SOURCE"):
        jax.grad(lambda x: jnp.sum(notoken.sendrecv(x, x, MPI.ANY_SOURCE, rank)))(jnp.ones(3))


def test_scatter_with_a_template_that_depends_on_nothing(rank, size):
    """The documented way: a template made from what is differentiated, so that each rank takes part in the way back."""

    def loss(x):
        template = x[0] if rank == 0 else 0 * x[0]
        part = notoken.scatter(x if rank == 0 else template, 0)
        return jnp.sum(notoken.allreduce(part * (1.0 + rank), MPI.SUM))

    gradient = jax.jit(jax.grad(loss))(jnp.ones((size, 3)))
    expected = np.repeat(1.0 + np.arange(size)[:, None], 3, axis=1) if rank == 0 else np.zeros((size, 3))
    np.testing.assert_array_equal(gradient, expected)


def test_python_numbers_and_mixed_dtypes(rank, size):
    """Derivatives at Python numbers; a template of integers has no derivative, whatever is sent."""
    value, tangent = jax.jvp(lambda p: notoken.allreduce(p, MPI.SUM), (3.0,), (1.0,))
    assert (value, tangent) == (3.0 * size, size)
    assert jax.grad(lambda p: notoken.allreduce(p, MPI.SUM) * 2)(3.0) == 2
    integer = jax.ShapeDtypeStruct((), jnp.int64)
    f = jax.grad(lambda p: p + 0 * notoken.sendrecv(p, integer, MPI.PROC_NULL, MPI.PROC_NULL))
    assert f(jnp.float64(3)) == 1


@pytest.mark.parametrize("what", ["operation", pytest.param("JAX's print", marks=needs_new_jax)])
def test_search_for_leaked_tracers(what, size):
    """JAX's search finds its own list of ordered effects where it divides a scan, with or without us: docs say so."""

    def scanned(x):
        def step(carry, _):
            if what == "operation":
                return jnp.sin(notoken.allreduce(carry, MPI.SUM)), None
            jax.debug.print("{}", carry, ordered=True)
            return jnp.sin(carry * size), None

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
