"""The timelines of the ranks as they were written: see _mpi/timeline.py and csrc/observe/timeline.c.

Whoever can write into the folder may have written anything. `_fact` compares each line with one schema, and `_check`
what lines say of each other; whatever comes after relies on that. A line that is not JSON is counted, for a process
that was killed may leave one. Any other damage raises ValueError, with the name of the file.
"""

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, in which equal texts are one string: lines of the program above all."""
    return {name: sys.intern(value) if type(value) is str else value for name, value in pairs}


WAITS = {"wait", "exchange_finish", "index_finish", "redistribute_finish"}
"""The operations that wait for what has been started."""

FROM_ROOT, TO_ROOT = {"bcast", "ibcast", "scatter", "scatterv"}, {"gather", "reduce", "ireduce", "gatherv"}

_DECODER = json.JSONDecoder(object_pairs_hook=_object)

_MOST_CHARACTERS = 1 << 26
"""The length of the longest line that is read. The longest one written lists the ranks of a communicator."""
_MOST_RANKS = 1 << 24


def _text(x: Any) -> bool:
    return type(x) is str


def _whole(x: Any) -> bool:
    return type(x) is int and abs(x) < 1 << 63


def _count(x: Any) -> bool:
    return _whole(x) and x >= 0


def _time(x: Any) -> bool:
    return type(x) in (int, float) and abs(x) < 1e18


def _plain(x: Any) -> bool:
    return _text(x) or _whole(x) or _time(x) or type(x) is bool


def _list_of(its: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: type(x) is list and all(map(its, x))


def _is_name(x: Any) -> bool:
    return _text(x) and re.fullmatch(r"[A-Za-z][\w .']{0,99}", x) is not None


_EVENT: dict[str, Callable[[Any], bool]] = {"name": _is_name, "tid": _whole, "ts": _time}
_SCHEMA: dict[str, dict[str, Callable[[Any], bool]]] = {
    "B": _EVENT,
    "E": _EVENT,
    "X": {**_EVENT, "dur": lambda x: _time(x) and x >= 0},
    "jaxmpi": {
        "job": lambda x: x is None or _text(x),
        **dict.fromkeys(("launched", "host", "clock"), _text),
        "rank": _count,
        "size": lambda x: _count(x) and x <= _MOST_RANKS,
        **dict.fromkeys(("monotonic", "realtime"), _time),
        "program": _list_of(_text),
    },
    "jaxmpi_job": {"job": _text},
    "jaxmpi_communicator": {"number": _count, "name": _text, "ranks": _list_of(_count), "members": _text},
    "jaxmpi_end": {"lost": _count},
}
"""What a line of each phase has, and what the arguments of a fact (phase M) have, by its name."""
_MAY_LACK = {"ranks", "members"}
_ARGUMENTS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("comm", "from", "request", "count", "sent", "received"), _count),
    **dict.fromkeys(("root", "dest", "source", "tag", "sendtag", "recvtag", "from_tag"), _whole),
    **dict.fromkeys(("line", "dtype", "op"), _text),
    **dict.fromkeys(("operation", "derivative"), _is_name),
}
"""What the arguments of an operation are. All but `comm` may be absent; those with other names are plain values."""


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
    """Whether it has ended. If not the process has ended in it, and `end` is the last time in its file."""
    waited: float = 0.0
    """The time for which other ranks had not come yet: see `matching`."""
    other_end: "Event | None" = field(default=None, repr=False)
    """The event that waits for what this one starts, or that starts what this one waits for."""
    shown: str = ""
    """The name that users know, where that is another."""

    @property
    def seconds(self) -> float:
        return (self.end - self.begin) / 1e6

    @property
    def nbytes(self) -> int:
        """What this rank passes to it, or takes from it, whichever is more."""
        if self.name in WAITS and self.other_end is not None:
            return self.other_end.nbytes
        return max(self.arguments.get("sent", 0), self.arguments.get("received", 0))

    @property
    def title(self) -> str:
        return self.shown or self.name

    @property
    def label(self) -> str:
        """The name, and whether it is of tangents or cotangents; for a wait, what it waits for."""
        if self.name in WAITS - {"exchange_finish"} and self.other_end is not None:
            return f"wait for {self.other_end.label}"
        its = self.other_end if self.name == "exchange_finish" and self.other_end is not None else self
        derivative = str(its.arguments.get("derivative", ""))
        return f"{self.title} of {derivative.split()[-1]}s" if derivative else self.title


@dataclass
class Communicator:
    name: str
    ranks: Sequence[int]
    """The ranks in COMM_WORLD of its processes, in the order of the communicator."""
    earlier: int = 0
    """The number of communicators with this name and these ranks that this rank had made before."""
    members: str = ""
    """A hash of the ranks; empty if they are all."""

    @property
    def key(self) -> tuple[Any, ...]:
        """What identifies the communicator on all its ranks, if they use those that are alike in one order."""
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
    """Operations that were left out; None: the process was killed before it could tell."""
    unreadable: int = 0
    """Lines, but for the last one of a process that was killed."""


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
"""The name of a file: the name of the job, or one that the rank has given itself, and the rank."""


def jobs(folder: Path) -> list[Job]:
    """The jobs whose files are in a folder, by their names. Ranks that do not know their job, since not all
    of it were heard, are of one job if they were launched together. Raises ValueError if there are none, or if such
    ranks cannot be told apart."""
    paths = [path for path in sorted(folder.iterdir()) if _NAME.fullmatch(path.name) and path.is_file()]
    if not paths:
        raise ValueError(f"no timelines in {folder}: run the program with JAXMPI_TRACE={folder}")
    headers = {path: header for path in paths if (header := _header(path)) is not None}
    if not headers:
        raise ValueError(f"{paths[0]} is no timeline of jaxmpi, or its process was killed at once")
    together: dict[str, set[str]] = defaultdict(set)
    for header in headers.values():
        if header["job"] is not None:
            together[header["launched"]].add(header["job"])
    found: dict[str, dict[Path, dict[str, Any]]] = defaultdict(dict)
    for path, header in headers.items():
        known = together[header["launched"]]
        job = next(iter(known)) if header["job"] is None and len(known) == 1 else header["job"]
        found[job or header["launched"]][path] = header
    return sorted((_job(members) for members in found.values()), key=lambda job: job.name)


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
                f"{path} and {first} cannot be told apart, and may be of different jobs: not all ranks of these have "
                "imported jaxmpi. Move the files of one job into a folder of their own"
            )
        job.paths[other["rank"]] = path
    job.paths = dict(sorted(job.paths.items()))
    return job


def _header(path: Path) -> dict[str, Any] | None:
    """Who wrote a file; None: it does not say, since the process was killed."""
    lines = _lines(path)
    header = next(_arguments_of(path, islice(lines, 5), "jaxmpi"), None)
    if header is not None and header["job"] is None:
        later = _arguments_of(path, (line for line in lines if '"jaxmpi_job"' in line), "jaxmpi_job")
        header["job"] = next((arguments["job"] for arguments in later), None)
    if header is not None and header["rank"] >= header["size"]:
        raise _damaged(path, f"it is of rank {header['rank']} of {header['size']}")
    return header


def _arguments_of(path: Path, lines: Iterable[str], name: str) -> Iterator[dict[str, Any]]:
    """The arguments of the facts that have a name."""
    for line in lines:
        if (fact := _fact(path, line)) is not None and fact["ph"] == "M" and fact["name"] == name:
            yield fact["args"]


def read(folder: Path, name: str = "") -> list[Rank]:
    """The ranks of the job whose name begins so, in their order. Raises ValueError if that is not one job."""
    there = jobs(folder)
    chosen = [job for job in there if job.name.startswith(name)]
    if len(chosen) != 1:
        rows = "".join(f"\n  {job}" for job in there)
        plural = "jobs have" if len(there) > 1 else "job has"
        wrong = f"; {len(chosen) or 'no'} names begin with {name}" if name else ""
        raise ValueError(f"{len(there)} {plural} written into {folder}, choose one by --job NAME{wrong}:{rows}")
    ranks = [_read(path) for path in chosen[0].paths.values()]
    _find_members(ranks)
    for rank, path in zip(ranks, chosen[0].paths.values(), strict=True):
        _check(rank, path)
    return ranks


def _find_members(ranks: list[Rank]) -> None:
    """Finds the ranks of communicators in the files that list them. Those of which the first rank has no file are
    forgotten."""
    listed: dict[str, Sequence[int]] = {"": range(ranks[0].size)}
    for rank in ranks:
        listed.update({comm.members: comm.ranks for comm in rank.communicators.values() if comm.ranks})
    for rank in ranks:
        rank.communicators = {n: comm for n, comm in rank.communicators.items() if comm.members in listed}
        for comm in rank.communicators.values():
            comm.ranks = listed[comm.members]


def _check(rank: Rank, path: Path) -> None:
    """Raises ValueError if a line names a rank that its communicator or the job does not have."""
    for comm in rank.communicators.values():
        if not isinstance(comm.ranks, range) and (
            len({*comm.ranks}) < len(comm.ranks) or max(comm.ranks, default=0) >= rank.size
        ):
            raise _damaged(path, f"{comm.ranks!r:.80} are no ranks of a communicator")
    for event in rank.events:
        if (known := rank.communicators.get(event.arguments["comm"])) is None:
            continue
        needed = {"root"} if event.name in FROM_ROOT | TO_ROOT else {"from"} & event.arguments.keys()
        if any(event.arguments.get(name) not in range(len(known.ranks)) for name in needed):
            raise _damaged(path, f"{event.name} of {len(known.ranks)} ranks has {event.arguments!r:.80}")


def _damaged(path: Path, what: str) -> ValueError:
    return ValueError(
        f"{path} is no timeline, or is damaged: {what}. Remove it, or run the program again with another JAXMPI_TRACE"
    )


def _read(path: Path) -> Rank:
    header = _header(path)
    assert header is not None, path
    names = ("rank", "size", "host", "clock", "monotonic", "realtime")
    rank = Rank(**{name: header[name] for name in names})
    begun: dict[int, Event] = {}
    last = 0.0
    for text in _lines(path):
        line = _fact(path, text)
        if line is None:
            rank.unreadable += text.endswith("\n") and text.strip() not in ("[", "]", "")
            continue
        if line["ph"] == "M":
            _add_fact(rank, line["name"], line["args"])
            continue
        begin = float(line["ts"])
        shown, arguments = line["name"], line["args"]
        event = Event(
            rank.rank,
            line["tid"],
            arguments.pop("operation", shown),
            begin,
            begin + line.get("dur", 0.0),
            arguments,
            shown=shown,
        )
        last = max(last, event.end)
        if line["ph"] == "B":
            begun[event.track] = event
            continue
        if line["ph"] == "E" and event.track in begun:
            event.begin = begun.pop(event.track).begin
        rank.events.append(event)
    for event in begun.values() if not rank.lost else ():  # else the line of its end may have been left out
        event.end, event.complete = max(last, event.begin), False
        rank.events.append(event)
    rank.events.sort(key=lambda event: event.begin)
    _count_communicators(rank)
    _join_ends(rank)
    return rank


def _join_ends(rank: Rank) -> None:
    """What starts an operation, and what waits for it. Numbers of requests are used again, after 16 million others."""
    started: dict[int, Event] = {}
    for event in rank.events:
        number = event.arguments.get("request", 0)
        if number and event.name not in WAITS:
            started[number] = event
        elif number in started:
            event.other_end = started.pop(number)
            event.other_end.other_end = event


def _fact(path: Path, line: str) -> dict[str, Any] | None:
    """What a line says. None: it is no JSON, such as one that is cut off. Raises ValueError if it says what no timeline
    does."""
    try:
        fact = _DECODER.decode(line.strip().removesuffix(","))
    except (ValueError, RecursionError):
        return None
    kinds = [type(fact.get(name)) for name in ("name", "ph", "args")] if type(fact) is dict else None
    if kinds != [str, str, dict]:
        raise _damaged(path, f"a line is {line.strip()!r:.80}")
    if fact["ph"] == "M":
        wrong = _unlike(fact["args"], fact["name"])
    else:
        wrong = "ph" if fact["ph"] not in ("B", "E", "X") else _unlike(fact, fact["ph"])
        given = ((name, _ARGUMENTS.get(name, _plain)(value)) for name, value in fact["args"].items())
        wrong = wrong or next((name for name, fits in given if not fits), None if "comm" in fact["args"] else "comm")
    if wrong is not None:
        raise _damaged(path, f"{wrong!r:.40} is missing or wrong in {line.strip()!r:.80}")
    return fact


def _unlike(given: dict[str, Any], kind: str) -> str | None:
    """The name of what is not as the schema says; a kind that it does not have may say anything."""
    for name, fits in _SCHEMA.get(kind, {}).items():
        if not fits(given[name]) if name in given else name not in _MAY_LACK:
            return name
    return None


def _lines(path: Path) -> Iterator[str]:
    with path.open(errors="replace") as file:
        while line := file.readline(_MOST_CHARACTERS):
            if len(line) == _MOST_CHARACTERS:
                raise _damaged(path, f"a line has more than {_MOST_CHARACTERS} characters")
            yield line


def _add_fact(rank: Rank, name: str, given: dict[str, Any]) -> None:
    if name == "jaxmpi_end":
        rank.lost = given["lost"]
    if name == "jaxmpi_communicator":  # told again by a second thread, or with the name that it has got since
        ranks, members = tuple(given.get("ranks", ())), given.get("members", "")
        rank.communicators[given["number"]] = Communicator(given["name"], ranks, members=members)


def _count_communicators(rank: Rank) -> None:
    """Tells apart those with one name and the same ranks, once all have their last names."""
    counts: Counter[tuple[str, str]] = Counter()
    for comm in rank.communicators.values():
        comm.earlier = counts[comm.name, comm.members]
        counts[comm.name, comm.members] += 1
