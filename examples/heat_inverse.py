"""The conductivity of a plate, everywhere, computed from temperatures that a few sensors have measured.

A square plate with insulated rims has hot and cold spots at the start. While they fade, sensors on a lattice measure
the temperature, with some noise. The conductivity k is unknown in all cells. The optimizer Adam changes the logarithm
until a simulation agrees with the data. The gradient comes from the simulation itself, backwards through the time loop,
exchanges of halos included.

    python heat_inverse.py                          # one process
    python -m jaxmpi.run -n 2 heat_inverse.py       # the same result on two, or any other number
    python -m jaxmpi.run -n 2 heat_inverse.py --output k.zarr --checkpoints saved
    python -m jaxmpi.run -n 3 heat_inverse.py --output k.zarr --checkpoints saved --restart

A run shows a progress bar with the loss, prints how far the estimate is from the truth before and after, writes
`heat-inverse.png` and prints where it is. `--output` writes k of every tenth iteration. `--checkpoints` keeps the last
estimates with the state of the optimizer. `--restart` goes on from them, on any number of processes.

The model and the loss, with temperature T, data D of each sensor and time, and G a field of all cells:

    dT/dt = div(k grad T)           k = MEAN exp(G)
    loss = mean((T - D)^2) / NOISE^2 + SMOOTHNESS sum of (difference of G between two neighbours)^2

in finite volumes, Euler forward. Heat that flows from one cell to the next meets the mean of their resistances 1/k.
"""

import argparse
import contextlib
import math
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from mpi4py import MPI
from tqdm import tqdm

import jaxmpi
from jaxmpi import allreduce, io

EDGE = 0.1  # of the plate [m]
MEAN = 1e-5  # about the conductivity, divided by the heat capacity: the first guess [m2/s]
MOST = 6 * MEAN  # conductivity for which the time step is stable [m2/s]
DURATION = 6.0  # of the experiment [s]
TIMES = 12  # at which the sensors measure
SPACING = 3  # cells from one sensor to the next
AMPLITUDE, SPOTS = 10.0, 4  # of the temperature at the start [K], and hot or cold spots along a rim
NOISE = 0.1  # of a measurement, standard deviation [K]
SMOOTHNESS = 0.02  # weight of the differences in the loss
RATE = 0.1  # of learning, at the start
SEED = 0  # of the noise


# The model. A field is this process's block of the plate, without halo.


def with_halo(field: jax.Array, grid: jaxmpi.Grid) -> jax.Array:
    """Return the block and one cell more at each side. Beyond a rim the last cell is repeated: no heat flows there."""
    return grid.exchange(grid.pad(field), corners=False, boundary="edge")


def advance(t: jax.Array, k_x: jax.Array, k_y: jax.Array, grid: jaxmpi.Grid) -> jax.Array:
    """Do a time step; `k_x`, `k_y` are the conductivities of the cells' faces, times the step over the cell's area."""
    padded = with_halo(t, grid)
    flow_x = k_x * jnp.diff(padded[1:-1], axis=1)
    flow_y = k_y * jnp.diff(padded[:, 1:-1], axis=0)
    return t + jnp.diff(flow_x, axis=1) + jnp.diff(flow_y, axis=0)


def simulate(g: jax.Array, grid: jaxmpi.Grid) -> jax.Array:
    """Return T at each of the TIMES, shape (TIMES, ny, nx).

    Nothing between two of them is stored for the gradient; it is computed a second time.
    """
    cell = EDGE / grid.global_shape[0]
    steps = math.ceil(DURATION / TIMES * 4 * MOST / cell**2)
    resistance = with_halo(jnp.exp(-g) / MEAN, grid)
    step = DURATION / TIMES / steps
    k_x = 2 * step / cell**2 / (resistance[1:-1, 1:] + resistance[1:-1, :-1])
    k_y = 2 * step / cell**2 / (resistance[1:, 1:-1] + resistance[:-1, 1:-1])

    @jax.checkpoint
    def until_next_time(t: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        t = lax.fori_loop(0, steps, lambda _, t: advance(t, k_x, k_y, grid), t)
        return t, t

    return lax.scan(until_next_time, spots(grid), None, length=TIMES)[1]


def loss_of(g: jax.Array, data: jax.Array, sensors: jax.Array, grid: jaxmpi.Grid) -> jax.Array:
    """Return the loss, the same on all processes; `sensors` is 1 in cells with a sensor, and 0 in others."""
    misfit = jnp.sum(sensors * (simulate(g, grid) - data) ** 2) / NOISE**2
    # The halo is only behind the block: so each pair of neighbours counts once.
    padded = grid.exchange(grid.pad(g, [(0, 1)] * 2), [(0, 1)] * 2, corners=False, boundary="edge")
    roughness = jnp.sum(jnp.diff(padded[:-1], axis=1) ** 2) + jnp.sum(jnp.diff(padded[:, :-1], axis=0) ** 2)
    misfit, count, roughness = allreduce((misfit, TIMES * jnp.sum(sensors), roughness), MPI.SUM)
    return misfit / count + SMOOTHNESS * roughness


# The experiment. Fields are made from the places of the cells in the whole plate.


def places(grid: jaxmpi.Grid) -> tuple[np.ndarray, np.ndarray]:
    """Return x and y of the middles of this process's cells, relative to EDGE."""
    y, x = (np.mgrid[grid.slices] + 0.5) / grid.global_shape[0]
    return x, y


def spots(grid: jaxmpi.Grid) -> jax.Array:
    """Return T at the start."""
    x, y = places(grid)
    return jnp.asarray(AMPLITUDE * np.cos(SPOTS * np.pi * x) * np.cos(SPOTS * np.pi * y))


def truth(grid: jaxmpi.Grid) -> jax.Array:
    """Return G of the plate: one part that conducts well, and two that conduct badly."""
    x, y = places(grid)

    def blob(x_0: float, y_0: float, width: float) -> np.ndarray:
        return np.exp(-((x - x_0) ** 2 + (y - y_0) ** 2) / width**2)

    return jnp.asarray(1.3 * blob(0.35, 0.6, 0.25) - blob(0.75, 0.3, 0.2) - blob(0.8, 0.8, 0.12))


def experiment(grid: jaxmpi.Grid) -> tuple[jax.Array, jax.Array]:
    """Return the data of all times, noise included, and the places of the sensors."""
    lattice = np.zeros(grid.global_shape)
    lattice[SPACING // 2 :: SPACING, SPACING // 2 :: SPACING] = 1
    # Every process draws the noise of the whole plate and takes its block: the same on any number of processes.
    noise = NOISE * np.random.default_rng(SEED).standard_normal((TIMES, *grid.global_shape))
    data = jaxmpi.jit(partial(simulate, grid=grid))(truth(grid)) + grid.scatter(noise, None)
    return data, grid.scatter(lattice, None)


# Results.


def distance(g: jax.Array, grid: jaxmpi.Grid) -> jax.Array:
    """Return the distance of k from the truth, root mean square, relative to the root mean square of the truth."""
    k, true = jnp.exp(g), jnp.exp(truth(grid))
    off, size = allreduce((jnp.sum((k - true) ** 2), jnp.sum(true**2)), MPI.SUM)
    return jnp.sqrt(off / size)


def save_picture(path: Path, true: np.ndarray, estimate: np.ndarray, losses: np.ndarray) -> None:
    """Draw both conductivities and the loss of all iterations."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    extent = (0, 100 * EDGE, 0, 100 * EDGE)
    for place, field, title in zip(axes, (true, estimate), ("truth", "estimate"), strict=False):
        image = place.imshow(field, extent=extent, origin="lower", vmin=true.min(), vmax=true.max())
        place.set_title(title, loc="left")
        place.set_xlabel("x [cm]")
    axes[0].set_ylabel("y [cm]")
    figure.colorbar(image, ax=axes[:2], label="k [m2/s]", extend="both", pad=0.02)
    axes[2].semilogy(losses)
    axes[2].set_title("loss", loc="left")
    axes[2].set_xlabel("iterations")
    figure.savefig(path, dpi=130)
    plt.close(figure)


# The programme.


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=int, default=32, help="cells per axis (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=200, help="(default: %(default)s)")
    parser.add_argument("--save-state", type=Path, metavar="FILE.npz", help="write k, its truth and the losses")
    parser.add_argument("--output", type=Path, metavar="FILE.zarr", help="write k of every tenth iteration")
    parser.add_argument("--checkpoints", type=Path, metavar="DIR", help="keep the last estimates there")
    parser.add_argument("--restart", action="store_true", help="go on from the last estimate in the --checkpoints")
    parser.add_argument("--output-dir", type=Path, default=Path(), metavar="DIR", help="where the picture goes")
    options = parser.parse_args()
    if options.restart and not options.checkpoints:
        parser.error("--restart needs the folder of --checkpoints")
    return options


def main() -> None:
    options = parse_options()
    jax.config.update("jax_enable_x64", True)
    grid = jaxmpi.Grid((0, 0), (options.size, options.size))
    rank = grid.comm.rank
    data, sensors = experiment(grid)
    optimizer = optax.adam(optax.cosine_decay_schedule(RATE, options.iterations))

    @jaxmpi.jit
    def improve(g: jax.Array, state: optax.OptState) -> tuple[jax.Array, optax.OptState, jax.Array]:
        loss, gradient = jax.value_and_grad(loss_of)(g, data, sensors, grid)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(g, updates), state, loss

    g = jnp.zeros(grid.local_shape)
    state, losses, before = optimizer.init(g), np.full(options.iterations, np.nan), distance(g, grid)
    begin = 0
    if options.restart:
        newest = io.latest(options.checkpoints)
        if newest is None:
            raise SystemExit(f"--restart: there is no complete estimate in {options.checkpoints}")
        # The optimizer's state has special types, which the file does not have.
        like = {"g": g, "state": state, "losses": losses, "done": 0}
        g, state, losses, begin = map(io.load(newest, grid=grid, like=like).get, like)
    with contextlib.ExitStack() as stack:
        out = None
        if options.output:
            out = stack.enter_context(
                io.Writer(options.output, grid, every=10, resume=options.restart, dims=("y", "x"))
            )
        bar = stack.enter_context(tqdm(range(begin, options.iterations), unit=" iterations", disable=rank != 0))
        for i in bar:
            if out:
                out.append(i, {"k": MEAN * jnp.exp(g)})
            g, state, loss = improve(g, state)
            losses[i] = float(loss)
            bar.set_postfix_str(f"loss {losses[i]:.4g}")
            if options.checkpoints and (i + 1) % 10 == 0:
                tree = {"g": g, "state": state, "losses": losses, "done": i + 1}
                io.checkpoint(options.checkpoints, tree, grid=grid, keep=2)

    after = distance(g, grid)
    true, estimate = grid.gather((MEAN * jnp.exp(truth(grid)), MEAN * jnp.exp(g)))
    if rank != 0:
        return
    print(f"{grid.comm.size} processes, loss {losses[0]:.6g} before, {losses[-1]:.6g} after")
    print(f"Relative error of k: {float(before):.3f} before, {float(after):.3f} after")
    options.output_dir.mkdir(parents=True, exist_ok=True)
    picture = (options.output_dir / "heat-inverse.png").resolve()
    save_picture(picture, np.asarray(true), np.asarray(estimate), losses)
    print(f"Picture: {picture}")
    if options.save_state:
        np.savez(options.save_state, k=estimate, truth=true, losses=losses)
        print(f"State: {options.save_state.resolve()}")


if __name__ == "__main__":
    main()
