"""Changes of `replicate` and `invariant` in a program, to be tried: does one of them make its gradient right?

A change is made in all places of one line of the user's program, as an editor would make it, or in those that were
called by one line, at any distance, or in those that were called by the same lines all the way; of operations also in
one of these.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxmpi._jax import jaxprs
from jaxmpi._jax.primitives import Literal
from jaxmpi._operations.replication import replicate_p
from jaxmpi._primitive.params import Common
from jaxmpi._testing.together import Ranks
from jaxmpi._testing.walking import BARE, MEETING, Kinds, Lines, Position, Site, Walk, constants

ARGUMENTS = "arguments"
"""A change beside those of `walking`: variables pass through `replicate` before all else."""


@dataclass(frozen=True)
class Change:
    """A change that all ranks make."""

    kind: str
    operation: str = ""
    lines: Lines = ()
    which: tuple[int, ...] = ()
    """The numbers of the operations in the program, or of the variables."""
    number: str = ""
    """The number of the operation among several in one line."""


class Program:
    """A traced function that communicates. `invariant` says which of its arguments are."""

    def __init__(self, traced: Any, invariant: Sequence[bool], ranks: Ranks) -> None:
        self._jaxpr, self._invariant, self._ranks = jaxprs.without_objects(traced), invariant, ranks
        self._kinds = Kinds(_varying(self._jaxpr, ranks))
        walk = Walk(self._kinds, ranks.communicator)
        jax.make_jaxpr(lambda *xs: walk(self._jaxpr, xs, invariant, [None] * len(xs)))(*traced.in_avals)
        self._sites = walk.sites
        self._told = ranks.tell(list(walk.sites.values()))

    def changed(self, changes: Sequence[Change]) -> Callable[..., list[Any]]:
        """The function with these changes."""
        operations = [key for key, site in self._sites.items() if site.operation]
        chosen: set[tuple[str, Position]] = set()
        for change in changes:
            if change.kind in (BARE, MEETING):
                sites = [(key, site) for key, site in self._sites.items() if key[0] == change.kind]
                chosen.update(key for key, site in sites if change.lines in _groups(site.lines))
            elif change.kind != ARGUMENTS:
                chosen.update(operations[i] for i in change.which)
        replicated = sorted({i for change in changes if change.kind == ARGUMENTS for i in change.which})

        def function(*values: Any) -> list[Any]:
            given, invariant, bare = list(values), list(self._invariant), [None] * len(values)
            for i in replicated:
                bare[i], invariant[i] = values[i], False
                (given[i],) = replicate_p.apply(Common(self._ranks.communicator), values[i])
            return Walk(self._kinds, self._ranks.communicator, chosen)(self._jaxpr, given, invariant, bare)

        return function

    def arguments(self, wrong: Sequence[int]) -> list[Change]:
        return [Change(ARGUMENTS, which=tuple(wrong))] if wrong else []

    def operations(self) -> list[Change]:
        """Changes of operations; none if those of the ranks differ."""
        first, *others = [[site for site in sites if site.operation] for sites in self._told]
        if any([site.operation for site in other] != [site.operation for site in first] for other in others):
            return []
        groups: dict[tuple[str, Lines], list[int]] = {}
        for i, site in enumerate(first):
            for lines in _groups(site.lines):
                groups.setdefault((site.operation, lines), []).append(i)
        made: dict[tuple[int, ...], Change] = {}
        for (operation, lines), which in groups.items():
            made.setdefault(tuple(which), Change(first[which[0]].change, operation, lines, tuple(which)))
        for change in [change for change in made.values() if len({first[i].lines for i in change.which}) == 1]:
            for n, i in enumerate(change.which, 1):
                made.setdefault((i,), replace(change, which=(i,), number=f"number {n} of {len(change.which)}"))
        return list(made.values())

    def bare(self) -> list[Change]:
        """Changes of lines that compute from replicated values alone, on any rank; they communicate nothing more."""
        return _of_lines(BARE, [*itertools.chain.from_iterable(self._told)])

    def meetings(self) -> list[Change]:
        """Changes of lines where invariant values meet varying ones. None if the ranks' programs differ: each must
        replicate the same values in the same order."""
        alike = [
            [(site.change, site.lines[:1], site.shapes) for site in sites if site.change != BARE]
            for sites in self._told
        ]
        return _of_lines(MEETING, self._told[0]) if alike.count(alike[0]) == len(alike) else []


def _groups(lines: Lines) -> list[Lines]:
    """The groups of sites in which one is that is reached by these lines, each by the lines that name it."""
    return list(dict.fromkeys((lines[:1], lines, *((line,) for line in lines[1:]))))


def _of_lines(kind: str, sites: Sequence[Site]) -> list[Change]:
    groups: dict[Lines, list[int]] = {}
    for i, site in enumerate(sites):
        for lines in _groups(site.lines) if site.change == kind else ():
            groups.setdefault(lines, []).append(i)
    made: dict[tuple[int, ...], Change] = {}
    for lines, which in groups.items():
        made.setdefault(tuple(which), Change(kind, lines=lines))
    return list(made.values())


def _varying(jaxpr: Any, ranks: Ranks) -> set[int]:
    """The identities of the constants and literals that are not the same on all ranks."""
    found = list(constants(jaxpr))
    if len(set(ranks.tell(len(found)))) > 1:
        return {id(x) for x in found if not isinstance(x, Literal)}
    literals = ranks.tell([np.asarray(x.val).item() if isinstance(x, Literal) else None for x in found])
    ours = zip(found, *literals, strict=True)
    return {
        id(x)
        for x, *values in ours
        if (len(set(map(repr, values))) > 1 if isinstance(x, Literal) else ranks.difference(x) is not None)
    }


_MOST = 64
"""How many changes are tried, and how many pairs of them."""


def repairs(program: Program, wrong: Sequence[int], repaired: Callable[[Sequence[Change]], bool]) -> list[list[Change]]:
    """The changes after which a gradient is `repaired`: several that do it alone, or else some that do it together.

    `wrong` are the invariant variables for which it is wrong.
    """
    simple = [*program.arguments(wrong), *program.operations(), *program.bare()][:_MOST]
    if found := [[change] for change in simple if repaired([change])]:
        return found
    meetings = program.meetings()[:_MOST]
    if found := [[change] for change in meetings if repaired([change])]:
        return found
    for pair in itertools.islice(itertools.combinations(simple, 2), _MOST):
        if repaired(pair):
            return [list(pair)]
    if not meetings or not repaired(meetings):
        return []
    needed = list(meetings)
    for change in meetings:
        fewer = [other for other in needed if other != change]
        if repaired(fewer):
            needed = fewer
    return [needed]
