"""The limit of each test, which holds for what it has started too.

A test that is not done in time prints all stacks, and its process ends at once (faulthandler), wherever it waits, in C
as well. Nothing is tidied up then: what the test or its fixtures have started would go on, and whoever reads their
output, as a CI does, would wait for them. So a guard, a process of its own, waits for the end of pytest's process, and
ends what that has left: all processes with its variable in their environment.
"""

import contextlib
import faulthandler
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

VARIABLE = "JAXMPI_TEST_PROCESS"
SECONDS = float(os.environ.get("JAXMPI_TEST_SECONDS", "300"))
PATIENCE = 5
"""For so many seconds the guard waits between two signals."""
TO_TIDY_UP = 10
"""Seconds that a job's end may take."""
_deadline = None


def processes(variable: str) -> dict[int, str]:
    """The command lines of the processes that were started with `variable`, NAME=VALUE, in their environment."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if variable.encode() in (process / "environ").read_bytes().split(b"\0"):
                found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def ended(numbers: Iterable[int], seconds: float) -> bool:
    """Waits for the end of processes, of any parent. Whether all have ended in time."""
    poll, until = select.poll(), time.monotonic() + seconds
    with contextlib.ExitStack() as files:
        waited = set()
        for number in numbers:
            with contextlib.suppress(ProcessLookupError):
                waited.add(file := os.pidfd_open(number))
                files.callback(os.close, file)
                poll.register(file, select.POLLIN)
        while waited and (left := until - time.monotonic()) > 0:
            for file, _ in poll.poll(1000 * left):
                poll.unregister(file)
                waited.discard(file)
    return not waited


def begin() -> None:
    """Starts the guard. It ends what this process starts from here on."""
    os.environ[VARIABLE] = str(uuid.uuid4())
    reader, _ = os.pipe()  # the other end is open, in this process alone, until it ends
    command = [sys.executable, "-I", "-S", __file__, f"{VARIABLE}={os.environ[VARIABLE]}"]
    nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True, "env": {}}
    _guards.append(subprocess.Popen(command, stdin=reader, **nowhere))
    os.close(reader)


_guards: list[subprocess.Popen[bytes]] = []


def start(seconds: float) -> None:
    """A test begins that may take so long."""
    global _deadline
    _deadline = time.monotonic() + seconds
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)


def stop() -> None:
    global _deadline
    _deadline = None
    faulthandler.cancel_dump_traceback_later()


def within(seconds: float) -> float:
    """At most so many seconds, and no more than the test has, so that its error is told before its process is ended."""
    return seconds if _deadline is None else max(1, min(seconds, _deadline - time.monotonic() - TO_TIDY_UP))


def _guard(variable: str) -> None:
    sys.stdin.buffer.read()
    for by in (signal.SIGTERM, signal.SIGKILL):
        left = processes(variable)
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, by)
        ended(left, PATIENCE)


if __name__ == "__main__":
    _guard(sys.argv[1])
