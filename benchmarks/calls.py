"""Time per call of every operation, contender and kind of call, at sizes from 4 B to 64 MiB: part of `make bench`.

    python -m jaxmpi.run -n 2 benchmarks/calls.py --output calls.json
    python -m jaxmpi.run -n 2 benchmarks/calls.py --gloo --output gloo.json

contenders.py says what is measured. `bytes` is the size of a message from one rank to another. report.py makes tables
and plots of the files.
"""

import argparse
import os
import platform
import statistics
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from contenders import CFLAGS, GLOO, MISSING, MPI, OPERATIONS, RANK, SIZE, build, build_donated, sample
from report import write

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
    """Yields (operation, bytes, {(kind, contender): seconds in every round})."""
    for operation in ["allreduce"] if GLOO else options.operations:
        for nbytes in SIZES[:1] if operation == "barrier" else options.bytes:
            yield operation, nbytes, sample(build(operation, nbytes, options.seconds), options.rounds)
    if not GLOO and "allreduce" in options.operations:
        for nbytes, calls in DONATED.items():
            yield "allreduce alone", nbytes, sample(build_donated(nbytes, calls), options.rounds)


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
    for operation, nbytes, times in measure(options):
        for (kind, name), seconds in times.items():
            contender = f"{name} beside gloo" if GLOO and name == "jaxmpi" else name
            records.append(
                {"operation": operation, "bytes": nbytes, "kind": kind, "contender": contender, "seconds": seconds}
            )
        if RANK == 0:
            row = ", ".join(f"{' '.join(key)} {1e6 * statistics.median(value):.4g}" for key, value in times.items())
            print(f"{operation} of {nbytes} B, us: {row}", flush=True)
    if RANK == 0:
        print("\n".join(f"{name} is missing: {why}" for name, why in MISSING.items()))
        write(options.output, {"surroundings": surroundings(), "missing": MISSING, "calls": records})


if __name__ == "__main__":
    main()
