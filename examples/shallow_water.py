"""A jet in a rotating, shallow sea breaks into eddies: a shallow-water model on one or many processes.

The program solves the nonlinear shallow-water equations on a C grid that is periodic in x (east) and has walls in y
(north). The cells are divided among the processes in rectangles, which need not be equal. Each step exchanges the
halos of all fields at once, from inside the jitted time loop. Only rounding depends on the number of processes.

    python shallow_water.py                                     # one process
    mpiexec -n 2 python shallow_water.py --save-animation       # two, or any other number
    mpiexec -n 2 python shallow_water.py --benchmark --days 0.1 --size 3600 1800
    mpiexec -n 2 python shallow_water.py --benchmark --overlap  # cells that need no halo are computed meanwhile
    mpiexec -n 2 python shallow_water.py --days 5 --output sea.zarr --checkpoints saved
    mpiexec -n 3 python shallow_water.py --days 10 --output sea.zarr --checkpoints saved --restart

A normal run shows a progress bar, writes `shallow-water.png` (if asked, `shallow-water.gif` too) and prints
where they are. `--output` writes h, u and v of many times, for xarray and others (`pip install 'zarr>=3'`).
`--checkpoints` keeps the last states. `--restart` goes on from them, on any number of processes.
A benchmark prints one line, `Solution took 12.34 s`, without compilation.
With as many processes as cores, one XLA thread each is fastest: `PJRT_NPROC=1`.

The equations, with layer thickness h, velocity (u, v), potential vorticity q and Bernoulli potential B:

    dh/dt = -div(hu, hv)                         q = (f + dv/dx - du/dy) / h
    du/dt = +q hv - dB/dx + nu lap(u)            B = g h + (u^2 + v^2) / 2
    dv/dt = -q hu - dB/dy + nu lap(v)
"""

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxmpi
import jaxmpi.io

DX = 5e3  # edge of a cell [m]
GRAVITY = 9.81  # [m/s2]
DEPTH = 100.0  # mean thickness of the layer [m]
CORIOLIS, BETA = 2e-4, 2e-11  # f = CORIOLIS + BETA y [1/s, 1/(m s)]
VISCOSITY = 0.04 * CORIOLIS * DX**2  # enough to smooth filaments before they are as thin as a cell [m2/s]
DT = 0.125 * DX / (GRAVITY * DEPTH) ** 0.5  # an eighth of the time in which a gravity wave crosses a cell [s]
DAY = 86400.0  # [s]

JET_SPEED, JET_WIDTH = 10.0, 40e3  # [m/s], [m]
RIPPLE = 1.0  # amplitude of the disturbance of h that starts the instability [m]

# Adams-Bashforth weights of the new and the old tendency. With 3/2 and -1/2 gravity waves would grow slowly;
# the shift by a tenth damps them.
NEW, OLD = 1.6, -0.6

REPORTS = 40  # how often a run stops for the progress bar and a frame of the animation


class State(NamedTuple):
    """Fields of this process's cells and of a halo of one cell around them, and the tendencies of the step before.

    The fields have the shape (ny + 2, nx + 2), the tendencies (ny, nx).
    Cell (j, i) has h in the middle, u in the middle of the eastern and v in the middle of the northern edge.
    """

    h: jax.Array
    u: jax.Array
    v: jax.Array
    dh: jax.Array
    du: jax.Array
    dv: jax.Array


Fields = tuple[jax.Array, ...]
Walls = tuple[bool, bool]

# The halo at a wall repeats the row beside it; in x the sea is periodic.
BOUNDARY = ("edge", None)


def make_grid(nx: int, ny: int) -> jaxmpi.Grid:
    """Divide nx times ny cells among all processes."""
    return jaxmpi.Grid((0, 0), (ny, nx), periodic=(False, True))


def walls_of(grid: jaxmpi.Grid) -> Walls:
    return grid.is_wall(0, -1), grid.is_wall(0, 1)


# The model. Means and differences of neighbours lie half a cell further and shorten the axis by one.


def mean_x(a: jax.Array) -> jax.Array:
    return 0.5 * (a[:, 1:] + a[:, :-1])


def mean_y(a: jax.Array) -> jax.Array:
    return 0.5 * (a[1:] + a[:-1])


def d_dx(a: jax.Array) -> jax.Array:
    return (1 / DX) * (a[:, 1:] - a[:, :-1])


def d_dy(a: jax.Array) -> jax.Array:
    return (1 / DX) * (a[1:] - a[:-1])


def laplacian(a: jax.Array) -> jax.Array:
    """Return the Laplacian of the inner cells."""
    around = a[1:-1, 2:] + a[1:-1, :-2] + a[2:, 1:-1] + a[:-2, 1:-1]
    return (1 / DX**2) * (around - 4 * a[1:-1, 1:-1])


def tendencies(
    h: jax.Array, u: jax.Array, v: jax.Array, coriolis: jax.Array, walls: Walls
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return dh/dt, du/dt and dv/dt of ny times nx cells, from fields with one more around them.

    `coriolis` (ny + 1, 1) is f at the cells' corners, from south to north. `walls` says whether the cells reach the
    southern and the northern wall.

    The averages of q and of the transports are chosen so that the Coriolis force does no work on the flow as a whole.
    """
    if walls[0]:
        v = v.at[0].set(0.0)

    flow_x = mean_x(h) * u[:, :-1]
    flow_y = mean_y(h) * v[:-1]
    q = (coriolis + d_dx(v)[:-1] - d_dy(u)[:, :-1]) / mean_x(mean_y(h))
    bernoulli = GRAVITY * h[1:, 1:] + 0.5 * (mean_x(u * u)[1:] + mean_y(v * v)[:, 1:])

    dh = -d_dx(flow_x)[1:-1] - d_dy(flow_y)[:, 1:-1]
    du = mean_y(q * mean_x(flow_y))[:, 1:] - d_dx(bernoulli)[:-1] + VISCOSITY * laplacian(u)
    dv = -mean_x(q * mean_y(flow_x))[1:] - d_dy(bernoulli)[:, :-1] + VISCOSITY * laplacian(v)
    if walls[1]:
        dv = dv.at[-1].set(0.0)
    return dh, du, dv


def exchanged(fields: Fields, coriolis: jax.Array, grid: jaxmpi.Grid) -> tuple[Fields, Fields]:
    """Return the fields with their halos filled, and their tendencies."""
    fields = grid.exchange(fields, boundary=BOUNDARY)
    return fields, tendencies(*fields, coriolis, walls_of(grid))


def overlapped(fields: Fields, coriolis: jax.Array, grid: jaxmpi.Grid) -> tuple[Fields, Fields]:
    """Return the same. Compute the cells that need no halo while the halos travel, then the cells at the rim."""
    south, north = walls_of(grid)
    inner = slice(1, -1)
    request = grid.start(fields, boundary=BOUNDARY)
    interior = tendencies(*[a[inner, inner] for a in fields], coriolis[inner], (False, False))
    fields, interior = grid.finish(request, after=interior)
    first = tendencies(*[a[:3] for a in fields], coriolis[:2], (south, False))
    last = tendencies(*[a[-3:] for a in fields], coriolis[-2:], (False, north))
    west, east = (
        tendencies(*[a[inner, columns] for a in fields], coriolis[inner], (False, False))
        for columns in (slice(None, 3), slice(-3, None))
    )
    rows = [jnp.concatenate(parts, axis=1) for parts in zip(west, interior, east, strict=True)]
    return fields, tuple(jnp.concatenate(parts) for parts in zip(first, rows, last, strict=True))


def step(state: State, coriolis: jax.Array, grid: jaxmpi.Grid, overlap: bool) -> State:
    """Advance by DT (Adams-Bashforth of second order)."""
    fields, new = (overlapped if overlap else exchanged)(state[:3], coriolis, grid)
    old = state[3:]
    changes = [DT * (NEW * da + OLD * da_old) for da, da_old in zip(new, old, strict=True)]
    return State(*[a.at[1:-1, 1:-1].add(change) for a, change in zip(fields, changes, strict=True)], *new)


class Model(NamedTuple):
    """The jitted functions `start(h, u, v)` and `advance(state, steps)`; the latter donates the state."""

    start: Callable[[jax.Array, jax.Array, jax.Array], State]
    advance: Callable[[State, int], State]


def make_model(grid: jaxmpi.Grid, overlap: bool = False) -> Model:
    """Return the model of this process's part of the sea; with `overlap` it computes while halos travel."""
    if overlap and min(grid.local_shape) < 3:
        raise ValueError(f"--overlap: a process has {grid.local_shape} cells, and needs 3 x 3: use a larger --size")
    rows = grid.slices[0]
    f = CORIOLIS + BETA * DX * np.arange(rows.start, rows.stop + 1)
    coriolis = jnp.asarray(f[:, None], jnp.float32)

    @jaxmpi.jit
    def start(h: jax.Array, u: jax.Array, v: jax.Array) -> State:
        # With equal old and new tendencies the first step is Euler's.
        h, u, v = grid.scatter((h, u, v), None, width=1, boundary=BOUNDARY)
        return State(h, u, v, *tendencies(h, u, v, coriolis, walls_of(grid)))

    @jaxmpi.jit(donate_argnums=0)
    def advance(state: State, steps: int) -> State:
        return jax.lax.fori_loop(0, steps, lambda _, s: step(s, coriolis, grid, overlap), state)

    return Model(start, advance)


def initial_fields(nx: int, ny: int, ripple: float = RIPPLE) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return h, u and v of the whole sea: a jet in geostrophic balance (f u = -g dh/dy) with a ripple."""
    x, y = (DX * (np.arange(n) + 0.5) for n in (nx, ny))
    from_jet = (y - y.mean()) / JET_WIDTH
    u = JET_SPEED / np.cosh(from_jet) ** 2

    f = CORIOLIS + BETA * DX * np.arange(1, ny)
    h = np.concatenate([[0.0], np.cumsum(-f * mean_y(u) * DX / GRAVITY)])
    waves = sum(np.sin(2 * np.pi * k * x / x.size / DX + k * k) for k in range(3, 10))
    h = h[:, None] + ripple * waves / 7 * np.exp(-(from_jet[:, None] ** 2))
    h += DEPTH - h.mean()
    return h, np.repeat(u[:, None], nx, axis=1), np.zeros((ny, nx))


def run(model: Model, state: State, done: int, steps: int) -> Iterator[tuple[int, State]]:
    """Advance from `done` to `steps` and yield, up to REPORTS times, the steps done and the state (then donated)."""
    for stop in np.linspace(done, steps, min(REPORTS, steps - done) + 1).astype(int)[1:].tolist():
        state = jax.block_until_ready(model.advance(state, stop - done))
        done = stop
        yield done, state


# Files. A state is stored without halos, which the next step fills.


def save_checkpoint(folder: Path, state: State, done: int, grid: jaxmpi.Grid) -> None:
    """Keep a state, and the one before."""
    tree = {"fields": state[:3], "tendencies": state[3:], "steps": done}
    jaxmpi.io.checkpoint(folder, tree, grid=grid, width={"fields": 1, "tendencies": 0, "steps": 0}, keep=2)


def load_checkpoint(folder: Path, grid: jaxmpi.Grid) -> tuple[State, int]:
    """Return the last state that is complete, and the number of steps."""
    newest = jaxmpi.io.latest(folder, comm=grid.comm)
    if newest is None:
        raise SystemExit(f"--restart: there is no complete state in {folder}")
    tree = jaxmpi.io.load(newest, grid=grid, width={"fields": 1, "tendencies": 0, "steps": 0})
    return State(*tree["fields"], *tree["tendencies"]), tree["steps"]


def open_output(path: Path, grid: jaxmpi.Grid, resume: bool) -> jaxmpi.io.Writer:
    """Return a file of the fields and the times in days."""
    y, x = (DX * (np.arange(n) + 0.5) for n in grid.global_shape)
    units = {"h": "m", "u": "m/s", "v": "m/s", "x": "m", "y": "m", "time": "model days"}
    return jaxmpi.io.Writer(
        path,
        grid,
        width=1,
        resume=resume,
        dims=("y", "x"),
        coords={"y": y, "x": x},
        attrs={name: {"units": unit} for name, unit in units.items()},
    )


# Results.


def gather_fields(state: State, grid: jaxmpi.Grid) -> np.ndarray | None:
    """Return h, u and v of the whole sea, shape (3, NY, NX), on rank 0 and None elsewhere."""
    sea = grid.gather(jnp.stack(state[:3]), width=1)
    return np.asarray(sea) if grid.comm.rank == 0 else None


def relative_vorticity(fields: np.ndarray) -> np.ndarray:
    """Return (dv/dx - du/dy) / f at the cells' north-eastern corners, zero on the northern wall."""
    _, u, v = fields.astype(np.float64)
    f = CORIOLIS + BETA * DX * np.arange(1, len(u))
    rotation = (np.roll(v, -1, axis=1) - v)[:-1] - np.diff(u, axis=0)
    return np.pad(rotation / DX / f[:, None], ((0, 1), (0, 0)))


def show(axes, image: np.ndarray, label: str, limit: float, colours: str, extend: str = "both"):
    """Draw `image` over km axes with a colour bar and return the artist."""
    ny, nx = image.shape
    extent = (0, nx * DX / 1e3, 0, ny * DX / 1e3)
    artist = axes.imshow(image, extent=extent, origin="lower", cmap=colours, vmin=-limit, vmax=limit)
    axes.figure.colorbar(artist, ax=axes, label=label, extend=extend, pad=0.02, aspect=16)
    axes.set_ylabel("y [km]")
    return artist


def save_picture(path: Path, fields: np.ndarray, days: float) -> None:
    """Draw height anomaly with velocity arrows above relative vorticity."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    h, u, v = fields
    figure, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(9.5, 9), layout="constrained")
    show(top, h - DEPTH, "height anomaly [m]", np.abs(h - DEPTH).max(), "RdYlBu_r", "neither")
    gap = max(1, len(h) // 30)
    rows, columns = np.mgrid[gap // 2 : len(h) : gap, gap // 2 : len(h[0]) : gap]
    x, y = (0.5 + columns) * DX / 1e3, (0.5 + rows) * DX / 1e3
    arrows = top.quiver(x, y, u[rows, columns], v[rows, columns], scale=250, width=1.2e-3, color="0.15")
    top.quiverkey(arrows, 0.93, 1.04, JET_SPEED, f"{JET_SPEED:g} m/s", labelpos="E")
    top.set_title(f"Shallow water after {days:.1f} days", loc="left")
    vorticity = relative_vorticity(fields)
    show(bottom, vorticity, "relative vorticity / f", np.quantile(np.abs(vorticity), 0.998), "RdBu_r")
    bottom.set_xlabel("x [km]")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def save_animation(path: Path, frames: list[tuple[float, np.ndarray]]) -> None:
    """Draw the relative vorticity of all frames (model days, values)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.animation import PillowWriter

    figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    limit = np.quantile(np.abs([values for _, values in frames]), 0.995)
    artist = show(axes, frames[0][1], "relative vorticity / f", limit, "RdBu_r")
    axes.set_xlabel("x [km]")
    axes.set_title("Shallow water", loc="left")
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # the same layout for all frames: computing it takes most of the time

    writer = PillowWriter(fps=8)
    with writer.saving(figure, path, dpi=90):  # FuncAnimation would draw each frame three times
        for days, values in frames:
            axes.set_title(f"Shallow water after {days:.1f} days", loc="left")
            artist.set_data(values)
            writer.grab_frame()
    plt.close(figure)


# The programme.


def parse_options() -> argparse.Namespace:
    summary = __doc__.partition("\n")[0]
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--size", nargs=2, type=int, default=(360, 180), metavar=("NX", "NY"), help="cells")
    parser.add_argument("--days", type=float, default=10.0, help="model days (default: %(default)s)")
    parser.add_argument("--benchmark", action="store_true", help="only print the time that the solution took")
    parser.add_argument("--overlap", action="store_true", help="exchange halos while other cells are computed")
    parser.add_argument("--save-animation", action="store_true", help="write shallow-water.gif")
    parser.add_argument("--save-state", type=Path, metavar="FILE.npz", help="write the final h, u and v")
    parser.add_argument("--output", type=Path, metavar="FILE.zarr", help="write h, u and v of many times")
    parser.add_argument("--checkpoints", type=Path, metavar="DIR", help="keep the last states there")
    parser.add_argument("--restart", action="store_true", help="go on from the last state in the --checkpoints")
    parser.add_argument("--output-dir", type=Path, default=Path(), metavar="DIR", help="where pictures go")
    options = parser.parse_args()
    if options.restart and not options.checkpoints:
        parser.error("--restart needs the folder of --checkpoints")
    return options


def benchmark(model: Model, fields: list[jax.Array], steps: int, grid: jaxmpi.Grid) -> State:
    """Time the solution, print the time on rank 0 and return the final state."""
    jax.block_until_ready(model.advance(model.start(*fields), 1))
    first = jax.block_until_ready(model.start(*fields))
    grid.comm.Barrier()
    begin = time.perf_counter()
    final = jax.block_until_ready(model.advance(first, steps))
    grid.comm.Barrier()
    if grid.comm.rank == 0:
        print(f"Solution took {time.perf_counter() - begin:.2f} s", flush=True)
    return final


def demo(
    model: Model,
    fields: list[jax.Array],
    steps: int,
    grid: jaxmpi.Grid,
    options: argparse.Namespace,
) -> State:
    """Run with a progress bar, write the pictures and return the final state."""
    from tqdm import tqdm

    frames = []
    rank, days = grid.comm.rank, DT / DAY
    begin, first = load_checkpoint(options.checkpoints, grid) if options.restart else (model.start(*fields), 0)
    layout = "{percentage:3.0f}%|{bar}| {n:.1f} of {total:.1f} model days [{elapsed}, {remaining} left]"
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(tqdm(total=steps * days, initial=first * days, bar_format=layout, disable=rank != 0))
        out = stack.enter_context(open_output(options.output, grid, options.restart)) if options.output else None
        state = begin
        for done, state in run(model, begin, first, steps):
            bar.update(done * days - bar.n)
            if out:
                out.append(done * days, dict(zip("huv", state[:3], strict=True)))
                if options.checkpoints:
                    out.flush()  # a run that goes on from the state needs all older data in the file
            if options.checkpoints:
                save_checkpoint(options.checkpoints, state, done, grid)
            if options.save_animation:
                sea = gather_fields(state, grid)
                if rank == 0:
                    frames.append((done * days, relative_vorticity(sea).astype(np.float32)))
    sea = gather_fields(state, grid)
    if rank == 0:
        options.output_dir.mkdir(parents=True, exist_ok=True)
        picture = (options.output_dir / "shallow-water.png").resolve()
        save_picture(picture, sea, steps * days)
        print(f"Picture: {picture}")
        if options.save_animation:
            animation = picture.with_suffix(".gif")
            save_animation(animation, frames)
            print(f"Animation: {animation}")
    return state


def main() -> None:
    options = parse_options()
    nx, ny = options.size
    grid = make_grid(nx, ny)
    model = make_model(grid, options.overlap)
    fields = [jnp.asarray(a, jnp.float32) for a in initial_fields(nx, ny)]
    steps = max(1, round(options.days * DAY / DT))
    state = benchmark(model, fields, steps, grid) if options.benchmark else demo(model, fields, steps, grid, options)

    if options.save_state:
        sea = gather_fields(state, grid)
        if grid.comm.rank == 0:
            np.savez(options.save_state, h=sea[0], u=sea[1], v=sea[2])
            if not options.benchmark:
                print(f"State: {options.save_state.resolve()}")


if __name__ == "__main__":
    main()
