"""The launcher as the parent of mpiexec: from the start of mpiexec to the status with which the launcher ends.

It passes signals on, watches the job's folder (monitor.py), hands out standard input (stdin.py), and says what an exit
status alone does not: which rank has ended the job, and which ranks have begun and not said that they end. If the
launcher is killed, the ranks of its machine end (folder.py), and mpiexec ends after them.
"""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from typing import Any

from jaxmpi_launch import stdin
from jaxmpi_launch.folder import VARIABLE, Folder
from jaxmpi_launch.monitor import Monitor, in_words, ready

LOST = 77
"""The status of a job that has lost ranks, and whose other ranks have ended without an error."""

VARIABLES = (VARIABLE, stdin.VARIABLE)
"""The variables for the ranks."""

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_OF_A_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
_STEP_SECONDS, _LOOK_SECONDS = 0.25, 0.05
"""The time from a look at the job's folder to the next one; the time to the next look at mpiexec and signals."""
_SAME_SECONDS = 1.0
"""`timeout` sends a signal to the launcher, and then to the group of the launcher: mpiexec gets one."""
_KILL_SECONDS = 5.0


def say(text: str) -> None:
    """Write to stderr, which the ranks share. If nobody can read it any more the text is lost, and the job goes on."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))


class _Signals:
    """Passes signals on to mpiexec. Only in the main thread, where Python has signals.

    If standard input is a terminal mpiexec stays in the terminal's foreground, to read from it, and gets the signals of
    the terminal's keys itself. Otherwise mpiexec runs in a session of its own, and gets all signals from here.
    """

    def __init__(self) -> None:
        self.ending: list[int] = []
        self._came: list[int] = []
        self._before: dict[int, Any] = {}
        self._sent: dict[int, float] = {}
        self._terminal = os.isatty(0)
        if threading.current_thread() is not threading.main_thread():
            return
        # A SIGCHLD that is ignored would take the status of mpiexec with it.
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in (*_ENDING, signal.SIGUSR1, signal.SIGUSR2):
            before = signal.getsignal(number)
            if before is not None and before != signal.SIG_IGN:
                self._before[number] = before
                signal.signal(number, lambda number, _: self._came.append(number))

    def end(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def pass_on(self, process: subprocess.Popen) -> None:
        """Pass on what has come since."""
        while self._came:
            number = self._came.pop(0)
            if number in _ENDING:
                self.ending.append(number)
            now = time.monotonic()
            has_it = self._terminal and number in _OF_A_TERMINAL
            if not has_it and now - self._sent.get(number, -_SAME_SECONDS) >= _SAME_SECONDS:
                self._sent[number] = now
                process.send_signal(number)


class Job:
    """What is made for a job before mpiexec starts, and the job itself.

    `several`: ranks may run on other machines. `survives`: the job goes on without a rank that has died. `spares`: how
    many of the ranks are spare.
    """

    def __init__(self, ranks: int, several: bool, survives: bool = False, spares: int = 0) -> None:
        self.ranks, self.survives, self.spares = ranks, survives, spares
        for file in (0, 1, 2):  # what is opened next would take the number of one that is closed
            try:
                os.fstat(file)
            except OSError:
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        self.folder: Folder | None = None
        try:
            self.folder = Folder.make()
        except OSError as error:  # the ranks report without it
            say(
                f"jaxmpi.run: the job has no folder for its files ({error}): no table says what its ranks wait for, "
                "and ranks may go on if this launcher is killed. Set TMPDIR to a folder with room\n"
            )
        self._input = stdin.offer(self.folder, here=not several)
        self.variables = {stdin.VARIABLE: "" if self._input is None else "socket"}
        if self.folder is not None:
            self.variables[VARIABLE] = self.folder.path

    def run(self, command: list[str], environment: Mapping[str, str]) -> int:
        """Run mpiexec. Return the status of the job: that of mpiexec, 128 and more if a signal has ended it, and not 0
        if ranks are missing."""
        signals = _Signals()
        try:
            # What this process has open and hands on, as a shell's <(...), is handed on; ignored signals stay so.
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=None if self._input is None else subprocess.DEVNULL,
                close_fds=False,
                restore_signals=False,
                start_new_session=not os.isatty(0),
            )
            self._watch(process, signals)
            return self._end(process.returncode, signals)
        except OSError as error:
            say(f"jaxmpi.run: {command[0]} cannot be started: {error}\n")
            return 126
        finally:
            signals.end()
            if self._input is not None:
                self._input.close()
            if self.folder is not None:
                self.folder.remove()

    def _watch(self, process: subprocess.Popen, signals: _Signals) -> None:
        """Wait for the end of mpiexec, and do meanwhile what is to be done."""
        asks = [] if self._input is None else [self._input.fileno()]
        monitor = None if self.folder is None else Monitor(self.folder, self.ranks, self.survives, say)
        step = time.monotonic()
        while process.poll() is None:
            if ready(asks, _LOOK_SECONDS) and self._input is not None:
                stdin.give(self._input)
            signals.pass_on(process)
            if monitor is None or time.monotonic() < step:
                continue
            step = time.monotonic() + _STEP_SECONDS
            try:
                why = monitor.step(bool(signals.ending))
            except (OSError, ValueError) as error:  # the folder may be on a disk that is full, or be removed
                say(f"jaxmpi.run: what ranks wait for is not told any more: {type(error).__name__}: {error}\n")
                monitor = None
                continue
            if why:
                end(process, why)
        if monitor is not None:
            with contextlib.suppress(OSError):
                monitor.end(bool(signals.ending))

    def _said(self, kind: str) -> dict[int, tuple[int, str]]:
        """The ranks that have left a file of a kind, with the code and the reason in it."""
        found = {}
        for rank, text in self._texts(kind).items():
            code, _, reason = text.partition("\n")
            found[rank] = (int(code) if code.isdecimal() else 1, reason.strip())
        return found

    def _texts(self, kind: str) -> dict[int, str]:
        with contextlib.suppress(OSError):
            return self.folder.texts(kind) if self.folder is not None else {}
        return {}

    def _end(self, code: int, signals: _Signals) -> int:
        """Say the last words, and return the status."""
        aborting = self._said("aborts")
        ends = self._texts("left" if self.survives else "ended").keys() | aborting.keys() | self._texts("lost").keys()
        missing = sorted(self._texts("began").keys() - ends)
        if code < 0 and -code not in signals.ending:
            say(f"jaxmpi.run: mpiexec was ended by signal {-code} ({_name(-code)})\n")
        if aborting:
            (rank, (status, reason)), *others = aborting.items()
            also = f" ({in_words(sorted(other for other, _ in others))} too)" if others else ""
            reason = f": {reason.removeprefix('jaxmpi.run: ')}" if reason else ""
            say(f"\njaxmpi.run: rank {rank}{also} ended the job with code {status}{reason}\n")
            code = code if code > 0 else status or 1
        elif signals.ending and (code != 0 or (missing and not self.survives)):
            say(f"jaxmpi.run: ended by {_name(signals.ending[-1])}\n")
            code = -signals.ending[-1]
        elif code == 0 and self.survives:
            code = self._end_of_survivors(missing)
        elif code == 0 and missing:
            code = 1
            say(
                f"jaxmpi.run: mpiexec ended with status 0, but {in_words(missing)} began and did not report an end: "
                "the machine was lost, another rank ended it, or it called C's exit(). The status is 1\n"
            )
        return code if code >= 0 else 128 - code

    def _end_of_survivors(self, missing: list[int]) -> int:
        lost = self._said("lost")
        began = self._texts("began").keys()
        spare = {rank for rank, number in self._texts("spare").items() if not number}
        died = {int(word) for text in self._texts("deaths").values() for word in text.split() if word.isdecimal()}
        gone = sorted({*lost, *missing, *(died - began)})  # with those that have begun elsewhere
        if not gone:
            return 0
        if not self._texts("ended").keys() - spare - set(gone):  # or those that had begun, before MPI was initialized
            code = next((code for code, _ in lost.values() if code), 1)
            where = "" if len(began) == self.ranks else " of this machine"
            say(f"jaxmpi.run: all ranks{where} are lost. The status is {code}\n")
            return code
        among = f" ({self.spares} began as spare)" if self.spares else ""
        say(
            f"jaxmpi.run: {in_words(gone)} of {self.ranks}{among} {'were' if len(gone) > 1 else 'was'} lost, and the "
            f"others ended without an error. The status is {LOST}\n"
        )
        return LOST


def end(process: subprocess.Popen, why: str) -> None:
    """End mpiexec, which may hang: Open MPI's does if ranks on two machines abort at the same time."""
    say(f"jaxmpi.run: {why}; mpiexec is still there, and is ended\n")
    for number in (signal.SIGTERM, signal.SIGKILL):
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_SECONDS)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "of no name"
