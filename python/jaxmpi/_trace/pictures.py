"""The timeline and the matrix of messages as pictures, by matplotlib."""

from collections import defaultdict
from collections.abc import Sequence
from typing import IO, Any

import numpy as np

from jaxmpi._trace.files import WAITS, Event, Rank
from jaxmpi._trace.matching import Message

_BINS = 1200
"""Pixels of the time axis. A timeline of any length takes the same time to draw."""
_GREY = 0.85


def _busy(intervals: Sequence[tuple[float, float]], edges: Any) -> Any:
    """Return the part of each bin that intervals cover. The intervals do not overlap."""
    if not intervals:
        return np.zeros(len(edges) - 1)
    begin, end = np.array(sorted(intervals)).T
    before = np.concatenate([[0.0], np.cumsum(end - begin)])
    index = np.searchsorted(begin, edges)
    inside = np.where(index > 0, np.clip(edges - begin[index - 1], 0, (end - begin)[index - 1]), 0.0)
    return np.diff(before[np.maximum(index - 1, 0)] + inside) / np.diff(edges)


def _by_track(events: Sequence[Event], edges: Any, waiting: bool) -> Any:
    """Return the part of each bin that operations of a rank cover. They overlap only between threads of the rank."""
    tracks: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        tracks[event.track].append((event.begin, event.begin + event.waited if waiting else event.end))
    return np.minimum(sum((_busy(spans, edges) for spans in tracks.values()), np.zeros(len(edges) - 1)), 1.0)


def _in_flight(events: Sequence[Event], edges: Any) -> Any:
    """Return the part of each bin in which an operation is in flight and no wait for it has begun."""
    spans = sorted((e.end, e.other_end.begin) for e in events if e.other_end is not None and e.name not in WAITS)
    merged: list[tuple[float, float]] = []
    for begin, end in spans:
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif end > begin:
            merged.append((begin, end))
    return _busy(merged, edges)


def timeline(file: IO[bytes], ranks: Sequence[Rank]) -> None:
    """Draw one row per rank: white where it is in no operation, grey if one is in flight then, and paler where it waits
    for another rank."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    span = max(event.end for rank in ranks for event in rank.events)
    edges = np.linspace(0.0, max(span, 1.0), _BINS + 1)
    names = sorted({event.title for rank in ranks for event in rank.events})
    colours = {
        name: np.array(colormaps["tab10" if len(names) <= 10 else "tab20"](i)[:3]) for i, name in enumerate(names)
    }
    image = np.ones((len(ranks), _BINS, 3))
    overlaps = any(event.other_end is not None for rank in ranks for event in rank.events)
    for row, rank in enumerate(ranks):
        free = 1 - _by_track(rank.events, edges, False)
        image[row] -= (np.minimum(_in_flight(rank.events, edges), free) * (1 - _GREY))[:, None]
        for name in names:
            events = [event for event in rank.events if event.title == name]
            busy, waiting = _by_track(events, edges, False), _by_track(events, edges, True)
            strength = (busy - waiting) + 0.4 * waiting
            image[row] -= strength[:, None] * (1 - colours[name])
    figure = Figure(figsize=(12, 1.8 + 0.35 * min(len(ranks), 64)), layout="constrained")
    axes = figure.subplots()
    grey = "; grey: in none, with something in flight" if overlaps else ""
    extent = (0.0, edges[-1] / 1e6, len(ranks) - 0.5, -0.5)
    axes.imshow(np.clip(image, 0, 1), aspect="auto", interpolation="nearest", extent=extent)
    axes.set(xlabel="seconds", ylabel="rank", title=f"operations; paler: waiting for another rank{grey}")
    if len(ranks) <= 32:
        axes.set_yticks(range(len(ranks)), [str(rank.rank) for rank in ranks])
    patches = [Patch(color=tuple(colours[name]), label=name) for name in names]
    figure.legend(handles=patches, loc="outside lower center", ncols=min(len(names), 8))
    figure.savefig(file, format="png", dpi=120)


def matrix(file: IO[bytes], ranks: Sequence[Rank], messages: Sequence[Message]) -> None:
    """Draw the bytes of messages from each rank to each other."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    size = ranks[0].size
    bins = min(size, _BINS)  # one rank per bin, as long as there are enough
    nbytes = np.zeros((bins, bins))
    for message in messages:
        nbytes[message.sent.rank * bins // size, message.received.rank * bins // size] += message.nbytes
    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.subplots()
    shown = np.ma.masked_equal(nbytes, 0)
    extent = (-0.5, size - 0.5, size - 0.5, -0.5)
    image = axes.imshow(shown, vmin=0, vmax=max(nbytes.max(), 1), interpolation="nearest", extent=extent)
    figure.colorbar(image, label="bytes")
    axes.set(xlabel="receiving rank", ylabel="sending rank", title="messages")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(file, format="png", dpi=120)
