"""The derivative of a program that spans processes.

Rank 0 scatters the numbers 0 ... 7, the last rank doubles its part, and the parts are added up. The result is
on every rank. The derivative is on rank 0, where the numbers came from: the adjoint of a scatter is a gather.

    python scatter_grad.py                  # result 56.0, gradient on rank 0: [2. 2. 2. 2. 2. 2. 2. 2.]
    mpiexec -n 2 python scatter_grad.py     # result 50.0, gradient on rank 0: [1. 1. 1. 1. 2. 2. 2. 2.]
    mpiexec -n 4 python scatter_grad.py     # result 41.0, gradient on rank 0: [1. 1. 1. 1. 1. 1. 2. 2.]
    mpiexec -n 8 python scatter_grad.py     # result 35.0, gradient on rank 0: [1. 1. 1. 1. 1. 1. 1. 2.]

Each rank prints one line, in order; the gradient is zero on all ranks but rank 0.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import jaxmpi

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
NUMBERS = 8
EXPECTED = {1: 56.0, 2: 50.0, 4: 41.0, 8: 35.0}


def weighted_sum(numbers: jax.Array) -> jax.Array:
    """Return the sum of rank 0's `numbers`, shape (8,); the last rank's part counts twice."""
    parts = numbers.reshape(SIZE, NUMBERS // SIZE)
    # Only rank 0 has something to scatter; elsewhere the argument gives the shape of a part.
    part = jaxmpi.scatter(parts if RANK == 0 else parts[0], 0)
    if RANK == SIZE - 1:
        part = 2 * part
    total = jaxmpi.allreduce(part, MPI.SUM)
    return total.sum()


def main() -> None:
    if SIZE not in EXPECTED:
        message = f"{NUMBERS} numbers cannot be scattered among {SIZE} processes: use 1, 2, 4 or 8"
        sys.exit(message if RANK == 0 else 1)
    numbers = jnp.arange(float(NUMBERS))
    result, gradient = jax.jit(jax.value_and_grad(weighted_sum))(numbers)

    for rank in range(SIZE):
        if rank == RANK:
            print(f"rank {RANK}: result {result}, gradient {gradient}", flush=True)
        MPI.COMM_WORLD.Barrier()

    weights = np.repeat([1.0, 2.0], [NUMBERS - NUMBERS // SIZE, NUMBERS // SIZE])
    assert float(result) == EXPECTED[SIZE]
    np.testing.assert_array_equal(gradient, weights if RANK == 0 else np.zeros(NUMBERS))


if __name__ == "__main__":
    main()
