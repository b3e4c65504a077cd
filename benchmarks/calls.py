"""Time per call of every operation, contender and kind of call, at sizes from 4 B to 64 MiB: part of `make bench`.

    python -m jaxmpi.run -n 2 benchmarks/calls.py --json calls.json --plots .

contenders.py says what is measured. The figures are those of `jaxmpi.bench`; `x C` is the median of the ratios to C in
a loop, of each turn. Ends with an error if jaxmpi was wrong; another contender that was is named.
"""

import argparse
import os
from pathlib import Path

import numpy as np
from contenders import OPERATIONS, PLAIN, build
from peers import CFLAGS, MISSING

from jaxmpi._bench import report
from jaxmpi._bench.operations import OPERATIONS as ROWS
from jaxmpi._bench.operations import Case
from jaxmpi._bench.timing import COMM, ratio, take_turns

SIZES = (4, 256, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
FLOOR = ("loop", "C")
BANDWIDTHS = ("algorithm_bandwidth_gigabytes_per_second", "bus_bandwidth_gigabytes_per_second")
SHOWN = ("bytes", "microseconds_min", "microseconds_median", "microseconds_max", *BANDWIDTHS, "wrong")
COLUMNS = {
    "kind": ("kind", 6),
    "contender": ("contender", 18),
    **{name: report.COLUMNS[name] for name in SHOWN},
    "ratio_to_c": ("x C", 8),
}
PANELS = {**report.PANELS, "ratio_to_c": "time, ratio to C in a loop"}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [name for name in OPERATIONS if name in ROWS and name != "alltoallv"]
    parser.add_argument("--operations", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--bytes", nargs="+", type=int, default=SIZES, help="from one rank to another, multiples of 4")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.02, help="of a batch, roughly, where calls are short")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw a picture of each kind of call there")
    options = parser.parse_args()
    groups, rows = {}, []
    for operation in options.operations:
        report.say(f"\n{operation}\n{report.titles(COLUMNS)}")
        for nbytes in SIZES[:1] if operation == "barrier" else options.bytes:
            samples = take_turns(build(operation, nbytes, options.seconds), options.rounds)
            groups[f"{operation} of {nbytes} B"] = samples
            for (kind, contender), sample in samples.items():
                case = Case(0, COMM.size, nbytes // 4)
                row = report.figures_of(ROWS[operation], case, np.dtype(np.float32), sample)
                row |= {"kind": kind, "contender": contender, "wrong": sample.wrong}
                row["ratio_to_c"] = ratio(samples, (kind, contender), FLOOR)
                if contender == PLAIN:  # it communicates nothing
                    row |= dict.fromkeys(BANDWIDTHS)
                rows.append(row)
                report.say(report.line(row, COLUMNS))
    for name, why in MISSING.items():
        report.say(f"{name} is missing: {why}")
    header = report.surroundings()
    settings = {name: value for name, value in os.environ.items() if name.startswith(("XLA_FLAGS", "OMPI_MCA"))}
    if COMM.rank == 0 and options.json:
        report.write(options.json, {**header, "c_flags": CFLAGS, "settings": settings, "missing": MISSING}, rows)
    if COMM.rank == 0 and options.plots:
        for kind in dict.fromkeys(row["kind"] for row in rows):
            of_kind = [row for row in rows if row["kind"] == kind or (row["kind"], row["contender"]) == FLOOR]
            report.plot(options.plots / f"calls-{kind}.png", kind, of_kind, "contender", "operation", PANELS)
    report.finish(groups)


if __name__ == "__main__":
    main()
