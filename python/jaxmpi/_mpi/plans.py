"""Plans: which parts of the arrays of a call travel in which messages (csrc/core/plan.h).

A plan is made of moves. A move copies a box of an array of one rank to a box of an array of another rank, or of the
same rank, or adds it there. A rank states the moves in which it takes part, each with a key. Both ranks of the moves
sort them by key. All moves from one rank to another are one message.
"""

import dataclasses
import functools
import hashlib
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import jaxmpi._core as _core
from jaxmpi._mpi.library import CONSTANTS

_ALIGNMENT = 8
_LINE = 64
"""Bytes of a cache line. The data after a message's label begins with a line: otherwise long copies take longer."""
_LABEL_BYTES, _MOST_AXES = CONSTANTS["LABEL_BYTES"], CONSTANTS["MAX_BOX_AXES"]
_BEGINS, _COMBINATIONS = CONSTANTS["BEGINS"], CONSTANTS["COMBINATIONS"]


class Indices:
    """A list of indices along an axis, in any order. The core keeps lists of plans for ever, and equal lists once."""

    __slots__ = ("_number", "digest", "values")

    def __init__(self, values: Any):
        self.values = np.ascontiguousarray(values, np.int64)
        self.digest = hashlib.sha256(self.values.data).hexdigest()
        self._number = 0

    @property
    def number(self) -> int:
        """The core's number of the list."""
        if self._number == 0:
            stable_key = f"indices {self.digest}"
            if stable_key not in _numbers:
                _numbers[stable_key] = _core.indices(self.values, stable_key)
            self._number = _numbers[stable_key]
        return self._number


@dataclass(frozen=True)
class Box:
    """Elements of an array: along each axis `counts` of them, from `starts` on, `steps` apart (0: always the same)."""

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    steps: tuple[int, ...]
    listed: tuple[int, Indices] | None = None
    """An axis and the indices of the elements along it; there the start is 0 and the step 1. The axes behind it are
    whole."""
    walk: tuple[int, ...] | None = None
    """The order in which the axes are walked, the outermost first: the last axes, from the end. None: as they are."""

    @property
    def size(self) -> int:
        return math.prod(self.counts)


@dataclass(frozen=True)
class Move:
    """A copy from a box to a box with as many elements, both of this leaf of the arrays."""

    key: tuple[int, ...]
    leaf: int
    source: int
    read: Box
    dest: int
    written: Box

    def reverse(self) -> "Move":
        return Move(self.key, self.leaf, self.dest, self.written, self.source, self.read)


@dataclass(frozen=True)
class Fill:
    """A box whose elements are replaced by a number."""

    leaf: int
    written: Box
    value: Any = 0


@dataclass(frozen=True)
class Exchange:
    """What a plan is made of: see `make`."""

    rank: int
    avals: Sequence[Any]
    results: Sequence[Any]
    moves: Sequence[Move]
    """All moves in which the rank takes part and that have elements, in the order of the keys."""
    fills: Sequence[Fill]
    combines: str | None
    zeroed: bool
    signature: int

    def messages(self, begin: int, *, sent: bool) -> "_Messages":
        """Return the messages to other ranks or from them, which begin there in the stage."""
        return self._between(begin, *(("source", "dest") if sent else ("dest", "source")), own=False)

    def own(self, begin: int) -> "_Messages":
        """Return what this rank sends to itself, as a message that begins there."""
        return self._between(begin, "source", "dest", own=True)

    def _between(self, begin: int, mine: str, other: str, own: bool) -> "_Messages":
        of_rank: dict[int, list[Any]] = {}
        for index, move in enumerate(self.moves):
            peer = getattr(move, other)
            if getattr(move, mine) == self.rank and (peer == self.rank) == own:
                size = move.read.size * np.dtype(self.avals[move.leaf].dtype).itemsize
                of_rank.setdefault(peer, []).append((index, size))
        messages = _Messages(begin)
        for peer in sorted(of_rank, key=lambda peer: (peer - self.rank) % (1 << 31)):
            messages.add(peer, of_rank[peer])
        return messages


class Plan:
    """A plan as a parameter of compiled programs."""

    __slots__ = ("exchange", "number")

    def __init__(self, words: Sequence[int], exchange: Exchange):
        self.exchange = exchange
        data = b"".join((word % (1 << 64)).to_bytes(8, sys.byteorder) for word in words)
        stable_key = f"plan {hashlib.sha256(data).hexdigest()}"
        if stable_key not in _numbers:
            _numbers[stable_key] = _core.plan(data, stable_key)
        self.number = _numbers[stable_key]


_numbers: dict[str, int] = {}
"""The numbers of all plans and lists made so far, by stable key: the core keeps them for ever."""


def signature(*facts: Any) -> int:
    """Return a number for facts that all ranks must agree on. Equal facts have the same number. A rank uses the first
    of several equal facts, because plans are kept, and other ranks may have used another one first."""
    return int.from_bytes(hashlib.sha256(repr(_in_one_form(facts)).encode()).digest()[:8], "little")


def _in_one_form(fact: Any) -> Any:
    """Return the fact in a form whose representation is the same for all equal facts: 1, 1.0, True and NumPy's are
    equal, and so are dtypes that name the byte order and dtypes that do not."""
    if isinstance(fact, tuple | list):
        return tuple(map(_in_one_form, fact))
    if dataclasses.is_dataclass(fact) and not isinstance(fact, type):
        values = (getattr(fact, field.name) for field in dataclasses.fields(fact) if field.compare)
        return type(fact).__name__, *map(_in_one_form, values)
    if isinstance(fact, np.dtype):
        return fact.name
    if isinstance(fact, bool | int | float | complex | np.generic):
        value = fact.item() if isinstance(fact, np.generic) else fact
        return int(value) if not isinstance(value, complex) and value == value // 1 else value
    if fact is None or isinstance(fact, str | bytes):
        return fact
    return str(fact)


def _strides(shape: Sequence[int], itemsize: int) -> list[int]:
    """Return the bytes from an element to the next along each axis."""
    return [itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


_Axes = tuple[int, list[tuple[int, tuple[int, ...]]]]
"""Bytes of a run; along each axis, the outermost first, a count and the stride of each box."""


def _merged(counts: Sequence[int], strides: Sequence[Sequence[int]], itemsize: int) -> _Axes:
    """Return the axes of boxes with these counts and the strides of each. Axes that continue each other in all boxes
    are merged, and the innermost is a run of bytes if possible."""
    run = itemsize
    axes: list[tuple[int, tuple[int, ...]]] = []  # the innermost first
    for count, of_boxes in list(zip(counts, zip(*strides, strict=True), strict=True))[::-1]:
        if count == 1:
            continue
        if not axes and all(stride == run for stride in of_boxes):
            run *= count
        elif axes and all(outer == axes[-1][0] * inner for outer, inner in zip(of_boxes, axes[-1][1], strict=True)):
            axes[-1] = (axes[-1][0] * count, axes[-1][1])
        else:
            axes.append((count, of_boxes))
    return run, axes[::-1]


def _walk(box: Box, aval: Any) -> tuple[list[int], list[int]]:
    """Return the elements of a box along each axis, and the bytes from one to the next, in the order of the walk."""
    strides = _strides(aval.shape, np.dtype(aval.dtype).itemsize)
    counts, steps = list(box.counts), [step * stride for step, stride in zip(box.steps, strides, strict=True)]
    if box.walk is not None:
        for values in (counts, steps):
            values[-len(box.walk) :] = [values[axis] for axis in box.walk]
    return counts, steps


def _axes_of(box: Box, aval: Any) -> _Axes:
    """Return the axes by which a box is copied; if there is a list of indices, the last axis has it."""
    itemsize = np.dtype(aval.dtype).itemsize
    counts, steps = _walk(box, aval)
    if box.listed is None:
        return _merged(counts, [steps], itemsize)
    axis, indices = box.listed
    if indices.values.size != box.counts[axis] or indices.values.max(initial=0) >= aval.shape[axis]:
        raise IndexError(f"indices beyond {aval.shape[axis]} elements along axis {axis} of an array, or too many")
    run, inner = _merged(box.counts[axis + 1 :], [steps[axis + 1 :]], itemsize)
    if inner:
        raise NotImplementedError("an array of which parts of rows are listed by index")
    # Without bytes that continue each other, the outer axes are not a run.
    _, outer = _merged(box.counts[:axis], [steps[:axis]], 0)
    return run, [*outer, (box.counts[axis], (steps[axis],))]


def _words_of_box(leaf: int, stage: int, box: Box, aval: Any, value: bytes = b"", axes: _Axes | None = None) -> list:
    """Return the words of a box. `axes`: the axes of a pair of boxes of which this is the first."""
    itemsize = np.dtype(aval.dtype).itemsize
    run, merged = axes or _axes_of(box, aval)
    if len(merged) > _MOST_AXES:
        raise NotImplementedError(f"an array of {len(aval.shape)} axes, more than {_MOST_AXES} of which are cut")
    first = sum(start * stride for start, stride in zip(box.starts, _strides(aval.shape, itemsize), strict=True))
    pattern = value * (16 // len(value)) if value else bytes(16)
    words = [leaf, stage, first, run, *(int.from_bytes(pattern[i : i + 8], "little") for i in (0, 8))]
    words += [0 if box.listed is None else box.listed[1].number, len(merged)]
    for count, strides in merged:
        words += [count, strides[0]]
    return words


def _axes_of_pair(move: Move, operand: Any, result: Any) -> tuple[_Axes, _Axes] | None:
    """Return the axes by which the boxes of a move on one rank are copied part by part, as seen from the box that is
    read and from the other one. None: their elements lie along different axes."""
    sides = []
    if move.read.listed or move.written.listed:
        return None
    for box, aval in ((move.read, operand), (move.written, result)):
        whole = zip(*_walk(box, aval), strict=True)
        sides.append(tuple(zip(*[(count, step) for count, step in whole if count != 1], strict=True)) or ((), ()))
    (counts, read), (of_written, written) = sides
    run, axes = _merged(counts, [read, written], np.dtype(operand.dtype).itemsize) if counts == of_written else (0, [])
    if run == 0 or len(axes) > _MOST_AXES:
        return None
    return (run, axes), (run, [(count, strides[::-1]) for count, strides in axes])


def _aligned(number: int, alignment: int = _ALIGNMENT) -> int:
    return -(-number // alignment) * alignment


class _Messages:
    """The messages of one direction: one to each rank, or one from each rank."""

    def __init__(self, begin: int):
        self.end = begin
        self.words: list[int] = []
        self.places: dict[int, int] = {}
        """The place of a move in the stage, by the index among all moves."""
        self.ranks = 0

    def add(self, rank: int, moves: Iterable[tuple[int, int]]) -> None:
        """Add a message with moves: the index of each, and the bytes."""
        at = _aligned(self.end + _LABEL_BYTES, _LINE)
        begin = at - _LABEL_BYTES
        for index, size in moves:
            self.places[index] = at
            at = _aligned(at + size)
        self.words += [rank, begin, at - begin]
        self.end, self.ranks = at, self.ranks + 1


def _begin(zeroed: bool, combined: bool, moves: Sequence[Move], results: Sequence[Any]) -> int:
    """Return how results begin that receive these moves. No two moves are to the same elements if they replace them."""
    if not zeroed:
        return _BEGINS.index("operands")
    left = [math.prod(aval.shape) for aval in results]
    for move in moves:
        left[move.leaf] -= move.written.size
    return _BEGINS.index("zero" if combined or any(left) else "covered")


def make(
    rank: int,
    avals: Sequence[Any],
    moves: Sequence[Move],
    fills: Sequence[Fill] = (),
    *,
    results: Sequence[Any] | None = None,
    combines: str | None = None,
    zeroed: bool = False,
    signature: int = 0,
) -> Plan:
    """Return the plan of this rank.

    Args:
      avals: shapes and dtypes of the operands; of the results where `results` is None.
      moves: the moves from this rank or to it, also both.
      fills: the boxes that are filled before anything is received.
      combines: SUM, MAX or MIN: moved elements are combined with the elements there; None: they replace them.
      zeroed: results begin as zeros; otherwise as the operands, whose shapes they then have.
      signature: a number for facts that all ranks must agree on.
    """
    results = avals if results is None else results
    moves = sorted((m for m in moves if m.read.size > 0), key=lambda m: (m.key, m.leaf))
    fills = [fill for fill in fills if fill.written.size > 0]
    exchange = Exchange(rank, avals, results, moves, fills, combines, zeroed, signature)
    sends = exchange.messages(0, sent=True)
    own = exchange.own(sends.end)
    receives = exchange.messages(own.end, sent=False)
    pairs: dict[int, Any] = {}
    """The axes of the moves on this rank that can be copied at once, by the index of the move."""
    for index in own.places if zeroed and not combines else ():
        axes = _axes_of_pair(moves[index], avals[moves[index].leaf], results[moves[index].leaf])
        if axes is not None:
            pairs[index] = axes
    boxes: list[int] = []

    def put(places: dict[int, int], side: int, arrays: Sequence[Any]) -> None:
        # In the order of the stage. Sums in the order of the moves, on which the last bits of a number depend.
        order = sorted(places.keys() - pairs.keys(), key=lambda index: index if side and combines else places[index])
        for index in [*order, *pairs]:
            move, axes = moves[index], pairs[index][side] if index in pairs else None
            box = move.written if side else move.read
            boxes.extend(_words_of_box(move.leaf, places[index], box, arrays[move.leaf], axes=axes))

    packed = {**sends.places, **own.places}
    unpacked = {**receives.places, **own.places}
    put(packed, 0, avals)
    for fill in fills:
        aval = results[fill.leaf]
        value = np.asarray(fill.value).astype(aval.dtype).tobytes()
        boxes += _words_of_box(fill.leaf, 0, fill.written, aval, value)
    put(unpacked, 1, results)
    elements = [math.prod(aval.shape) for aval in (*avals, *results)]
    header = {
        "combines": _COMBINATIONS.index(combines or "none"),
        "begin": _begin(zeroed, bool(combines), [moves[index] for index in unpacked], results),
        "sent": own.end,
        "received": receives.end - own.end,
        "pack_count": len(packed),
        "fill_count": len(fills),
        "unpack_count": len(unpacked),
        "pair_count": len(pairs),
    }
    return _plan(exchange, header, elements, sends, receives, boxes)


def _plan(
    exchange: Exchange,
    header: dict[str, int],
    elements: Sequence[int],
    sends: _Messages,
    receives: _Messages,
    boxes: Sequence[int] = (),
) -> Plan:
    header = {
        "signature": exchange.signature,
        "arrays": len(exchange.avals),
        "send_count": sends.ranks,
        "receive_count": receives.ranks,
        **header,
    }
    head = [header.get(name, 0) for name in CONSTANTS["PLAN_HEADER"]]
    return Plan([int(word) for word in (*head, *elements, *sends.words, *receives.words, *boxes)], exchange)


cached = functools.lru_cache(maxsize=4096)
"""The cache of functions that make plans."""


@dataclass(frozen=True)
class PlanOfMessages:
    """A plan of the same messages. The operand is all that is sent, the result all that is received."""

    plan: Plan
    sizes: tuple[int, int]
    """The words of the operand, and of the result."""
    sent: dict[int, int]
    """The places of moves in the operand, in words, by the index of the move."""
    received: dict[int, int]
    """The places of moves in the result."""


@cached
def of_messages(plan: Plan, word: int, started: bool) -> PlanOfMessages:
    """Return the plan of the messages of a plan, in words of so many bytes. `started`: with what the rank sends to
    itself, which waits with them."""
    exchange = plan.exchange
    sends = exchange.messages(0, sent=True)
    own = exchange.own(sends.end) if started else _Messages(sends.end)
    receives = exchange.messages(own.end, sent=False)
    header = {"begin": _BEGINS.index("messages"), "sent": own.end, "received": receives.end - own.end}
    sizes = (own.end // word, (receives.end - sends.end) // word)
    sent = {index: place // word for index, place in {**sends.places, **own.places}.items()}
    received = {index: (place - sends.end) // word for index, place in {**own.places, **receives.places}.items()}
    return PlanOfMessages(_plan(exchange, header, sizes, sends, receives), sizes, sent, received)
