"""Draws the pictures of docs/grids.md and docs/fft.md: `python docs/grids/draw.py`. Needs matplotlib.

The function that makes the plans of `Grid.exchange` also computes the pictures.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from jaxmpi._grid.divisions import best_division
from jaxmpi._grid.halos import Field, Halo, Layout, Number, _regions
from jaxmpi._mpi.plans import Box

COLOURS = ["#4c78a8", "#f58518", "#54a24b", "#b279a2"]
LEFT_ALONE = "#dddddd"
FOLDER = Path(__file__).parent


def cells_of(box: Box) -> list[tuple[int, ...]]:
    """Return the indices of a box, in the order in which they travel."""
    along = [
        [start + i * step for i in range(count)]
        for start, count, step in zip(box.starts, box.counts, box.steps, strict=True)
    ]
    return [tuple(index) for index in np.stack(np.meshgrid(*along, indexing="ij"), axis=-1).reshape(-1, len(along))]


def origins(halo: Halo, rank: int, field: Field) -> dict[tuple[int, ...], tuple[int, tuple[int, ...]] | float]:
    """Return for each filled cell of a halo the rank and the cell that it comes from, or a number."""
    filled = {}
    for _, source, written, read in _regions(halo, rank, field):
        for at, cell in enumerate(cells_of(written)):
            filled[cell] = (source, cells_of(read)[at]) if isinstance(read, Box) else read.value
    return filled


def draw_exchange() -> None:
    layout = Layout(((3, 2), (4, 3)), (False, True))
    halo = Halo(layout, ((1, 1), (1, 1)), True)
    field = Field((0, 1), (), (False, False), np.dtype(np.float32), ((None, None), (None, None)))
    figure, axes = plt.subplots(2, 2, figsize=(8.4, 6.2), layout="constrained")
    for rank, ax in enumerate(axes.flat):
        shape = field.shape(halo, rank)
        filled = origins(halo, rank, field)
        for cell in np.ndindex(*shape):
            inside = all(0 < i <= n for i, n in zip(cell, layout.block(rank), strict=True))
            source = rank if inside else filled[cell][0] if cell in filled else None
            colour = LEFT_ALONE if source is None else COLOURS[source]
            ax.add_patch(plt.Rectangle(cell[::-1], 1, 1, facecolor=colour, alpha=1 if inside else 0.45, edgecolor="w"))
            if source is not None and not inside:
                ax.text(cell[1] + 0.5, cell[0] + 0.5, str(source), ha="center", va="center", fontsize=9)
        block = layout.block(rank)
        ax.add_patch(plt.Rectangle((1, 1), block[1], block[0], fill=False, edgecolor="black", linewidth=1.6))
        ax.set(xlim=(-0.1, shape[1] + 0.1), ylim=(shape[0] + 0.1, -0.1), aspect="equal", xticks=[], yticks=[])
        ax.set_title(f"rank {rank} at {layout.coordinates(rank)}", fontsize=10)
        ax.spines[:].set_visible(False)
    figure.savefig(FOLDER / "exchange.png", dpi=110)
    plt.close(figure)


def draw_rules() -> None:
    rules = [None, "edge", "symmetric", "reflect", Number("0", 0)]
    layout = Layout(((5,),), (False,))
    figure, ax = plt.subplots(figsize=(7.2, 2.9), layout="constrained")
    for row, rule in enumerate(rules):
        name = rule.text if isinstance(rule, Number) else repr(rule)
        halo = Halo(layout, ((2, 2),), True)
        field = Field((0,), (), (False,), np.dtype(np.float32), ((rule, rule),))
        filled = origins(halo, 0, field)
        for cell in range(9):
            inside = 2 <= cell < 7
            text = "abcde"[cell - 2] if inside else "·"
            if (cell,) in filled:
                origin = filled[cell,]
                text = "abcde"[origin[1][0] - 2] if isinstance(origin, tuple) else str(origin)
            colour = COLOURS[0] if inside else LEFT_ALONE if text == "·" else COLOURS[1]
            patch = plt.Rectangle((cell, row), 0.96, 0.9, facecolor=colour, alpha=1 if inside else 0.5)
            ax.add_patch(patch)
            ax.text(cell + 0.48, row + 0.45, text, ha="center", va="center")
        ax.text(
            -0.3,
            row + 0.45,
            f"boundary={name}",
            ha="right",
            va="center",
            family="monospace",
            fontsize=9,
        )
    ax.set(xlim=(-3.6, 9.1), ylim=(len(rules), -0.1), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    figure.savefig(FOLDER / "rules.png", dpi=110)
    plt.close(figure)


def draw_staggered() -> None:
    layout = Layout(((4, 4),), (False,))
    figure, ax = plt.subplots(figsize=(8.4, 3.4), layout="constrained")
    for row, (name, staggered) in enumerate([("cells", False), ("points between them", True)]):
        halo = Halo(layout, ((1, 1),), True)
        field = Field((0,), (), (staggered,), np.dtype(np.float32), ((None, None),))
        for rank in range(2):
            y, first = 2.4 * row + rank, 4 * rank
            filled = origins(halo, rank, field)
            for cell in range(field.shape(halo, rank)[0]):
                x = first + cell - 1 - (0.5 if staggered else 0)
                inside = 1 <= cell < 5 + staggered
                source = rank if inside else filled[cell,][0] if (cell,) in filled else None
                colour = LEFT_ALONE if source is None else COLOURS[source]
                shared = staggered and inside and x == 3.5
                ax.add_patch(plt.Rectangle((x, y), 0.9, 0.8, facecolor=colour, alpha=1 if inside else 0.45))
                if shared or not inside:
                    text = "both" if shared else "" if source is None else str(source)
                    ax.text(x + 0.45, y + 0.4, text, ha="center", va="center", fontsize=9)
            ax.text(-2, y + 0.4, f"{name}, rank {rank}", ha="right", va="center", fontsize=9)
    ax.set(xlim=(-6.2, 9.6), ylim=(4.5, -0.2), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    figure.savefig(FOLDER / "staggered.png", dpi=110)
    plt.close(figure)


def draw_pencils() -> None:
    """Draw the divisions of a transform along all axes of a cube, on four ranks."""
    shape = (4, 4, 4)
    dims = [(1, 2, 2)]
    for axis in (1, 2):
        dims.append(best_division(shape, dims[-1], axis))
    figure, axes = plt.subplots(1, 3, figsize=(8.4, 3.5), subplot_kw={"projection": "3d"}, layout="constrained")
    for ax, processes, name in zip(axes, dims, ("first", "second", "third"), strict=True):
        layout = Layout(tuple((n // number,) * number for n, number in zip(shape, processes, strict=True)), (True,) * 3)
        colours = np.empty(shape, object)
        for rank in range(4):
            at = layout.coordinates(rank)
            index = tuple(slice(i * b, (i + 1) * b) for i, b in zip(at, layout.block(rank), strict=True))
            colours[index] = COLOURS[rank]
        ax.voxels(np.ones(shape, bool), facecolors=colours, edgecolor="white", linewidth=0.4)
        ax.set(xticks=[], yticks=[], zticks=[])
        for label, number in ((ax.set_xlabel, "1"), (ax.set_ylabel, "2"), (ax.set_zlabel, "3")):
            label(number, labelpad=-14, fontsize=9)
        ax.set_title(f"processes {processes}:\nthe {name} axis is whole", fontsize=10)
        ax.set_box_aspect((1, 1, 1), zoom=0.9)
    figure.savefig(FOLDER / "pencils.png", dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    draw_exchange()
    draw_rules()
    draw_pencils()
    draw_staggered()
