"""Flow past a cylinder by the lattice Boltzmann method, the drag, and the derivative of the drag by the viscosity.

A fluid enters a channel on the left and flows around a cylinder, behind which a street of vortices forms. The channel
is periodic from top to bottom. Each process has a block of the lattice, and one exchange a step fills the halos of all
nine distributions. The derivative comes from the simulation itself, in forward mode, exchanges of halos included.

    python lattice_boltzmann.py                          # one process
    python -m jaxmpi.run -n 2 lattice_boltzmann.py       # the same result on two, or any other number
    python -m jaxmpi.run -n 2 lattice_boltzmann.py --reynolds 30 --check    # steady; the derivative by differences, too

A run shows a progress bar, prints the drag coefficient and the derivative, writes `lattice-boltzmann.png` and prints
where it is.

The model has nine velocities c_i in units of the lattice, with weights w_i, and one time of relaxation t:

    f_i(x + c_i, time + 1) = f_i(x, time) - (f_i - e_i) / t        viscosity = (t - 1/2) / 3
    e_i = w_i density (1 + 3 c_i.u + 9/2 (c_i.u)^2 - 3/2 u.u)

What would enter the cylinder is thrown back. The momentum that it loses is the force on the cylinder.
"""

import argparse
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from mpi4py import MPI
from tqdm import tqdm

import jaxmpi
from jaxmpi import allreduce

VELOCITIES = np.array([(0, 0), (1, 0), (0, 1), (-1, 0), (0, -1), (1, 1), (-1, 1), (-1, -1), (1, -1)])  # (x, y)
WEIGHTS = np.array([4 / 9] + 4 * [1 / 9] + 4 * [1 / 36])
OPPOSITE = [0, 3, 4, 1, 2, 7, 8, 5, 6]  # the number of -c_i
SPEED = 0.08  # of the fluid that enters [lattice cells per step]
HEIGHT, LENGTH, PLACE = 10, 30, 7  # of the channel, and of the cylinder behind the inlet [radii]
PIECES = 50  # of a run, for the progress bar


def equilibrium(density: jax.Array, u: jax.Array) -> jax.Array:
    """Return e, shape (9, ny, nx); `u` has shape (2, ny, nx)."""
    along = jnp.tensordot(VELOCITIES, u, 1)
    weights = WEIGHTS.reshape(-1, 1, 1)
    return weights * density * (1 + 3 * along + 4.5 * along**2 - 1.5 * jnp.sum(u**2, axis=0))


def moments(f: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the density, shape (ny, nx), and the velocity, shape (2, ny, nx)."""
    density = jnp.sum(f, axis=0)
    return density, jnp.tensordot(VELOCITIES.T, f, 1) / density


class Channel:
    """This process's block of the channel, with the places of the cylinder and the inlet as constants."""

    def __init__(self, radius: int, comm: MPI.Comm | None = None) -> None:
        ny, nx = HEIGHT * radius, LENGTH * radius
        self.grid = jaxmpi.Grid((0, 0), (ny, nx), periodic=(True, False), comm=comm)
        y, x = np.ogrid[tuple(slice(s.start - 1, s.stop + 1) for s in self.grid.slices)]  # with a halo of one cell
        self.inlet = x < 0
        self.solid = (x + 0.5 - PLACE * radius) ** 2 + (y % ny + 0.5 - ny / 2) ** 2 < radius**2
        self.radius, self.x = radius, x[:, 1:-1] / nx

    def shift(self, field: np.ndarray | jax.Array, i: int) -> np.ndarray | jax.Array:
        """Return what the block gets from a field with halo by a step along c_i."""
        (x, y), (ny, nx) = VELOCITIES[i], self.grid.local_shape
        return field[1 - y : 1 - y + ny, 1 - x : 1 - x + nx]

    def start(self) -> jax.Array:
        """Return f of a uniform flow, slightly bent, so that vortices form soon."""
        bend = 0.05 * np.sin(2 * np.pi * self.x) * np.ones(self.grid.local_shape)
        return equilibrium(jnp.ones(self.grid.local_shape), SPEED * jnp.stack([jnp.ones_like(bend), bend]))

    def advance(self, viscosity: jax.Array, f: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Do a step. Return f and the drag coefficient, which is the same on all processes."""
        f = f - (f - equilibrium(*moments(f))) / (3 * viscosity + 0.5)
        # Beyond the outlet the last cells are repeated, and beyond the inlet the flow is uniform.
        padded = self.grid.exchange(self.grid.pad(f), boundary="edge")
        entering = equilibrium(jnp.ones((1, 1)), jnp.array([SPEED, 0.0]).reshape(2, 1, 1))
        padded = jnp.where(self.inlet, entering, padded)
        fluid, force, new = ~self.solid[1:-1, 1:-1], 0.0, []
        for i, back in enumerate(OPPOSITE):
            link = fluid & self.shift(self.solid, i)  # here c_i comes out of the cylinder
            new.append(jnp.where(link, f[back], self.shift(padded[i], i)))
            force += 2 * VELOCITIES[back][0] * jnp.sum(jnp.where(link, f[back], 0.0))
        return jnp.stack(new), allreduce(force, MPI.SUM) / (SPEED**2 * self.radius)


def advance_many(steps: int, channel: Channel, viscosity: jax.Array, f: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Do `steps` steps. Return f and the drag of each."""
    return lax.scan(lambda f, _: channel.advance(viscosity, f), f, None, length=steps)


def vorticity(channel: Channel, f: jax.Array) -> jax.Array:
    """Return du_y/dx - du_x/dy, times the radius over the speed, and NaN in the cylinder; shape (ny, nx)."""
    u = channel.grid.exchange(channel.grid.pad(moments(f)[1]), boundary="edge")
    dy, dx = (jnp.gradient(u, axis=axis)[:, 1:-1, 1:-1] for axis in (1, 2))
    return jnp.where(channel.solid[1:-1, 1:-1], jnp.nan, (dx[1] - dy[0]) * channel.radius / SPEED)


def save_picture(path: Path, field: np.ndarray, drags: np.ndarray, radius: int) -> None:
    """Draw the vorticity at the end, and the drag of all steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 1, figsize=(9, 5.5), layout="constrained", height_ratios=(3, 1))
    extent = (0, LENGTH, 0, HEIGHT)
    image = axes[0].imshow(field, extent=extent, origin="lower", vmin=-1, vmax=1, cmap="RdBu_r")
    axes[0].set_facecolor("0.3")
    axes[0].set_xlabel("x [radii of the cylinder]")
    figure.colorbar(image, ax=axes[0], label="vorticity [speed / radius]", extend="both")
    axes[1].plot(np.arange(len(drags)) * SPEED / radius, drags)
    axes[1].set_ylim(0, 2 * np.median(drags))
    axes[1].set_xlabel("time [radius / speed]")
    axes[1].set_ylabel("drag coefficient")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--radius", type=int, default=8, help="of the cylinder, in cells (default: %(default)s)")
    parser.add_argument("--reynolds", type=float, default=120, help="speed * diameter / viscosity (%(default)s)")
    parser.add_argument("--steps", type=int, default=15_000, help=f"a multiple of {PIECES} (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="compare the derivative with differences")
    parser.add_argument("--save-state", type=Path, metavar="FILE.npz", help="write the vorticity and the drag")
    parser.add_argument("--output-dir", type=Path, default=Path(), metavar="DIR", help="where the picture goes")
    options = parser.parse_args()
    if options.radius < 1 or options.reynolds <= 0 or options.steps < PIECES:
        parser.error(f"--radius must be 1 or more, --reynolds more than 0, --steps {PIECES} or more")
    return options


def main() -> None:
    options = parse_options()
    jax.config.update("jax_enable_x64", True)
    channel = Channel(options.radius)
    rank = channel.grid.comm.rank
    steps = options.steps // PIECES
    piece = partial(advance_many, steps, channel)
    piece_with_derivative = jaxmpi.jit(lambda *arguments: jax.jvp(piece, *arguments))

    def run(viscosity: float) -> tuple[jax.Array, np.ndarray, np.ndarray]:
        """Return f, the drag of each step, and the derivatives of the drag by the viscosity."""
        f, drags, slopes = channel.start(), [], []
        df = jnp.zeros_like(f)
        for _ in tqdm(range(PIECES), unit_scale=steps, unit=" steps", disable=rank != 0):
            (f, drag), (df, slope) = piece_with_derivative((viscosity, f), (1.0, df))
            drags.append(drag)
            slopes.append(slope)
        if not np.isfinite(drag[-1]):  # the same on all processes
            raise SystemExit("The flow has become unstable. Choose a larger --radius or a smaller --reynolds.")
        return f, np.concatenate(drags), np.concatenate(slopes)

    def mean(values: np.ndarray) -> float:
        """Return the mean of the last third of the run."""
        return float(np.mean(values[-len(values) // 3 :]))

    viscosity = 2 * SPEED * options.radius / options.reynolds
    f, drags, slopes = run(viscosity)
    field = channel.grid.gather(jaxmpi.jit(partial(vorticity, channel))(f))
    if rank == 0:
        print(f"{channel.grid.comm.size} processes, {len(drags)} steps, {np.prod(channel.grid.global_shape)} cells")
        print(f"Drag coefficient {mean(drags):.6f} at viscosity {viscosity:.5f}, derivative {mean(slopes):.5f}")
    if options.check:
        low, high = (mean(run(viscosity * (1 + change))[1]) for change in (-1e-4, 1e-4))
        slope = (high - low) / (2e-4 * viscosity)
        if rank == 0:
            print(f"Derivative by differences: relative error {abs(mean(slopes) / slope - 1):.2e}")
    if rank != 0:
        return
    options.output_dir.mkdir(parents=True, exist_ok=True)
    picture = (options.output_dir / "lattice-boltzmann.png").resolve()
    save_picture(picture, np.asarray(field), drags, options.radius)
    print(f"Picture: {picture}")
    if options.save_state:
        np.savez(options.save_state, vorticity=np.nan_to_num(field), drags=drags, slopes=slopes)
        print(f"State: {options.save_state.resolve()}")


if __name__ == "__main__":
    main()
