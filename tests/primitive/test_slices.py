"""Operations on slices of arrays and into them. XLA for GPUs makes one kernel of a call and such slices where it can.

It does so where a slice is a multiple of its buffers' alignment, 256 bytes. `make test-compiled` compiles these
programs for a GPU on any machine.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from mpi4py import MPI

import jaxmpi
from support.rows import each, rows

ROWS, LENGTH = 6, 256


def _sum(x):
    return jaxmpi.allreduce(x, MPI.SUM)


def _around(x):
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    return jaxmpi.sendrecv(x, x, (rank - 1) % size, (rank + 1) % size)


def read(f, x):
    """Rows are read by a loop."""
    return lax.fori_loop(0, ROWS, lambda i, total: total + f(x[i]), jnp.zeros_like(x[0]))


def in_place(f, x):
    """Rows are written by a loop."""
    return lax.fori_loop(0, ROWS, lambda i, x: x.at[i].set(f(x[i])), x)


def stacked(f, x):
    """A loop collects what has arrived."""
    return lax.scan(lambda total, row: (total + f(row), f(total)), x[0], x)


def static(f, x):
    return f(x[2:4])


def into(f, x):
    return x.at[2:4].set(f(x[:2]))


def slope(f, x):
    """What has arrived is kept for the derivative."""

    def steps(x):
        def step(y, row):
            arrived = f(jnp.sin(y) + row)
            return arrived * jnp.cos(arrived) / 4, None

        return jnp.sum(lax.scan(step, x[0], x)[0] ** 2)

    return jax.grad(steps)(x)


WAYS = [read, in_place, stacked, static, into, slope]
OPERATIONS = [_sum, _around]


@rows("ways", WAYS, lambda way: way.__name__)
def test_slices(ways, rank):
    x = np.linspace(-1, 1, ROWS * LENGTH).reshape(ROWS, LENGTH) * (rank + 1)
    calls = [(way, operation) for way in ways for operation in OPERATIONS]
    found = jaxmpi.jit(lambda x: [way(operation, x) for way, operation in calls])(jnp.asarray(x))
    with jax.disable_jit():  # each operation by itself, loops by Python
        expected = [way(operation, jnp.asarray(x)) for way, operation in calls]

    def same(row):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), *row[1:])

    each(list(zip(calls, found, expected, strict=True)), same, lambda row: " ".join(f.__name__ for f in row[0]))
