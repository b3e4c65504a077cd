"""The output of the figures: a table per operation, a JSON file, a picture."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxmpi._bench.operations import OPERATIONS, Operation
from jaxmpi._bench.timing import Point

COLUMNS = (
    ("bytes", 11),
    ("count", 10),
    ("dtype", 10),
    ("min us", 10),
    ("median us", 10),
    ("max us", 10),
    ("algbw GB/s", 11),
    ("busbw GB/s", 11),
    ("wrong", 7),
)


def row_of(point: Point, dtype: str, itemsize: int) -> dict[str, Any]:
    """Return the figures under names that contain the units. A gigabyte is 10^9 bytes."""
    row, case = point.operation, point.case
    count = case.elements * row.parts(case.size) if row.size else 0
    speed = count * itemsize / point.median / 1e9
    microseconds = [1e6 * value for value in point.seconds]
    return {
        "operation": row.name,
        "bytes": count * itemsize,
        "count": count,
        "dtype": dtype,
        "iterations": point.iterations,
        "microseconds_min": min(microseconds),
        "microseconds_median": 1e6 * point.median,
        "microseconds_max": max(microseconds),
        "microseconds_by_round": microseconds,
        "algorithm_bandwidth_gigabytes_per_second": speed if row.size else None,
        "bus_bandwidth_gigabytes_per_second": bus_factor(point) * speed if row.size else None,
        "wrong": point.wrong,
        "elements_checked": point.checked,
    }


def bus_factor(point: Point) -> float:
    return point.operation.factor(point.case) if point.case.size > 1 else 0.0


def digits(value: float) -> str:
    """Write a number with four digits, without an exponent."""
    return f"{value:.4g}" if value < 1e4 else f"{value:.0f}"


def line(cells: Sequence[Any]) -> str:
    texts = ["-" if cell is None else digits(cell) if isinstance(cell, float) else str(cell) for cell in cells]
    return " ".join(f"{text:>{width}}" for text, (_, width) in zip(texts, COLUMNS, strict=True))


def line_of(row: Mapping[str, Any]) -> str:
    figures = ("bytes", "count", "dtype", "microseconds_min", "microseconds_median", "microseconds_max")
    rates = ("algorithm_bandwidth_gigabytes_per_second", "bus_bandwidth_gigabytes_per_second", "wrong")
    return line([row[name] for name in (*figures, *rates)])


def heading(asked: str, operation: Operation, remark_on_sizes: str) -> str:
    """Return the lines above the table of an operation."""
    also = f" ({asked})" if asked != operation.name else ""
    remark = operation.names.get(asked, "")
    lines = [f"{operation.name}{also}{f': bytes of {operation.size}' if operation.size else ''}"]
    lines += [f"{asked}: {remark}"] if remark else []
    lines += [remark_on_sizes] if remark_on_sizes else []
    return "\n".join([*lines, line([title for title, _ in COLUMNS])])


def listed() -> str:
    """Return the list of all operations, with the meaning of the sizes and other names."""
    rows = []
    for operation in OPERATIONS.values():
        rows.append(f"{operation.name:20} {', '.join(operation.names)}".rstrip())
        if operation.size:
            rows.append(f"{'':4}bytes of {operation.size}")
        rows += [f"{'':4}{name}: {remark}" for name, remark in operation.names.items() if remark]
    return "\n".join(rows)


def write(path: Path, header: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    date = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    path.write_text(json.dumps({**header, "date": date, "rows": rows}, indent=1) + "\n")


def plot(path: Path, header: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw time and bus bandwidth of each operation by size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in dict.fromkeys(row["operation"] for row in rows):
        own = [row for row in rows if row["operation"] == name]
        if not own[0]["bytes"]:
            left.axhline(own[0]["microseconds_median"], linestyle=":", color="gray", label=name)
            continue
        left.plot([row["bytes"] for row in own], [row["microseconds_median"] for row in own], ".-", label=name)
        rates = [row["bus_bandwidth_gigabytes_per_second"] for row in own]
        if any(rates):
            right.plot([row["bytes"] for row in own], rates, ".-", color=left.lines[-1].get_color())
    left.set(xlabel="bytes", ylabel="time, us (median)")
    right.set(xlabel="bytes", ylabel="bus bandwidth, GB/s")
    for axes in (left, right):
        axes.grid(True, alpha=0.3)
        if axes.lines:
            axes.set(xscale="log", yscale="log")
    figure.suptitle(f"{header['ranks']} ranks, {header['mpi']}, {header['device']}, {header['how']}")
    figure.legend(loc="outside right center")
    figure.savefig(path, dpi=120)
