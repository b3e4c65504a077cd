"""Time per call of every operation, contender and kind of call, at sizes from 4 B to 64 MiB: part of `make bench`.

    python -m jaxmpi.run -n 2 benchmarks/calls.py --output calls.json
    python -m jaxmpi.run -n 2 benchmarks/calls.py --gloo --output gloo.json

contenders.py says what is measured, bandwidth.py what the figures are. `bytes` is the size of a message from one rank
to another, `wrong` the number of elements that were not what they must be, on all ranks and in all rounds. Ends with an
error if jaxmpi was wrong; another contender that was is named. report.py makes tables and plots of the files.
"""

import argparse
import os
import platform
import statistics
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bandwidth import algbw, busbw
from compiled import CFLAGS
from contenders import GLOO, MISSING, MPI, OPERATIONS, PLAIN, RANK, SIZE, build, build_donated, finish, sample
from report import ALONE, three_digits, write

SIZES = (4, 256, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
DONATED = {4: 100, 64 << 10: 100, 1 << 20: 50, 16 << 20: 10}
"""Bytes -> calls in a batch, for the calls with and without donation."""
PACKAGES = ("jaxmpi", "jax", "jaxlib", "numpy", "mpi4py", "mpi4jax")


def _line(path, start=""):
    """The first line of a file that starts so, or nothing."""
    try:
        return next(line.strip() for line in Path(path).read_text().splitlines() if line.startswith(start))
    except (OSError, StopIteration):
        return ""


def _version(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def surroundings():
    """Machine, versions and settings."""
    settings = ("XLA_FLAGS", "OMP_NUM_THREADS", "PJRT_NPROC", "GLIBC_TUNABLES")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": _line("/proc/cpuinfo", "model name").partition(":")[2].strip() or platform.processor(),
        "cores": os.cpu_count(),
        "memory": _line("/proc/meminfo", "MemTotal").partition(":")[2].strip(),
        "huge pages": _line("/sys/kernel/mm/transparent_hugepage/enabled"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "MPI": MPI.Get_library_version().split(",")[0],
        "thread level": MPI.Query_thread(),
        "C flags": " ".join(CFLAGS),
        "ranks": SIZE,
        **{name: _version(name) for name in PACKAGES},
        **{name: os.environ[name] for name in os.environ if name in settings or name.startswith("OMPI_MCA_mpi")},
    }


def measure(options):
    """Yields (operation, its name in the tables, bytes, {(kind, contender): sample})."""
    for operation in ["allreduce"] if GLOO else options.operations:
        for nbytes in SIZES[:1] if operation == "barrier" else options.bytes:
            yield operation, operation, nbytes, sample(build(operation, nbytes, options.seconds), options.rounds)
    if not GLOO and "allreduce" in options.operations:
        for nbytes, calls in DONATED.items():
            if nbytes in options.bytes:
                yield "allreduce", ALONE, nbytes, sample(build_donated(nbytes, calls), options.rounds)


def record(operation, name, nbytes, key, sample):
    """The figures of one contender."""
    kind, contender = key
    median = statistics.median(sample.seconds)
    moved = (nbytes, SIZE, median)
    silent = contender == PLAIN
    return {
        "operation": name,
        "bytes": nbytes,
        "kind": kind,
        "contender": f"{contender} beside gloo" if GLOO and contender == "jaxmpi" else contender,
        "seconds": sample.seconds,
        "latency_us": 1e6 * median,
        "algbw_GBps": None if silent else algbw(operation, *moved),
        "busbw_GBps": None if silent else busbw(operation, *moved),
        "wrong": sample.wrong,
    }


COLUMNS = {  # of what is printed: figure -> title and width
    "operation": ("operation", -15),
    "bytes": ("bytes", 10),
    "kind": ("kind", 6),
    "contender": ("contender", -22),
    "latency_us": ("latency (us)", 13),
    "algbw_GBps": ("algbw (GB/s)", 13),
    "busbw_GBps": ("busbw (GB/s)", 13),
    "wrong": ("wrong", 8),
}


def show(values):
    """A line of a table on the terminal."""
    cells = []
    for value, (_, width) in zip(values, COLUMNS.values(), strict=True):
        text = "" if value is None else three_digits(value) if isinstance(value, float) else str(value)
        cells.append(f"{text:{'<' if width < 0 else '>'}{abs(width)}}")
    print(" ".join(cells).rstrip(), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gloo", action="store_true", help="compare with JAX's own collectives alone")
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=list(OPERATIONS), metavar="NAME")
    parser.add_argument("--bytes", nargs="+", type=int, default=SIZES, help="multiples of 4")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.02, help="of a batch, roughly, where calls are short")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    records = []
    if RANK == 0:
        show(title for title, _ in COLUMNS.values())
    for operation, name, nbytes, samples in measure(options):
        rows = [record(operation, name, nbytes, key, value) for key, value in samples.items()]
        if RANK == 0:
            for row in rows:
                show(row[figure] for figure in COLUMNS)
        records += rows
    if RANK == 0:
        for name, why in MISSING.items():
            print(f"{name} is missing: {why}")
        write(options.output, {"surroundings": surroundings(), "missing": MISSING, "calls": records})
    finish(
        (f"{row['kind']}, {row['operation']} of {row['bytes']} B", row["contender"], row["wrong"]) for row in records
    )


if __name__ == "__main__":
    main()
