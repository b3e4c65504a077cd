"""The speed of the operations on this machine: `python -m jaxmpi.run -n 4 -m jaxmpi.bench`, or by mpiexec.

Measures latency and bandwidth of each operation by size, as the OSU micro-benchmarks and nccl-tests do. The names that
these use are accepted. Each run also compares the data with NumPy's result. Rank 0 prints a table for each operation.
`--list` explains the sizes. The exit code is 1 if an element was wrong, 2 for wrong arguments, and 130 after Ctrl-C.
"""

import signal
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from mpi4py.run import set_abort_status

from jaxmpi._bench import options, programs, report
from jaxmpi._bench.operations import OPERATIONS, Operation
from jaxmpi._bench.report import say
from jaxmpi._bench.timing import COMM


def _header(choices: Any, plan: programs.Plan) -> dict[str, Any]:
    """Return where and how the operations are measured."""
    device = jax.local_devices()[0]
    return {
        **report.surroundings(),
        "device": device.device_kind if device.platform != "cpu" else "cpu",
        "dtype": choices.dtype,
        "how": plan.how,
        "rounds": plan.rounds,
        "microseconds_of_a_message_to_nobody": 1e6 * programs.to_nobody(np.dtype(choices.dtype), plan),
    }


def _show(header: dict[str, Any]) -> str:
    counts = [(header["ranks"], "rank"), (len(header["hosts"]), "host")]
    ranks, hosts = (f"{count} {what}{'s' if count > 1 else ''}" for count, what in counts)
    least = report.digits(header["microseconds_of_a_message_to_nobody"])
    return (
        f"jaxmpi {header['jaxmpi']}, JAX {header['jax']}, {header['mpi']}, {ranks} on {hosts}, {header['device']}\n"
        f"time of one operation, {programs.HOW[header['how']]} (a message to nobody takes {least} us):\n"
        f"least, median and most of {header['rounds']} rounds on the slowest rank; bandwidths are by the median"
    )


def _heading(asked: str, operation: Operation, remark_on_sizes: str) -> str:
    """Return the lines above the table of an operation."""
    also = f" ({asked})" if asked != operation.name else ""
    remark = operation.names.get(asked, "")
    lines = [f"{operation.name}{also}{f': bytes of {operation.size}' if operation.size else ''}"]
    lines += [f"{asked}: {remark}"] if remark else []
    lines += [remark_on_sizes] if remark_on_sizes else []
    return "\n".join([*lines, report.titles()])


def _listed() -> str:
    """Return the list of all operations, with the meaning of the sizes and other names."""
    rows = []
    for operation in OPERATIONS.values():
        rows.append(f"{operation.name:20} {', '.join(operation.names)}".rstrip())
        if operation.size:
            rows.append(f"{'':4}bytes of {operation.size}")
        rows += [f"{'':4}{name}: {remark}" for name, remark in operation.names.items() if remark]
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the arguments ask for. All ranks call it with the same arguments. Return the exit code, or exit."""
    choices = options.parse(arguments)
    if choices.list:
        say(_listed())
        return 0
    plan = programs.Plan(choices.how, choices.rounds, choices.seconds)
    dtype, rows = np.dtype(choices.dtype), []
    header = _header(choices, plan)
    say(_show(header))
    for asked, operation in choices.rows:
        cases, remark = options.cases(operation, choices)
        say(f"\n{_heading(asked, operation, remark)}")
        for case in cases:
            row = report.figures_of(operation, case, dtype, programs.measure(operation, case, dtype, plan))
            rows.append({"asked_for": asked, **row})
            say(report.line(row))
    if COMM.rank == 0:
        _write(choices, header, rows)
    wrong = sum(row["wrong"] or 0 for row in rows)
    if wrong:
        say(f"\njaxmpi.bench: WRONG DATA: {wrong} elements")
    COMM.Barrier()  # a launcher ends the job when the first rank ends with an error
    return 1 if wrong else 0


def _write(choices: Any, header: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Write the files of --json and --plot."""
    if choices.json is not None:
        report.write(choices.json, header, rows)
        say(f"\nWritten: {choices.json}")
    if choices.plot is not None:
        title = f"{header['ranks']} ranks, {header['mpi']}, {header['device']}, {header['how']}"
        report.plot(choices.plot, title, rows)
        say(f"\nWritten: {choices.plot}")


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
