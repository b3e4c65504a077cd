"""Heat conduction in a plate with a pipe through it, by finite elements on triangles, and how to improve the design.

The plate is heated around one place and insulated at the walls; the pipe is kept at zero. Conjugate gradients compute
the steady temperature u, and the gradients of the mean of u with respect to the conductivity k of each triangle and to
the places of all vertices: so to the shape of the pipe. The gradients cost one more solution, the adjoint one. Both are
compared with difference quotients; for the second one the pipe moves to the right.

    python mesh_poisson.py                                      # one process
    python -m jaxmpi.run -n 2 mesh_poisson.py                   # the same result on two, or any other number
    python -m jaxmpi.run -n 3 mesh_poisson.py --size 100        # a finer mesh

A run shows a progress bar, prints the residual and the comparison, writes `mesh-poisson.png` and prints where it is.

The equation, on the unit square with lengths, k and u without units:

    -div(k grad u) = f,    u = 0 on the pipe,    du/dn = 0 at the walls

Elements are linear: the values at the vertices define u. Each process owns some vertices, and the triangles whose first
corner is one of them. Other corners may be ghosts, vertices of neighbours. `IndexMap.exchange` copies values to the
ghosts. `IndexMap.accumulate` adds the triangles' contributions to ghosts to the vertices of the owners.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from mpi4py import MPI
from scipy.spatial import Delaunay
from tqdm import tqdm

import jaxmpi
from jaxmpi import allreduce

CENTRE, RADIUS = np.array([0.35, 0.4]), 0.1  # of the pipe
HEATED, WIDTH = np.array([0.75, 0.7]), 0.15  # the heated place
FINER = 3  # the factor by which edges are shorter at the pipe
SMOOTHINGS = 30  # of the mesh
TOLERANCE = 1e-12  # of the residual, relative to the right-hand side
MOST_ITERATIONS = 10_000  # of one solution
REPORT = 10  # iterations between two reports to the progress bar
STEP = 1e-4  # of the difference quotients
SEED = 0

COMM = MPI.COMM_WORLD
RANK = COMM.rank
Pair = tuple[jax.Array, jax.Array]
"""For k, one value per triangle of this process, and for x, the places of the own vertices."""


# The mesh.


def make_mesh(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the places of all vertices (n, 2), which are on the pipe (n,), and the corners of all triangles (m, 3).

    Edges have about the length 1/size, and less at the pipe.
    """

    def from_pipe(points: np.ndarray) -> np.ndarray:
        return np.hypot(*(points - CENTRE).T) - RADIUS

    def length(points: np.ndarray) -> np.ndarray:
        return np.interp(from_pipe(points), [0, 0.3], [1 / (FINER * size), 1 / size])

    angles = np.linspace(0, 2 * np.pi, round(2 * np.pi * RADIUS * FINER * size), endpoint=False)
    pipe = CENTRE + RADIUS * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    side, zero = np.arange(size) / size, np.zeros(size)
    walls = [(side, zero), (1 + zero, side), (1 - side, 1 + zero), (zero, 1 - side)]
    fixed = np.concatenate([pipe, *(np.stack(wall, axis=1) for wall in walls)])
    # Points of a fine lattice, as many as the density needs. Then each moves to the middle of the neighbours.
    fine = 1 / (FINER * size)
    lattice = (np.mgrid[: FINER * size, : FINER * size] * fine).reshape(2, -1).T
    chance = (fine / length(lattice)) ** 2
    room = np.minimum(np.minimum(lattice, 1 - lattice).min(axis=1), from_pipe(lattice))
    chosen = (room > length(lattice) / 2) & (np.random.default_rng(SEED).random(len(lattice)) < chance)
    points = np.concatenate([fixed, lattice[chosen]])
    for _ in range(SMOOTHINGS):
        first, neighbours = Delaunay(points).vertex_neighbor_vertices
        middles = np.add.reduceat(points[neighbours], first[:-1]) / np.diff(first)[:, None]
        points[len(fixed) :] = middles[len(fixed) :]
    on_pipe = np.arange(len(points)) < len(pipe)
    cells = Delaunay(points).simplices
    return points, on_pipe, cells[~on_pipe[cells].all(axis=1)]  # without triangles inside the pipe


def bisect(points: np.ndarray, parts: int) -> np.ndarray:
    """Return the part of each point: halves along the longer side, halves of these and so on; any number of parts."""
    part = np.zeros(len(points), int)

    def divide(chosen: np.ndarray, first: int, count: int) -> None:
        part[chosen] = first
        if count > 1:
            axis = np.ptp(points[chosen], axis=0).argmax()
            chosen = chosen[points[chosen, axis].argsort(kind="stable")]
            low = count // 2
            cut = len(chosen) * low // count
            divide(chosen[:cut], first, low)
            divide(chosen[cut:], first + low, count - low)

    divide(np.arange(len(points)), 0, parts)
    return part


class Mesh(NamedTuple):
    """The mesh as one process has it."""

    map: jaxmpi.IndexMap
    """The map of the vertices."""
    triangles: np.ndarray
    """The numbers of the own triangles in the whole mesh."""
    cells: np.ndarray
    """The corners of the own triangles, by local numbers: (triangles, 3)."""
    free: np.ndarray
    """Which of the own vertices are not on the pipe."""


def take_part(on_pipe: np.ndarray, cells: np.ndarray, owner: np.ndarray) -> Mesh:
    triangles = np.flatnonzero(owner[cells[:, 0]] == RANK)
    owned = np.flatnonzero(owner == RANK)
    ghosts = np.setdiff1d(cells[triangles], owned)
    vertices = jaxmpi.IndexMap(owned, ghosts)
    return Mesh(vertices, triangles, vertices.to_local(cells[triangles]), ~on_pipe[owned])


# The equation. A field has one value for each vertex that this process owns.


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the product of two fields, over all processes."""
    return allreduce(jnp.vdot(a, b), MPI.SUM)


def at_corners(field: jax.Array, mesh: Mesh) -> jax.Array:
    """Return the values at the corners of all triangles: (triangles, 3, ...)."""
    return mesh.map.exchange(mesh.map.pad(field))[mesh.cells]


def assemble(values: jax.Array, mesh: Mesh) -> jax.Array:
    """Return the field whose value at a vertex is the sum over the triangles around it; `values` is (triangles, 3)."""
    owned, ghosts = mesh.map.sizes
    sums = jax.ops.segment_sum(values.ravel(), mesh.cells.ravel(), owned + ghosts)
    return mesh.map.accumulate(sums)[:owned]


def areas(corners: jax.Array) -> jax.Array:
    """Return the areas of triangles with these corners: (triangles, 3, 2)."""
    a, b = corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]
    return (a[:, 0] * b[:, 1] - a[:, 1] * b[:, 0]) / 2


def stiffness(corners: jax.Array, k: jax.Array) -> jax.Array:
    """Return integrals of k grad(p_i) grad(p_j) over each triangle; p_i is linear, one at corner i and zero at others.

    The gradient of p_i is the opposite edge, turned by a right angle, over twice the area.
    """
    edges = jnp.roll(corners, 1, axis=1) - jnp.roll(corners, -1, axis=1)
    return (k / (4 * areas(corners)))[:, None, None] * jnp.einsum("tix,tjx->tij", edges, edges)


def operator(matrices: jax.Array, mesh: Mesh, u: jax.Array) -> jax.Array:
    """Return -div(k grad u), integrated with the function p of each vertex; on the pipe, where u is known, just u."""
    flows = jnp.einsum("tij,tj->ti", matrices, at_corners(u * mesh.free, mesh))
    return jnp.where(mesh.free, assemble(flows, mesh), u)


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


def mean_temperature(k: jax.Array, x: jax.Array, mesh: Mesh, report: Callable):
    """Return the mean of u, u and the relative residual. Triangles that move keep their k, the heated place stays.

    The derivatives of u are solutions of the same equation: nothing is differentiated iteration by iteration.
    """
    corners = at_corners(x, mesh)
    shares = assemble(jnp.repeat(areas(corners)[:, None] / 3, 3, axis=1), mesh)  # the part of each vertex in the area
    heat = mesh.free * shares * jnp.exp(-jnp.sum((x - HEATED) ** 2, axis=1) / (2 * WIDTH**2))
    apply = partial(operator, stiffness(corners, k), mesh)
    u = lax.custom_linear_solve(apply, heat, partial(conjugate_gradients, report=report), symmetric=True)
    left = heat - apply(u)
    return dot(shares, u) / allreduce(jnp.sum(shares), MPI.SUM), (u, jnp.sqrt(dot(left, left) / dot(heat, heat)))


def relative_error(value: Callable, at: Pair, gradients: Pair, direction: Pair) -> jax.Array:
    """Return the error of the derivative in a direction by the gradients, relative to a difference quotient."""
    there, back = (value(*(y + step * d for y, d in zip(at, direction, strict=True))) for step in (STEP, -STEP))
    derivative = sum(dot(gradient, d) for gradient, d in zip(gradients, direction, strict=True))
    return jnp.abs(derivative / ((there - back) / (2 * STEP)) - 1)


# Results.


def gather(values: jax.Array, numbers: np.ndarray) -> np.ndarray | None:
    """Return on rank 0 the values of all processes, ordered as in the whole mesh."""
    parts = COMM.gather((numbers, np.asarray(values)))
    if parts is None:
        return None
    order = np.argsort(np.concatenate([numbers for numbers, _ in parts]))
    return np.concatenate([values for _, values in parts])[order]


def make_report(bar: tqdm) -> Callable[[jax.Array, jax.Array], None]:
    """Return a function that shows the iterations of a solution in a progress bar."""

    def show(square: np.ndarray) -> None:
        bar.set_postfix_str(f"residual {square**0.5:.1e}", refresh=False)
        bar.update(REPORT)

    def report(done: jax.Array, square: jax.Array) -> None:
        if not bar.disable:
            lax.cond(done % REPORT == 0, partial(jax.debug.callback, show), lambda _: None, square)

    return report


def save_picture(path: Path, fields: dict[str, np.ndarray], owner: np.ndarray, area: np.ndarray) -> None:
    """Draw the parts of the mesh, the temperature, and where k and the pipe should change."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    x, cells, on_pipe = fields["x"], fields["cells"], fields["on_pipe"]
    drawn = *x.T, cells
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.6), sharex=True, sharey=True, layout="constrained")
    part = owner[cells[:, 0]]
    axes[0].tripcolor(*drawn, facecolors=part, cmap="Set3", vmin=0, vmax=11, edgecolors="gray", linewidth=0.2)
    axes[0].set_title(f"mesh, on {part.max() + 1} processes", loc="left")
    image = axes[1].tricontourf(*drawn, fields["u"], levels=20)
    figure.colorbar(image, ax=axes[1], pad=0.02)
    axes[1].set_title("temperature u", loc="left")
    by_k = fields["gradient_k"] / area
    image = axes[2].tripcolor(*drawn, facecolors=by_k, cmap="viridis_r", vmin=np.quantile(by_k, 0.02), vmax=0)
    figure.colorbar(image, ax=axes[2], pad=0.02)
    pipe, towards = x[on_pipe], -fields["gradient_x"][on_pipe]
    axes[2].quiver(*pipe.T, *towards.T, color="tab:red", width=0.004)
    axes[2].set_title("d mean(u) / dk; where the pipe cools more", loc="left")
    for place in axes:
        place.set_aspect("equal")
    figure.savefig(path, dpi=130)
    plt.close(figure)


# The programme.


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=int, default=40, help="edges along a wall (default: %(default)s)")
    parser.add_argument("--save-state", type=Path, metavar="FILE.npz", help="write mesh, k, u and both gradients")
    parser.add_argument("--output-dir", type=Path, default=Path(), metavar="DIR", help="where the picture goes")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    jax.config.update("jax_enable_x64", True)
    points, on_pipe, cells = COMM.bcast(make_mesh(options.size) if RANK == 0 else None)
    owner = bisect(points, COMM.size)
    mesh = take_part(on_pipe, cells, owner)
    x = jnp.asarray(points[mesh.map.owned])
    middles = points[cells].mean(axis=1)[mesh.triangles]
    k = jnp.asarray(np.exp(np.sin(6 * middles[:, 0]) * np.cos(5 * middles[:, 1])))
    # Every process draws the whole direction and takes its part: the same on any number of processes.
    noise = np.random.default_rng(SEED).standard_normal(len(cells))[mesh.triangles]
    from_pipe = jnp.hypot(*(x - CENTRE).T) - RADIUS
    to_the_right = jnp.clip(1 - from_pipe / 0.2, 0, 1)[:, None] * jnp.array([1.0, 0.0])
    directions = {"conductivity": (k * noise, 0 * x), "pipe's place": (0 * k, to_the_right)}

    with tqdm(desc="iterations", unit="", disable=RANK != 0) as bar:
        value = partial(mean_temperature, mesh=mesh, report=make_report(bar))
        value_and_gradients = jaxmpi.jit(jax.value_and_grad(value, argnums=(0, 1), has_aux=True))
        (mean, (u, residual)), gradients = value_and_gradients(k, x)
        check = jaxmpi.jit(partial(relative_error, lambda *at: value(*at)[0]))
        errors = {name: check((k, x), gradients, direction) for name, direction in directions.items()}
        jax.block_until_ready(errors)
        jax.effects_barrier()

    fields = {name: gather(y, mesh.triangles) for name, y in (("k", k), ("gradient_k", gradients[0]))}
    fields |= {name: gather(y, mesh.map.owned) for name, y in (("u", u), ("gradient_x", gradients[1]))}
    if RANK != 0:
        return
    print(f"{COMM.size} processes, {len(points)} vertices, {len(cells)} triangles")
    print(f"Mean temperature {float(mean):.9f}, relative residual {float(residual):.1e}")
    for name, error in errors.items():
        print(f"Derivative with respect to the {name}: relative error {float(error):.1e}")
    fields |= {"x": points, "cells": cells, "on_pipe": on_pipe}
    options.output_dir.mkdir(parents=True, exist_ok=True)
    picture = (options.output_dir / "mesh-poisson.png").resolve()
    save_picture(picture, fields, owner, np.asarray(areas(points[cells])))
    print(f"Picture: {picture}")
    if options.save_state:
        np.savez(options.save_state, **fields)
        print(f"State: {options.save_state.resolve()}")


if __name__ == "__main__":
    main()
