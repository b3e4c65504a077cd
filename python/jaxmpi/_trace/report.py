"""Tables of the times, and one timeline of all ranks for Perfetto."""

import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

from jaxmpi._trace.files import WAITS, Event, Rank
from jaxmpi._trace.matching import Matched, Message


def _seconds(value: float) -> str:
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value / 1e-6:.3g} us" if value > 0 else "0"


def _size(value: float) -> str:
    for factor, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.3g} B"


def printable(text: str) -> str:
    """Return a text in one line, without characters that cannot be printed."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole > 0 else "-"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table. Columns are as wide as the cells, and the last one is flush left."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    for row in (head, *rows):
        cells = [cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        yield "  ".join([*cells, row[-1]])


def by_line(ranks: Sequence[Rank], span: float, most: int) -> Iterator[str]:
    """Yield a table by operation and line, with averages over the ranks. For waiting also the least and the most."""
    groups: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for rank in ranks:
        for event in rank.events:
            groups[event.label, event.arguments.get("line", "unknown line")].append(event)
    longest = sorted(groups.items(), key=lambda item: -sum(event.seconds for event in item[1]))
    rows = []
    for (name, line), events in longest[:most]:
        time, waited = sum(event.seconds for event in events), sum(event.waited for event in events) / 1e6
        waits = {rank.rank: 0.0 for rank in ranks}
        for event in events:
            waits[event.rank] += event.waited / 1e6
        moved = sum(event.nbytes for event in events)
        rows.append(
            [
                name,
                f"{round(len(events) / len(ranks), 1):.9g}",
                _seconds(time / len(ranks)),
                _percent(time / len(ranks), span),
                _seconds(waited / len(ranks)),
                _percent(waited, time),
                f"{_seconds(min(waits.values()))} to {_seconds(max(waits.values()))}",
                _size(moved / len(events)),
                _seconds(statistics.median(event.seconds for event in events)),
                line,
            ]
        )
    head = ["operation", "calls", "time", "of all", "waiting", "of it", "on the ranks", "bytes", "median", "line"]
    yield from table(head, rows)
    if len(longest) > most:
        yield f"... and {len(longest) - most} more (--top)"


def by_rank(ranks: Sequence[Rank], span: float, caused: Mapping[tuple[int, int], float]) -> Iterator[str]:
    rows = []
    others: dict[int, float] = defaultdict(float)
    for (_, cause), value in caused.items():
        others[cause] += value / 1e6
    for rank in ranks:
        time, waited = sum(event.seconds for event in rank.events), sum(event.waited for event in rank.events) / 1e6
        shares = [_seconds(time), _percent(time, span), _seconds(waited), _seconds(others[rank.rank])]
        cells = [len(rank.events), *shares, rank.host]
        rows.append([str(rank.rank), *map(str, cells)])
    yield from table(["rank", "calls", "in operations", "of all", "waiting", "others waited for it", "host"], rows)


def by_pair(messages: Sequence[Message], caused: Mapping[tuple[int, int], float], most: int) -> Iterator[str]:
    pairs: dict[tuple[int, int], list[Message]] = defaultdict(list)
    for message in messages:
        pairs[message.sent.rank, message.received.rank].append(message)
    waits = {pair: sum(m.received.waited for m in own) for pair, own in pairs.items()}
    rows = []
    for (a, b), own in sorted(pairs.items(), key=lambda item: -waits[item[0]])[:most]:
        moved = sum(message.nbytes for message in own)
        known = [(m.nbytes, m.on_the_way / 1e6) for m in own if m.on_the_way is not None]
        moving = sum(time for _, time in known)
        speed = f"{_size(sum(nbytes for nbytes, _ in known) / moving)}/s" if moving > 0 else "-"
        on_the_way = _seconds(moving / len(known)) if known else "-"
        cells = [len(own), _size(moved), _seconds(waits[a, b] / 1e6), on_the_way, speed]
        rows.append([f"{a} -> {b}", *map(str, cells)])
    yield from table(["messages", "number", "bytes", "receiver waited", "on the way", "speed"], rows)
    if len(pairs) > most:
        yield f"... and {len(pairs) - most} more pairs (--top)"


def caveats(ranks: Sequence[Rank], matched: Matched, uncertainty: float) -> Iterator[str]:
    """Yield the facts that a reader must know to trust the figures."""
    there = [-1, *sorted(rank.rank for rank in ranks), ranks[0].size]
    gaps = [(a + 1, b - 1) for a, b in itertools.pairwise(there) if b - a > 1]
    missing = ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in gaps)
    if missing:
        yield f"ranks {missing} have no timeline: the time for which others waited there is not known"
    for rank in ranks:
        if rank.lost:
            yield f"rank {rank.rank} left out {rank.lost} operations: the file was full, or the disk too slow"
        if rank.unreadable:
            yield f"{rank.unreadable} lines of the timeline of rank {rank.rank} cannot be read"
        if rank.lost is None:
            yield f"rank {rank.rank} was killed, or is still running: the last 0.1 s may be missing"
        for event in rank.events:
            if not event.complete:
                line = event.arguments.get("line", "an unknown line")
                yield f"rank {rank.rank} never came back from {event.label}, called at {line}"
    if matched.unmatched:
        yield f"{matched.unmatched} operations match none on other ranks: no waiting is known for them"
    if uncertainty > 0 and len({rank.clock for rank in ranks}) > 1:
        exact = uncertainty < float("inf")
        how = f"to {_seconds(uncertainty / 1e6)}, by their operations" if exact else "by their time of day alone"
        yield f"the clocks of different machines were compared {how}"


def merge(file: IO[bytes], ranks: Sequence[Rank], matched: Matched) -> None:
    """Write the events of all ranks into one file for Perfetto (ui.perfetto.dev). Arrows show messages, and connect the
    start of an operation to the wait for it."""
    file.write(b"[\n")
    for rank in ranks:
        name = {"name": f"rank {rank.rank} on {rank.host}"}
        file.write(_line({"name": "process_name", "ph": "M", "pid": rank.rank, "args": name}))
        for event in rank.events:
            file.write(_line(_merged(event)))
    for number, message in enumerate(matched.messages):
        arrow = {"name": "message", "cat": "message", "id": number}
        file.writelines(_arrow(arrow, message.sent, message.sent.begin, message.received, message.received.end))
    events = (event for rank in ranks for event in rank.events)
    ends = ((event.other_end, event) for event in events if event.name in WAITS)
    for number, (start, wait) in enumerate(ends):
        arrow = {"name": "in flight", "cat": "in flight", "id": number}
        if start is not None:
            file.writelines(_arrow(arrow, start, start.begin, wait, wait.begin))
    file.write(b'{"name": "jaxmpi", "ph": "M", "pid": 0, "args": {}}\n]\n')


def _line(event: dict[str, object]) -> bytes:
    return (json.dumps(event) + ",\n").encode()


def _arrow(arrow: dict[str, object], begin: Event, at: float, end: Event, until: float) -> Iterator[bytes]:
    for phase, event, time in (({"ph": "s"}, begin, at), ({"ph": "f", "bp": "e"}, end, until)):
        position = {"pid": event.rank, "tid": event.track, "ts": round(time, 3)}
        yield _line({**arrow, **phase, **position})


def _merged(event: Event) -> dict[str, object]:
    arguments = {name: value for name, value in event.arguments.items() if name != "comm"}
    if event.waited > 0:
        arguments["waited_us"] = round(event.waited, 3)
    position = {"pid": event.rank, "tid": event.track, "ts": round(event.begin, 3)}
    return {"name": event.label, "ph": "X", **position, "dur": round(event.end - event.begin, 3), "args": arguments}
