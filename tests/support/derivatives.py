"""What the suites of derivatives share: the dot-product test on all ranks, the data of it, and operations for it.

Stack the arrays of all ranks into one vector: an operation is a map of it with one Jacobian J, of which each rank has
rows and columns. For any v and w, <J v, w> = <v, J' w> summed over the ranks. Finite differences of the operation
itself, at x + h v on all ranks, are the witness of J v.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import jaxmpi
from jaxmpi import notoken
from support.table import NEW_JAX

needs_new_jax = pytest.mark.skipif(not NEW_JAX, reason="this JAX drops what has no result that is used")


def draw(shape, dtype, rank, seed):
    """Normal data of a rank, which the pair of seed and rank chooses; complex in a complex dtype."""
    generator = np.random.default_rng([seed, rank])
    x = generator.normal(size=shape)
    if np.issubdtype(dtype, np.complexfloating):
        x = x + 1j * generator.normal(size=shape)
    return jnp.asarray(x).astype(dtype)


def tree_dot(a, b):
    return sum(
        np.sum(np.asarray(x) * np.asarray(y)) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def check(f, x, comm, rtol=1e-12, differences=True, replicated=False, compiled=False):
    """J v of `f` at `x` by jvp against finite differences, and J' w by vjp against J v. `replicated`: results of
    `f` are one value on all ranks, which counts once. `compiled`: J' w also through jit."""
    rank, size = comm.rank, comm.size
    v = jax.tree.map(lambda leaf: draw(leaf.shape, leaf.dtype, rank, 1), x)
    y, jv = jax.jvp(f, (x,), (v,))
    if differences:
        h = 1e-6
        above, below = (f(jax.tree.map(lambda a, b, s=s: a + s * h * b, x, v)) for s in (1, -1))
        for got, up, down in zip(*map(jax.tree.leaves, (jv, above, below)), strict=True):
            np.testing.assert_allclose(got, (up - down) / (2 * h), rtol=1e-6, atol=1e-7)
    w = jax.tree.map(lambda leaf: draw(leaf.shape, leaf.dtype, 0 if replicated else rank, 2), y)
    (jtw,) = jax.vjp(f, x)[1](w)
    left = comm.allreduce(tree_dot(jv, w)) / (size if replicated else 1)
    np.testing.assert_allclose(comm.allreduce(tree_dot(v, jtw)), left, rtol=rtol, atol=rtol)
    if not compiled:
        return
    (jitted,) = jax.jit(lambda x, w: jax.vjp(f, x)[1](w))(x, w)
    (ours,) = jaxmpi.jit(lambda x, w: jax.vjp(f, x)[1](w))(x, w)
    for a, b, c in zip(*map(jax.tree.leaves, (jtw, jitted, ours)), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)
        np.testing.assert_array_equal(b, c)


def between_ranks(rank, size):
    """Each operation of an array (size, ...) in which what other ranks pass matters to this one, or the reverse."""
    return [
        notoken.allgather,
        notoken.alltoall,
        lambda x: notoken.bcast(x, 0),
        lambda x: notoken.gather(x, size - 1),
        lambda x: notoken.reduce(x, MPI.SUM, size - 1),
        lambda x: notoken.scan(x, MPI.SUM),
        lambda x: notoken.scatter(x if rank == 0 else x[0], 0),
        lambda x: notoken.sendrecv(x, x, (rank - 1) % size, (rank + 1) % size),
    ]
