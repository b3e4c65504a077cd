"""A shallow-water model goes on as processes die: it is saved in memory, and those that live take over the rest.

The model is that of shallow_water.py. Every few steps each process sends what it has computed to its right neighbour,
which keeps it. If a process dies the others get an error, make a communicator without it, divide the sea anew among
themselves, and go on from what was saved last. The result is that of a run in which nobody dies, but for rounding.

    python -m jaxmpi.run -n 4 --survive examples/survivor.py --kill 1@300 --kill 2@700

`--kill RANK@STEP` lets a process end itself by SIGKILL; any other death does as well, `kill -9` from another shell or
an exception. If two neighbours die at the same time what one of them kept of the other is lost, and the program says
so. It writes `survivor.png`, with the division of the sea at the beginning and at the end.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import shallow_water
from mpi4py import MPI

import jaxmpi

Slices = tuple[slice, ...]


class Saved(NamedTuple):
    """What this process keeps of a step: the parts of the sea that are its own and its left neighbour's."""

    step: int
    parts: list[tuple[Slices, np.ndarray]]


def division_of(grid: jaxmpi.Grid) -> list[Slices]:
    """The part of each process."""
    return [grid.slices_of(rank) for rank in range(grid.comm.size)]


def save(step: int, state: shallow_water.State, grid: jaxmpi.Grid) -> Saved:
    """Sends this process's part to the right neighbour, and gets that of the left one."""
    inner = [np.asarray(field)[1:-1, 1:-1] for field in state[:3]]
    own = grid.slices, np.stack([*inner, *state[3:]])
    comm = grid.comm
    left = comm.sendrecv(own, (comm.rank + 1) % comm.size, source=(comm.rank - 1) % comm.size)
    return Saved(step, [own, left])


def put_together(saved: Saved, comm: MPI.Comm, shape: tuple[int, int]) -> np.ndarray:
    """All six fields of the whole sea, of the parts that the processes have."""
    sea = np.full((6, *shape), np.nan, np.float32)
    for parts in comm.allgather(saved.parts):
        for slices, part in parts:
            sea[:, slices[0], slices[1]] = part
    if np.isnan(sea).any():
        sys.exit("a process has died together with the one that kept its part: the sea is lost")
    return sea


def restart(saved: Saved | None, grid: jaxmpi.Grid, model: shallow_water.Model) -> shallow_water.State:
    """The state of the step that was saved last, or that of the beginning, on this grid."""
    ny, nx = grid.global_shape
    if saved is None:
        return model.start(*[jnp.asarray(a, jnp.float32) for a in shallow_water.initial_fields(nx, ny)])
    sea = jnp.asarray(put_together(saved, grid.comm, (ny, nx)))

    @jaxmpi.jit
    def divide(sea: jax.Array) -> shallow_water.State:
        fields = grid.scatter(tuple(sea[:3]), None, width=1, boundary=shallow_water.BOUNDARY)
        return shallow_water.State(*fields, *grid.scatter(tuple(sea[3:]), None, width=0))

    return divide(sea)


def advance(
    model: shallow_water.Model, state: shallow_water.State, done: int, stop: int, death: int | None
) -> shallow_water.State:
    """Advances from step `done` to `stop`; at the step `death` this process ends."""
    if death is not None and done <= death < stop:
        jax.block_until_ready(model.advance(state, death - done))
        os.kill(os.getpid(), signal.SIGKILL)
    return model.advance(state, stop - done)


def run(options: argparse.Namespace, steps: int) -> tuple[shallow_water.State, jaxmpi.Grid]:
    nx, ny = options.size
    death = dict(options.kill).get(MPI.COMM_WORLD.rank)
    grid = shallow_water.make_grid(nx, ny)
    model = shallow_water.make_model(grid)
    saved, done, state = None, 0, None
    while done < steps:
        stop = min(done + options.every, steps)
        try:
            with jaxmpi.survive(uniform=True):  # all that live have done these steps and saved them, or none has
                if state is None:
                    state = restart(saved, grid, model)
                state = advance(model, state, done, stop, death)
                kept = save(stop, state, grid)
            saved, done = kept, stop
        except jaxmpi.ProcessFailed as failure:
            begin = time.perf_counter()
            comm = jaxmpi.recover()  # calls without comm= use it from now on, so that the grid is made of it
            lost = jaxmpi.lost(grid.comm, comm)
            grid = shallow_water.make_grid(nx, ny)
            model, state = shallow_water.make_model(grid), None
            if comm.rank == 0:
                took = time.perf_counter() - begin
                of = f" in {failure.operation}" if failure.operation else ""
                print(
                    f"step {done}: {len(lost)} of {len(lost) + comm.size} processes lost{of}; recovered in {took:.2f} s"
                )
    assert state is not None
    return state, grid


def save_picture(path: Path, fields: np.ndarray, divisions: list[list[Slices]], days: float) -> None:
    """Draws the relative vorticity, with the parts of the processes at the beginning and at the end."""
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
    parser.add_argument(
        "--kill", type=_killed, action="append", default=[], metavar="RANK@STEP", help="a process that ends itself"
    )
    parser.add_argument("--save-state", type=Path, metavar="FILE.npz", help="write the final h, u and v")
    parser.add_argument("--output-dir", type=Path, default=Path(), metavar="DIR", help="where the picture goes")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    steps = max(1, round(options.days * shallow_water.DAY / shallow_water.DT))
    first = division_of(shallow_water.make_grid(*options.size))
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
