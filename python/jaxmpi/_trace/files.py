"""The timelines of the ranks as they were written: see _timeline.py and csrc/core/timeline.c."""

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Equal texts once: lines of the program above all."""
    return {name: sys.intern(value) if type(value) is str else value for name, value in pairs}


WAITS = {"wait", "exchange_finish"}
"""Of what has been started."""

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
    """Otherwise the process has ended in it, and `end` is the last time in its file."""
    waited: float = 0.0
    """For how much of it other ranks had not come yet: see `matching`."""
    other_end: "Event | None" = field(default=None, repr=False)
    """Of what starts an operation, where that is waited for; of a wait, what it waits for."""
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
        """Its name, and whether it is of tangents or cotangents; of a wait, what it waits for."""
        if self.name == "wait" and self.other_end is not None:
            return f"wait for {self.other_end.label}"
        its = self.other_end if self.name == "exchange_finish" and self.other_end is not None else self
        derivative = str(its.arguments.get("derivative", ""))
        return f"{self.title} of {derivative.split()[-1]}s" if derivative else self.title


@dataclass
class Communicator:
    name: str
    ranks: tuple[int, ...]
    """In the order of the communicator: their ranks in COMM_WORLD."""
    place: int = 0
    """Which it was on this rank of those with this name and these ranks."""

    @property
    def key(self) -> tuple[Any, ...]:
        """The same on all its ranks, and of no other communicator, if all use those that are alike in one order."""
        return self.name, self.ranks, self.place


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


def read(folder: Path) -> list[Rank]:
    """The ranks' files, in their order. Raises ValueError if they are not those of one job."""
    paths = sorted(folder.glob("[0-9]" * 5 + ".json"))
    if not paths:
        raise ValueError(f"no timelines in {folder}: run the program with JAXMPI_TRACE={folder}")
    ranks = [_read(path) for path in paths]
    size, begin = ranks[0].size, max(rank.realtime for rank in ranks if rank.rank < ranks[0].size)
    for rank, path in zip(ranks, paths, strict=True):
        if rank.size != size or begin - rank.realtime > 6e8:
            raise ValueError(f"{path} is of another job than {paths[0]}: use an empty folder for each job")
    return ranks


def _read(path: Path) -> Rank:
    lines = _lines(path)
    header = next((line["args"] for line in lines if line["name"] == "jaxmpi"), None)
    if header is None:
        raise ValueError(f"{path} is no timeline of jaxmpi, or its process was killed at once")
    names = ("rank", "size", "host", "clock", "monotonic", "realtime")
    rank = Rank(**{name: header[name] for name in names})
    begun: dict[int, Event] = {}
    last = 0.0
    for line in lines:
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


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Without lines that are cut off: the last one of a process that was killed."""
    with path.open(errors="replace") as file:
        for line in file:
            if line.strip() in ("[", "]", ""):
                continue
            with contextlib.suppress(ValueError):
                yield _DECODER.decode(line.rstrip().removesuffix(","))


def _add_fact(rank: Rank, name: str, given: dict[str, Any]) -> None:
    if name == "jaxmpi_end":
        rank.lost = given["lost"]
    if name != "jaxmpi_communicator":
        return
    ranks = tuple(given["ranks"]) if given["ranks"] is not None else tuple(range(rank.size))
    number, name = given["number"], given["name"]
    others = [other for known, other in rank.communicators.items() if known != number]
    if number in rank.communicators and rank.communicators[number].name == name:
        return  # two threads have told it
    place = sum((other.name, other.ranks) == (name, ranks) for other in others)
    rank.communicators[number] = Communicator(name, ranks, place)
