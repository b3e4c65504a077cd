"""The timelines that the ranks have written: see _mpi/timeline.py and csrc/observe/timeline.c.

A line that is not JSON is only counted, because a killed process may leave one. Any other line that cannot be read
raises ValueError, with the name of the file.
"""

import contextlib
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of JSON in which equal texts are one string, above all lines of the program."""
    return {name: sys.intern(value) if type(value) is str else value for name, value in pairs}


WAITS = {"wait", "exchange_finish"}
"""The operations that wait for nonblocking ones."""

_DECODER = json.JSONDecoder(object_pairs_hook=_object)


@dataclass(slots=True)
class Event:
    """An operation on one rank. Times are in microseconds, of the rank's own clock until `clocks.align`."""

    rank: int
    track: int
    name: str
    begin: float
    end: float
    arguments: dict[str, Any]
    complete: bool = True
    """Whether it has ended. If not, the process has ended in it, and `end` is the last time in the file."""
    waited: float = 0.0
    """The time in which other ranks had not yet called it: see `matching`."""
    other_end: "Event | None" = field(default=None, repr=False)
    """The event that waits for the operation that this one starts, or the reverse."""
    shown: str = ""
    """The name that users know, if it differs."""

    @property
    def seconds(self) -> float:
        return (self.end - self.begin) / 1e6

    @property
    def nbytes(self) -> int:
        """The bytes that this rank passes to it or takes from it. The larger number counts."""
        if self.name in WAITS and self.other_end is not None:
            return self.other_end.nbytes
        return max(self.arguments.get("sent", 0), self.arguments.get("received", 0))

    @property
    def title(self) -> str:
        return self.shown or self.name

    @property
    def label(self) -> str:
        """The name, and whether it is of tangents or cotangents. For a wait, the operation that it waits for."""
        if self.title == "wait" and self.other_end is not None:
            return f"wait for {self.other_end.label}"
        operation = self.other_end if self.name in WAITS and self.other_end is not None else self
        derivative = str(operation.arguments.get("derivative", ""))
        return f"{self.title} of {derivative.split()[-1]}s" if derivative else self.title


@dataclass
class Communicator:
    name: str
    ranks: Sequence[int]
    """The ranks of the processes in COMM_WORLD, in the order of the communicator."""
    earlier: int = 0
    """The number of communicators with this name and these ranks that this rank made before it."""
    members: str = ""
    """A hash of the ranks. Empty if these are all ranks."""

    @property
    def key(self) -> tuple[Any, ...]:
        """The key of the communicator, the same on all ranks if they use equal communicators in one order."""
        return self.name, self.members, self.earlier


@dataclass
class Rank:
    """A rank's file."""

    rank: int
    size: int
    host: str
    clock: str
    monotonic: float
    realtime: float
    events: list[Event] = field(default_factory=list)
    communicators: dict[int, Communicator] = field(default_factory=dict)
    lost: int | None = None
    """The number of operations that were left out. None: the process was killed before it could write this."""
    unreadable: int = 0
    """The number of unreadable lines, without the last line of a killed process."""


@dataclass
class Job:
    """The files of a job in a folder, by their ranks."""

    name: str
    size: int
    program: str
    paths: dict[int, Path] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}  {len(self.paths)} of {self.size} rank{'s' * (self.size > 1)}  {self.program}"


_NAME = re.compile(r"(.+)\.\d{5,}\.json")
"""The name of a file: the name of the job, or a name that the rank has chosen, and the rank."""


def jobs(folder: Path) -> list[Job]:
    """Return the jobs whose files are in a folder, by name. A rank does not know the name of the job if not all ranks
    reported. These ranks are of one job if they were launched together. Raise ValueError if there is no job, or if the
    jobs of these ranks are not clear."""
    paths = [path for path in sorted(folder.iterdir()) if _NAME.fullmatch(path.name) and path.is_file()]
    if not paths:
        raise ValueError(f"no timelines in {folder}: run the program with JAXMPI_TRACE={folder}")
    headers = {path: header for path in paths if (header := _header(path)) is not None}
    if not headers:
        raise ValueError(f"{paths[0]} is no timeline of jaxmpi, or the process was killed at once")
    together: dict[str, set[str]] = defaultdict(set)
    for header in headers.values():
        if header["job"] is not None:
            together[header["launched"]].add(header["job"])
    members_of: dict[str, dict[Path, dict[str, Any]]] = defaultdict(dict)
    for path, header in headers.items():
        known = together[header["launched"]]
        job = next(iter(known)) if header["job"] is None and len(known) == 1 else header["job"]
        members_of[job or header["launched"]][path] = header
    return sorted((_job(members) for members in members_of.values()), key=lambda job: job.name)


def _job(headers: dict[Path, dict[str, Any]]) -> Job:
    (first, header), *_ = headers.items()
    agreed = {other["job"] for other in headers.values()} - {None}
    name = next(iter(agreed), None) or first.name.split(".")[0]
    job = Job(name, header["size"], " ".join(header["program"]))
    begin = max(other["realtime"] for other in headers.values())
    for path, other in headers.items():
        late = not agreed and begin - other["realtime"] > 6e8
        if other["size"] != job.size or other["rank"] in job.paths or late:
            raise ValueError(
                f"{path} and {first} may be of different jobs: not all ranks of these jobs imported jaxmpi. Move the "
                "files of one job into a folder of their own"
            )
        job.paths[other["rank"]] = path
    job.paths = dict(sorted(job.paths.items()))
    return job


def _header(path: Path) -> dict[str, Any] | None:
    """Return the header of a file. None: it has none, because the process was killed."""
    with _errors_of(path), path.open(errors="replace") as file:
        facts = filter(None, map(_fact, islice(file, 5)))
        return next((fact["args"] for fact in facts if fact["name"] == "jaxmpi"), None)


def read(folder: Path, name: str = "") -> list[Rank]:
    """Return the ranks of the job whose name begins with `name`, in order. Raise ValueError if this is not one job."""
    listed = jobs(folder)
    chosen = [job for job in listed if job.name.startswith(name)]
    if len(chosen) != 1:
        rows = "".join(f"\n  {job}" for job in listed)
        plural = "jobs have" if len(listed) > 1 else "job has"
        wrong = f"; {len(chosen) or 'no'} names begin with {name}" if name else ""
        raise ValueError(f"{len(listed)} {plural} written into {folder}, choose one by --job NAME{wrong}:{rows}")
    ranks = [_read(path) for path in chosen[0].paths.values()]
    _find_members(ranks)
    return ranks


def _find_members(ranks: list[Rank]) -> None:
    """Read the ranks of communicators from the files that list them. Forget the communicators whose first rank has no
    file."""
    listed: dict[str, Sequence[int]] = {"": range(ranks[0].size)}
    for rank in ranks:
        listed.update({comm.members: comm.ranks for comm in rank.communicators.values() if comm.ranks})
    for rank in ranks:
        rank.communicators = {n: comm for n, comm in rank.communicators.items() if comm.members in listed}
        for comm in rank.communicators.values():
            comm.ranks = listed[comm.members]


@contextlib.contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Name the file in an error about a line that no timeline has."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no timeline, or is damaged ({error!r:.80}). Remove it, or run the program again with another "
            "JAXMPI_TRACE"
        ) from error


def _read(path: Path) -> Rank:
    header = _header(path)
    assert header is not None, path
    with _errors_of(path), path.open(errors="replace") as file:
        names = ("rank", "size", "host", "clock", "monotonic", "realtime")
        rank = Rank(**{name: header[name] for name in names})
        _add_lines(rank, file)
    rank.events.sort(key=lambda event: event.begin)
    _count_communicators(rank)
    _join_ends(rank)
    return rank


def _add_lines(rank: Rank, lines: Iterable[str]) -> None:
    begun: dict[int, Event] = {}
    last = 0.0
    for text in lines:
        line = _fact(text)
        if line is None:
            rank.unreadable += text.endswith("\n") and text.strip() not in ("[", "]", "")
            continue
        if line["ph"] == "M":
            _add_fact(rank, line["name"], line["args"])
            continue
        begin = float(line["ts"])
        shown, arguments = line["name"], line["args"]
        name, end = arguments.pop("operation", shown), begin + line.get("dur", 0.0)
        event = Event(rank.rank, line["tid"], name, begin, end, arguments, shown=shown)
        last = max(last, event.end)
        if line["ph"] == "B":
            begun[event.track] = event
            continue
        if line["ph"] == "E" and event.track in begun:
            event.begin = begun.pop(event.track).begin
        rank.events.append(event)
    for event in begun.values() if not rank.lost else ():  # otherwise the line of an end may have been left out
        event.end, event.complete = max(last, event.begin), False
        rank.events.append(event)


def _join_ends(rank: Rank) -> None:
    """Join each start with the wait for it. Numbers of requests are used again, after 16 million others."""
    started: dict[int, Event] = {}
    for event in rank.events:
        number = event.arguments.get("request", 0)
        if number and event.name not in WAITS:
            started[number] = event
        elif number in started:
            event.other_end = started.pop(number)
            event.other_end.other_end = event


def _fact(line: str) -> dict[str, Any] | None:
    """Return the fact in a line. None: the line is no JSON, because it is cut off for example."""
    try:
        return _DECODER.decode(line.strip().removesuffix(","))
    except (ValueError, RecursionError):
        return None


def _add_fact(rank: Rank, name: str, entries: dict[str, Any]) -> None:
    if name == "jaxmpi_end":
        rank.lost = entries["lost"]
    if name == "jaxmpi_communicator":  # repeated by a second thread, or when the name has changed
        ranks, members = tuple(entries.get("ranks", ())), entries.get("members", "")
        rank.communicators[entries["number"]] = Communicator(entries["name"], ranks, members=members)


def _count_communicators(rank: Rank) -> None:
    """Distinguish communicators with one name and the same ranks, when all have their last names."""
    counts: Counter[tuple[str, str]] = Counter()
    for comm in rank.communicators.values():
        comm.earlier = counts[comm.name, comm.members]
        counts[comm.name, comm.members] += 1
