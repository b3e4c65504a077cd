"""Time per call of allreduce and sendrecv: in a compiled loop, as a jitted call, eager, and by mpi4py on NumPy.

    python -m jaxmpi.run -n 2 benchmarks/calls.py

Data is not zero and changes with each call; the ways take turns, and the median of the rounds is printed by rank 0.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from jaxmpi import notoken

COMM = MPI.COMM_WORLD
LEFT, RIGHT = (COMM.rank - 1) % COMM.size, (COMM.rank + 1) % COMM.size


def allreduce(x):
    return notoken.allreduce(x, MPI.MAX) * 0.999


def sendrecv(x):
    return notoken.sendrecv(x, x, LEFT, RIGHT) * 0.999


def numpy_allreduce(x, y):
    COMM.Allreduce(x, y, MPI.MAX)
    np.multiply(y, 0.999, out=x)


def numpy_sendrecv(x, y):
    COMM.Sendrecv(x, RIGHT, recvbuf=y, source=LEFT)
    np.multiply(y, 0.999, out=x)


def seconds(function, x, calls):
    """Time of one of `calls` calls, each on the result of the one before."""
    COMM.Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        x = function(x)
    jax.block_until_ready(x)
    return (time.perf_counter() - start) / calls


def ways(operation, numpy_operation, count, calls):
    """Name -> function measuring the time of one call."""
    x = jnp.arange(1.0, count + 1) + COMM.rank
    loop = jax.jit(lambda v: jax.lax.fori_loop(0, calls, lambda i, u: operation(u), v))
    jitted = jax.jit(operation)
    a = np.asarray(x).copy()
    b = np.empty_like(a)
    return {
        "loop": lambda: seconds(loop, x, 1) / calls,
        "jit": lambda: seconds(jitted, x, max(2, calls // 20)),
        "eager": lambda: seconds(operation, x, max(2, calls // 100)),
        "mpi4py": lambda: seconds(lambda v: numpy_operation(a, b), None, calls),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bytes", type=int, nargs="+", default=[4, 1024, 65536, 1 << 20])
    options = parser.parse_args()
    if COMM.rank == 0:
        print(f"{COMM.size} ranks, microseconds per call, median of {options.rounds} rounds")
        print(
            f"{'operation':10} {'bytes':>9} " + " ".join(f"{name:>10}" for name in ("loop", "jit", "eager", "mpi4py"))
        )
    for operation, numpy_operation in ((allreduce, numpy_allreduce), (sendrecv, numpy_sendrecv)):
        for size in options.bytes:
            calls = 5000 if size <= 1024 else 500 if size <= 65536 else 100
            measured = {name: [] for name in ("loop", "jit", "eager", "mpi4py")}
            candidates = ways(operation, numpy_operation, size // 4, calls)
            for turn in range(options.rounds + 1):  # the first one compiles
                for name, measure in candidates.items():
                    duration = measure()
                    if turn > 0:
                        measured[name].append(duration * 1e6)
            if COMM.rank == 0:
                row = " ".join(f"{statistics.median(times):10.2f}" for times in measured.values())
                print(f"{operation.__name__:10} {size:9d} {row}", flush=True)


if __name__ == "__main__":
    main()
