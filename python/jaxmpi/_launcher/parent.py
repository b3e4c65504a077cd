"""The launcher as the parent of mpiexec: from its start to the status with which the launcher ends.

It passes signals on, and mpiexec's stderr (output.py); it watches the job's folder (monitor.py), hands out standard
input (stdin.py), and says what an exit status alone would not: of ranks that have begun and never told of their end,
and which rank has ended the job. What remains if it is killed: lifeline.py in each rank, guard.py beside mpiexec.
"""

import contextlib
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxmpi._launcher import guard, lifeline, monitor, output, private, segments, stdin
from jaxmpi._launcher.ready import ready

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH)
_WITNESS_SECONDS = 0.2
"""How long the witness may be late."""
_SAME_SECONDS = 1.0
"""A signal comes once to the group and once to the launcher if it is sent by `timeout`: mpiexec is to get one."""
_POLL_SECONDS = 0.05
_STOP_SECONDS = 2.0


NAMES = (monitor.FOLDER, stdin.VARIABLE)
"""The variables for the ranks."""


@dataclass
class Job:
    """What is made for a job before mpiexec starts."""

    ranks: int
    survives: bool = False
    """Whether it goes on without a rank that has died."""
    spares: int = 0
    """How many of the ranks are spare."""
    folder: str | None = None
    variables: dict[str, str] = field(default_factory=dict)
    """The variables that the ranks get."""
    alive: tuple[int, int] | None = None
    input: Any = None
    began: float = field(default_factory=time.time)

    @classmethod
    def prepare(cls, ranks: int, several: bool, survives: bool = False, spares: int = 0) -> "Job":
        """`several`: ranks may run on other machines."""
        job = cls(ranks, survives, spares)
        for file in (0, 1, 2):  # what is opened next would take the number of one that is closed
            if not _is_open(file):
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        files = None
        try:
            files = private.make("jaxmpi-")
            job.folder = files.path
            job.alive = lifeline.hold(files)
        except OSError as error:  # the ranks report without it
            job._remove()
            text = (
                f"jaxmpi.run: the job has no folder for its files ({error}): what its ranks wait for is not told in "
                "one table, and ranks may go on if this launcher is killed. Set TMPDIR to a folder with room\n"
            )
            output.write(text.encode(errors="replace"))
        if job.folder is not None:
            job.variables[monitor.FOLDER] = job.folder
        job.variables[stdin.VARIABLE], job.input = stdin.offer(
            files if job.folder is not None else None, here=not several
        )
        if files is not None:
            files.close()
        return job

    def _remove(self) -> None:
        if self.folder is not None:
            private.remove(self.folder)
        self.folder = None

    def end(self) -> None:
        self._remove()
        for file in self.alive or ():
            os.close(file)
        if self.input is not None:
            self.input.close()
        self.alive = self.input = None

    def told(self, kind: str) -> dict[int, str]:
        """The ranks that have left a file of a kind, in the order in which they did, and what is in it."""
        found = []
        with contextlib.suppress(OSError), private.Folder(str(self.folder)) as folder:
            for name, rank in monitor.of_kind(folder.names(), kind).items():
                found.append((folder.changed_at(name), rank, folder.read(name)))
        return {rank: text for _, rank, text in sorted(found)}

    def missing(self) -> list[int]:
        """The ranks that have begun on this machine and have told of no end, and will not do it as another program."""
        found = []
        with contextlib.suppress(OSError), private.Folder(str(self.folder)) as folder:
            names = folder.names()
            kinds = ("left" if self.survives else "ended", "aborts", "lost")
            ends = {rank for kind in kinds for rank in monitor.of_kind(names, kind).values()}
            for name, rank in monitor.of_kind(names, "began").items():
                if rank not in ends and folder.read(name) == "":
                    found.append(rank)
        return sorted(found)

    def aborting(self, kind: str = "aborts") -> dict[int, tuple[int, str]]:
        """The ranks that end the job, with the code and the reason; with `lost` those that have ended alone."""
        found = {}
        for rank, text in self.told(kind).items():
            code, _, reason = text.partition("\n")
            found[rank] = (int(code) if code.isdecimal() else 1, reason.strip())
        return found


def _is_open(file: int) -> bool:
    try:
        os.fstat(file)
        return True
    except OSError:
        return False


class _Signals:
    """Passes signals on to mpiexec, once each, since they may have come to its whole group as well.

    Only in the main thread, where Python has signals; elsewhere they are the program's own.
    """

    def __init__(self) -> None:
        self.reads, self.witnessed, self.witnesses, self.ending = -1, -1, -1, list[int]()
        self._before: dict[int, Any] = {}
        self._group: dict[int, float] = {}  # when a signal came to the group
        self._waiting: dict[int, float] = {}  # until when one of our own waits for its witness
        self._stop = self._stopped = -math.inf
        if threading.current_thread() is not threading.main_thread():
            return
        self.reads, self._writes = os.pipe()
        self.witnessed, self.witnesses = os.pipe()
        for file in (self.reads, self._writes, self.witnessed, self.witnesses):
            os.set_blocking(file, False)
        self._before_file = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        # A SIGCHLD that is ignored would take the status of mpiexec with it.
        for number in (*_PASSED, signal.SIGCHLD):
            before = signal.getsignal(number)
            if number == signal.SIGCHLD or (before is not None and before != signal.SIG_IGN):
                self._before[number] = before
                signal.signal(number, lambda *_: None)

    def end(self) -> None:
        if self.reads < 0:
            return
        signal.set_wakeup_fd(self._before_file)
        for number, before in self._before.items():
            if before is not None:
                signal.signal(number, before)
        for file in (self.reads, self._writes, self.witnessed, self.witnesses):
            os.close(file)

    def files(self) -> list[int]:
        return [file for file in (self.reads, self.witnessed) if file >= 0]

    def pause(self) -> float | None:
        return max(0.0, min(self._waiting.values()) - time.monotonic()) if self._waiting else None

    def take(self, process: subprocess.Popen, witness: bool) -> None:
        now = time.monotonic()
        for number in _bytes_in(self.witnessed):
            self._group[number] = now
            self._waiting.pop(number, None)
        for number in _bytes_in(self.reads):
            if number == signal.SIGCHLD:
                self._note_stop(process)
                continue
            if number not in self._before:
                continue
            if number in _ENDING:
                self.ending.append(number)
            if number == signal.SIGTSTP:
                self._stop = now
            if now - self._group.get(number, -_SAME_SECONDS) >= _SAME_SECONDS:
                self._waiting.setdefault(number, now + (_WITNESS_SECONDS if witness else 0.0))
        for number in [number for number, end in self._waiting.items() if end <= now]:
            del self._waiting[number]
            with contextlib.suppress(OSError):
                process.send_signal(number)
                if number == signal.SIGTSTP:
                    self._stop = time.monotonic()

        if abs(self._stop - self._stopped) < _STOP_SECONDS:
            self._stop_too()

    def _note_stop(self, process: subprocess.Popen) -> None:
        with contextlib.suppress(ChildProcessError, AttributeError):
            if os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG) is not None:
                self._stopped = time.monotonic()

    def _stop_too(self) -> None:
        """After Ctrl-Z mpiexec has stopped, if it does so at all: the shell waits for this process to do the same.
        That it has may be known here before the signal is."""
        self._stop = self._stopped = -math.inf
        self._waiting.pop(signal.SIGTSTP, None)  # it has come there, however late its witness is
        os.kill(os.getpid(), signal.SIGSTOP)


def _bytes_in(file: int) -> bytes:
    with contextlib.suppress(BlockingIOError):
        return os.read(file, 4096) if file >= 0 else b""
    return b""


def run(command: list[str], environment: Mapping[str, str], job: Job, verbose: bool) -> int:
    """The status of the job: that of mpiexec, 128 and more if a signal has ended it, and not 0 if ranks are missing."""
    signals = _Signals()
    try:
        return _run(command, environment, job, verbose, signals)
    finally:
        job.end()
        signals.end()


def _run(command: list[str], environment: Mapping[str, str], job: Job, verbose: bool, signals: _Signals) -> int:
    pipe, errors = os.pipe()
    empty = None if job.variables[stdin.VARIABLE] == "" else subprocess.DEVNULL
    try:
        # What this process has open and hands on, as a shell's <(...), is handed on; signals that are ignored stay so.
        process = subprocess.Popen(
            command, env=environment, stdin=empty, stderr=errors, close_fds=False, restore_signals=False
        )
    except OSError as error:
        os.close(pipe)
        output.write(f"jaxmpi.run: {command[0]} cannot be started: {error}\n".encode())
        return 126
    finally:
        os.close(errors)
    ends, beside = None, None
    with contextlib.suppress(OSError, AttributeError):  # a system that has none
        ends = os.pidfd_open(process.pid)
    if job.alive is not None and job.folder is not None:  # before there are threads
        beside = guard.start(job.alive[0], ends, job.folder, job.began, signals.witnesses, _PASSED)
    codes = None if verbose else lambda: {rank: code for rank, (code, _) in job.aborting().items()}
    passing = output.Output(pipe, codes)
    try:
        try:
            passing.start()
            watching = _watch(job, ends, process, signals, passing)
        except RuntimeError as error:  # of a user who may have no more
            process.kill()
            process.wait()
            output.write(f"jaxmpi.run: no thread can be started, and so no job: {error}: see ulimit -u\n".encode())
            return 126
        _wait(process, ends, job, signals, beside is not None)
        if process.returncode != 0:
            segments.remove(job.began)
        if watching is not None:
            watching.join(_STOP_SECONDS)
        return _end(process.returncode, job, signals, passing)
    finally:
        passing.close()
        if beside is not None:
            with contextlib.suppress(OSError):
                os.kill(beside, signal.SIGKILL)
                os.waitpid(beside, 0)
        if ends is not None:
            os.close(ends)


def _watch(
    job: Job, ends: int | None, process: subprocess.Popen, signals: _Signals, passing: output.Output
) -> threading.Thread | None:
    """A thread that watches the folder."""
    if job.folder is None or ends is None:
        return None
    watched = (job.folder, job.ranks, ends, process.pid, signals.ending, passing.say, job.survives)
    watching = threading.Thread(target=monitor.watch, args=watched, daemon=True)
    watching.start()
    return watching


def _wait(process: subprocess.Popen, ends: int | None, job: Job, signals: _Signals, witness: bool) -> None:
    files = signals.files() + ([ends] if ends is not None else [])
    asks = job.input.fileno() if job.input is not None else -1
    files += [asks] if asks >= 0 else []
    while process.poll() is None:
        pause = signals.pause()
        if ends is None:
            pause = min(_POLL_SECONDS, _POLL_SECONDS if pause is None else pause)
        found = ready(files, pause)
        signals.take(process, witness)
        if asks in found:
            stdin.give(job.input)


def _end(code: int, job: Job, signals: _Signals, passing: output.Output) -> int:
    """The last words, and the status."""
    missing, aborting = job.missing(), job.aborting()
    if not _passed_on(passing, signals):
        return 128 + signals.ending[-1]
    words = ""
    if code < 0 and -code not in signals.ending:
        words += f"jaxmpi.run: mpiexec was ended by signal {-code} ({_name(-code)})\n"
    if aborting and not any(_says(passing.last_line(), reason) for _, reason in aborting.values()):
        words += _who_ended(aborting)
    ended_early = code != 0 or (missing and not job.survives)
    if ended_early and signals.ending and not aborting:
        words += f"jaxmpi.run: ended by {_name(signals.ending[-1])}\n"
        code = -signals.ending[-1]
    if code == 0 and job.survives and not aborting:
        code, more = _end_of_survivors(job, missing)
        words += more
    elif code == 0 and aborting:
        code = next(iter(aborting.values()))[0] or 1
    elif code == 0 and missing:
        code = 1
        words += (
            f"jaxmpi.run: mpiexec ended with status 0, but {_ranks(missing)} began and never told of an end: lost with "
            "a machine, ended because others were, or by an exit that is not Python's. The status is 1\n"
        )
    output.write(("\n" if words and passing.within_a_line else "").encode() + words.encode(errors="replace"))
    return code if code >= 0 else 128 - code


LOST = 77
"""The status of a job that has lost ranks, and whose other ranks have ended without an error."""


def _end_of_survivors(job: Job, missing: list[int]) -> tuple[int, str]:
    """The status of a job that goes on without ranks that die, and what is said of them."""
    told = job.aborting("lost")
    spare = {rank for rank, number in job.told("spare").items() if not number}
    died = {int(word) for text in job.told("deaths").values() for word in text.split() if word.isdecimal()}
    lost = sorted({*told, *missing, *(died - set(job.told("began")))})  # with those that have begun elsewhere
    ended = set(job.told("ended")) - spare - set(lost)
    if not lost:
        return 0, ""
    if not ended:  # or those that had begun, before MPI was initialized
        code = next((code for code, _ in told.values() if code), 1)
        where = "" if len(job.told("began")) == job.ranks else " of this machine"
        return code, f"jaxmpi.run: all ranks{where} are lost. The status is {code}\n"
    among = f" ({job.spares} began as spare)" if job.spares else ""
    return LOST, (
        f"jaxmpi.run: {_ranks(lost)} of {job.ranks}{among} {'were' if len(lost) > 1 else 'was'} lost, and the others "
        f"ended without an error. The status is {LOST}\n"
    )


def _passed_on(passing: output.Output, signals: _Signals) -> bool:
    """Whether all that mpiexec has written is passed on. A reader may never take it: then a signal ends the waiting."""
    passing.finish()
    seen = len(signals.ending)
    while True:
        if passing.done in ready([passing.done, *signals.files()]):
            return True
        signals.ending += [number for number in _bytes_in(signals.reads) if number in _ENDING]
        _bytes_in(signals.witnessed)
        if len(signals.ending) > seen:
            return False


def _says(line: str, reason: str) -> bool:
    return reason != "" and line.startswith(reason)


def _who_ended(aborting: dict[int, tuple[int, str]]) -> str:
    (rank, (code, reason)), *others = aborting.items()
    also = f" ({_ranks(sorted(rank for rank, _ in others))} too)" if others else ""
    return f"jaxmpi.run: rank {rank}{also} ended the job with code {code}{': ' if reason else ''}{reason}\n"


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {monitor.ranges(numbers)}"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "of no name"
