"""How fast the operations are here: `python -m jaxmpi.run -n 4 -m jaxmpi.bench`, or by mpiexec.

Measures latency and bandwidth of each operation by size, as the OSU micro-benchmarks and nccl-tests do, whose names for
them are accepted, and compares the data with what NumPy makes of it, in the same run. Rank 0 prints a table for each
operation; `--list` says what their sizes are. The exit code is 1 if an element was wrong, 2 for wrong arguments, and
130 after Ctrl-C.
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


def _tell(text: str) -> None:
    if COMM.rank == 0:
        print(text, flush=True)


def _header(given: Any, plan: timing.Plan) -> dict[str, Any]:
    """Where and how it is measured."""
    nobody = timing.to_nobody(np.dtype(given.dtype), plan)
    return {
        "ranks": COMM.size,
        "hosts": list(dict.fromkeys(COMM.allgather(MPI.Get_processor_name()))),
        "mpi": " ".join(re.split(r"[,\n]", library.LIBRARY.version)[0].split()),
        "jaxmpi": versions.shown("jaxmpi"),
        "jax": jax.__version__,
        "device": given.placed.device_kind if given.placed.platform != "cpu" else "cpu",
        "dtype": given.dtype,
        "reduction": given.op,
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
    """All ranks call it alike. Returns the exit code, or exits."""
    given = options.parse(arguments)
    if given.list:
        _tell(report.listed())
        return 0
    plan = timing.Plan(given.how, given.rounds, given.seconds, given.iterations, given.warmup, given.check)
    dtype, rows = np.dtype(given.dtype), []
    with jax.default_device(given.placed):
        header = _header(given, plan)
        _tell(_show(header))
        for asked, operation in given.rows:
            cases, remark = options.cases(operation, given)
            _tell(f"\n{report.heading(asked, operation, remark)}")
            for case in cases:
                row = report.row_of(timing.measure(operation, case, dtype, plan), given.dtype, dtype.itemsize)
                rows.append({"asked_for": asked, **row})
                _tell(report.line_of(row))
    failed = COMM.bcast(_write(given, header, rows) if COMM.rank == 0 else None)
    wrong = sum(row["wrong"] or 0 for row in rows)
    if wrong:
        _tell(f"\njaxmpi.bench: WRONG DATA: {wrong} elements")
    COMM.Barrier()  # a launcher ends the job as the first rank ends with an error
    return 1 if wrong or failed else 0


def _write(given: Any, header: dict[str, Any], rows: Sequence[dict[str, Any]]) -> bool:
    """Whether a file that was asked for could not be written."""
    failed = False
    for option, path, write in (("--json", given.json, report.write), ("--plot", given.plot, report.plot)):
        if path is None:
            continue
        try:
            write(path, header, rows)
            _tell(f"\nWritten: {path}")
        except OSError as error:
            failed = True
            _tell(f"\njaxmpi.bench: {option}: {path} could not be written ({error.strerror}); the figures are above")
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
        set_abort_status(1)  # the others would wait for this rank
        raise
