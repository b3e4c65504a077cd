"""The events of different ranks that are one collective or one message, and the time that ranks waited in them.

All ranks of a communicator call collectives in the same order. Messages between two ranks with one tag are received in
the order in which they are sent. So counting matches both. Nonblocking operations are counted where they start. What
can take long is the wait, which knows the start (`Event.other_end`).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxmpi._trace.files import WAITS, Communicator, Event, Rank

MESSAGES = {"send", "recv", "sendrecv", "isend", "irecv"}
ALONE = {"after", "hold", *WAITS}
"""The operations that are no collectives and no messages."""
_ONE_CLOCK: Mapping[int, str] = {}
FROM_ROOT, TO_ROOT = {"bcast", "ibcast", "scatter", "scatterv"}, {"gather", "reduce", "ireduce", "gatherv"}
_STARTED = {"iallreduce", "ialltoall", "ibarrier", "ibcast", "ireduce"}
_WITH_NEIGHBORS = {"exchange", "exchange_start"}
_BY_COUNTS = {"allgatherv", "alltoallv", "gatherv", "reduce_scatterv", "scatterv"}


@dataclass
class Collective:
    """The events of a collective by the ranks in COMM_WORLD. For a nonblocking collective, the events that start it."""

    communicator: Communicator
    events: dict[int, Event] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        return len(self.events) == len(self.communicator.ranks)

    @property
    def consistent(self) -> bool:
        return len({(event.name, event.arguments.get("root")) for event in self.events.values()}) == 1

    def needs(self, clock: Mapping[int, str] = _ONE_CLOCK) -> list[tuple[Event, Event]]:
        """Return pairs of events. The first event cannot end before the second begins. `clock`: of each rank. Of events
        with the same clock only the last to begin is needed."""
        pairs = self._needs(clock)
        if pairs and pairs[0][0].name in _STARTED:
            return [(wait, early) for late, early in pairs if (wait := late.other_end) is not None]
        return pairs

    def _needs(self, clock: Mapping[int, str]) -> list[tuple[Event, Event]]:
        ordered = [self.events[rank] for rank in self.communicator.ranks if rank in self.events]
        first = ordered[0]
        if first.name not in ("barrier", "ibarrier") and not any(event.nbytes for event in ordered):
            return []  # no data is moved, so a library need not wait
        if first.name in _WITH_NEIGHBORS:
            return []  # the events do not name the neighbours
        if first.name in _BY_COUNTS and clock is not _ONE_CLOCK:
            return []  # a count of 0 needs nobody: this hardly changes the waiting, but would spoil the clocks
        if first.name in FROM_ROOT | TO_ROOT:
            root = self.events.get(self.communicator.ranks[first.arguments["root"]])
            others = [event for event in ordered if event is not root]
            if root is None:
                return []
            return [(event, root) if first.name in FROM_ROOT else (root, event) for event in others]
        if first.name in ("scan", "exscan"):
            return list(zip(ordered[1:], ordered, strict=False))
        last = {clock.get(event.rank): event for event in sorted(ordered, key=lambda event: event.begin)}
        return [(a, b) for a in ordered for b in last.values() if a is not b]


@dataclass
class Message:
    sent: Event
    received: Event
    """The recv, or the wait for an irecv."""

    @property
    def sender_waits(self) -> Event | None:
        """The event in which the sender may have to wait for the receiver. For isend this is the wait for it."""
        return self.sent.other_end if self.sent.name == "isend" else self.sent

    @property
    def expected(self) -> Event:
        """The event with which the receiver posts the receive."""
        return self.received.other_end or self.received

    @property
    def on_the_way(self) -> float | None:
        """Microseconds. None: unknown, because the message may have arrived before the wait for it."""
        if self.received.name == "wait":
            return None
        return self.received.end - max(self.sent.begin, self.received.begin)

    @property
    def nbytes(self) -> int:
        return int(self.sent.arguments.get("sent", 0))

    def needs(self, clock: Mapping[int, str] = _ONE_CLOCK) -> list[tuple[Event, Event]]:
        return [(self.received, self.sent)]


@dataclass
class Matched:
    collectives: list[Collective]
    messages: list[Message]
    unmatched: int
    """The number of events without a partner on every other rank, or with a different one. A rank has ended or lost
    events, or ranks have made equal communicators in another order."""

    @property
    def all(self) -> list[Collective | Message]:
        return [*self.collectives, *self.messages]


def match(ranks: Sequence[Rank]) -> Matched:
    collectives: dict[Any, Collective] = {}
    sent: dict[Any, list[Event]] = defaultdict(list)
    received: dict[Any, list[Event]] = defaultdict(list)
    unknown = 0
    for rank in ranks:
        counts: dict[Any, int] = defaultdict(int)
        for event in rank.events:
            comm = rank.communicators.get(event.arguments["comm"])
            if comm is None:  # the program comes from an earlier run and is not traced again
                unknown += 1
                continue
            if event.name in ALONE:
                continue
            if event.name in MESSAGES:
                _sort_message(event, comm, sent, received)
                continue
            number = counts[comm.key]
            counts[comm.key] += 1
            collectives.setdefault((comm.key, number), Collective(comm)).events[rank.rank] = event
    good = [one for one in collectives.values() if one.whole and one.consistent]
    unmatched = unknown + sum(len(one.events) for one in collectives.values()) - sum(len(one.events) for one in good)
    messages = []
    for key in sent.keys() | received.keys():
        messages += [Message(a, b) for a, b in zip(sent[key], received[key], strict=False)]
        unmatched += abs(len(sent[key]) - len(received[key]))
    return Matched(good, messages, unmatched)


def _sort_message(event: Event, comm: Communicator, sent: dict[Any, list[Event]], received: dict[Any, Any]) -> None:
    """Sort a message by the numbers that it has in common with the other end."""
    own = event.arguments
    if 0 <= (dest := own.get("dest", -1)) < len(comm.ranks):
        tag = own.get("tag", own.get("sendtag"))
        sent[comm.key, event.rank, comm.ranks[dest], tag].append(event)
    end = event.other_end if event.name == "irecv" else event
    if end is not None and "from" in (own := end.arguments):
        received[comm.key, comm.ranks[own["from"]], event.rank, own.get("from_tag")].append(end)


def add_waiting(matched: Matched) -> dict[tuple[int, int], float]:
    """Set `waited` of all events. Return how long each rank waited for another, in microseconds: only the last of the
    needed ranks counts. A sender needs the receiver only if the send ended after the receiver had posted."""
    caused: dict[tuple[int, int], float] = defaultdict(float)
    latest: dict[int, tuple[Event, Event]] = {}
    for one in matched.all:
        pairs = one.needs()
        if isinstance(one, Message) and (held_up := one.sender_waits) and held_up.end >= one.expected.begin:
            pairs = [*pairs, (held_up, one.expected)]
        for event, needed in pairs:
            if id(event) not in latest or latest[id(event)][1].begin < needed.begin:
                latest[id(event)] = (event, needed)
    for event, needed in latest.values():
        event.waited = min(max(needed.begin - event.begin, 0.0), event.end - event.begin)
        caused[event.rank, needed.rank] += event.waited
    return caused
