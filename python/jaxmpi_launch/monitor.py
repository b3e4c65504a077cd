"""What the launcher says about a job in which ranks wait: one table of all ranks.

The launcher asks the ranks when one of them reports that it waits for long, or has ended while others have not. The
ranks of its machine answer in the job's folder, by the thread of csrc/observe/watchdog.c. Files there:

    began, ended      the program of a rank has begun, has ended
    aborts            the rank ends the job: the code, and the reason in the next line
    report            the rank has printed a report
    state             the answer to the question in `ask`

In a job that survives deaths also:

    pid, joined       the process; it has initialized MPI
    lost, left        the rank has failed; it has nothing more to do
    deaths            the ranks that a survivor has seen die
    spare             the rank is spare; the number that it has taken

Ranks on other machines leave no files: they report on stderr alone.
"""

import os
import re
import select
import time
from collections.abc import Callable, Mapping

from jaxmpi_launch.folder import Folder

_ANSWER_SECONDS = 2.5
"""The time in which ranks answer: their watch looks once a second."""
_LEAST_WAIT_SECONDS = 2.0
"""A rank that waits as long for one that has ended most likely waits for ever."""
_END_SECONDS = 20.0
"""The time that mpiexec has to end a job that a rank has aborted."""
_END_SECONDS_OF_SURVIVORS = 1.0
"""The time that mpiexec has in a job that survives deaths: it does not end the others."""
_GONE_SECONDS = 60.0
"""The time that mpiexec has to end after a signal."""

_ELSEWHERE = "is on another machine, or has not begun: its own report tells what it waits for"
_SILENT = "does not answer: jaxmpi has not been imported, or the process has stopped, or cannot be reached"


class Monitor:
    """Watches the folder of a job. The launcher calls `step` a few times per second."""

    def __init__(self, folder: Folder, ranks: int, survives: bool, say: Callable[[str], None]):
        self._folder, self._ranks, self._say = folder, ranks, say
        self._lost = Lost(folder, say) if survives else None
        self._patience_at_end = _END_SECONDS_OF_SURVIVORS if survives else _END_SECONDS
        self._known: set[int] = set()  # ranks that have ended, and have caused a question
        self._patience = _LEAST_WAIT_SECONDS
        self._last, self._question = "", 0
        self._asked = 0.0  # since when answers are awaited; 0: none are
        self._reported = False
        self._ended_at = self._aborted_at = self._signalled_at = time.monotonic()

    def step(self, signalled: bool) -> str:
        """Look at the files. Return why mpiexec must be ended; empty if it need not be."""
        now, folder = time.monotonic(), self._folder
        files = folder.kinds()
        if not signalled:
            self._signalled_at = now
        elif now - self._signalled_at > _GONE_SECONDS:
            return f"mpiexec was told to end {_GONE_SECONDS:.0f} s ago"
        aborting = sorted(files["aborts"])
        if not aborting:
            self._aborted_at = now
        elif now - self._aborted_at > self._patience_at_end:
            return f"{in_words(aborting)} failed {self._patience_at_end:.0f} s ago"
        if self._lost is not None and not signalled and (why := self._lost.look()):
            return why
        if self._asked:
            self._gather(now, files)
            return ""
        ended = set(files["ended"])
        self._reported = bool(files["report"])
        if not ended - self._known or ended >= set(files["began"]):
            self._ended_at = now
        if self._reported or now - self._ended_at > self._patience:
            self._question += 1
            folder.clear("state")
            folder.write("ask", str(self._question))
            folder.ring()
            self._asked = now
        return ""

    def end(self, signalled: bool) -> None:
        if self._lost is not None:
            if not signalled:  # what a signal ends has not died
                self._lost.look_at_files()
            self._lost.close()

    def _gather(self, now: float, files: Mapping[str, dict[int, str]]) -> None:
        """Print the table once all ranks of this machine have answered, or their time is over."""
        folder = self._folder
        here, ended = set(files["began"]), set(files["ended"])
        table = {rank: tuple(text.split("\n", 3)) for rank, text in folder.texts("state").items()}
        table |= dict.fromkeys(self._lost.known if self._lost is not None else (), ("dead",))
        table |= {rank: ("spare",) for rank, number in folder.texts("spare").items() if not number}
        table |= dict.fromkeys(ended, ("ended",))
        if not here <= table.keys() and now - self._asked < _ANSWER_SECONDS:
            return
        folder.hush()
        self._asked = 0.0
        table = {rank: table.get(rank, () if rank in here else ("elsewhere",)) for rank in range(self._ranks)}
        waiting = any(len(state) == 4 and float(state[0]) >= _LEAST_WAIT_SECONDS for state in table.values())
        if self._reported or waiting:
            self._known |= ended
            self._patience = _LEAST_WAIT_SECONDS
        else:  # some may wait later
            self._patience *= 2
        folder.clear("report")
        text = _text(table)
        lines = re.sub(r", \S+ s so far$", "", text, flags=re.MULTILINE)
        if lines != self._last and (self._reported or waiting):
            self._last = lines
            self._say(text)


class Lost:
    """The ranks that have died, in a job that goes on without them. Each is named once, with its reason if it left one.

    `known`: the ranks that have been named."""

    def __init__(self, folder: Folder, say: Callable[[str], None]):
        self._folder, self._say = folder, say
        self.known, self._stepped_in = set[int](), set[int]()
        self._processes = dict[int, int]()

    def look(self) -> str:
        """Name the ranks that have died since. Return why the job cannot go on; empty: it can."""
        self.look_at_files()
        return self._look_at_processes()

    def look_at_files(self) -> None:
        for rank, text in self._folder.texts("lost").items():
            if rank not in self.known:
                self.known.add(rank)
                reason = text.partition("\n")[2].strip().removeprefix("jaxmpi.run: ")
                self._say(f"jaxmpi.run: rank {rank} is lost, and the job goes on{': ' if reason else ''}{reason}\n")
        for text in self._folder.texts("deaths").values():
            self._name({int(word) for word in text.split() if word.isdecimal()})
        for rank, number in self._folder.texts("spare").items():
            if rank not in self._stepped_in and number.strip():
                self._stepped_in.add(rank)
                self._say(
                    f"jaxmpi.run: rank {rank}, which was spare, is rank {number.strip()} of the default communicator\n"
                )

    def _name(self, dead: set[int]) -> None:
        dead = dead - self.known
        self.known |= dead
        if dead:
            have = "have" if len(dead) > 1 else "has"
            self._say(f"jaxmpi.run: {in_words(sorted(dead))} {have} died, and the job goes on\n")

    def _look_at_processes(self) -> str:
        """Find ranks whose processes have ended. Return why the job ends, if one ended before MPI was initialized."""
        for rank, pid in self._folder.texts("pid").items():
            if rank not in self._processes:
                try:
                    self._processes[rank] = os.pidfd_open(int(pid))
                except (OSError, ValueError):
                    self._processes[rank] = -1
        gone = {rank for rank, file in self._processes.items() if file < 0 or ready([file], 0)}
        if gone:  # without what they have left before their end
            files = self._folder.kinds()
            gone -= files["ended"].keys() | files["lost"].keys() | files["aborts"].keys()
            if early := sorted(gone - files["joined"].keys()):
                return f"{in_words(early)} died before MPI was initialized, for which the others wait"
        self._name(gone)
        return ""

    def close(self) -> None:
        for file in self._processes.values():
            if file >= 0:
                os.close(file)


def ready(files: list[int], seconds: float) -> list[int]:
    """Return the files that can be read without waiting, or have come to their end, after `seconds` at most.

    By poll: `select` refuses descriptors over 1,023."""
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    return [file for file, _ in poll.poll(1000 * seconds)]


def _text(table: dict[int, tuple[str, ...]]) -> str:
    """Return the table in words; ranks that do the same are one line."""
    simple = {"ended": "has ended", "dead": "has died", "spare": "is spare", "elsewhere": _ELSEWHERE}
    lines: dict[str, list[int]] = {}
    longest: dict[str, float] = {}
    for rank, state in table.items():
        if len(state) != 4:
            line = simple.get(state[0] if state else "", _SILENT)
        elif float(state[0]) < 0:
            line = "is in no operation" + (f"; {state[3]}" if state[3] else "")
        else:
            line = f"waits in {state[1]}, on {state[2]}" + (f"; {state[3]}" if state[3] else "")
            longest[line] = max(longest.get(line, 0.0), float(state[0]))
        lines.setdefault(line, []).append(rank)
    text = "jaxmpi.run: what the ranks do:\n"
    for line, ranks in lines.items():
        since = f", {longest[line]:.3g} s so far" if line in longest else ""
        if len(ranks) > 1:
            verb, _, rest = line.partition(" ")
            verb = {"is": "are", "has": "have", "does": "do", "waits": "wait"}[verb]
            line = f"{verb} {rest}".replace("on another machine", "on other machines").replace(
                "or has not", "or have not"
            )
            line = line.replace("its own report tells what it waits", "their own reports tell what they wait")
        text += f"  {in_words(ranks)}: {line}{since}\n"
    return text


def in_words(ranks: list[int]) -> str:
    """Return sorted ranks in words, such as `ranks 0 to 3, 5`."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    words = ", ".join(f"{p[0]} to {p[-1]}" if len(p) > 2 else ", ".join(map(str, p)) for p in parts)
    return f"rank{'s' if len(ranks) > 1 else ''} {words}"
