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

Prints lines `name: value` as quick.py does. All fields are compared with NumPy's, every element, on every rank.
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

try:
    import mpi4jax
except ImportError:
    mpi4jax = None

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
W, STEPS, FACTOR = 2, 1000, np.float32(0.9999)
GRIDS = {2: (2, 1), 4: (2, 2)}
SIZES = {"8_fields": (8, 256), "1_field_of_16": (1, 16)}
WITHOUT = "without"
GOALS = {
    ("8_fields", "mpi4jax"): ">= 10",
    ("8_fields", "C"): "<= 1.2",
    ("1_field_of_16", "mpi4jax"): ">= 5",
    ("1_field_of_16", "C"): "<= 2",
}


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


def looped(exchange, jit):
    run = jit(lambda fields, once: jax.lax.fori_loop(0, STEPS, lambda _, f: scale(exchange(f), once), fields))

    def batch(fields):
        given = jax.block_until_ready([jnp.asarray(field) for field in fields])
        COMM.Barrier()
        begin = time.perf_counter()
        result = jax.block_until_ready(run(given, 1))
        return time.perf_counter() - begin, result

    return batch


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

    def batch(given):
        for field, values in zip(fields, given, strict=True):
            field[...] = values
        COMM.Barrier()
        begin = time.perf_counter()
        library.halos_run(made, STEPS, FACTOR)
        return time.perf_counter() - begin, fields

    return batch


def contenders(library, number, n):
    periodic = tuple(count > 1 for count in GRIDS[SIZE])
    shape = tuple(count * n for count in GRIDS[SIZE])
    grid = jaxmpi.Grid(GRIDS[SIZE], shape, periodic=periodic)
    widths = tuple(W if count > 1 else (W, W) for count in GRIDS[SIZE])
    made = {
        "jaxmpi": looped(lambda fields: grid.exchange(fields, widths), jaxmpi.jit),
        WITHOUT: looped(lambda fields: fields, jaxmpi.jit),
        "jaxmpi pattern": looped(by_hand(lambda x, y, source, dest: jaxmpi.sendrecv(x, y, source, dest)), jaxmpi.jit),
        "C, at once": in_c(library, number, n, 0),
        "C, in turn": in_c(library, number, n, 1),
    }
    if mpi4jax is not None:
        peer = lambda x, y, source, dest: mpi4jax.sendrecv(x, y, source, dest, comm=COMM)  # noqa: E731
        made["mpi4jax"] = looped(by_hand(peer), jax.jit)
    return made


def measure(library, number, n, rounds):
    """Seconds of a step by contender, one per round, and the elements that were wrong."""
    made = contenders(library, number, n)
    seconds = {name: [] for name in made}
    wrong = dict.fromkeys(made, 0)
    for turn in range(rounds + 1):  # the first compiles, and its time does not count
        expected, given = right(number, n, turn), start(number, n, turn)
        for name, batch in made.items():
            spent, result = batch(given)
            seconds[name] += [COMM.allreduce(spent, MPI.MAX) / STEPS] if turn else []
            for x, y in zip(result, expected, strict=True) if name != WITHOUT else ():
                wrong[name] += np.count_nonzero(~np.isclose(np.asarray(x), y, rtol=1e-6, atol=0))
    return seconds, {name: COMM.allreduce(count) for name, count in wrong.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="batches of each contender (default: %(default)s)")
    rounds = parser.parse_args().rounds
    if SIZE not in GRIDS:
        sys.exit(f"halos.py runs on {' or '.join(map(str, GRIDS))} ranks: python -m jaxmpi.run -n 2 ...")
    library = load_c()
    found = {name: measure(library, number, n, rounds) for name, (number, n) in SIZES.items()}
    if RANK > 0:
        return
    for name, (seconds, _) in found.items():
        seconds["C"] = min((seconds["C, at once"], seconds["C, in turn"]), key=statistics.median)
        for peer in ("mpi4jax", "C"):
            goal = GOALS[name, peer]
            if peer not in seconds:
                print(f"halo_{name}_vs_{peer}_on_{SIZE}: -  (goal {goal}; {peer} is missing)")
                continue
            pairs = zip(seconds["jaxmpi"], seconds[peer], strict=True)
            value = statistics.median(a / b if peer == "C" else b / a for a, b in pairs)
            label = "vs_mpi4jax_pattern" if peer == "mpi4jax" else "vs_raw_c"
            print(f"halo_{name}_{label}_{SIZE}_ranks: {value:.4g}  (goal {goal})")
    print(f"halo_wrong_elements_{SIZE}_ranks: {sum(sum(wrong.values()) for _, wrong in found.values())}  (goal 0)")
    for name, (seconds, _) in found.items():
        print(f"\n{name} on {SIZE} ranks, us per exchange, median and quartiles:")
        for who, times in seconds.items():
            if who != "C":
                low, middle, high = (f"{1e6 * value:.4g}" for value in statistics.quantiles(times, n=4))
                print(f"  {who:15} {middle:>8}  ({low} - {high})")
    if any(any(wrong.values()) for _, wrong in found.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
