"""Tables and plots of what calls.py and startup.py have written: part of `make bench`.

    python benchmarks/report.py output/bench/*.json --markdown --plots output/bench

Medians of the rounds, with quartiles; a ratio is one of medians.
"""

import argparse
import json
import math
import statistics
from collections import defaultdict
from pathlib import Path

KINDS = {
    "loop": "In a `lax.fori_loop` inside one compiled call",
    "jit": "One compiled call",
    "eager": "One eager call",
}
ALONE = "allreduce alone"
FLOOR = ("loop", "C")
COLOURS = {
    "C": "black",
    "C, in place": "gray",
    "mpi4py": "tab:green",
    "jaxmpi": "tab:blue",
    "jaxmpi in jax.jit": "tab:cyan",
    "mpi4jax": "tab:red",
    "psum, gloo": "tab:orange",
    "x + 1": "tab:purple",
}


def read(paths):
    """All that the files say: calls[operation, bytes][kind, contender] -> seconds, and the rest."""
    calls, rest = defaultdict(dict), {"surroundings": {}, "missing": {}, "startup": [], "shallow water": []}
    for path in paths:
        whole = json.loads(Path(path).read_text())
        for record in whole.pop("calls", []):
            calls[record["operation"], record["bytes"]][record["kind"], record["contender"]] = record["seconds"]
        for name, value in whole.items():
            rest[name] = {**value, **rest[name]} if isinstance(value, dict) else rest[name] + value
    return calls, rest


def write(path, whole):
    """Writes figures for `read`, where there is a path."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(whole, indent=1) + "\n")


def size(nbytes):
    for factor, unit in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= factor:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def three_digits(value):
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def cell(seconds):
    """Median and quartiles in microseconds."""
    if seconds is None:
        return ""
    low, middle, high = (three_digits(1e6 * value) for value in statistics.quantiles(seconds, n=4))
    return f"{middle} ({low}-{high})"


def ratio(times, key, reference):
    if key not in times or reference not in times:
        return None
    return statistics.median(times[key]) / statistics.median(times[reference])


def table(head, rows):
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def markdown(calls, rest):
    for kind, title in KINDS.items():
        names = list(dict.fromkeys(name for times in calls.values() for k, name in times if k == kind))
        names = [name for name in names if not name.endswith("donated")]
        ratios = [((kind, "jaxmpi"), FLOOR, "jaxmpi / C"), ((kind, "mpi4jax"), (kind, "jaxmpi"), "mpi4jax / jaxmpi")]
        rows = []
        for (operation, nbytes), times in calls.items():
            if operation != ALONE:
                quotients = (ratio(times, key, reference) for key, reference, _ in ratios)
                rows.append(
                    [operation, size(nbytes)]
                    + [cell(times.get((kind, name))) for name in names]
                    + ["" if value is None else three_digits(value) for value in quotients]
                )
        print(f"### {title}, µs\n")
        table(["operation", "bytes", *names, *(label for *_, label in ratios)], rows)
    alone = {nbytes: times for (operation, nbytes), times in calls.items() if operation == ALONE}
    if alone:
        names = list(dict.fromkeys(key for times in alone.values() for key in times))
        print("### One compiled call of allreduce alone, with and without donation, µs\n")
        rows = [[size(nbytes), *(cell(times.get(key)) for key in names)] for nbytes, times in alone.items()]
        table(["bytes", *(name for _, name in names)], rows)
    if rest["shallow water"]:
        print("### The shallow-water model\n")
        rows = []
        for record in rest["shallow water"]:
            per_step = [value / record["steps"] for value in record["seconds"]]
            quotient = statistics.median(record["seconds"]) / statistics.median(record["jaxmpi"])
            rows.append([str(record["ranks"]), record["contender"], cell(per_step), f"{quotient:.2f}"])
        table(["ranks", "", "µs per step", "/ jaxmpi"], rows)
    if rest["startup"]:
        figures = [name for name in rest["startup"][0] if name != "contender"]
        print("### Before and beside the calls\n")
        rows = []
        for name in dict.fromkeys(record["contender"] for record in rest["startup"]):
            own = [record for record in rest["startup"] if record["contender"] == name]
            rows.append([name, *(f"{statistics.median(record[figure] for record in own):.3g}" for figure in figures)])
        table(["", *figures], rows)
    for name, why in rest["missing"].items():
        print(f"{name} is missing: {why}\n")
    print("Measured with " + "; ".join(f"{name}: {value}" for name, value in rest["surroundings"].items()) + ".")


def plot(calls, folder):
    """One picture per kind of call: time over size for each operation, and below it the ratio to C."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    operations = list(dict.fromkeys(operation for operation, _ in calls if operation not in (ALONE, "barrier")))
    for kind, title in KINDS.items():
        figure, axes = plt.subplots(
            2, len(operations), figsize=(3.2 * len(operations), 6.5), sharex=True, sharey="row", squeeze=False
        )
        for column, operation in enumerate(operations):
            of_operation = {nbytes: times for (name, nbytes), times in calls.items() if name == operation}
            names = dict.fromkeys(name for times in of_operation.values() for k, name in times if k == kind)
            for name in [FLOOR] * (kind != "loop") + [(kind, name) for name in names]:
                if name[1] not in COLOURS:
                    continue
                points = [(nbytes, times) for nbytes, times in of_operation.items() if name in times]
                sizes = [nbytes for nbytes, _ in points]
                quartiles = [[1e6 * q for q in statistics.quantiles(times[name], n=4)] for _, times in points]
                low, middle, high = zip(*quartiles, strict=True)
                colour = COLOURS[name[1]]
                label = f"{name[1]}, in a loop" if name[0] != kind else name[1]
                axes[0, column].loglog(sizes, middle, "o-", markersize=3, color=colour, label=label)
                axes[0, column].fill_between(sizes, low, high, color=colour, alpha=0.2, linewidth=0)
                relative = [ratio(times, name, FLOOR) or math.nan for _, times in points]
                axes[1, column].loglog(sizes, relative, "o-", markersize=3, color=colour)
            axes[0, column].set_title(operation)
            axes[1, column].axhline(1, color="black", linewidth=0.5)
            axes[1, column].set_xlabel("bytes")
        axes[0, 0].set_ylabel("µs per call")
        axes[1, 0].set_ylabel("ratio to C")
        handles, labels = axes[0, 0].get_legend_handles_labels()  # allreduce has all contenders
        figure.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False)
        figure.suptitle(title.replace("`", ""))
        figure.tight_layout(rect=(0, 0.04, 1, 1))
        path = Path(folder) / f"calls-{kind}.png"
        figure.savefig(path, dpi=120)
        plt.close(figure)
        print(f"plot: {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--markdown", action="store_true", help="print the tables")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write the plots there")
    options = parser.parse_args()
    calls, rest = read(options.files)
    if options.markdown:
        markdown(calls, rest)
    if options.plots:
        plot(calls, options.plots)


if __name__ == "__main__":
    main()
