"""Redistribution: `python -m jaxmpi.run -n 2 benchmarks/redistribute.py`, on 2 or 4 ranks.

A cube of float32 in slabs, cut along the first axis, becomes pencils, in which that axis is whole and the second one is
cut, and slabs again. In between the first plane is multiplied by 0.9999, which is spread over all ranks only then: so
data changes, and is right only if it has moved. The contenders take turns, some steps in a loop at a time:

  jaxmpi         `jaxmpi.redistribute` there and back, in a `lax.fori_loop` inside one compiled call, to which the array
                 is donated: fresh memory for results is not part of a step
  C, packed      redistribute.c: messages packed and unpacked in long runs, MPI_Isend and MPI_Irecv, own parts copied
  C, alltoallw   redistribute.c: one MPI_Alltoallw with datatypes of subarrays

The figures are medians of the ratios of each turn. All elements are compared with NumPy's on every rank, in each turn.
Prints lines `name: value` as quick.py does.
"""

import argparse
import ctypes
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from compiled import compile_c
from in_place import multiply
from mpi4py import MPI

import jaxmpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
FACTOR = np.float32(0.9999)
STEPS = {64: 100, 256: 20}
"""Points along each axis of the cube: steps of a turn."""
PEERS = {"C, packed": ("raw_c", "<= 1.1"), "C, alltoallw": ("alltoallw", "<= 0.9")}


def load_c():
    library = compile_c("redistribute.c")
    library.redistribution_make.restype = ctypes.c_void_p
    library.redistribution_array.restype = ctypes.POINTER(ctypes.c_float)
    library.redistribution_array.argtypes = [ctypes.c_void_p]
    library.redistribution_run.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_float, ctypes.c_int]
    return library


def by_jaxmpi(slabs, pencils, steps):
    def step(x, once):
        y = jaxmpi.redistribute(x, slabs, pencils)
        return jaxmpi.redistribute(multiply(y, slice(1), FACTOR, once), pencils, slabs)

    run = jaxmpi.jit(lambda x, once: jax.lax.fori_loop(0, steps, lambda _, x: step(x, once), x), donate_argnums=0)

    def batch(given):
        x = jax.block_until_ready(jnp.array(given))
        COMM.Barrier()
        begin = time.perf_counter()
        result = jax.block_until_ready(run(x, 1))
        return time.perf_counter() - begin, result

    return batch


def in_c(library, slabs, pencils, steps, by_alltoallw):
    numbers = [(ctypes.c_int * 3)(*of) for of in (slabs.global_shape, slabs.processes, pencils.processes)]
    made = library.redistribution_make(*numbers)
    array = np.ctypeslib.as_array(library.redistribution_array(made), slabs.local_shape)

    def batch(given):
        array[...] = given
        COMM.Barrier()
        begin = time.perf_counter()
        library.redistribution_run(made, steps, FACTOR, by_alltoallw)
        return time.perf_counter() - begin, array

    return batch


def measure(library, n, cut, rounds):
    """Seconds of a redistribution by contender, one per turn, and the elements that were wrong."""
    slabs = jaxmpi.Grid((SIZE, 1, 1), (n, n, n))
    processes = [1, 1, 1]
    processes[cut] = SIZE
    pencils = jaxmpi.Grid(processes, (n, n, n))
    steps = STEPS.get(n, max(1, 100 * 64**3 // n**3))
    made = {
        "jaxmpi": by_jaxmpi(slabs, pencils, steps),
        "C, packed": in_c(library, slabs, pencils, steps, 0),
        "C, alltoallw": in_c(library, slabs, pencils, steps, 1),
    }
    seconds = {name: [] for name in made}
    wrong = dict.fromkeys(made, 0)
    for turn in range(rounds + 1):  # the first compiles, and its time does not count
        given = 1 + np.random.default_rng([n, turn, RANK]).random(slabs.local_shape, np.float32)
        expected = given.copy()
        for _ in range(steps if RANK == 0 else 0):
            expected[0] *= FACTOR
        for name, batch in made.items():
            spent, result = batch(given)
            seconds[name] += [COMM.allreduce(spent, MPI.MAX) / steps / 2] if turn else []
            wrong[name] += np.count_nonzero(np.asarray(result) != expected)
    return seconds, {name: COMM.allreduce(count) for name, count in wrong.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contender (default: %(default)s)")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(STEPS)[::-1], help="points along each axis")
    parser.add_argument("--cut", type=int, choices=(1, 2), default=1, help="the axis along which pencils are cut")
    options = parser.parse_args()
    library = load_c()
    found = {n: measure(library, n, options.cut, options.rounds) for n in options.sizes}
    if RANK > 0:
        return
    for n, (seconds, _) in found.items():
        for peer, (label, goal) in PEERS.items():
            value = statistics.median(a / b for a, b in zip(seconds["jaxmpi"], seconds[peer], strict=True))
            print(f"redistribute_{n}_vs_{label}_{SIZE}_ranks: {value:.4g}  (goal {goal})")
    total = sum(sum(wrong.values()) for _, wrong in found.values())
    print(f"redistribute_wrong_elements_{SIZE}_ranks: {total}  (goal 0)")
    for n, (seconds, _) in found.items():
        print(f"\n{n}^3 on {SIZE} ranks, us per redistribution, median and quartiles:")
        for who, times in seconds.items():
            low, middle, high = (f"{1e6 * value:.4g}" for value in statistics.quantiles(times, n=4))
            print(f"  {who:15} {middle:>8}  ({low} - {high})")
    if total:
        sys.exit(1)


if __name__ == "__main__":
    main()
