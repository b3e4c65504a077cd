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
import functools

import jax.numpy as jnp
import numpy as np
from loops import looped, multiply
from peers import compile_c

import jaxmpi
from jaxmpi._bench.data import count_wrong
from jaxmpi._bench.report import conclude, figure
from jaxmpi._bench.timing import COMM, Batch, ratio, take_turns

RANK, SIZE = COMM.rank, COMM.size
FACTOR = np.float32(0.9999)
STEPS = {256: 20, 64: 100}
"""Points along each axis of the cube: steps of a turn."""


def load_c():
    library = compile_c("redistribute.c")
    library.redistribution_make.restype = ctypes.c_void_p
    library.redistribution_array.restype = ctypes.POINTER(ctypes.c_float)
    library.redistribution_array.argtypes = [ctypes.c_void_p]
    library.redistribution_run.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_float, ctypes.c_int]
    return library


@functools.lru_cache(1)
def given(shape, turn):
    """This rank's slab."""
    return 1 + np.random.default_rng([*shape, turn, RANK]).random(shape, np.float32)


def contenders(library, slabs, pencils, steps):
    def batch(start, run):
        return Batch(2 * steps, start, run, wrong)

    def wrong(turn, result):
        expected = given(slabs.local_shape, turn).copy()
        for _ in range(steps if RANK == 0 else 0):
            expected[0] *= FACTOR
        return count_wrong(result, expected)

    def step(x, once):
        y = jaxmpi.redistribute(x, slabs, pencils)
        return jaxmpi.redistribute(multiply(y, slice(1), FACTOR, once), pencils, slabs)

    made = library.redistribution_make(slabs.global_shape[0])
    array = np.ctypeslib.as_array(library.redistribution_array(made), slabs.local_shape)

    def put(turn):
        array[...] = given(slabs.local_shape, turn)
        return array

    def in_c(by_alltoallw):
        def run(array):
            library.redistribution_run(made, steps, FACTOR, by_alltoallw)
            return array

        return batch(put, run)

    return {
        "jaxmpi": batch(lambda turn: jnp.array(given(slabs.local_shape, turn)), looped(step, steps)),
        "C, packed": in_c(0),
        "C, alltoallw": in_c(1),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contender (default: %(default)s)")
    options = parser.parse_args()
    library, groups = load_c(), {}
    for n, steps in STEPS.items():
        slabs, pencils = (jaxmpi.Grid(processes, (n, n, n)) for processes in ((SIZE, 1, 1), (1, SIZE, 1)))
        samples = take_turns(contenders(library, slabs, pencils, steps), options.rounds)
        groups[f"redistribution of {n}^3 on {SIZE} ranks"] = samples
        figure(f"redistribute_{n}_vs_raw_c_{SIZE}_ranks", ratio(samples, "jaxmpi", "C, packed"), "<= 1.1")
        figure(f"redistribute_{n}_vs_alltoallw_{SIZE}_ranks", ratio(samples, "jaxmpi", "C, alltoallw"), "<= 0.9")
    conclude(f"redistribute_wrong_elements_{SIZE}_ranks", groups)


if __name__ == "__main__":
    main()
