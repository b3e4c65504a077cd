"""One time for all ranks. Ranks of one machine share its clock. Machines are compared by the operations themselves: no
rank can leave an operation before those that it needs have begun it, which bounds the difference of their clocks from
both sides, as closely as their fastest operation together."""

import bisect
import math
from collections import defaultdict
from collections.abc import Sequence

from jaxmpi._trace.files import Rank
from jaxmpi._trace.matching import Matched

_WINDOW = 1e7
"""Microseconds in which clocks do not drift by more than an operation takes."""


def align(ranks: Sequence[Rank], matched: Matched) -> float:
    """Shifts the times of all events to those of one clock, from 0 on. Returns how far they may be off, in
    microseconds; infinity if clocks had to be compared by the time of day."""
    clock = {rank.rank: rank.clock for rank in ranks}
    offsets, errors = {ranks[0].clock: [(0.0, 0.0)]}, {ranks[0].clock: 0.0}
    bounds = _bounds(clock, matched)
    while missing := {rank.clock for rank in ranks} - offsets.keys():
        known = [(a, b) for a, b in bounds if a in offsets and b in missing]
        if not known:  # no operation connects them
            other = next(rank for rank in ranks if rank.clock in missing)
            day = (ranks[0].realtime - ranks[0].monotonic) - (other.realtime - other.monotonic)
            offsets[other.clock], errors[other.clock] = [(0.0, -day)], math.inf
            continue
        a, b = max(known, key=lambda pair: len(bounds[pair]))
        points, error = _points(bounds[a, b])
        offsets[b] = [(time, _at(offsets[a], time + offset) + offset) for time, offset in points]
        errors[b] = errors[a] + error
    for rank in ranks:
        for event in rank.events:
            for end in ("begin", "end"):
                time = getattr(event, end)
                setattr(event, end, time + _at(offsets[rank.clock], time))
    first = min((event.begin for rank in ranks for event in rank.events), default=0.0)
    for rank in ranks:
        for event in rank.events:
            event.begin, event.end = event.begin - first, event.end - first
    return max(errors.values())


Bounds = dict[tuple[str, str], dict[int, list[float]]]


def _bounds(clock: dict[int, str], matched: Matched) -> Bounds:
    """Bounds for pairs of clocks a and b, and windows of b's time: two numbers between which what must be added to b's
    times lies, to give a's."""
    bounds: Bounds = defaultdict(lambda: defaultdict(lambda: [-math.inf, math.inf]))
    if len(set(clock.values())) == 1:
        return bounds
    for one in matched.all:
        for late, early in one.needs(clock):  # late.end >= early.begin
            a, b = clock[late.rank], clock[early.rank]
            if a == b or not late.complete:
                continue
            above = bounds[a, b][int(early.begin // _WINDOW)]
            above[1] = min(above[1], late.end - early.begin)
            below = bounds[b, a][int(late.end // _WINDOW)]
            below[0] = max(below[0], early.begin - late.end)
    return bounds


def _points(windows: dict[int, list[float]]) -> tuple[list[tuple[float, float]], float]:
    """Times and offsets there, and how far these may be off. Where only one side is bounded there is no point."""
    both = {window: limits for window, limits in sorted(windows.items()) if all(map(math.isfinite, limits))}
    if not both:
        low, high = max(limits[0] for limits in windows.values()), min(limits[1] for limits in windows.values())
        return [(0.0, low if math.isfinite(low) else high)], math.inf
    points = [((window + 0.5) * _WINDOW, (low + high) / 2) for window, (low, high) in both.items()]
    return points, max(abs(high - low) / 2 for low, high in both.values())


def _at(points: list[tuple[float, float]], time: float) -> float:
    """The offset at a time, by straight lines between the points."""
    if time <= points[0][0] or len(points) == 1:
        return points[0][1]
    next_one = bisect.bisect_left(points, time, key=lambda point: point[0])
    if next_one == len(points):
        return points[-1][1]
    (t0, x0), (t1, x1) = points[next_one - 1 : next_one + 1]
    return x0 + (x1 - x0) * (time - t0) / (t1 - t0)
