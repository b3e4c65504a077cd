"""No rank on the launcher's machine outlives it, whatever ends the launcher, and whatever the rank does then.

The job's folder has a FIFO, whose writing end the launcher alone keeps open. Each rank opens the reading end, and asks
the kernel to end it by SIGKILL as the last writer goes. This takes no thread and no lock, so it works in compiled code,
in a sleep, and where the interpreter is held. It names no process by a number that another may have got since, and
unlike PR_SET_PDEATHSIG it does not depend on a thread: a launcher may start ranks from one that ends before them. On
other machines the helpers of mpiexec end the ranks: guard.py ends mpiexec.

A second FIFO tells the ranks that they are asked what they do: csrc/core/job.c. A look at it costs no disk anything, so
a thousand ranks on a disk that many machines share may look each second.

Nothing here imports jax, mpi4py or the package: child.py loads this file by its path.
"""

import contextlib
import fcntl
import os
import signal
import stat
from typing import Any

_NAME, _BELL = "alive", "bell"
_MACHINE = "machine"
"""A file with what two processes have in common that run under one kernel, which alone connects the ends of a FIFO."""


def hold(folder: Any) -> tuple[int, int]:
    """Makes the FIFOs in a folder of private.py's: the reading and the writing end of that which is held. OSError: it
    cannot be made here."""
    folder.write(_MACHINE, machine())
    os.mkfifo(_BELL, 0o600, dir_fd=folder.descriptor)
    os.mkfifo(_NAME, 0o600, dir_fd=folder.descriptor)
    reads = folder.open(_NAME, stat.S_IFIFO)  # a writer alone would wait for a reader
    try:
        return reads, os.open(_NAME, os.O_WRONLY | os.O_NOFOLLOW, dir_fd=folder.descriptor)
    except OSError:
        os.close(reads)
        raise


def tie(folder: Any) -> None:
    """Ends this process as the last writer goes, and at once if it has gone."""
    with contextlib.suppress(OSError, AttributeError):
        known: Any = fcntl  # some systems have no such signals
        file = folder.open(_NAME, stat.S_IFIFO)  # until the process ends
        fcntl.fcntl(file, known.F_SETOWN, os.getpid())
        fcntl.fcntl(file, known.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_ASYNC)
        with contextlib.suppress(BlockingIOError):  # there is a writer, which has written nothing
            if not os.read(file, 1) and machine():
                os.kill(os.getpid(), signal.SIGKILL)


class Bell:
    """Who asks the ranks of a machine rings it. It holds a byte then, which no rank takes."""

    def __init__(self, folder: Any):
        self._file = -1
        with contextlib.suppress(OSError):  # a folder in which nobody looks
            self._file = os.open(_BELL, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=folder.descriptor)

    def ring(self) -> None:
        if self._file >= 0:
            os.write(self._file, b"?")

    def hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if self._file >= 0:
                os.read(self._file, 100)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)


def is_here(folder: Any) -> bool:
    """Whether the folder is of this machine, and not one that several see. OSError: it does not say."""
    return folder.read(_MACHINE) == machine()


def machine() -> str:
    """A name of this machine, the same in all processes under one kernel; empty where the system has none."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return ""
