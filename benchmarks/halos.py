"""The exchange of halos: `python -m jaxmpi.run -n 2 benchmarks/halos.py`, on 2 or 4 ranks.

Fields of float32 with a halo of two cells, on 2 ranks in a row or on 2 x 2, periodic along the axes that are divided.
A step is the exchange of all fields, and then the first rows of the first field are multiplied by 0.9999: data is not
zero and changes, and what is measured is the exchange. The contenders take turns, 1000 steps in a loop at a time:

  jaxmpi          one `grid.exchange` of all fields, in a `lax.fori_loop` inside one compiled call
  mpi4jax         what users write: slices, `sendrecv` and `.at[].set` per field and direction, one axis after the other
  jaxmpi pattern  the same with `jaxmpi.sendrecv`
  C               halos.c: packed buffers, MPI_Isend and MPI_Irecv, one message to each rank; the faster of two ways:
                  all directions at once, and one axis after the other
  without         jaxmpi's loop without an exchange: the rest of a step, which is in all figures, as XLA executes it

Prints lines `name: value` as quick.py does. The figures are medians of the ratios of each turn. All fields are compared
with NumPy's, every element, on every rank.
"""

import argparse
import ctypes
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from loops import looped, multiply
from peers import MISSING, compile_c, load_package

import jaxmpi
from jaxmpi._bench.data import count_wrong
from jaxmpi._bench.report import conclude, figure
from jaxmpi._bench.timing import COMM, Batch, ratio, take_turns

RANK, SIZE = COMM.rank, COMM.size
W, STEPS, FACTOR = 2, 1000, np.float32(0.9999)
GRIDS = {2: (2, 1), 4: (2, 2)}
SIZES = {"8_fields": (8, 256), "1_field_of_16": (1, 16)}
GOALS = {"8_fields": (">= 10", "<= 1.2"), "1_field_of_16": (">= 5", "<= 2")}
"""Times as fast as mpi4jax, and of the time of C."""


def load_c():
    loaded = compile_c("halos.c")
    loaded.halos_make.restype = ctypes.c_void_p
    loaded.halos_make.argtypes = [ctypes.c_void_p] + 7 * [ctypes.c_int]
    loaded.halos_run.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_float]
    return loaded


# --- data and witness ------------------------------------------------------------------------------------------------


def blocks_of_all(number, n, turn):
    """The fields of all ranks without halos: (rank, field, n, n)."""
    numbers = np.random.default_rng([number, n, turn]).random((SIZE, number, n, n), np.float32)
    return numbers + np.float32(1)


def start(number, n, turn):
    """This rank's fields, with halos of zeros."""
    return [np.pad(field, W) for field in blocks_of_all(number, n, turn)[RANK]]


@functools.lru_cache(1)
def right(number, n, turn):
    """What this rank must have after the steps."""
    blocks = blocks_of_all(number, n, turn)
    before = blocks.copy()
    for step in range(STEPS):
        blocks[:, 0, :W] *= FACTOR
        if step < STEPS - 1:
            before = blocks.copy()
    dims, (i, j) = GRIDS[SIZE], np.unravel_index(RANK, GRIDS[SIZE])
    result = []
    for field in range(number):
        grid = before[:, field].reshape(*dims, n, n)
        whole = np.concatenate([np.concatenate(list(row), axis=1) for row in grid])
        pads = [(W, W) if count > 1 else (0, 0) for count in dims]
        around = np.pad(np.pad(whole, pads, mode="wrap"), [(0, 0) if count > 1 else (W, W) for count in dims])
        block = around[i * n : (i + 1) * n + 2 * W, j * n : (j + 1) * n + 2 * W]
        block[W:-W, W:-W] = blocks[RANK, field]
        if field == 0:  # the halo beside the rows that are multiplied, too
            block[W : 2 * W, :W] *= FACTOR
            block[W : 2 * W, -W:] *= FACTOR
        result.append(block)
    return result


def scale(fields, once):
    return [multiply(fields[0], slice(W, 2 * W), FACTOR, once), *fields[1:]]


# --- contenders ------------------------------------------------------------------------------------------------------


def wrong(number, n):
    """Return the check of the fields after a batch."""

    def check(turn, result):
        pairs = zip(result, right(number, n, turn), strict=True)
        return sum(count_wrong(field, expected, tolerance=1e-6) for field, expected in pairs)

    return check


def in_loop(exchange, number, n, jit=jaxmpi.jit):
    run = looped(lambda fields, once: scale(exchange(fields), once), STEPS, jit=jit)
    return Batch(STEPS, lambda turn: [jnp.array(field) for field in start(number, n, turn)], run, wrong(number, n))


def by_hand(sendrecv):
    dims = GRIDS[SIZE]
    at = np.unravel_index(RANK, dims)

    def rank(axis, side):
        there = list(at)
        there[axis] = (there[axis] + side) % dims[axis]
        return int(np.ravel_multi_index(there, dims))

    def part(axis, cells):
        return (slice(None),) * axis + (cells,)

    def exchange(fields):
        results = []
        for field in fields:
            for axis in range(2):
                if dims[axis] == 1:
                    continue
                n = field.shape[axis]
                low, high = field[part(axis, slice(W, 2 * W))], field[part(axis, slice(n - 2 * W, n - W))]
                from_high = sendrecv(low, low, rank(axis, 1), rank(axis, -1))
                from_low = sendrecv(high, high, rank(axis, -1), rank(axis, 1))
                field = field.at[part(axis, slice(n - W, n))].set(from_high)
                field = field.at[part(axis, slice(0, W))].set(from_low)
            results.append(field)
        return results

    return exchange


def in_c(library, number, n, in_turn):
    fields = [np.zeros((n + 2 * W, n + 2 * W), np.float32) for _ in range(number)]
    pointers = (ctypes.c_void_p * number)(*(field.ctypes.data for field in fields))
    made = library.halos_make(pointers, number, n, n, W, *GRIDS[SIZE], in_turn)

    def put(turn):
        for field, values in zip(fields, start(number, n, turn), strict=True):
            field[...] = values
        return fields

    def run(fields):
        library.halos_run(made, STEPS, FACTOR)
        return fields

    return Batch(STEPS, put, run, wrong(number, n))


def contenders(library, number, n):
    periodic = tuple(count > 1 for count in GRIDS[SIZE])
    shape = tuple(count * n for count in GRIDS[SIZE])
    grid = jaxmpi.Grid(GRIDS[SIZE], shape, periodic=periodic)
    widths = tuple(W if count > 1 else (W, W) for count in GRIDS[SIZE])
    without = in_loop(lambda fields: fields, number, n)
    made = {
        "jaxmpi": in_loop(lambda fields: grid.exchange(fields, widths), number, n),
        "without": Batch(STEPS, without.start, without.run),
        "jaxmpi pattern": in_loop(by_hand(jaxmpi.sendrecv), number, n),
        "C, at once": in_c(library, number, n, 0),
        "C, in turn": in_c(library, number, n, 1),
    }
    if mpi4jax := load_package("mpi4jax"):
        made["mpi4jax"] = in_loop(by_hand(functools.partial(mpi4jax.sendrecv, comm=COMM)), number, n, jit=jax.jit)
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="batches of each contender (default: %(default)s)")
    rounds = parser.parse_args().rounds
    if SIZE not in GRIDS:
        sys.exit(f"halos.py runs on {' or '.join(map(str, GRIDS))} ranks: python -m jaxmpi.run -n 2 ...")
    library, groups = load_c(), {}
    for name, (number, n) in SIZES.items():
        samples = take_turns(contenders(library, number, n), rounds)
        groups[f"exchange of {name} on {SIZE} ranks"] = samples
        of_peer, of_c = GOALS[name]
        c = min(("C, at once", "C, in turn"), key=lambda name: samples[name].median)
        figure(f"halo_{name}_vs_mpi4jax_pattern_{SIZE}_ranks", ratio(samples, "mpi4jax", "jaxmpi"), of_peer)
        figure(f"halo_{name}_vs_raw_c_{SIZE}_ranks", ratio(samples, "jaxmpi", c), of_c)
    conclude(f"halo_wrong_elements_{SIZE}_ranks", groups, missing=MISSING)


if __name__ == "__main__":
    main()
