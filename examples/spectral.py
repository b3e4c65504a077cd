"""Pattern formation by Fourier transforms that are divided among processes, and the gradient through all time steps.

A square or a cube, periodic, is filled with two phases, u near -1 and u near 1, that separate from noise (the equation
of Allen and Cahn). A time step uses Fourier transforms in two or three dimensions, forth and back. NumPy computes the
transform of the initial state and the final state on one process, and both are compared. The gradient of the final
energy with respect to the initial state is compared with a difference quotient in a random direction.

    python spectral.py                                                  # one process, two dimensions
    python -m jaxmpi.run -n 2 spectral.py                               # the same result on two, or any other number
    python -m jaxmpi.run -n 3 spectral.py --dimensions 3 --size 32      # parts need not be equal

A run shows a progress bar, prints the comparisons, writes `spectral.png` and prints where it is.

The equation, for lengths in which the square or cube has side 1, and times without units:

    du/dt = D laplace(u) + u - u^3

A step takes diffusion implicitly and the rest explicitly, in Fourier space. Each process has a block of u that is whole
along the last axis. `jaxmpi.fft.Transform` transforms along whole axes, moves the data so that another axis is whole,
and goes on. Fields in Fourier space have the blocks of the last step.
"""

import argparse
import math
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
from jaxmpi.fft import Transform

SIZES = {2: 128, 3: 32}  # points per axis by default
DIFFUSION = 3e-4
TIME_STEP = 0.1
STEPS = 60
BATCH = 10  # steps in one compiled call
NOISE = 0.1  # of the initial state
STEP = 1e-4  # of the difference quotient
SEED = 0

COMM = MPI.COMM_WORLD
RANK = COMM.rank


def division(size: int, dimensions: int) -> jaxmpi.Grid:
    """Return the blocks of u: rows of a square, pencils of a cube."""
    processes = {2: (0, 1), 3: (0, 0, 1)}[dimensions]
    return jaxmpi.Grid(processes, (size,) * dimensions, periodic=True)


def advance(u: jax.Array, steps: int, grid: jaxmpi.Grid) -> jax.Array:
    """Do `steps` time steps."""
    transform = Transform(grid, real=True)
    damping = 1 / (1 + TIME_STEP * DIFFUSION * sum(k**2 for k in transform.wavenumbers(lengths=1)))

    def step(_: int, u: jax.Array) -> jax.Array:
        return transform.backward(damping * transform.forward(u + TIME_STEP * (u - u**3)))

    return lax.fori_loop(0, steps, step, u)


def energy(u: jax.Array, grid: jaxmpi.Grid) -> jax.Array:
    """Return the energy that the mixture loses when it separates, without the boundaries between the phases."""
    return allreduce(jnp.sum((1 - u**2) ** 2), MPI.SUM) / (4 * math.prod(grid.global_shape))


def final_energy(u: jax.Array, steps: int, grid: jaxmpi.Grid) -> jax.Array:
    return energy(advance(u, steps, grid), grid)


def by_numpy(u: np.ndarray, steps: int) -> np.ndarray:
    """Do the same time steps on one process, for comparison."""
    k = 2 * np.pi * np.fft.fftfreq(len(u), 1 / len(u))
    square = sum(axis**2 for axis in np.meshgrid(*[k] * u.ndim, indexing="ij"))
    for _ in range(steps):
        explicit = u + TIME_STEP * (u - u**3)
        u = np.fft.ifftn(np.fft.fftn(explicit) / (1 + TIME_STEP * DIFFUSION * square)).real
    return u


def save_picture(path: Path, fields: dict[str, np.ndarray]) -> None:
    """Draw the fields; of a cube the middle slice."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 4), sharex=True, sharey=True, layout="constrained")
    labels = ("initial u", "final u", "d final energy / d initial u")
    for place, field, label in zip(axes, fields.values(), labels, strict=True):
        shown = field[..., field.shape[-1] // 2] if field.ndim == 3 else field
        limit = np.abs(shown).max()
        image = place.imshow(shown.T, extent=(0, 1, 0, 1), origin="lower", cmap="RdBu_r", vmin=-limit, vmax=limit)
        figure.colorbar(image, ax=place, pad=0.02)
        place.set_title(label, loc="left")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dimensions", type=int, choices=SIZES, default=2, help="(default: %(default)s)")
    parser.add_argument("--size", type=int, help=f"points per axis (default: by dimensions, {SIZES})")
    parser.add_argument("--steps", type=int, default=STEPS, help="time steps (default: %(default)s)")
    parser.add_argument("--save-state", type=Path, metavar="FILE.npz", help="write the fields of the picture")
    parser.add_argument("--output-dir", type=Path, default=Path(), metavar="DIR", help="where the picture goes")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    jax.config.update("jax_enable_x64", True)
    size = options.size or SIZES[options.dimensions]
    grid = division(size, options.dimensions)
    # Every process draws all noise and takes its block: the same on any number of processes.
    generator = np.random.default_rng(SEED)
    noise, direction = (jnp.asarray(generator.standard_normal(grid.global_shape)[grid.slices]) for _ in range(2))
    start = NOISE * noise

    transform = Transform(grid, real=True)
    spectrum = jaxmpi.jit(transform.forward)(start)
    u, run = start, jaxmpi.jit(partial(advance, grid=grid), static_argnames="steps")
    with tqdm(total=options.steps, desc="time steps", unit="", disable=RANK != 0) as bar:
        for done in range(0, options.steps, BATCH):
            steps = min(BATCH, options.steps - done)
            u = jax.block_until_ready(run(u, steps=steps))
            bar.update(steps)

    of_start = partial(final_energy, steps=options.steps, grid=grid)
    value = jaxmpi.jit(of_start)
    last, gradient = jaxmpi.jit(jax.value_and_grad(of_start))(start)
    slope = allreduce(jnp.vdot(gradient, direction), MPI.SUM)
    quotient = (value(start + STEP * direction) - value(start - STEP * direction)) / (2 * STEP)

    start, u, gradient = grid.gather((start, u, gradient))
    spectrum = transform.spectral_grid.gather(spectrum)
    if RANK != 0:
        return
    expected = np.fft.rfftn(start)
    error = np.abs(spectrum - expected).max() / np.abs(expected).max()
    witness = np.abs(by_numpy(np.asarray(start), options.steps) - u).max()
    print(f"{COMM.size} processes, final energy {float(last):.9f}")
    print(f"Transform, compared with NumPy's: relative error {error:.1e}")
    print(f"Final state, compared with NumPy's: largest error {witness:.1e}")
    print(f"Gradient: relative error {abs(float(slope / quotient) - 1):.1e}")
    fields = {"start": np.asarray(start), "end": np.asarray(u), "gradient": np.asarray(gradient)}
    options.output_dir.mkdir(parents=True, exist_ok=True)
    picture = (options.output_dir / "spectral.png").resolve()
    save_picture(picture, fields)
    print(f"Picture: {picture}")
    if options.save_state:
        np.savez(options.save_state, **fields)
        print(f"State: {options.save_state.resolve()}")


if __name__ == "__main__":
    main()
