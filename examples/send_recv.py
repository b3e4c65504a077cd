"""A message from rank 0 to rank 1 inside a jitted function.

The branch is on the rank, an ordinary Python integer: each process traces and compiles only its own side.
A `send` returns only a token, which you may ignore. The message is sent all the same, in program order.

    python send_recv.py                     # rank 0 received [0. 1. 2. 3.] from itself
    mpiexec -n 2 python send_recv.py        # rank 1 received [0. 1. 2. 3.] from rank 0
    mpiexec -n 4 python send_recv.py        # the same; ranks 2 and 3 do nothing

A single process cannot wait for a blocking message to itself, and exchanges in one call, `sendrecv`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import jaxmpi

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
TEMPLATE = jax.ShapeDtypeStruct((4,), jnp.float32)  # shape and dtype of the message


@jax.jit
def pass_on(x: jax.Array) -> jax.Array:
    """Send x from rank 0 to rank 1 and return the array that this rank has then."""
    if SIZE == 1:
        x = jaxmpi.sendrecv(x, TEMPLATE, source=0, dest=0)
    elif RANK == 0:
        jaxmpi.send(x, dest=1, tag=7)
    elif RANK == 1:
        x = jaxmpi.recv(TEMPLATE, source=0, tag=7)
    return x


def main() -> None:
    message = jnp.arange(4, dtype=jnp.float32)
    mine = message if RANK == 0 else jnp.full(4, -1, jnp.float32)
    result = jax.block_until_ready(pass_on(mine))

    receiver = min(1, SIZE - 1)
    if receiver == RANK:
        print(f"rank {RANK} received {result} from {'itself' if SIZE == 1 else 'rank 0'}", flush=True)
    expected = message if RANK in (0, receiver) else mine
    np.testing.assert_array_equal(result, expected)


if __name__ == "__main__":
    main()
