"""One time for all ranks. Ranks of one machine share one clock. Clocks of machines are compared by the operations.

No rank can leave an operation before the ranks that it needs have begun it. This bounds the difference of two clocks
from both sides. The two bounds are as close as the fastest operation between the machines takes.
"""

import bisect
import math
from collections import defaultdict
from collections.abc import Sequence

from jaxmpi._trace.files import Rank
from jaxmpi._trace.matching import Matched

_WINDOW = 1e7
"""Microseconds in which the drift of clocks is smaller than the time of an operation."""


def align(ranks: Sequence[Rank], matched: Matched) -> float:
    """Shift the times of all events to one clock, from 0 on. Return the largest error, in microseconds, or infinity if
    clocks had to be compared by the time of day."""
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
    """Return bounds for pairs of clocks a and b, and windows of b's time. The number to add to b's times, to get
    a's, lies between the two."""
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
    """Return times, the offsets at these times, and the largest error. A window with one bound alone gives no point."""
    both = {window: limits for window, limits in sorted(windows.items()) if all(map(math.isfinite, limits))}
    if not both:
        low, high = max(limits[0] for limits in windows.values()), min(limits[1] for limits in windows.values())
        return [(0.0, low if math.isfinite(low) else high)], math.inf
    points = [((window + 0.5) * _WINDOW, (low + high) / 2) for window, (low, high) in both.items()]
    return points, max(abs(high - low) / 2 for low, high in both.values())


def _at(points: list[tuple[float, float]], time: float) -> float:
    """Return the offset at a time, by straight lines between the points."""
    if time <= points[0][0] or len(points) == 1:
        return points[0][1]
    next_one = bisect.bisect_left(points, time, key=lambda point: point[0])
    if next_one == len(points):
        return points[-1][1]
    (t0, x0), (t1, x1) = points[next_one - 1 : next_one + 1]
    return x0 + (x1 - x0) * (time - t0) / (t1 - t0)
