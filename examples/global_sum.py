"""A global sum inside a jitted function, with the derivative.

Each of n processes holds four of the numbers 1 ... 4n. All get the sum of all squares. Each also gets the
derivative of that sum with respect to its own numbers x, which is 2 x, without knowing the numbers of the others.

    python global_sum.py                    # sum of squares of 1 ... 4: 30.0
    mpiexec -n 2 python global_sum.py       # sum of squares of 1 ... 8: 204.0
    mpiexec -n 4 python global_sum.py       # sum of squares of 1 ... 16: 1496.0

Rank 0 prints this and the gradient, [2. 4. 6. 8.] each time. Every rank compares with the closed formula.
"""

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import jaxmpi

BLOCK = 4


def global_sum_of_squares(x: jax.Array) -> jax.Array:
    """Return the sum of x**2 over all elements and all processes."""
    return jaxmpi.allreduce(jnp.sum(x**2), MPI.SUM)


def main() -> None:
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    x = jnp.arange(1.0, BLOCK + 1) + rank * BLOCK
    total, gradient = jax.jit(jax.value_and_grad(global_sum_of_squares))(x)

    n = size * BLOCK
    if rank == 0:
        print(f"sum of squares of 1 ... {n}: {total}", flush=True)
        print(f"gradient on rank 0: {gradient}", flush=True)
    assert float(total) == n * (n + 1) * (2 * n + 1) / 6
    np.testing.assert_array_equal(gradient, 2 * x)


if __name__ == "__main__":
    main()
