"""Files: `python -m jaxmpi.run -n 2 benchmarks/files.py`, on 2 or 4 ranks.

A field of float32, cut along its first axis, is written to a folder. The contenders take turns, each to a new file,
which is read back and removed outside of the clock. The first of a turn finds the memory of the
files before not yet free, and can take twice as long.

  jaxmpi          `jaxmpi.io.save`: each rank writes its chunks, with checksums
  rank 0          the blocks are gathered on rank 0 (`Grid.gather`), which writes one file of NumPy's
  MPI-IO          mpi4py's `MPI.File.Write_at_all` of the bytes alone, each rank at its place

Then a `Writer` beside a computation: steps that take as long to compute as to write are computed alone, written alone,
and computed while they are written. What is hidden is (computed alone + written alone - both) / written alone.

The figures are medians of the ratios of each turn. What was written is compared with what was given, in each turn.
Prints lines `name: value` as quick.py does. TMPDIR decides what is measured: memory or a disk.
"""

import argparse
import functools
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import jaxmpi
import jaxmpi.io
from jaxmpi._bench.data import count_wrong
from jaxmpi._bench.report import conclude, figure
from jaxmpi._bench.timing import COMM, Batch, ratio, take_turns

RANK, SIZE = COMM.rank, COMM.size
STEPS = 6
"""Steps of a turn of the writer."""


def by_jaxmpi(path, block, grid):
    jaxmpi.io.save(path, {"x": block}, grid=grid)
    return lambda: jaxmpi.io.load(path, grid=grid)["x"]


def by_rank_0(path, block, grid):
    whole = grid.gather(block)
    if RANK == 0:
        np.save(path, whole)
    COMM.Barrier()
    return lambda: np.load(f"{path}.npy", mmap_mode="r")[grid.slices]


def by_mpi(path, block, grid):
    begin = grid.slices[0].start * (block.nbytes // len(block))
    file = MPI.File.Open(COMM, str(path), MPI.MODE_CREATE | MPI.MODE_WRONLY)
    file.Write_at_all(begin, np.asarray(block).view(np.uint8).reshape(-1))
    file.Close()
    return lambda: np.fromfile(path, np.float32, block.size, offset=begin).reshape(block.shape)


CONTENDERS = {"jaxmpi": by_jaxmpi, "jaxmpi, rank 0": by_rank_0, "MPI-IO": by_mpi}


def remove(folder):
    COMM.Barrier()
    if RANK == 0:
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    COMM.Barrier()


def writing(folder, grid):
    """The contenders: all write a field, which is another one in each turn."""

    @functools.lru_cache(1)
    def given(turn):
        return jnp.asarray(np.random.default_rng([turn, RANK]).random(grid.local_shape, np.float32))

    def contender(write):
        def wrong(turn, read):
            found = count_wrong(read(), np.asarray(given(turn)))
            remove(folder)
            return found

        return Batch(1, given, lambda block: write(folder / "field", block, grid), wrong)

    return {name: contender(write) for name, write in CONTENDERS.items()}


def overlap(folder, grid, rounds):
    """Steps that are written alone, computed alone, and computed while they are written."""

    @jax.jit
    def compute(x, times):
        return jax.lax.fori_loop(0, times, lambda _, x: 0.9999 * x + 1e-4 * jnp.sin(x), x)

    x = jnp.asarray(np.random.default_rng(RANK).random(grid.local_shape, np.float32))

    def steps(times, write):
        def run(x):
            y = x
            with jaxmpi.io.Writer(folder / "series", grid) as out:
                for step in range(STEPS):
                    y = jax.block_until_ready(compute(y, times)) if times else y
                    if write:
                        out.append(float(step), {"x": y})

        return Batch(1, lambda turn: x, run, lambda turn, result: remove(folder) or 0)

    one = take_turns({"": Batch(4, lambda turn: x, lambda x: jax.block_until_ready(compute(x, 4)))}, 3)[""].median
    alone = take_turns({"": steps(0, True)}, 1)[""].median
    times = max(1, round(alone / STEPS / one))
    return take_turns({"written": steps(0, True), "computed": steps(times, False), "both": steps(times, True)}, rounds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=6, help="turns of each contender (default: %(default)s)")
    parser.add_argument("--mib", type=int, default=1024, help="of the field (default: %(default)s)")
    options = parser.parse_args()
    made = tempfile.mkdtemp() if RANK == 0 else None
    folder = Path(COMM.bcast(made))
    try:
        saved = take_turns(writing(folder, jaxmpi.Grid((0, 1), (options.mib, 1 << 18))), options.rounds)
        series = overlap(folder, jaxmpi.Grid((0, 1), (max(SIZE, options.mib // 8), 1 << 18)), options.rounds)
    finally:
        COMM.Barrier()
        if RANK == 0:
            shutil.rmtree(folder)
    size = f"save_{options.mib}MiB_speed_vs"
    figure(f"{size}_rank_0_{SIZE}_ranks", ratio(saved, "jaxmpi, rank 0", "jaxmpi"), ">= 1.5")
    figure(f"{size}_mpi_io_{SIZE}_ranks", ratio(saved, "MPI-IO", "jaxmpi"), ">= 0.5")
    written, computed, both = (series[name].median for name in ("written", "computed", "both"))
    figure(f"writer_hidden_behind_computation_{SIZE}_ranks", (computed + written - both) / written)
    groups = {f"{options.mib} MiB from {SIZE} ranks": saved, f"{STEPS} steps of an eighth": series}
    conclude(f"save_wrong_elements_{SIZE}_ranks", groups, unit="s")


if __name__ == "__main__":
    main()
