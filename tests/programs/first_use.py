"""What a new installation must be able to do, on any number of ranks, beside NumPy: for `make test-wheel`."""

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import jaxmpi

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
left, right = (rank - 1) % size, (rank + 1) % size
x = jnp.arange(5.0) + rank


@jaxmpi.jit
def norm(x):
    return jnp.sum(jaxmpi.allreduce(jnp.sin(x), MPI.SUM) ** 2)


@jaxmpi.jit
def ring(x):
    receive = jaxmpi.irecv(x, left)
    send = jaxmpi.isend(x * 2, right)
    return jaxmpi.waitall([receive, send])[0]


total = sum(np.sin(np.arange(5.0) + r) for r in range(size))
np.testing.assert_allclose(norm(x), np.sum(total**2), rtol=1e-5)
np.testing.assert_allclose(jax.grad(norm)(x), 2 * total * np.cos(np.arange(5.0) + rank), rtol=1e-4, atol=1e-5)
np.testing.assert_array_equal(ring(x), 2 * (np.arange(5.0) + left))

grid = jaxmpi.Grid((size, 1), shape=(4 * size, 3), periodic=True)
whole = np.arange(12.0 * size, dtype=np.float32).reshape(4 * size, 3)
field = jaxmpi.jit(grid.exchange)(grid.pad(jnp.asarray(whole[grid.slices])))
np.testing.assert_array_equal(field, np.pad(whole, 1, mode="wrap")[4 * rank : 4 * rank + 6])

points = jaxmpi.IndexMap(range(3 * rank, 3 * rank + 3), [3 * right] if size > 1 else [])
values = jnp.asarray([*range(3 * rank, 3 * rank + 3), *([-1.0] if size > 1 else [])], jnp.float32)
rows = jaxmpi.jit(points.exchange)(values)
np.testing.assert_array_equal(rows[3:], [3 * right] if size > 1 else [])
print("right", flush=True)
