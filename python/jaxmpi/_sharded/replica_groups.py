"""The devices between which a program communicates: a reader of XLA's text of the collectives of an HLO module.

An instruction is a line: a name, `=`, the shapes of the results, the opcode, the operands in parentheses, and
attributes. These attributes name the participants, in XLA's notations:

    replica_groups      = "{" [list {"," list}] "}"                 no list: one group of all ids.
                        | "[" ids "]" "<=" iota                     the rows of it.
                        | mesh "{" [part {"," part}] "}"            over some axes of a mesh, the last of them fastest.
    source_target_pairs = "{" [list {"," list}] "}"                 lists of two.
    mesh                = "mesh" "[" axis {"," axis} "]" ["," "device_ids" "=" "(" (iota | ids) ")"]
    axis                = name "=" number                           the mesh is in the order of rows.
    part                = name [":" "(" number ")" number]          of an axis: behind parts of this product, this size.
    iota                = "[" ids "]" ["T" "(" ids ")"]             0, 1, … in this shape, then with transposed axes.
    list                = "{" ids "}"
    ids                 = number {"," number}

Other attributes say whether an id is the id of a replica, of a partition, or of a device. A program's devices are the
rows of (replica, partition). The reader does not guess: another notation, or one without each id once, is an error.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

Group = tuple[int, ...]
_T = TypeVar("_T")


class Unreadable(ValueError):
    """A notation that the reader does not know, or that does not divide the devices."""


# --- tokens ----------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(
    r"""\s+ | /\*.*?\*/                          # an operand's or a shape's number, where there are many.
    | (?P<token> "(?:\\.|[^"\\])*" | '[^']*'     # text; the name of an axis, in which XLA escapes nothing.
    | %?[A-Za-z_][\w.-]* | [0-9]+ | <= | . )""",
    re.VERBOSE,
)
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class _Reader:
    """The tokens of a line, which are taken one by one."""

    def __init__(self, line: str):
        matches = [match for match in _TOKEN.finditer(line) if match["token"]]
        self.line = line
        self.tokens = [match["token"] for match in matches]
        self.begins = [match.start("token") for match in matches] + [len(line)]
        self.at = 0

    @property
    def next(self) -> str:
        """The next token; empty at the end."""
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def text(self, began: int) -> str:
        """Return the text of all tokens since `began`."""
        return self.line[self.begins[began] : self.begins[self.at]].strip()

    def unlike(self, expected: str) -> Unreadable:
        rest = self.line[self.begins[self.at] :]
        actual = repr(rest if len(rest) <= 40 else rest[:40] + "…") if rest else "the end"
        return Unreadable(f"{actual} instead of {expected}")

    def skip(self, token: str) -> bool:
        """Consume the next token if it equals `token`. Return whether it did."""
        equal = self.next == token
        self.at += equal
        return equal

    def take(self, pattern: str, expected: str = "") -> str:
        """Consume and return the next token, which must match the pattern."""
        token = self.next
        if not re.fullmatch(pattern, token, re.DOTALL):
            raise self.unlike(expected or pattern.replace("\\", ""))
        self.at += 1
        return token

    def number(self) -> int:
        return int(self.take("[0-9]+", "a number"))

    def name(self) -> str:
        return self.take(r"'.*'|[A-Za-z_][\w.-]*", "the name of an axis").strip("'")

    def some(self, item: Callable[[], _T]) -> list[_T]:
        """Return one or more items, with commas between them."""
        result = [item()]
        while self.skip(","):
            result.append(item())
        return result

    def within(self, opening: str, item: Callable[[], _T]) -> list[_T]:
        """Return any number of items, in brackets."""
        self.take(re.escape(opening))
        result = [] if self.next == _CLOSING[opening] else self.some(item)
        self.take(re.escape(_CLOSING[opening]))
        return result

    def pass_over(self) -> str:
        """Consume any token, with everything in its bracket, and return the text."""
        began, closing = self.at, []
        while True:
            token = self.take(".+", "more")
            if token in _CLOSING:
                closing.append(_CLOSING[token])
            elif token in _CLOSING.values() and (not closing or closing.pop() != token):
                self.at -= 1
                raise self.unlike("another bracket")
            if not closing:
                return self.text(began)


# --- groups of ids ---------------------------------------------------------------------------------------------------


def _shaped(array: np.ndarray, shape: list[int]) -> np.ndarray:
    if array.size != math.prod(shape):
        raise Unreadable(f"{array.size} ids in an array of shape {shape}")
    return array.reshape(shape)


def _iota(read: _Reader) -> np.ndarray:
    sizes = read.within("[", read.number)
    order = read.within("(", read.number) if read.skip("T") else list(range(len(sizes)))
    if sorted(order) != list(range(len(sizes))):
        raise Unreadable(f"{order} as the order of {len(sizes)} axes")
    return np.arange(math.prod(sizes)).reshape(sizes).transpose(order)


@dataclass(frozen=True)
class _Part:
    """A digit of the positions on an axis, in a number system in which the digits before it have `before` values."""

    axis: str
    before: int
    size: int


def _part(read: _Reader, sizes: dict[str, int]) -> _Part:
    name = read.name()
    if name not in sizes:
        raise Unreadable(f"the axis {name!r} in a mesh of {', '.join(map(repr, sizes))}")
    if not read.skip(":"):
        return _Part(name, 1, sizes[name])
    read.take(r"\(")
    before = read.number()
    read.take(r"\)")
    return _Part(name, before, read.number())


def _digits(axis: str, size: int, parts: list[_Part]) -> list[_Part]:
    """Return all digits of an axis, among which are the given parts."""
    own = [part for part in parts if part.axis == axis and part.size != 1]
    cuts = sorted({1, size, *(part.before for part in own), *(part.before * part.size for part in own)})
    exact = cuts[0] == 1 and cuts[-1] == size and all(b % a == 0 for a, b in itertools.pairwise(cuts))
    digits = [_Part(axis, a, b // a) for a, b in itertools.pairwise(cuts)] if exact else []
    if not exact or len(set(own)) < len(own) or not set(own) <= set(digits):
        raise Unreadable(f"parts of the axis {axis!r}, of size {size}, that overlap or do not divide it")
    return digits


def _axis(read: _Reader) -> tuple[str, int]:
    name = read.name()
    read.take("=")
    return name, read.number()


def _over_a_mesh(read: _Reader) -> np.ndarray:
    read.take("mesh", "groups")
    sizes = dict(read.within("[", lambda: _axis(read)))
    ids = np.arange(math.prod(sizes.values()))
    if read.skip(","):
        for token in ("device_ids", "=", r"\("):
            read.take(token)
        ids = _iota(read) if read.next == "[" else np.array(read.some(read.number))
        read.take(r"\)")
    parts = [part for part in read.within("{", lambda: _part(read, sizes)) if part.size != 1]
    digits = [digit for axis, size in sizes.items() for digit in _digits(axis, size, parts)]
    inner = [digits.index(part) for part in parts]
    outer = [i for i in range(len(digits)) if i not in inner]
    array = _shaped(ids.reshape(-1), [digit.size for digit in digits]).transpose(outer + inner)
    return array.reshape(-1, math.prod(part.size for part in parts))


def _groups(read: _Reader) -> list[Group]:
    """Return the groups; an empty list stands for one group of all ids."""
    if read.next == "{":
        return [tuple(ids) for ids in read.within("{", lambda: read.within("{", read.number))]
    if read.next != "[":
        rows = _over_a_mesh(read)
    else:
        shape = read.within("[", read.number)
        read.take("<=")
        rows = _shaped(_iota(read), shape)
        if rows.ndim != 2:
            raise Unreadable(f"groups as an array of shape {shape}")
    return [tuple(row) for row in rows.tolist()]


def _checked(groups: list[Group], ids: int) -> list[Group]:
    groups = groups or [tuple(range(ids))]
    if not all(groups) or sorted(itertools.chain(*groups)) != list(range(ids)):
        raise Unreadable(f"groups which do not have each of {ids} ids once: {', '.join(map(str, groups[:8]))}")
    return groups


def _pairs(read: _Reader) -> list[list[int]]:
    pairs = read.within("{", lambda: read.within("{", read.number))
    if any(len(pair) != 2 for pair in pairs):
        raise Unreadable(f"lists of other than two as pairs: {pairs}")
    return pairs


# --- collectives -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Collective:
    """An instruction by which devices communicate."""

    opcode: str
    """The opcode of the instruction, without -start."""
    shapes: str
    """The shapes of the results, as text."""
    groups: list[Group]
    """Groups of positions among the program's devices, each in the order of its communicator."""


_COMMUNICATES = r"\b(?:(?:all-|reduce-scatter|collective-)[a-z-]*\(|(?:replica_groups|source_target_pairs)=)"
_MAY_BE = re.compile(rf"\s*(?:ROOT )?%?[\w.-]+ = .*{_COMMUNICATES}")
_OF_REPLICAS = ("all-reduce", "all-gather", "reduce-scatter")
"""The collectives whose ids, with a channel, are ids of replicas, each with all partitions. The ids of other
collectives are ids of partitions."""


def _attributes(read: _Reader) -> dict[str, Any]:
    """Return the attributes after the operands of an instruction, or after the name of a module; most as text."""
    special = {"replica_groups": _groups, "source_target_pairs": _pairs}
    attributes: dict[str, Any] = {}
    while read.skip(","):
        name = read.take(r"[A-Za-z_][\w.-]*", "the name of an attribute")
        read.take("=")
        if name in special:
            attributes[name] = special[name](read)
            continue
        began = read.at
        while read.next not in ("", ","):
            read.pass_over()
        attributes[name] = read.text(began)
    if read.next:
        raise read.unlike("an attribute")
    return attributes


def _positions(opcode: str, attributes: dict[str, Any], rows: np.ndarray) -> list[Group]:
    """Return the groups of an instruction, by XLA's rules for the kind of its ids."""
    replicas, partitions = rows.shape
    channel = "channel_id" in attributes
    if attributes.get("use_global_device_ids") == "true":
        count, arrays = rows.size, lambda ids: rows.reshape(1, -1)[:, ids]
    elif channel and opcode in _OF_REPLICAS:
        count, arrays = replicas, lambda ids: rows[ids].reshape(1, -1)
    elif channel:
        count, arrays = partitions, lambda ids: rows[:, ids]
    else:
        count, arrays = replicas, lambda ids: rows[ids].T
    if not set(itertools.chain(*attributes.get("source_target_pairs", []))) <= set(range(count)):
        raise Unreadable(f"pairs of others than {count} ids: {attributes['source_target_pairs']}")
    groups = _checked(attributes.get("replica_groups", []), count)  # for pairs, XLA has one group of all ids
    return [tuple(row) for ids in groups for row in arrays(list(ids)).tolist()]


def _is_opcode(read: _Reader) -> bool:
    """Return whether the next token is an opcode: a shape has a name before a parenthesis only within brackets."""
    return read.next[:1].isalpha() and read.tokens[read.at + 1 : read.at + 2] == ["("]


def _collective(line: str, rows: np.ndarray) -> Collective | None:
    read = _Reader(line)
    read.skip("ROOT")
    read.take(".+", "a name")
    read.take("=")
    began = read.at
    while not _is_opcode(read):
        read.pass_over()
    shapes, name = read.text(began), read.next
    read.take(".+")
    read.pass_over()
    attributes = _attributes(read)
    communicates = re.search(_COMMUNICATES, f"{name}(") or attributes.keys() & {"replica_groups", "source_target_pairs"}
    if name.endswith("-done") or not communicates:
        return None
    opcode = name.removesuffix("-start")
    return Collective(opcode, shapes, _positions(opcode, attributes, rows))


def _rows(header: str) -> np.ndarray:
    """Return the positions of a program's devices, by replicas and partitions."""
    read = _Reader(header)
    read.take("HloModule")
    read.take(".+", "a name")
    attributes = _attributes(read)
    shape = [int(attributes.get(name, "1")) for name in ("replica_count", "num_partitions")]
    return np.arange(math.prod(shape)).reshape(shape)


def collectives(program: str, devices: int) -> Iterator[tuple[Collective, str]]:
    """Yield the collectives of a program of so many devices, and the line of each.

    Args:
      program: the text of an HLO module after optimization.

    Raises:
      Unreadable: a collective is written in an unknown way; the line is in the error's text.
    """
    header, *lines = program.split("\n")
    line = header
    try:
        rows = _rows(header)
        if rows.size != devices:
            raise Unreadable(f"{rows.size} devices instead of {devices}")
        for line in filter(_MAY_BE.match, lines):
            if (collective := _collective(line, rows)) is not None:
                yield collective, line
    except Unreadable as error:
        text = line.strip()
        raise Unreadable(f"{error}, in: {text if len(text) <= 300 else text[:300] + '…'}") from None
