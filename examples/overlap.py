"""Halos that travel while the cells that need none are computed: the times with and without, and a timeline.

Heat spreads on a sheet that is divided among processes. A step exchanges halos of 8 cells and then makes 8 sweeps of a
stencil. After them the cells of the block are right. There are two ways to do a step:

    without overlap    u = grid.exchange(u); the whole block
    with overlap       request = grid.start(u); the interior of the block, which needs no halo;
                       u = grid.finish(request); the rim

Both give the same numbers, to the last bit. They take turns, and the time of a step is the median of all turns.

    python -m jaxmpi.run -n 2 overlap.py                  # or any other number
    python -m jaxmpi.run -n 2 overlap.py --save           # with overlap.png, a timeline of the last steps

Overlap gains the time in which messages travel, and the time in which a neighbour is late by chance. It loses the time
to compute the rim in pieces. A processor moves the messages: on one machine with as many processes as cores overlap
hides waiting, but no work (docs/nonblocking.md).

The picture needs all processes on one machine, because it uses their clocks.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

PICTURE = "overlap.png"
TIMELINE = "overlap-timeline"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", nargs=2, type=int, default=(1024, 1024), metavar=("NY", "NX"), help="cells")
    parser.add_argument("--steps", type=int, default=10, help="in a turn (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=10, help="of each way (default: %(default)s)")
    parser.add_argument("--save", action="store_true", help=f"write {PICTURE}, and the folder {TIMELINE}")
    parser.add_argument("--save-state", type=Path, metavar="FILE.npz", help="write the final temperatures")
    parser.add_argument("--output-dir", type=Path, default=Path(), metavar="DIR", help="where the picture goes")
    return parser.parse_args()


options = parse_options()
if options.save:  # jaxmpi reads it at import
    os.environ["JAXMPI_TRACE"] = str(options.output_dir / TIMELINE)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import lax  # noqa: E402

import jaxmpi  # noqa: E402

WIDTH = 8  # of the halo, and sweeps in a step
SHOWN = 3  # steps in the picture, of each way
NAMES = ("without overlap", "with overlap")
INNER = slice(WIDTH, -WIDTH)

Step = Callable[[jax.Array], jax.Array]


def sweeps(u: jax.Array) -> jax.Array:
    """Return the inner (a - 2 WIDTH, b - 2 WIDTH) of (a, b) cells, after WIDTH sweeps.

    Each sweep leaves the outermost cells unchanged, so wrong values come nearer by one cell each time. A cell becomes a
    mean with weights that are powers of two: so rounding does not depend on how the compiler orders the products.
    """

    def sweep(_: int, u: jax.Array) -> jax.Array:
        around = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]
        return u.at[1:-1, 1:-1].set(0.5 * u[1:-1, 1:-1] + 0.125 * around)

    return lax.fori_loop(0, WIDTH, sweep, u)[INNER, INNER]


def make_steps(grid: jaxmpi.Grid) -> tuple[Step, Step]:
    """Return a step without overlap and one with it, for a block with a halo."""

    def plain(u: jax.Array) -> jax.Array:
        u = grid.exchange(u, WIDTH)
        return u.at[INNER, INNER].set(sweeps(u))

    def overlapped(u: jax.Array) -> jax.Array:
        request = grid.start(u, WIDTH)
        interior = sweeps(u[INNER, INNER])
        u, interior = grid.finish(request, after=interior)
        rim = 3 * WIDTH  # cells from which the WIDTH cells of the rim come
        north, south = sweeps(u[:rim]), sweeps(u[-rim:])
        west, east = sweeps(u[INNER, :rim]), sweeps(u[INNER, -rim:])
        middle = jnp.concatenate([west, interior, east], axis=1)
        return u.at[INNER, INNER].set(jnp.concatenate([north, middle, south]))

    return plain, overlapped


def initial_temperatures(shape: tuple[int, int]) -> np.ndarray:
    """Return some hot disks."""
    y, x = np.mgrid[: shape[0], : shape[1]] / np.reshape(shape, (2, 1, 1))
    disks = ((0.2, 0.3, 0.1), (0.5, 0.5, 0.2), (0.8, 0.1, 0.05), (0.7, 0.8, 0.1))
    return sum(((y - cy) ** 2 + (x - cx) ** 2 < radius**2).astype(np.float32) for cy, cx, radius in disks)


def timed(run: Step, u: jax.Array, comm) -> tuple[float, jax.Array]:
    """Return the seconds that a turn takes on the slowest rank, and the result."""
    comm.Barrier()
    begin = time.perf_counter()
    u = jax.block_until_ready(run(u))
    return max(comm.allgather(time.perf_counter() - begin)), u


# The timeline.


def own_events(rank: int) -> list[dict]:
    """Return the operations of this process up to a barrier. jaxmpi writes them every tenth of a second."""
    folder = options.output_dir / TIMELINE
    path = max(folder.glob(f"*.{rank:05d}.json"))  # of the newest job: names begin with the time
    until = time.monotonic() + 20
    while time.monotonic() < until:
        events = [json.loads(line.removesuffix(",")) for line in path.read_text().splitlines()[1:] if line != "]"]
        if any(event["name"] == "barrier" for event in events):
            return [event for event in events if event["name"].startswith("Grid.")]
        time.sleep(0.1)
    sys.exit(f"{path} is not complete: does another job use the folder?")


def last_steps(events: list[dict]) -> tuple[list[dict], list[dict]]:
    """Return SHOWN steps without overlap, and with it, and the first operation of the next step."""
    plain = [event for event in events if event["name"] == "Grid.exchange"]
    overlapped = [event for event in events if event["name"] != "Grid.exchange"]
    return plain[-SHOWN - 1 :], overlapped[-2 * SHOWN - 2 : -1]


def spans(events: list[dict]) -> list[tuple[str, float, float]]:
    """Return what a process does, when, and for how long, in milliseconds: operations, and computation between them."""
    parts = []
    between = {"Grid.exchange": "whole block", "Grid.start": "interior", "Grid.finish": "rim"}
    names = {"Grid.exchange": "exchange", "Grid.start": "start", "Grid.finish": "wait"}
    for event, following in itertools.pairwise(events):
        end = event["ts"] + event["dur"]
        parts.append((names[event["name"]], event["ts"] / 1e3, event["dur"] / 1e3))
        parts.append((between[event["name"]], end / 1e3, (following["ts"] - end) / 1e3))
    return parts


def save_picture(path: Path, timelines: list[list[dict]]) -> None:
    """Draw the last steps of each way; `timelines`: of each rank."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    colours = {
        "exchange": "tab:red", "whole block": "tab:blue", "start": "tab:orange", "interior": "tab:blue",
        "wait": "tab:red", "rim": "tab:green",
    }  # fmt: skip
    figure, panels = plt.subplots(2, 1, figsize=(11, 2.2 + 0.8 * len(timelines)), sharex=True, layout="constrained")
    for axes, name, of_ranks in zip(panels, NAMES, zip(*map(last_steps, timelines), strict=True), strict=True):
        begin = min(events[0]["ts"] for events in of_ranks) / 1e3
        for rank, events in enumerate(of_ranks):
            for what, at, duration in spans(events):
                axes.broken_barh([(at - begin, duration)], (rank - 0.35, 0.7), color=colours[what], linewidth=0)
        axes.set_yticks(range(len(timelines)), [f"rank {rank}" for rank in range(len(timelines))])
        axes.invert_yaxis()
        used = [what for what in colours if any(what == s[0] for events in of_ranks for s in spans(events))]
        patches = [Patch(color=colours[what], label=what) for what in used]
        axes.legend(handles=patches, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        axes.set_title(f"{SHOWN} steps {name}", loc="left")
    panels[-1].set_xlabel("milliseconds")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    grid = jaxmpi.Grid((0, 0), options.size, periodic=True)
    comm, rank = grid.comm, grid.comm.rank
    if options.steps <= SHOWN:
        sys.exit(f"--steps {options.steps}: more than {SHOWN} are needed")
    if min(comm.allgather(min(grid.local_shape))) <= 2 * WIDTH:
        sys.exit(f"a block of {grid.local_shape} cells has no interior: use a larger --size, or fewer processes")
    steps = make_steps(grid)
    runs = [jaxmpi.jit(lambda u, step=step: lax.fori_loop(0, options.steps, lambda _, u: step(u), u)) for step in steps]
    start = grid.scatter(jnp.asarray(initial_temperatures(tuple(options.size))), None, width=WIDTH)
    for run in runs:
        jax.block_until_ready(run(start))  # compiles

    states, seconds = [start, start], [[], []]
    for _ in range(options.turns):
        for i, run in enumerate(runs):
            took, states[i] = timed(run, states[i], comm)
            seconds[i].append(took / options.steps)
    blocks = [np.asarray(u[INNER, INNER]) for u in states]
    same = all(comm.allgather(np.array_equal(*blocks)))
    times = [1e3 * statistics.median(some) for some in seconds]
    if rank == 0:
        for name, milliseconds in zip(NAMES, times, strict=True):
            print(f"{name + ':':17}{milliseconds:8.3f} ms per step")
        print(f"The numbers are {'identical' if same else 'different'}.", flush=True)

    if options.save:  # the steps of the last turns
        jaxmpi.barrier()
        jax.effects_barrier()
        timelines = comm.gather(own_events(rank))
        if rank == 0:
            picture = (options.output_dir / PICTURE).resolve()
            save_picture(picture, timelines)
            print(f"Picture: {picture}")
    if options.save_state:
        sheet = grid.gather(states[1], width=WIDTH)
        if rank == 0:
            np.savez(options.save_state, u=sheet)
    if not same:
        sys.exit(1)


if __name__ == "__main__":
    main()
