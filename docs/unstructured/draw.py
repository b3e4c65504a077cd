"""Draws the picture of docs/unstructured.md: `python -m jaxmpi.run -n 3 docs/unstructured/draw.py`.

Needs matplotlib. The picture shows the map of each rank.
"""

from pathlib import Path

import numpy as np
from mpi4py import MPI
from scipy.spatial import Delaunay

import jaxmpi

COLOURS = ["#4c78a8", "#f58518", "#54a24b"]
FOLDER = Path(__file__).parent


def mesh() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the points and triangles of a mesh, and the rank that owns each point."""
    rng = np.random.default_rng(4)
    points = np.stack(np.meshgrid(np.arange(7.0), np.arange(4.0)), -1).reshape(-1, 2)
    points += rng.uniform(-0.25, 0.25, points.shape)
    return points, Delaunay(points).simplices, np.digitize(points[:, 0] + 0.4 * points[:, 1], [2.4, 4.6])


def draw(parts: list[tuple[np.ndarray, np.ndarray, int]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    points, _, owner = mesh()
    figure, axes = plt.subplots(
        2, 3, figsize=(10.4, 2.7), height_ratios=(8, 1), layout="constrained", sharex="row", sharey="row"
    )
    longest = max(len(indices) for indices, _, _ in parts)
    for rank, (indices, triangles, owned) in enumerate(parts):
        above, below = axes[:, rank]
        above.triplot(*points.T, mesh()[1], color="#eeeeee", linewidth=0.8, zorder=0)
        above.triplot(*points.T, indices[triangles], color="#999999", linewidth=0.9, zorder=1)
        for local, index in enumerate(indices):
            ghost = local >= owned
            colour = COLOURS[owner[index]]
            fill = "white" if ghost else colour
            above.scatter(*points[index], s=150, facecolor=fill, edgecolor=colour, linewidth=1.8, zorder=2)
            text = "black" if ghost else "white"
            above.text(*points[index], str(local), ha="center", va="center", fontsize=7.5, color=text, zorder=3)
            below.add_patch(plt.Rectangle((local, 0), 0.9, 0.9, facecolor=fill, edgecolor=colour, linewidth=1.4))
            below.text(local + 0.45, 0.45, str(index), ha="center", va="center", fontsize=6.5, color=text)
        above.set(aspect="equal", xticks=[], yticks=[])
        above.margins(0.06)
        above.set_title(f"rank {rank}: {owned} own points, {len(indices) - owned} ghosts", fontsize=10)
        below.set(xlim=(-0.2, longest), ylim=(-0.1, 1), aspect="equal", xticks=[], yticks=[])
        for ax in (above, below):
            ax.spines[:].set_visible(False)
    figure.savefig(FOLDER / "map.png", dpi=110)


def main() -> None:
    comm = MPI.COMM_WORLD
    _, triangles, owner = mesh()
    mine = triangles[(owner[triangles] == comm.rank).any(axis=1)]
    made = jaxmpi.IndexMap(np.flatnonzero(owner == comm.rank), mine.reshape(-1))
    part = made.to_global(np.arange(sum(made.sizes))), made.to_local(mine), made.sizes[0]
    parts = comm.gather(part)
    if parts is not None:
        draw(parts)


if __name__ == "__main__":
    main()
