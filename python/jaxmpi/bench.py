"""The speed of the operations on this machine: `python -m jaxmpi.run -n 4 -m jaxmpi.bench`, or by mpiexec.

Measures latency and bandwidth of each operation by size, as the OSU micro-benchmarks and nccl-tests do. The names that
these use are accepted. Each run also compares the data with NumPy's result. Rank 0 prints a table for each operation.
`--list` explains the sizes. The exit code is 1 if an element was wrong, 2 for wrong arguments, and 130 after Ctrl-C.
"""

import re
import signal
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from mpi4py import MPI
from mpi4py.run import set_abort_status

from jaxmpi._bench import options, report, timing
from jaxmpi._mpi import library
from jaxmpi_launch import versions

COMM = MPI.COMM_WORLD


def _print(text: str) -> None:
    if COMM.rank == 0:
        print(text, flush=True)


def _header(choices: Any, plan: timing.Plan) -> dict[str, Any]:
    """Return where and how the operations are measured."""
    nobody = timing.to_nobody(np.dtype(choices.dtype), plan)
    return {
        "ranks": COMM.size,
        "hosts": list(dict.fromkeys(COMM.allgather(MPI.Get_processor_name()))),
        "mpi": " ".join(re.split(r"[,\n]", library.LIBRARY.version)[0].split()),
        "jaxmpi": versions.shown("jaxmpi"),
        "jax": jax.__version__,
        "device": choices.placed.device_kind if choices.placed.platform != "cpu" else "cpu",
        "dtype": choices.dtype,
        "reduction": choices.op,
        "how": plan.how,
        "rounds": plan.rounds,
        "microseconds_of_a_message_to_nobody": 1e6 * nobody,
    }


_MEANINGS = {
    "loop": "in a fori_loop of one compiled program",
    "call": "each a call of jaxmpi.jit",
    "eager": "each an eager one",
}


def _show(header: dict[str, Any]) -> str:
    counts = [(header["ranks"], "rank"), (len(header["hosts"]), "host")]
    ranks, hosts = (f"{count} {what}{'s' if count > 1 else ''}" for count, what in counts)
    least = report.digits(header["microseconds_of_a_message_to_nobody"])
    return (
        f"jaxmpi {header['jaxmpi']}, JAX {header['jax']}, {header['mpi']}, {ranks} on {hosts}\n"
        f"{header['dtype']} on {header['device']}, reductions by {header['reduction']}\n"
        f"time of one operation, {_MEANINGS[header['how']]} (a message to nobody takes {least} us):\n"
        f"least, median and most of {header['rounds']} rounds on the slowest rank; bandwidths are by the median"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the arguments ask for. All ranks call it with the same arguments. Return the exit code, or exit."""
    choices = options.parse(arguments)
    if choices.list:
        _print(report.listed())
        return 0
    plan = timing.Plan(choices.how, choices.rounds, choices.seconds, choices.iterations, choices.warmup, choices.check)
    dtype, rows = np.dtype(choices.dtype), []
    with jax.default_device(choices.placed):
        header = _header(choices, plan)
        _print(_show(header))
        for asked, operation in choices.rows:
            cases, remark = options.cases(operation, choices)
            _print(f"\n{report.heading(asked, operation, remark)}")
            for case in cases:
                row = report.row_of(timing.measure(operation, case, dtype, plan), choices.dtype, dtype.itemsize)
                rows.append({"asked_for": asked, **row})
                _print(report.line_of(row))
    failed = COMM.bcast(_write(choices, header, rows) if COMM.rank == 0 else None)
    wrong = sum(row["wrong"] or 0 for row in rows)
    if wrong:
        _print(f"\njaxmpi.bench: WRONG DATA: {wrong} elements")
    COMM.Barrier()  # a launcher ends the job when the first rank ends with an error
    return 1 if wrong or failed else 0


def _write(choices: Any, header: dict[str, Any], rows: Sequence[dict[str, Any]]) -> bool:
    """Write the files of --json and --plot. Return whether a file could not be written."""
    failed = False
    for option, path, write in (("--json", choices.json, report.write), ("--plot", choices.plot, report.plot)):
        if path is None:
            continue
        try:
            write(path, header, rows)
            _print(f"\nWritten: {path}")
        except OSError as error:
            failed = True
            _print(f"\njaxmpi.bench: {option}: {path} could not be written ({error.strerror}); the figures are above")
    return failed


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        if COMM.rank == 0:
            print("jaxmpi.bench: interrupted", file=sys.stderr, flush=True)
        set_abort_status(128 + signal.SIGINT)
        sys.exit(128 + signal.SIGINT)
    except Exception:
        set_abort_status(1)  # the other ranks would wait for this one
        raise
