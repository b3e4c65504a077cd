"""Heat conduction by conjugate gradients without a matrix, and the derivatives of the solution.

A square or cubic body of uneven conductivity k is heated by f and kept at zero at the walls. The program computes the
steady temperature u, and a misfit: half the mean square distance of u to a wanted temperature. It also computes the
gradients of the misfit with respect to f and to k, in all cells. They cost one more solution, the adjoint one. Both
gradients are compared with difference quotients in a random direction.

    python poisson_cg.py                                                # one process, two dimensions
    python -m jaxmpi.run -n 2 poisson_cg.py                             # the same result on two, or any other number
    python -m jaxmpi.run -n 3 poisson_cg.py --dimensions 3 --size 40    # blocks need not be equal

A run shows a progress bar, prints the residual and the comparison, writes `poisson-cg.png` and prints where it is.

The equation, on the unit square or cube with lengths, k and u without units:

    -div(k grad u) = f,    u = 0 at the walls

in finite volumes. Heat that flows from one cell to the next passes half of each, so it meets the mean of their
resistances 1/k. At a wall it passes only half of one cell: the resistance beyond is zero, as is u.
"""

import argparse
import math
from collections.abc import Callable
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

SIZES = {2: 128, 3: 32}  # cells per axis by default
TOLERANCE = 1e-12  # of the residual, relative to the right-hand side
MOST_ITERATIONS = 10_000  # of one solution
REPORT = 10  # iterations between two reports to the progress bar
STEP = 1e-4  # of the difference quotients, relative to f and k
SEED = 0  # of the directions

Pair = tuple[jax.Array, jax.Array]
"""For f and k."""


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the product of two fields, over all processes."""
    return allreduce(jnp.vdot(a, b), MPI.SUM)


# The equation. A field is this process's block of the body, without halo; n cells along an axis have n + 1 faces.


def with_neighbours(field: jax.Array, grid: jaxmpi.Grid) -> list[jax.Array]:
    """Return for each axis the block with one more cell at both ends; beyond a wall there are zeros."""
    padded = grid.exchange(grid.pad(field), corners=False, boundary=0)
    axes = range(field.ndim)
    return [padded[tuple(slice(None) if other == axis else slice(1, -1) for other in axes)] for axis in axes]


def conductances(k: jax.Array, grid: jaxmpi.Grid) -> list[jax.Array]:
    """Return for the faces across each axis one over the mean resistance of the cells on both sides."""
    resistances = enumerate(with_neighbours(1 / k, grid))
    return [2 / (lax.slice_in_dim(r, 1, None, axis=i) + lax.slice_in_dim(r, 0, -1, axis=i)) for i, r in resistances]


def operator(faces: list[jax.Array], grid: jaxmpi.Grid, u: jax.Array) -> jax.Array:
    """Return -div(k grad u)."""
    flows = [c * jnp.diff(v, axis=i) for i, (c, v) in enumerate(zip(faces, with_neighbours(u, grid), strict=True))]
    return -(grid.global_shape[0] ** 2) * sum(jnp.diff(flow, axis=i) for i, flow in enumerate(flows))


def conjugate_gradients(apply: Callable[[jax.Array], jax.Array], b: jax.Array, report: Callable) -> jax.Array:
    """Solve apply(x) = b for a symmetric positive definite `apply`; `report` is called in each iteration."""
    size = dot(b, b)

    def goes_on(state: tuple) -> jax.Array:
        _, _, _, square, done = state
        return (square > TOLERANCE**2 * size) & (done < MOST_ITERATIONS)

    def iterate(state: tuple) -> tuple:
        x, r, p, square, done = state
        q = apply(p)
        step = square / dot(p, q)
        x, r = x + step * p, r - step * q
        new = dot(r, r)
        report(done + 1, new / size)
        return x, r, r + new / square * p, new, done + 1

    return lax.while_loop(goes_on, iterate, (jnp.zeros_like(b), b, b, size, 0))[0]


def solve(f: jax.Array, k: jax.Array, grid: jaxmpi.Grid, report: Callable) -> jax.Array:
    """Return u. Derivatives of u solve the same equation, so nothing is differentiated iteration by iteration."""
    apply = partial(operator, conductances(k, grid), grid)
    return lax.custom_linear_solve(apply, f, partial(conjugate_gradients, report=report), symmetric=True)


def residual(u: jax.Array, f: jax.Array, k: jax.Array, grid: jaxmpi.Grid) -> jax.Array:
    """Return the residual relative to f."""
    r = f - operator(conductances(k, grid), grid, u)
    return jnp.sqrt(dot(r, r) / dot(f, f))


def misfit(f: jax.Array, k: jax.Array, wanted: jax.Array, grid: jaxmpi.Grid, report: Callable):
    """Return the misfit and u."""
    u = solve(f, k, grid, report)
    return 0.5 * dot(u - wanted, u - wanted) / math.prod(grid.global_shape), u


def relative_error(value: Callable, at: Pair, gradients: Pair, direction: Pair) -> jax.Array:
    """Return the error of the derivative in a direction by the gradients, relative to a difference quotient."""
    there, back = (value(*(x + step * d for x, d in zip(at, direction, strict=True))) for step in (STEP, -STEP))
    derivative = sum(dot(gradient, d) for gradient, d in zip(gradients, direction, strict=True))
    return jnp.abs(derivative / ((there - back) / (2 * STEP)) - 1)


# The body: blobs that conduct ten times better or worse, heated from one side; wanted is a dome.


def make_body(grid: jaxmpi.Grid) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return this process's blocks of f, k and the wanted u."""
    x = (np.mgrid[grid.slices] + 0.5) / grid.global_shape[0]

    def blob(*middle: float) -> np.ndarray:
        return np.exp(-sum((a - b) ** 2 for a, b in zip(x, (*middle, 0.5), strict=False)) / 0.02)

    k = 10 ** (blob(0.3, 0.3) - blob(0.7, 0.4) + blob(0.4, 0.8) - blob(0.2, 0.6))
    wanted = np.prod(np.sin(np.pi * x), axis=0)
    return jnp.asarray(24 * (1 - x[0])), jnp.asarray(k), jnp.asarray(wanted)


# Results.


def make_report(bar: tqdm) -> Callable[[jax.Array, jax.Array], None]:
    """Return a function that shows the iterations of a solution in a progress bar."""

    def show(square: np.ndarray) -> None:
        bar.set_postfix_str(f"residual {square**0.5:.1e}", refresh=False)
        bar.update(REPORT)

    def report(done: jax.Array, square: jax.Array) -> None:
        if not bar.disable:
            lax.cond(done % REPORT == 0, partial(jax.debug.callback, show), lambda _: None, square)

    return report


def save_picture(path: Path, fields: dict[str, np.ndarray]) -> None:
    """Draw k, u and both gradients; of a body in three dimensions the middle slice."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(9.5, 8.4), sharex=True, sharey=True, layout="constrained")
    labels = ("conductivity k", "temperature u", "d misfit / d f", "d misfit / d k")
    for place, (name, field), label in zip(axes.flat, fields.items(), labels, strict=True):
        shown = field[..., field.shape[-1] // 2] if field.ndim == 3 else field
        limit = np.abs(shown).max()
        style = {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit} if "gradient" in name else {}
        image = place.imshow(shown.T, extent=(0, 1, 0, 1), origin="lower", norm="log" if name == "k" else None, **style)
        figure.colorbar(image, ax=place, pad=0.02)
        place.set_title(label, loc="left")
    figure.savefig(path, dpi=130)
    plt.close(figure)


# The programme.


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dimensions", type=int, choices=SIZES, default=2, help="(default: %(default)s)")
    parser.add_argument("--size", type=int, help=f"cells per axis (default: by dimensions, {SIZES})")
    parser.add_argument("--save-state", type=Path, metavar="FILE.npz", help="write k, u and both gradients")
    parser.add_argument("--output-dir", type=Path, default=Path(), metavar="DIR", help="where the picture goes")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    jax.config.update("jax_enable_x64", True)
    size = options.size or SIZES[options.dimensions]
    grid = jaxmpi.Grid((0,) * options.dimensions, (size,) * options.dimensions)
    rank = grid.comm.rank
    f, k, wanted = make_body(grid)
    # Every process draws the whole direction and takes its block: the same on any number of processes.
    direction = grid.scatter(np.random.default_rng(SEED).standard_normal(grid.global_shape), None)

    with tqdm(desc="iterations", unit="", disable=rank != 0) as bar:
        value = partial(misfit, wanted=wanted, grid=grid, report=make_report(bar))
        value_and_gradients = jaxmpi.jit(jax.value_and_grad(value, argnums=(0, 1), has_aux=True))
        (distance, u), gradients = value_and_gradients(f, k)
        check = jaxmpi.jit(partial(relative_error, lambda *at: value(*at)[0]))
        directions = {"f": (f * direction, 0 * k), "k": (0 * f, k * direction)}
        errors = {name: check((f, k), gradients, direction) for name, direction in directions.items()}
        jax.block_until_ready(errors)
        jax.effects_barrier()

    left = jaxmpi.jit(partial(residual, grid=grid))(u, f, k)
    k, u, by_f, by_k = grid.gather((k, u, *gradients))
    if rank != 0:
        return
    print(f"{grid.comm.size} processes, misfit {float(distance):.6e}, relative residual {float(left):.1e}")
    for name, error in errors.items():
        print(f"Gradient with respect to {name}: relative error {float(error):.1e}")
    fields = {"k": k, "u": u, "gradient_f": by_f, "gradient_k": by_k}
    options.output_dir.mkdir(parents=True, exist_ok=True)
    picture = (options.output_dir / "poisson-cg.png").resolve()
    save_picture(picture, fields)
    print(f"Picture: {picture}")
    if options.save_state:
        np.savez(options.save_state, **fields)
        print(f"State: {options.save_state.resolve()}")


if __name__ == "__main__":
    main()
