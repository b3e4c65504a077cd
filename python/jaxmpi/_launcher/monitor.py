"""What the launcher tells of a job in which ranks wait: one table of all ranks.

A thread of the launcher asks the ranks as soon as one of them reports that it waits for long, or has ended while others
have not. They answer in the job's folder, by the thread of csrc/observe/watchdog.c. Files there: RANK.began, as a
rank's program begins; RANK.report, written with a rank's report; `ask`, with the number of a question, at which ranks
look while the bell of lifeline.py rings; RANK.state, a rank's answer; RANK.ended, as a rank's program ends;
RANK.aborts, as a rank ends the job, with the code and the reason. In a job that survives it a rank that fails leaves
RANK.lost instead, one that has nothing more to do RANK.left, and the first of those that go on RANK.deaths, with the
ranks that have died; a spare one leaves RANK.spare, with the number that it has taken, if any; RANK.pid and RANK.joined
are there for _Lost. Only ranks on the launcher's machine leave files: ranks on other machines report on stderr alone.
Nothing here imports jax or mpi4py.

An `mpiexec` that is still there long after a rank has ended the job is ended, and so is one that was told to end by a
signal and has nothing left of what it has started: Open MPI's may wait for ever if ranks on two machines abort at the
same time, or if a signal comes as a rank fails. Without a signal it may rightly stay: it passes on what is written by
processes that a rank has left behind.
"""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from jaxmpi._launcher import lifeline, private
from jaxmpi._launcher.ready import ready

FOLDER = "JAXMPI_JOB_FOLDER"
"""The variable that names the folder to the ranks."""

_PAUSE_SECONDS = 0.25
_ANSWER_SECONDS = 2.5  # the watch looks once a second
_LEAST_WAIT_SECONDS = 2.0  # what waits as long for a rank that has ended will wait for ever, most likely
_END_SECONDS_OF_SURVIVORS = 1.0  # whose mpiexec does not end them
_END_SECONDS = 20.0  # what `mpiexec` has for ending a job that a rank has aborted
_GONE_SECONDS = 20.0  # what it has for its own end after a signal, once what it has started is no more
_KILL_SECONDS = 5.0

_ELSEWHERE = "is on another machine, or has not begun: its own report tells what it waits for"
_ELSEWHERE_OF_MANY = "are on other machines, or have not begun: their own reports tell what they wait for"


def of_kind(names: Iterable[str], kind: str) -> dict[str, int]:
    """The files of ranks of a kind, and their ranks."""
    end = f".{kind}"
    found = {name: name[: -len(end)] for name in names if name.endswith(end)}
    return {name: int(rank) for name, rank in found.items() if re.fullmatch("[0-9]{1,9}", rank)}


def watch(
    path: str | os.PathLike,
    ranks: int,
    job: int,
    mpiexec: int,
    signals: list[int],
    say: Callable[[str], None],
    survives: bool = False,
) -> None:
    """Watches a job until `mpiexec`, of which `job` is a file, has ended. `signals`: those that have told the job to
    end. `survives`: it goes on without ranks that die, which are told."""
    try:
        with private.Folder(path) as folder, contextlib.closing(lifeline.Bell(folder)) as bell:
            _watch(folder, bell, ranks, job, mpiexec, signals, say, survives)
    except Exception as error:  # the folder may be on a disk that is full, or be removed
        say(f"jaxmpi.run: what ranks wait for is not told any more: {type(error).__name__}: {error}\n")


def _watch(
    folder: private.Folder,
    bell: lifeline.Bell,
    ranks: int,
    job: int,
    mpiexec: int,
    signals: list[int],
    say: Callable[[str], None],
    survives: bool,
) -> None:
    lost = _Lost(folder, say) if survives else None
    patience_at_end = _END_SECONDS_OF_SURVIVORS if survives else _END_SECONDS
    told: set[int] = set()  # ranks that have ended, once they have been the cause of a question
    last = ""
    question, patience = 0, _LEAST_WAIT_SECONDS
    ended_at = aborted_at = time.monotonic()
    started, gone = False, 0  # how many times nothing was left of what was started; while all are suspended none is
    while not ready([job], _PAUSE_SECONDS):
        left = _works(mpiexec) if signals or not started else True
        started, gone = started or left, 0 if left or not started or not signals else gone + 1
        if gone * _PAUSE_SECONDS > _GONE_SECONDS:
            _end(job, say, f"mpiexec was told to end, and what it has started ended {_GONE_SECONDS:.0f} s ago")
            return
        files = folder.names()
        aborting = sorted(of_kind(files, "aborts").values())
        if not aborting:
            aborted_at = time.monotonic()
        elif time.monotonic() - aborted_at > patience_at_end:
            _end(
                job,
                say,
                f"rank{'s' if len(aborting) > 1 else ''} {ranges(aborting)} failed {patience_at_end:.0f} s ago",
            )
            return
        if lost is not None and not signals and (why := lost.look(files)):
            _end(job, say, why)
            return
        ended, reports = set(of_kind(files, "ended").values()), of_kind(files, "report")
        if not ended - told or ended >= set(of_kind(files, "began").values()):
            ended_at = time.monotonic()
        late = time.monotonic() - ended_at > patience
        if not reports and not late:
            continue
        time.sleep(_PAUSE_SECONDS)  # ranks that wait for the same reason report at about the same time
        question += 1
        table = _ask(folder, bell, ranks, question, job, lost.known if lost is not None else set())
        waiting = any(_waits(state) for state in table.values())
        if reports or waiting:
            told, patience = told | ended, _LEAST_WAIT_SECONDS
        else:  # some may wait later
            patience *= 2
        for report in of_kind(folder.names(), "report"):
            folder.remove(report)
        text, lines = _text(table)
        if lines != last and (reports or waiting):
            last = lines
            say(text)
    if lost is not None:
        if not signals:  # what a signal ends has not died
            lost.look_at_files(folder.names())
        lost.close()


class _Lost:
    """The ranks that have died, in a job that goes on without them. Each is told once, with the reason that it has told
    itself, if any. `known`: those that have been told."""

    def __init__(self, folder: private.Folder, say: Callable[[str], None]):
        self._folder, self._say = folder, say
        self.known, self._stepped_in = set[int](), set[int]()
        self._processes = dict[int, int]()

    def look(self, files: list[str]) -> str:
        """Tells of those that have died since. Returns why the job cannot go on; empty: it can."""
        self.look_at_files(files)
        return self._look_at_processes(files)

    def look_at_files(self, files: list[str]) -> None:
        """Tells of those that ranks have told of."""
        for name, rank in of_kind(files, "lost").items():
            if rank not in self.known:
                self.known.add(rank)
                reason = self._folder.read(name).partition("\n")[2].strip().removeprefix("jaxmpi.run: ")
                self._say(f"jaxmpi.run: rank {rank} is lost, and the job goes on{': ' if reason else ''}{reason}\n")
        for name in of_kind(files, "deaths"):
            self._tell({int(word) for word in self._folder.read(name).split() if word.isdecimal()})
        for name, rank in of_kind(files, "spare").items():
            if rank not in self._stepped_in and (number := self._folder.read(name).strip()):
                self._stepped_in.add(rank)
                self._say(f"jaxmpi.run: rank {rank}, which was spare, is rank {number} of the default communicator\n")

    def _tell(self, dead: set[int]) -> None:
        dead = dead - self.known
        self.known |= dead
        if dead:
            who, have = ("ranks", "have") if len(dead) > 1 else ("rank", "has")
            self._say(f"jaxmpi.run: {who} {ranges(sorted(dead))} {have} died, and the job goes on\n")

    def _look_at_processes(self, files: list[str]) -> str:
        """Finds ranks whose processes have ended. Returns why the job ends, if one did before MPI was there."""
        for name, rank in of_kind(files, "pid").items():
            if rank not in self._processes:
                try:
                    self._processes[rank] = os.pidfd_open(int(self._folder.read(name)))
                except (OSError, ValueError):
                    self._processes[rank] = -1
        gone = {rank for rank, file in self._processes.items() if file < 0 or ready([file], 0)}
        again = self._folder.names() if gone else []  # what they have told before their end
        gone -= {rank for kind in ("ended", "lost", "aborts") for rank in of_kind(again, kind).values()}
        early = sorted(gone - set(of_kind(again, "joined").values()))
        if early:
            who = f"rank{'s' if len(early) > 1 else ''} {ranges(early)}"
            return f"{who} died before MPI was initialized, for which the others wait"
        self._tell(gone)
        return ""

    def close(self) -> None:
        for file in self._processes.values():
            if file >= 0:
                os.close(file)


def _state(pid: int) -> str:
    """The letter of the system for what a process does; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _works(mpiexec: int) -> bool:
    """Whether something runs that it has started, or it is suspended itself; False where the system does not tell."""
    if _state(mpiexec) in ("T", "t"):
        return True
    children: set[int] = set()
    for path in Path(f"/proc/{mpiexec}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children.update(map(int, path.read_text().split()))
    return any(_state(child) not in ("", "Z", "X") for child in children)


def _end(job: int, say: Callable[[str], None], why: str) -> None:
    """Ends `mpiexec`; its helpers, also those on other machines, end without it, and with them the ranks."""
    say(f"jaxmpi.run: {why}; mpiexec is still there, and is ended\n")
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(job, number)
        if ready([job], _KILL_SECONDS):
            return


def _ask(
    folder: private.Folder, bell: lifeline.Bell, ranks: int, question: int, job: int, dead: set[int]
) -> dict[int, tuple[str, ...]]:
    """The states of all ranks: of one that has neither ended nor died its answer, empty if it gives none. Only ranks
    that have begun on this machine are waited for."""
    files = folder.names()
    for answer in of_kind(files, "state"):
        folder.remove(answer)
    here = set(of_kind(files, "began").values())
    folder.write("ask", str(question))
    bell.ring()
    end = time.monotonic() + _ANSWER_SECONDS
    table: dict[int, tuple[str, ...]] = dict.fromkeys(dead, ("dead",))
    while not here <= table.keys() and time.monotonic() < end and not ready([job], 0.05):
        files = folder.names()
        for name, rank in of_kind(files, "state").items():
            if rank not in table:
                table[rank] = tuple(folder.read(name).split("\n", 3))
        table |= {rank: ("spare",) for name, rank in of_kind(files, "spare").items() if not folder.read(name)}
        table |= {rank: ("ended",) for rank in of_kind(files, "ended").values()}
    bell.hush()
    return {rank: table.get(rank, () if rank in here else ("elsewhere",)) for rank in range(ranks)}


def _waits(state: tuple[str, ...]) -> bool:
    return len(state) == 4 and float(state[0]) >= _LEAST_WAIT_SECONDS


def _text(table: dict[int, tuple[str, ...]]) -> tuple[str, str]:
    """The table in words, with and without times; ranks that do the same are one line."""
    lines: dict[str, list[int]] = {}
    longest: dict[str, float] = {}
    for rank, state in table.items():
        if state == ("ended",):
            line = "has ended"
        elif state == ("dead",):
            line = "has died"
        elif state == ("spare",):
            line = "is spare"
        elif state == ("elsewhere",):
            line = _ELSEWHERE
        elif len(state) != 4:
            line = "does not answer: jaxmpi has not been imported, or the process has stopped, or cannot be reached"
        elif float(state[0]) < 0:
            line = "is in no operation" + (f"; {state[3]}" if state[3] else "")
        else:
            line = f"waits in {state[1]}, on {state[2]}" + (f"; {state[3]}" if state[3] else "")
            longest[line] = max(longest.get(line, 0.0), float(state[0]))
        lines.setdefault(line, []).append(rank)
    text, timeless = "jaxmpi.run: what the ranks do:\n", ""
    for line, ranks in lines.items():
        many = len(ranks) > 1
        who = f"rank{'s' if many else ''} {ranges(ranks)}"
        since = f", {longest[line]:.3g} s so far" if line in longest else ""
        if many:
            line = line.replace(_ELSEWHERE, _ELSEWHERE_OF_MANY)
            line = line.replace("has ", "have ", 1).replace("waits", "wait", 1).replace("is in", "are in", 1)
            line = line.replace("does not", "do not", 1).replace("is spare", "are spare", 1)
        text += f"  {who}: {line}{since}\n"
        timeless += f"{who}: {line}\n"
    return text, timeless


def ranges(ranks: list[int]) -> str:
    """Numbers in words: 0 to 3, 5."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(f"{p[0]} to {p[-1]}" if len(p) > 2 else ", ".join(map(str, p)) for p in parts)
