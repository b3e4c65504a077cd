"""The output of all benchmarks: tables, figures with their goals, JSON files and pictures. Rank 0 alone prints."""

import json
import os
import platform
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from jaxmpi._bench.operations import Case, Operation
from jaxmpi._bench.timing import COMM, Sample
from jaxmpi._mpi import library
from jaxmpi_launch import versions

COLUMNS = {
    "bytes": ("bytes", 11),
    "count": ("count", 10),
    "dtype": ("dtype", 10),
    "microseconds_min": ("min us", 10),
    "microseconds_median": ("median us", 10),
    "microseconds_max": ("max us", 10),
    "algorithm_bandwidth_gigabytes_per_second": ("algbw GB/s", 11),
    "bus_bandwidth_gigabytes_per_second": ("busbw GB/s", 11),
    "wrong": ("wrong", 7),
}
"""The figures of a table: name -> title and width."""

PANELS = {"microseconds_median": "time, us (median)", "bus_bandwidth_gigabytes_per_second": "bus bandwidth, GB/s"}
"""What a picture shows: figure -> text of the axis."""

Groups = Mapping[str, Mapping[Any, Sample]]
"""title -> contender -> sample. A contender is a name, or several words of which the last is the name."""

UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6}


def say(text: str) -> None:
    if COMM.rank == 0:
        print(text, flush=True)


def digits(value: float) -> str:
    """Write a number with four digits, without an exponent."""
    return f"{value:.4g}" if value < 1e4 else f"{value:.0f}"


# --- tables by size --------------------------------------------------------------------------------------------------


def figures_of(operation: Operation, case: Case, dtype: np.dtype, sample: Sample) -> dict[str, Any]:
    """Return the figures under names that contain the units. A gigabyte is 10^9 bytes."""
    count = case.elements * operation.parts(case.size) if operation.size else 0
    speed = count * dtype.itemsize / sample.median / 1e9
    factor = operation.factor(case) if case.size > 1 else 0.0
    microseconds = [1e6 * value for value in sample.seconds]
    return {
        "operation": operation.name,
        "bytes": count * dtype.itemsize,
        "count": count,
        "dtype": dtype.name,
        "microseconds_min": min(microseconds),
        "microseconds_median": 1e6 * sample.median,
        "microseconds_max": max(microseconds),
        "microseconds_by_round": microseconds,
        "algorithm_bandwidth_gigabytes_per_second": speed if operation.size else None,
        "bus_bandwidth_gigabytes_per_second": factor * speed if operation.size else None,
        "wrong": sample.wrong if operation.size else None,
    }


def titles(columns: Mapping[str, tuple[str, int]] = COLUMNS) -> str:
    return line({name: title for name, (title, _) in columns.items()}, columns)


def line(row: Mapping[str, Any], columns: Mapping[str, tuple[str, int]] = COLUMNS) -> str:
    cells = ((row[name], width) for name, (_, width) in columns.items())
    texts = (("-" if it is None else digits(it) if isinstance(it, float) else str(it), width) for it, width in cells)
    return " ".join(f"{text:>{width}}" for text, width in texts)


# --- figures with goals ----------------------------------------------------------------------------------------------


def figure(name: str, value: float | None, goal: str = "") -> None:
    """Print a line `name: value`, with the goal if there is one. None: a contender is missing."""
    say(f"{name}: {'-' if value is None else f'{value:.4g}'}" + (f"  (goal {goal})" if goal else ""))


def conclude(name: str, groups: Groups, unit: str = "us", missing: Mapping[str, str] | None = None) -> None:
    """Print how many elements of jaxmpi were wrong, which contenders are missing, and all times; then finish."""
    figure(name, _wrong_of_jaxmpi(groups), "0")
    for contender, why in (missing or {}).items():
        say(f"{contender} is missing: {why}")
    for title, group in groups.items():
        say(f"\n{title}, {unit}, median (least - most), wrong elements:")
        width = max(len(" ".join(_words(contender))) for contender in group)
        for contender, sample in group.items():
            times = (sample.median, min(sample.seconds), max(sample.seconds))
            middle, least, most = (digits(UNITS[unit] * value) for value in times)
            say(f"  {' '.join(_words(contender)):{width}} {middle:>8}  ({least} - {most})  wrong: {sample.wrong}")
    finish(groups)


def finish(groups: Groups) -> None:
    """Name the contenders that were wrong. End the job with an error, on all ranks, if jaxmpi was."""
    for title, group in groups.items():
        for contender, sample in group.items():
            if sample.wrong:
                say(f"WRONG DATA: {' '.join(_words(contender))}, {title}: {sample.wrong} elements")
    COMM.Barrier()  # a launcher ends the job when the first rank ends with an error
    if _wrong_of_jaxmpi(groups):
        sys.exit(1)


def _words(contender: Any) -> tuple[str, ...]:
    return (contender,) if isinstance(contender, str) else contender


def _wrong_of_jaxmpi(groups: Groups) -> int:
    samples = [(_words(contender)[-1], sample) for group in groups.values() for contender, sample in group.items()]
    return sum(sample.wrong for name, sample in samples if name.startswith("jaxmpi"))


# --- files -----------------------------------------------------------------------------------------------------------


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor()


def surroundings() -> dict[str, Any]:
    """Return where this job runs, and with which versions. All ranks call it."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "ranks": COMM.size,
        "hosts": list(dict.fromkeys(COMM.allgather(MPI.Get_processor_name()))),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "mpi": " ".join(re.split(r"[,\n]", library.LIBRARY.version)[0].split()),
        "jaxmpi": versions.shown("jaxmpi"),
        **{name: versions.installed(name) for name in ("jax", "jaxlib", "numpy", "mpi4py", "mpi4jax")},
    }


def write(path: Path, header: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text(json.dumps({**header, "rows": rows}, indent=1) + "\n")


def plot(
    path: Path,
    title: str,
    rows: Sequence[Mapping[str, Any]],
    labels: str = "operation",
    columns: str | None = None,
    panels: Mapping[str, str] = PANELS,
) -> None:
    """Draw figures by size: a curve for each value of `labels`, and panels for each value of `columns`."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["bytes"]]
    colours = {label: f"C{number}" for number, label in enumerate(dict.fromkeys(row[labels] for row in rows))}
    headings = list(dict.fromkeys(row[columns] if columns else "" for row in rows)) or [""]
    picture = Figure(figsize=(3 + 3.2 * len(headings), 3.2 * len(panels)), layout="constrained")
    grid = picture.subplots(len(panels), len(headings), sharex=True, sharey="row", squeeze=False)
    curves: dict[str, Any] = {}
    for across, heading in enumerate(headings):
        of_column = [row for row in rows if not columns or row[columns] == heading]
        for axes, name in zip(grid[:, across], panels, strict=True):
            for label, colour in colours.items():
                points = [(row["bytes"], row[name]) for row in of_column if row[labels] == label and row[name]]
                if points:
                    (curves[label],) = axes.plot(*zip(*points, strict=True), ".-", label=label, color=colour)
            axes.grid(True, alpha=0.3)
            axes.set(xscale="log", yscale="log")
        grid[0, across].set_title(heading)
        grid[-1, across].set_xlabel("bytes")
    for axes, text in zip(grid[:, 0], panels.values(), strict=True):
        axes.set_ylabel(text)
    picture.suptitle(title)
    picture.legend(handles=list(curves.values()), loc="outside right center")
    picture.savefig(path, dpi=120)
