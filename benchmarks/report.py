"""Tables and plots of what calls.py and startup.py have written: part of `make bench`.

    python benchmarks/report.py output/bench/*.json --markdown --plots output/bench

Medians of the rounds, with quartiles; a ratio is one of medians. bandwidth.py says what algbw and busbw are. `wrong` is
the number of elements that were not what they must be, of all contenders of a row; those that had any are named.
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
    """All that the files say: calls[operation, bytes][kind, contender] -> record, and the rest."""
    calls, rest = defaultdict(dict), {"surroundings": {}, "missing": {}, "startup": [], "shallow water": []}
    for path in paths:
        whole = json.loads(Path(path).read_text())
        for record in whole.pop("calls", []):
            calls[record["operation"], record["bytes"]][record["kind"], record["contender"]] = record
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
    low, middle, high = (three_digits(1e6 * value) for value in statistics.quantiles(seconds, n=4))
    return f"{middle} ({low}-{high})"


def latency(record):
    return cell(record["seconds"]) if record else ""


def bandwidth(record):
    """algbw / busbw"""
    if not record or record.get("busbw_GBps") is None:
        return ""
    return f"{three_digits(record['algbw_GBps'])} / {three_digits(record['busbw_GBps'])}"


def wrong(records):
    """The number of wrong elements, and whose they are; nothing where data was not checked."""
    counts = {record["contender"]: record["wrong"] for record in records if "wrong" in record}
    named = [f"{name}: {count}" for name, count in counts.items() if count]
    return ", ".join(named) or ("0" if counts else "")


def ratio(records, key, reference):
    if key not in records or reference not in records:
        return None
    return statistics.median(records[key]["seconds"]) / statistics.median(records[reference]["seconds"])


def table(head, rows):
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def tables_of_calls(title, rows, keys, quotients=()):
    """Two tables: latency, with ratios and what was wrong, and bandwidth. rows: (first cells, records by key)."""
    names = [name for _, name in keys]
    first = ["operation", "bytes"]
    print(f"### {title}: latency, µs\n")
    lines = []
    for start, records in rows:
        values = (ratio(records, key, reference) for key, reference, _ in quotients)
        lines.append(
            [*start, *(latency(records.get(key)) for key in keys)]
            + ["" if value is None else three_digits(value) for value in values]
            + [wrong(records[key] for key in keys if key in records)]
        )
    table([*first, *names, *(label for *_, label in quotients), "wrong"], lines)
    keys = [key for key in keys if any(bandwidth(records.get(key)) for _, records in rows)]
    if keys:
        print(f"### {title}: bandwidth, algbw / busbw in GB/s\n")
        lines = [[*start, *(bandwidth(records.get(key)) for key in keys)] for start, records in rows]
        table([*first, *(name for _, name in keys)], [line for line in lines if any(line[len(first) :])])


def markdown(calls, rest):
    rows = [((operation, size(nbytes)), records) for (operation, nbytes), records in calls.items()]
    chained = [row for row in rows if row[0][0] != ALONE]
    for kind, title in KINDS.items():
        keys = list(dict.fromkeys(key for _, records in chained for key in records if key[0] == kind))
        ratios = [((kind, "jaxmpi"), FLOOR, "jaxmpi / C"), ((kind, "mpi4jax"), (kind, "jaxmpi"), "mpi4jax / jaxmpi")]
        tables_of_calls(title, chained, keys, ratios)
    alone = [row for row in rows if row[0][0] == ALONE]
    if alone:
        keys = list(dict.fromkeys(key for _, records in alone for key in records))
        tables_of_calls("One compiled call of allreduce alone, with and without donation", alone, keys)
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
    """One picture per kind of call: over size, for each operation, latency, its ratio to C, and bus bandwidth. What had
    wrong data is crossed out."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    operations = list(dict.fromkeys(operation for operation, _ in calls if operation not in (ALONE, "barrier")))
    for kind, title in KINDS.items():
        figure, axes = plt.subplots(
            3, len(operations), figsize=(3.2 * len(operations), 9), sharex=True, sharey="row", squeeze=False
        )
        for column, operation in enumerate(operations):
            of_operation = {nbytes: records for (name, nbytes), records in calls.items() if name == operation}
            names = dict.fromkeys(name for records in of_operation.values() for k, name in records if k == kind)
            for name in [FLOOR] * (kind != "loop") + [(kind, name) for name in names]:
                if name[1] not in COLOURS:
                    continue
                points = [(nbytes, records) for nbytes, records in of_operation.items() if name in records]
                sizes = [nbytes for nbytes, _ in points]
                own = [records[name] for _, records in points]
                quartiles = [[1e6 * q for q in statistics.quantiles(record["seconds"], n=4)] for record in own]
                low, middle, high = zip(*quartiles, strict=True)
                colour = COLOURS[name[1]]
                label = f"{name[1]}, in a loop" if name[0] != kind else name[1]
                axes[0, column].loglog(sizes, middle, "o-", markersize=3, color=colour, label=label)
                axes[0, column].fill_between(sizes, low, high, color=colour, alpha=0.2, linewidth=0)
                crossed = [
                    value if record.get("wrong") else math.nan for value, record in zip(middle, own, strict=True)
                ]
                axes[0, column].loglog(sizes, crossed, "kx", markersize=9)
                relative = [ratio(records, name, FLOOR) or math.nan for _, records in points]
                axes[1, column].loglog(sizes, relative, "o-", markersize=3, color=colour)
                speeds = [record.get("busbw_GBps") or math.nan for record in own]
                axes[2, column].loglog(sizes, speeds, "o-", markersize=3, color=colour)
            axes[0, column].set_title(operation)
            axes[1, column].axhline(1, color="black", linewidth=0.5)
            axes[2, column].set_xlabel("bytes")
        axes[0, 0].set_ylabel("latency, µs")
        axes[1, 0].set_ylabel("latency, ratio to C")
        axes[2, 0].set_ylabel("busbw, GB/s")
        handles, labels = axes[0, 0].get_legend_handles_labels()  # allreduce has all contenders
        figure.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False)
        figure.suptitle(title.replace("`", ""))
        figure.tight_layout(rect=(0, 0.03, 1, 1))
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
