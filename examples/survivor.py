"""A shallow-water model goes on when processes die: the others have copies of the state, and take over.

The model is that of shallow_water.py. Every few steps the program saves the state. By default it uses a
`jaxmpi.survive.Replica`: each process sends its part to the next one, which keeps it. With `--files DIR` it uses files.
If a process dies the others get an error, make a communicator without it, divide the sea again, and go on from the
last saved state. The result is the same as in a run in which nobody dies, but for rounding.

    python -m jaxmpi.run -n 4 --survive examples/survivor.py --kill 1@300 --kill 2@700

With `--spare 2` after `--survive` two more processes wait, and take the places of processes that die. So the sea is
divided as before.

`--kill RANK@STEP` lets a process end itself by SIGKILL. Any other death has the same effect, `kill -9` from another
shell or an exception. If two neighbours die at the same time, the copy that one kept of the other is lost, and the
program says so: `--copies 2` keeps another copy. The program writes `survivor.png`, with the division of the sea at the
beginning and at the end.
"""

import argparse
import os
import signal
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import shallow_water
from mpi4py import MPI

import jaxmpi

Slices = tuple[slice, ...]


def division_of(grid: jaxmpi.Grid) -> list[Slices]:
    """Return the part of each process."""
    return [grid.slices_of(rank) for rank in range(grid.comm.size)]


Tree = dict[str, Any]
WIDTH = {"fields": 1}
"""The width of the halos in a `Tree`. Tendencies have none."""


def tree_of(step: int, state: shallow_water.State) -> Tree:
    return {"step": step, "fields": tuple(state[:3]), "tendencies": tuple(state[3:])}


class Memory:
    """Keeps the last state in the memory of the processes."""

    def __init__(self, tree: Tree, grid: jaxmpi.Grid, copies: int) -> None:
        # Nothing is saved here: a spare process makes it when it steps in, while the others restore.
        self.replica = jaxmpi.survive.Replica(tree, grid=grid, width=WIDTH, copies=copies, save=False)

    def save(self, tree: Tree, grid: jaxmpi.Grid) -> None:
        self.replica.save(tree)

    def restore(self, grid: jaxmpi.Grid) -> Tree | None:
        return self.replica.restore(grid)


class Files:
    """Keeps the last states in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, tree: Tree, grid: jaxmpi.Grid) -> None:
        jaxmpi.io.checkpoint(self.folder, tree, step=tree["step"], grid=grid, width=WIDTH, overwrite=True)

    def restore(self, grid: jaxmpi.Grid) -> Tree | None:
        last = jaxmpi.io.latest(self.folder)
        return None if last is None else jaxmpi.io.load(last, grid=grid, width=WIDTH)


def start(grid: jaxmpi.Grid, model: shallow_water.Model) -> shallow_water.State:
    ny, nx = grid.global_shape
    return model.start(*[jnp.asarray(a, jnp.float32) for a in shallow_water.initial_fields(nx, ny)])


def restart(kept: Memory | Files, grid: jaxmpi.Grid, model: shallow_water.Model) -> tuple[int, shallow_water.State]:
    """Return the last saved step and state, or the first ones, on this grid."""
    tree = kept.restore(grid)
    if tree is None:
        return 0, start(grid, model)
    return tree["step"], shallow_water.State(*tree["fields"], *tree["tendencies"])  # a step begins with the halos


def advance(
    model: shallow_water.Model, state: shallow_water.State, done: int, stop: int, death: int | None
) -> shallow_water.State:
    """Advance from step `done` to `stop`; at the step `death` this process ends."""
    if death is not None and done <= death < stop:
        jax.block_until_ready(model.advance(state, death - done))
        os.kill(os.getpid(), signal.SIGKILL)
    return model.advance(state, stop - done)


def run(options: argparse.Namespace, steps: int) -> tuple[shallow_water.State, jaxmpi.Grid]:
    nx, ny = options.size
    death = dict(options.kill).get(MPI.COMM_WORLD.rank)
    grid = shallow_water.make_grid(nx, ny)
    model = shallow_water.make_model(grid)
    first = tree_of(0, jax.eval_shape(lambda: start(grid, model)))  # shapes alone: nothing is communicated
    kept = Memory(first, grid, options.copies) if options.files is None else Files(options.files)
    done, state = 0, None
    while done < steps:
        try:
            with jaxmpi.survive.deaths(uniform=True):  # all that live have done these steps and saved, or all raise
                if state is None:
                    done, state = restart(kept, grid, model)
                stop = min(done + options.every, steps)
                state = advance(model, state, done, stop, death)
                kept.save(tree_of(stop, state), grid)
            done = stop
        except jaxmpi.survive.ProcessFailed as failure:
            begin = time.perf_counter()
            comm = jaxmpi.survive.recover()  # calls without comm= use it from now on, also for the grid
            lost, size = jaxmpi.survive.lost(grid.comm, comm), grid.comm.size
            grid = shallow_water.make_grid(nx, ny)
            model, state = shallow_water.make_model(grid), None
            if comm.rank == 0:
                took = time.perf_counter() - begin
                of = f" in {failure.operation}" if failure.operation else ""
                print(f"step {done}: {len(lost)} of {size} processes lost{of}; recovered in {took:.2f} s")
    assert state is not None
    return state, grid


def save_picture(path: Path, fields: np.ndarray, divisions: list[list[Slices]], days: float) -> None:
    """Draw the relative vorticity, with the parts of the processes at the beginning and at the end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, both = plt.subplots(2, 1, sharex=True, figsize=(9.5, 9), layout="constrained")
    vorticity = shallow_water.relative_vorticity(fields)
    limit = float(np.quantile(np.abs(vorticity), 0.998))
    for axes, division, when in zip(both, divisions, ("at the beginning", "at the end"), strict=True):
        shallow_water.show(axes, vorticity, "relative vorticity / f", limit, "RdBu_r")
        for part in division:
            south, north, west, east = (shallow_water.DX / 1e3 * end for s in part for end in (s.start, s.stop))
            axes.plot([west, east, east, west, west], [south, south, north, north, south], color="0.2", linewidth=1.5)
        many = "es" if len(division) > 1 else ""
        axes.set_title(f"{len(division)} process{many} {when}, sea after {days:.1f} days", loc="left")
    both[-1].set_xlabel("x [km]")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _killed(text: str) -> tuple[int, int]:
    rank, step = text.split("@")
    return int(rank), int(step)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", nargs=2, type=int, default=(360, 180), metavar=("NX", "NY"), help="cells")
    parser.add_argument("--days", type=float, default=4.0, help="model days (default: %(default)s)")
    parser.add_argument("--every", type=int, default=50, metavar="N", help="steps between two saves")
    parser.add_argument("--copies", type=int, default=1, metavar="N", help="processes that keep each part")
    parser.add_argument("--files", type=Path, metavar="DIR", help="save in files there; needs zarr")
    parser.add_argument(
        "--kill", type=_killed, action="append", default=[], metavar="RANK@STEP", help="a process that ends itself"
    )
    parser.add_argument("--save-state", type=Path, metavar="FILE.npz", help="write the final h, u and v")
    parser.add_argument("--output-dir", type=Path, default=Path(), metavar="DIR", help="where the picture goes")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    steps = max(1, round(options.days * shallow_water.DAY / shallow_water.DT))
    first = division_of(shallow_water.make_grid(*options.size))  # a spare process waits here
    state, grid = run(options, steps)
    sea = shallow_water.gather_fields(state, grid)
    if sea is None:
        return
    options.output_dir.mkdir(parents=True, exist_ok=True)
    picture = (options.output_dir / "survivor.png").resolve()
    save_picture(picture, sea, [first, division_of(grid)], steps * shallow_water.DT / shallow_water.DAY)
    print(f"{steps} steps, {grid.comm.size} of {MPI.COMM_WORLD.size} processes left\nPicture: {picture}")
    if options.save_state:
        np.savez(options.save_state, h=sea[0], u=sea[1], v=sea[2])


if __name__ == "__main__":
    main()
