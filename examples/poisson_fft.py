"""The pressure of an incompressible flow in a periodic box, by Fourier transforms and by conjugate gradients.

A velocity field that is not free of divergence is projected onto one that is: p solves laplace(p) = div(u), and then
u - grad p has no divergence. Fourier transforms solve the equation of differences exactly, in one pass. Conjugate
gradients solve the same equation step by step. The program does both, and compares.

    python poisson_fft.py                                                  # one process, two dimensions
    python -m jaxmpi.run -n 2 poisson_fft.py                               # the same result on two, or any other number
    python -m jaxmpi.run -n 3 poisson_fft.py --dimensions 3 --size 40      # blocks need not be equal

A run prints the comparison, the divergence before and after, and the times; writes `poisson-fft.png` and prints where
it is.

Velocities are at the faces of cells, pressures at the centres, in a square or cube of side 1, without units. The
divergence of a cell is the sum of the flows out of the faces. laplace(p) is the divergence of the differences of p.
"""

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from mpi4py import MPI

import jaxmpi
from jaxmpi import allreduce
from jaxmpi.fft import Transform

SIZES = {2: 256, 3: 48}  # cells per axis by default
TOLERANCE = 1e-12  # of the residual of conjugate gradients, relative to the divergence
MOST_ITERATIONS = 10_000
SMOOTH = 4  # wavenumbers of the velocity decay from here on
SEED = 0

COMM = MPI.COMM_WORLD
RANK = COMM.rank


def difference(x: jax.Array, axis: int, side: int, grid: jaxmpi.Grid) -> jax.Array:
    """Return along an axis of the periodic box x of the next cell less x (side 1), or x less x before it (-1)."""
    width = [(0, 0)] * x.ndim
    width[axis] = (int(side < 0), int(side > 0))
    padded = grid.exchange(grid.pad(x, width), width, corners=False)
    return jnp.diff(padded, axis=axis) * grid.global_shape[axis]


def divergence(u: list[jax.Array], grid: jaxmpi.Grid) -> jax.Array:
    """Return the divergence; u[i] is the velocity through the lower face of each cell along axis i."""
    return sum(difference(v, axis, 1, grid) for axis, v in enumerate(u))


def gradient(p: jax.Array, grid: jaxmpi.Grid) -> list[jax.Array]:
    """Return the gradient at the lower faces of the cells."""
    return [difference(p, axis, -1, grid) for axis in range(p.ndim)]


def by_transforms(f: jax.Array, grid: jaxmpi.Grid) -> jax.Array:
    """Return p of mean zero with laplace(p) = f - mean(f)."""
    transform = Transform(grid, real=True)
    # The second difference multiplies a wave of k periods in n cells by -(2 n sin(pi k / n))^2.
    waves = zip(transform.wavenumbers(), grid.global_shape, strict=True)
    symbol = -sum((2 * n * np.sin(np.pi * k / n)) ** 2 for k, n in waves)
    inverse = np.divide(1, symbol, out=np.zeros_like(symbol), where=symbol != 0)
    return transform.backward(inverse * transform.forward(f))


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the sum of products over all cells of all processes."""
    return allreduce(jnp.vdot(a, b), MPI.SUM)


def by_conjugate_gradients(f: jax.Array, grid: jaxmpi.Grid) -> tuple[jax.Array, jax.Array]:
    """Return the same p, and the number of iterations."""
    f = f - dot(f, jnp.ones_like(f)) / math.prod(grid.global_shape)
    laplace = lambda p: divergence(gradient(p, grid), grid)  # noqa: E731
    size = dot(f, f)

    def goes_on(state: tuple) -> jax.Array:
        _, _, _, square, done = state
        return (square > TOLERANCE**2 * size) & (done < MOST_ITERATIONS)

    def iterate(state: tuple) -> tuple:
        p, r, d, square, done = state
        q = laplace(d)
        step = square / dot(d, q)
        p, r = p + step * d, r - step * q
        new = dot(r, r)
        return p, r, r + new / square * d, new, done + 1

    p, _, _, _, done = lax.while_loop(goes_on, iterate, (jnp.zeros_like(f), f, f, size, 0))
    return p - dot(p, jnp.ones_like(p)) / math.prod(grid.global_shape), done


def make_velocity(grid: jaxmpi.Grid) -> list[jax.Array]:
    """Return smooth noise, the same on any number of processes: each draws all of it and takes its block."""
    generator = np.random.default_rng(SEED)
    k = np.meshgrid(*[np.fft.fftfreq(n, 1 / n) for n in grid.global_shape], indexing="ij")
    decay = np.exp(-sum(number**2 for number in k) / SMOOTH**2)
    noise = (generator.standard_normal(grid.global_shape) for _ in grid.global_shape)
    return [jnp.asarray(np.fft.ifftn(decay * np.fft.fftn(x)).real[grid.slices]) for x in noise]


def timed(function: Callable, *args) -> tuple:
    """Return the result of a compiled function, and the seconds of the second call."""
    jax.block_until_ready(function(*args))
    COMM.Barrier()
    begin = time.perf_counter()
    return jax.block_until_ready(function(*args)), time.perf_counter() - begin


def save_picture(path: Path, fields: dict[str, np.ndarray]) -> None:
    """Draw the fields; of a cube the middle slice."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 4), sharex=True, sharey=True, layout="constrained")
    for place, (name, field) in zip(axes, fields.items(), strict=True):
        shown = field[..., field.shape[-1] // 2] if field.ndim == 3 else field
        limit = np.abs(shown).max()
        image = place.imshow(shown.T, extent=(0, 1, 0, 1), origin="lower", cmap="RdBu_r", vmin=-limit, vmax=limit)
        figure.colorbar(image, ax=place, pad=0.02)
        place.set_title(name, loc="left")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dimensions", type=int, choices=SIZES, default=2, help="(default: %(default)s)")
    parser.add_argument("--size", type=int, help=f"cells per axis (default: by dimensions, {SIZES})")
    parser.add_argument("--save-state", type=Path, metavar="FILE.npz", help="write the fields of the picture")
    parser.add_argument("--output-dir", type=Path, default=Path(), metavar="DIR", help="where the picture goes")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    jax.config.update("jax_enable_x64", True)
    size = options.size or SIZES[options.dimensions]
    grid = jaxmpi.Grid((0, 1) if options.dimensions == 2 else (0, 0, 1), (size,) * options.dimensions, periodic=True)
    u = make_velocity(grid)
    before = jaxmpi.jit(partial(divergence, grid=grid))(u)
    p, fast = timed(jaxmpi.jit(partial(by_transforms, grid=grid)), before)
    (q, iterations), slow = timed(jaxmpi.jit(partial(by_conjugate_gradients, grid=grid)), before)

    @jaxmpi.jit
    def projected(u, p):
        return divergence([v - g for v, g in zip(u, gradient(p, grid), strict=True)], grid)

    @jaxmpi.jit
    def norm(x):
        return jnp.sqrt(dot(x, x))

    difference, old, new = norm(p - q) / norm(q), norm(before), norm(projected(u, p))
    p, u0, div = grid.gather((p, u[0], before))
    if RANK != 0:
        return
    print(f"{COMM.size} processes, {grid.processes} of {grid.global_shape} cells")
    print(f"Transforms: {1e3 * fast:.1f} ms; conjugate gradients: {1e3 * slow:.1f} ms, {int(iterations)} iterations")
    print(f"Pressures: relative difference {float(difference):.1e}")
    print(f"Divergence after projection, relative to that before: {float(new / old):.1e}")
    fields = {"velocity along the first axis": u0, "divergence": div, "pressure": p}
    options.output_dir.mkdir(parents=True, exist_ok=True)
    picture = (options.output_dir / "poisson-fft.png").resolve()
    save_picture(picture, {name: np.asarray(field) for name, field in fields.items()})
    print(f"Picture: {picture}")
    if options.save_state:
        np.savez(options.save_state, u0=u0, divergence=div, p=p)
        print(f"State: {options.save_state.resolve()}")


if __name__ == "__main__":
    main()
