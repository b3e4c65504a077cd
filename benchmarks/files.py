"""Files: `python -m jaxmpi.run -n 2 benchmarks/files.py`, on 2 or 4 ranks.

A field of float32, cut along its first axis, is written to a folder. The contenders take turns, each to a new file,
which is read back and removed outside of the clock. Each turn begins with another one: the first finds the memory of
the files before not yet free, and can take twice as long.

  jaxmpi          `jaxmpi.io.save`: each rank writes its chunks, with checksums
  rank 0          the blocks are gathered on rank 0 (`Grid.gather`), which writes one file of NumPy's
  MPI-IO          mpi4py's `MPI.File.Write_at_all` of the bytes alone, each rank at its place

Then a `Writer` beside a computation: steps that take as long to compute as to write are computed alone, written alone,
and computed while they are written. What is hidden is (computed alone + written alone - both) / written alone.

The figures are medians of the ratios of each turn. What was written is compared with what was given, in each turn.
Prints lines `name: value` as quick.py does. The folder decides what is measured: memory or a disk.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import jaxmpi
import jaxmpi.io

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
GOALS = {"rank 0": (">= 1.5", "rank_0"), "MPI-IO": (">= 0.5", "mpi_io")}
STEPS = 6
"""Steps of a turn of the writer."""


def timed(work):
    """Seconds on the slowest rank."""
    COMM.Barrier()
    begin = time.perf_counter()
    work()
    return COMM.allreduce(time.perf_counter() - begin, MPI.MAX)


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


CONTENDERS = {"jaxmpi": by_jaxmpi, "rank 0": by_rank_0, "MPI-IO": by_mpi}


def remove(folder):
    COMM.Barrier()
    if RANK == 0:
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    COMM.Barrier()


def writing(folder, grid, rounds):
    """Seconds by contender, one per turn, and the elements that were wrong."""
    seconds, wrong = {name: [] for name in CONTENDERS}, dict.fromkeys(CONTENDERS, 0)
    for turn in range(rounds + 1):  # the first compiles, and its time does not count
        block = jnp.asarray(np.random.default_rng([turn, RANK]).random(grid.local_shape, np.float32))
        jax.block_until_ready(block)
        first = turn % len(CONTENDERS)
        for number, (name, write) in enumerate([*CONTENDERS.items()][first:] + [*CONTENDERS.items()][:first]):
            back = []
            spent = timed(lambda: back.append(write(folder / str(number), block, grid)))  # noqa: B023
            seconds[name] += [spent] if turn else []
            wrong[name] += int(np.count_nonzero(np.asarray(back[0]()) != np.asarray(block)))
            remove(folder)
    return seconds, {name: COMM.allreduce(count) for name, count in wrong.items()}


def overlap(folder, grid, rounds):
    """What part of the writing is hidden behind a computation of the same length, one value per turn."""

    @jax.jit
    def compute(x, times):
        return jax.lax.fori_loop(0, times, lambda _, x: 0.9999 * x + 1e-4 * jnp.sin(x), x)

    x = jnp.asarray(np.random.default_rng(RANK).random(grid.local_shape, np.float32))
    jax.block_until_ready(compute(x, 1))

    def run(times, write):
        def work():
            y = x
            with jaxmpi.io.Writer(folder / "series", grid) as out:
                for step in range(STEPS):
                    y = jax.block_until_ready(compute(y, times)) if times else y
                    if write:
                        out.append(float(step), {"x": y})

        spent = timed(work)
        remove(folder)
        return spent

    hidden = []
    one = statistics.median(timed(lambda: jax.block_until_ready(compute(x, 4))) for _ in range(3)) / 4
    for turn in range(rounds + 1):
        alone = run(0, True)
        times = max(1, round(alone / STEPS / one))
        computed, both = run(times, False), run(times, True)
        hidden += [((computed + alone - both) / alone, alone, computed, both)] if turn else []
    return hidden


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=6, help="turns of each contender (default: %(default)s)")
    parser.add_argument("--mib", type=int, default=1024, help="of the field (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where files go (default: that of temporary files)")
    options = parser.parse_args()
    made = tempfile.mkdtemp(dir=options.folder) if RANK == 0 else None
    folder = Path(COMM.bcast(made))
    try:
        seconds, wrong = writing(folder, jaxmpi.Grid((0, 1), (options.mib, 1 << 18)), options.rounds)
        hidden = overlap(folder, jaxmpi.Grid((0, 1), (max(SIZE, options.mib // 8), 1 << 18)), options.rounds)
    finally:
        COMM.Barrier()
        if RANK == 0:
            shutil.rmtree(folder)
    if RANK > 0:
        return
    for peer, (goal, label) in GOALS.items():
        value = statistics.median(b / a for a, b in zip(seconds["jaxmpi"], seconds[peer], strict=True))
        print(f"save_{options.mib}MiB_speed_vs_{label}_{SIZE}_ranks: {value:.4g}  (goal {goal})")
    print(f"writer_hidden_behind_computation_{SIZE}_ranks: {statistics.median(part for part, *_ in hidden):.2g}")
    total = sum(wrong.values())
    print(f"save_wrong_elements_{SIZE}_ranks: {total}  (goal 0)")
    print(f"\n{options.mib} MiB from {SIZE} ranks, GB/s, median and quartiles:")
    for who, times in seconds.items():
        low, middle, high = (f"{options.mib / 1024 * 1.0737 / value:.3g}" for value in statistics.quantiles(times, n=4))
        print(f"  {who:10} {middle:>8}  ({high} - {low})")
    for name, column in (("written", 1), ("computed", 2), ("both", 3)):
        print(f"  {STEPS} steps {name:10} {statistics.median(row[column] for row in hidden):.3g} s")
    if total:
        sys.exit(1)


if __name__ == "__main__":
    main()
