"""The process that remains if the launcher is killed: it ends mpiexec, and removes the job's folder and
what MPI has left in the memory that processes share.

The ranks end by themselves: lifeline.py. It is also the launcher's witness: it is in the process group of the launcher
and of mpiexec, so a signal that it gets has come to mpiexec, too, as Ctrl-C does from a terminal. Passed on once more,
it would make Open MPI's mpiexec leave at once, and not wait for its ranks.
"""

import contextlib
import os
import signal
import warnings
from collections.abc import Iterable

from jaxmpi._launcher import private, segments
from jaxmpi._launcher.ready import ready

_KILL_SECONDS = 5.0


def start(alive: int, job: int | None, folder: str, began: float, witnesses: int, signals: Iterable[int]) -> int | None:
    """Starts the guard. Returns its process number, or None if it cannot be started.

    Args:
      alive: a descriptor that is readable when the launcher has gone.
      job: mpiexec's process number.
      folder: the job's folder.
      began: when the job began, by time.time().
      witnesses: a descriptor to which the numbers of signals go.
      signals: the signals whose numbers are written there.
    """
    known = set(signals)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, known)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a program with threads: what runs here takes no lock of theirs
            process = os.fork()
        if process == 0:
            try:
                _guard(alive, job, folder, began, witnesses, known, before)
            finally:
                os._exit(0)
        return process
    except OSError:
        return None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _guard(
    alive: int, job: int | None, folder: str, began: float, witnesses: int, signals: set[int], mask: set[int]
) -> None:
    with contextlib.suppress(ValueError):  # not in the main thread, where no signals are passed on
        signal.set_wakeup_fd(witnesses, warn_on_full_buffer=False)
        for number in signals:
            signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    kept = {alive, witnesses, job}
    null = os.open(os.devnull, os.O_RDWR)
    for file in (0, 1, 2):  # whose readers wait for their end
        os.dup2(null, file)
    for file in map(int, os.listdir("/proc/self/fd")):
        if file > 2 and file not in kept:
            with contextlib.suppress(OSError):
                os.close(file)
    os.chdir("/")
    ready([alive])
    if job is not None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(job, signal.SIGCONT)
                signal.pidfd_send_signal(job, number)
            if ready([job], _KILL_SECONDS):
                break
    segments.remove(began)
    private.remove(folder)
