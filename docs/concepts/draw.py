"""Draw the pictures of docs/concepts.md: `python docs/concepts/draw.py`. Needs matplotlib."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = ["#4c78a8", "#f58518"]
SAME, COMPUTED, WAITING, TEXT = "#54a24b", "#dddddd", "#f2f2f2", "#333333"
FOLDER = Path(__file__).parent


def box(ax, left, right, y, text, colour, alpha=1.0, size=8.5, height=0.62, **more):
    patch = plt.Rectangle((left, y - height / 2), right - left, height, facecolor=colour, alpha=alpha, **more)
    ax.add_patch(patch)
    ax.text((left + right) / 2, y, text, ha="center", va="center", fontsize=size, color=TEXT)


def arrow(ax, start, end, style="-|>", colour=TEXT, width=1.1):
    ax.annotate(
        "", end, start, arrowprops={"arrowstyle": style, "color": colour, "lw": width, "shrinkA": 0, "shrinkB": 0}
    )


def draw_order() -> None:
    """Draw what two ranks do while they execute `y = step(x)`, `z = bcast(y, 0)`, `print(z)`."""
    figure, ax = plt.subplots(figsize=(8.6, 3.5), layout="constrained")
    python, operations = (3.4, -0.4), (2.4, 0.6)
    # An operation ends at the same time on both ranks, but begins at different times.
    ends = [("sendrecv", 4.6), ("sendrecv", 6.0), ("allreduce", 7.4), ("bcast", 8.8)]
    for rank, ready in enumerate((1.6, 3.6)):
        colour = COLOURS[rank]
        for call, left, right in (("step(x)", 0, 0.8), ("bcast", 0.8, 1.4), ("print(z)", 1.4, 9.0)):
            text = call if call != "print(z)" else "print(z) waits for the value"
            box(ax, left, right, python[rank], text, colour, 0.35, edgecolor="white")
        box(ax, 0.2, ready, operations[rank], "computation", COMPUTED, edgecolor="white")
        for name, end in ends:
            begin = max(ready, end - 1.0)
            if begin > ready:
                box(ax, ready, begin, operations[rank], "waits" if name == "sendrecv" and ready < 2 else "", WAITING)
            box(ax, begin, end, operations[rank], name, colour, 0.8, edgecolor="white")
            ready = end + (0.1, 0.4)[rank]
            if name != "bcast":
                box(ax, end, ready, operations[rank], "", COMPUTED, edgecolor="white")
    for name, end in ends:
        middle = end - 0.5
        style = "-|>" if name == "bcast" else "<|-|>"
        arrow(ax, (middle, operations[0] - 0.34), (middle, operations[1] + 0.34), style)
    labels = [("rank 0: Python", python[0]), ("compiled code", operations[0])]
    labels += [("compiled code", operations[1]), ("rank 1: Python", python[1])]
    for text, y in labels:
        ax.text(-0.15, y, text, ha="right", va="center", fontsize=8.5)
    ax.text(9.0, -1.05, "time", ha="right", va="center", fontsize=8.5)
    arrow(ax, (0, -1.05), (8.5, -1.05))
    ax.set(xlim=(-1.75, 9.1), ylim=(-1.3, 3.85), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    figure.savefig(FOLDER / "order.png", dpi=110)
    plt.close(figure)


def draw_values() -> None:
    """Draw a parameter, each rank's data and a loss: values flow to the loss, cotangents flow back."""
    figure, ax = plt.subplots(figsize=(8.6, 3.3), layout="constrained")
    columns = [(0, 1.7), (3.4, 5.1), (5.8, 7.5), (9.2, 10.9)]
    names = [("w", "w"), ("w", "w"), ("error of\nits own data", "error of\nits own data"), ("loss", "loss")]
    for rank, y in enumerate((2.0, 0.6)):
        ax.text(-0.2, y, f"rank {rank}", ha="right", va="center", fontsize=8.5)
        for (left, right), both in zip(columns, names, strict=True):
            same = left in (0, 9.2)
            box(ax, left, right, y, both[rank], SAME if same else COLOURS[rank], 0.55, height=0.8)
    for left, right, name, back in ((1.7, 3.4, "replicate", "sum"), (7.5, 9.2, "allreduce", "unchanged")):
        for y in (2.0, 0.6):
            arrow(ax, (left + 0.06, y + 0.16), (right - 0.06, y + 0.16))
            arrow(ax, (right - 0.06, y - 0.16), (left + 0.06, y - 0.16), colour="#888888")
        ax.text((left + right) / 2, 2.32, name, ha="center", va="bottom", fontsize=8.5)
        ax.text((left + right) / 2, 1.3, back, ha="center", va="center", fontsize=8.5, color="#777777")
    for y in (2.0, 0.6):
        arrow(ax, (5.14, y + 0.16), (5.76, y + 0.16))
        arrow(ax, (5.76, y - 0.16), (5.14, y - 0.16), colour="#888888")
    texts = [((0, 1.7), "invariant"), ((3.4, 7.5), "varying: each rank's own"), ((9.2, 10.9), "invariant")]
    for (left, right), text in texts:
        ax.text((left + right) / 2, -0.25, text, ha="center", va="center", fontsize=8.5)
        ax.plot((left, right), (0.0, 0.0), color=TEXT, lw=0.8)
    ax.text(5.45, 2.85, "values", ha="center", va="center", fontsize=8.5)
    arrow(ax, (4.9, 2.68), (6.0, 2.68))
    ax.text(5.45, -0.75, "cotangents", ha="center", va="center", fontsize=8.5, color="#777777")
    arrow(ax, (6.2, -0.58), (4.7, -0.58), colour="#888888")
    ax.set(xlim=(-1.0, 11.0), ylim=(-0.95, 3.05), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    figure.savefig(FOLDER / "values.png", dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    draw_order()
    draw_values()
