"""Evaluates a traced program with changes of `replicate` and `invariant` in it, and finds where they are possible.

Of each value it is known whether it is invariant, by how it is made. And what is computed from replicated values alone,
as a penalty on parameters is, is computed a second time from what was not replicated: that is its `bare` value.
"""

import dataclasses
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxmpi._jax import internals, jaxprs, primitives
from jaxmpi._jax.primitives import Literal
from jaxmpi._mpi import call_sites
from jaxmpi._operations.by_counts import allgatherv_p
from jaxmpi._operations.collectives import allgather_p, bcast_p
from jaxmpi._operations.reductions import allreduce_p
from jaxmpi._operations.replication import invariant_p, replicate_p
from jaxmpi._primitive.effect import CALLS, EFFECT
from jaxmpi._primitive.operation import Operation, is_ours
from jaxmpi._primitive.params import Common

Position = tuple[int, ...]
"""The position of an equation: its index in the program, then that in the jaxpr inside of it, and so on."""
Lines = tuple[str, ...]
"""A line of the user's program, the line that called it, and so on."""

REPLICATED, INVARIANT, LEFT_OUT, BARE, MEETING = "replicated", "invariant", "left out", "bare", "meeting"
"""Changes. The first three are of an operation: its result passes through `replicate` or `invariant`, or the operation
is left out. BARE: a computation uses what was not replicated. MEETING: invariant values pass through `replicate` where
they are used together with varying ones, or are communicated."""

OPERATIONS: dict[Operation[Any], str] = {
    allreduce_p: REPLICATED,
    allgather_p: INVARIANT,
    allgatherv_p: INVARIANT,
    bcast_p: INVARIANT,
    replicate_p: LEFT_OUT,
    invariant_p: LEFT_OUT,
}
"""The operations that can be changed, with the change."""

_MAKING_INVARIANT = (allreduce_p, invariant_p)


@dataclass(frozen=True)
class Site:
    """Where a program can be changed."""

    change: str
    operation: str
    lines: Lines
    shapes: tuple[Any, ...] = ()
    """The shapes of the values that would be replicated."""


@dataclass(frozen=True)
class _Value:
    value: Any
    invariant: bool
    bare: Any = None

    @property
    def neutral(self) -> bool:
        """It is made of nothing but numbers in the program."""
        return self.bare is self.value


class Walk:
    """One evaluation. On `comm` values are replicated where they meet varying ones; `changed` are the sites that are
    changed, by change and position."""

    def __init__(self, kinds: "Kinds", comm: Any, changed: Container[tuple[str, Position]] = ()) -> None:
        self._kinds, self._comm, self._changed = kinds, comm, changed
        self.sites: dict[tuple[str, Position], Site] = {}

    def __call__(self, jaxpr: Any, values: Sequence[Any], invariant: Sequence[bool], bare: Sequence[Any]) -> list[Any]:
        return [y.value for y in self._evaluate(jaxpr, map(_Value, values, invariant, bare), (), ())]

    def _found(self, change: str, at: Position, operation: str, lines: Lines, shapes: tuple[Any, ...] = ()) -> bool:
        """Remembers a site. Returns whether it is changed."""
        self.sites[change, at] = Site(change, operation, lines, shapes)
        return (change, at) in self._changed

    def _evaluate(self, jaxpr: Any, values: Iterable[_Value], at: Position, called: Lines) -> list[_Value]:
        inner = jaxprs.open_jaxpr(jaxpr)
        constants = [_Value(x, self._kinds.same(x)) for x in jaxprs.constants(jaxpr)]
        known = dict(zip((*inner.constvars, *inner.invars), (*constants, *values), strict=True))

        def read(x: Any) -> _Value:
            if not isinstance(x, Literal):
                return known[x]
            return _Value(x.val, True, x.val) if self._kinds.same(x) else _Value(x.val, False)

        for i, equation in enumerate(inner.eqns):
            lines = (*call_sites.lines_of_traceback(equation.source_info.traceback), *called)
            compute = _computes(inner, equation)
            results = self._equation(equation, compute, [read(x) for x in equation.invars], (*at, i), lines)
            known.update(zip(equation.outvars, results, strict=True))
        return [read(x) for x in inner.outvars]

    def _equation(
        self, equation: Any, compute: Callable[..., Any], operands: list[_Value], at: Position, lines: Lines
    ) -> Iterable[_Value]:
        primitive, params = equation.primitive, equation.params
        if EFFECT not in equation.effects:
            met = self._meet(operands, [all(x.invariant for x in operands)] * len(operands), at, lines)
            return self._local(compute, met, at, lines)
        if is_ours(primitive):
            return self._operation(primitive, params["call"], compute, operands, at, lines)
        if primitive in CALLS:
            return self._evaluate(jaxprs.called(params), operands, at, lines)
        if primitive is primitives.scan_p:
            return self._scan(params, operands, at, lines)
        if primitive is primitives.cond_p:
            return self._cond(params, operands, at, lines)
        return [_Value(y, False) for y in compute(*(x.value for x in operands))]

    def _meet(self, operands: Sequence[_Value], kinds: Sequence[bool], at: Position, lines: Lines) -> list[_Value]:
        """Values that are used as invariant, or not, as `kinds` says: those that become varying may be replicated."""
        which = [
            i
            for i, (x, kind) in enumerate(zip(operands, kinds, strict=True))
            if x.invariant and not kind and not x.neutral and internals.inexact(x.value)
        ]
        shapes = tuple((operands[i].value.shape, operands[i].value.dtype) for i in which)
        if not (which and self._found(MEETING, at, "", lines, shapes)):
            return list(operands)
        replicated = replicate_p.apply_to_all(Common(self._comm), [operands[i].value for i in which])
        met = list(operands)
        for i, y in zip(which, replicated, strict=True):
            met[i] = _Value(y, False, operands[i].value)
        return met

    def _local(
        self, compute: Callable[..., Any], operands: list[_Value], at: Position, lines: Lines
    ) -> Iterator[_Value]:
        """What communicates nothing."""
        results = compute(*(x.value for x in operands))
        invariant = [all(x.invariant for x in operands)] * len(results)
        if any(x.bare is None for x in operands):
            return map(_Value, results, invariant)
        if all(x.neutral for x in operands):
            return map(_Value, results, invariant, results)
        bare = compute(*(x.bare for x in operands))
        if self._found(BARE, at, "", lines):
            return map(_Value, bare, [True] * len(bare))
        return map(_Value, results, invariant, bare)

    def _operation(
        self,
        operation: Operation[Any],
        params: Common,
        compute: Callable[..., Any],
        operands: list[_Value],
        at: Position,
        lines: Lines,
    ) -> Iterator[_Value]:
        if operation not in (replicate_p, invariant_p):
            operands = self._meet(operands, [False] * len(operands), at, lines)
        values = [x.value for x in operands]
        value = params.derivative is None and internals.inexact_among(values)
        change = OPERATIONS.get(operation) if value else None
        changed = change is not None and self._found(change, at, operation.core_name, lines)
        if changed and change == LEFT_OUT:
            return iter(operands)
        results = compute(*values)
        if changed:
            more = replicate_p if change == REPLICATED else invariant_p
            results = more.apply_to_all(Common(params.comm), results)
        invariant = change == INVARIANT if changed else operation in _MAKING_INVARIANT
        bare = values if operation is replicate_p else [None] * len(results)
        return map(_Value, results, [invariant] * len(results), bare)

    def _scan(self, params: Any, operands: list[_Value], at: Position, lines: Lines) -> Iterator[_Value]:
        constants, carried = jaxprs.parts_of_scan(params)
        kinds = self._kinds.in_scan(params, [x.invariant for x in operands])
        results = [*kinds[constants : constants + carried], *self._kinds.results(params["jaxpr"], kinds)[carried:]]
        values = [x.value for x in self._meet(operands, kinds, at, lines)]

        def step(carry: Any, x: Any) -> Any:
            inside = map(_Value, (*carry, *x), kinds[constants:])
            made = self._evaluate(params["jaxpr"], (*operands[:constants], *inside), at, lines)
            made = self._meet(made, results, (*at, -1), lines)
            return [y.value for y in made[:carried]], [y.value for y in made[carried:]]

        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        carry, ys = jax.lax.scan(
            step, values[constants : constants + carried], values[constants + carried :], **options
        )
        return map(_Value, (*carry, *ys), results)

    def _cond(self, params: Any, operands: list[_Value], at: Position, lines: Lines) -> Iterator[_Value]:
        index, *given = operands
        bare = [None if x.neutral else x.bare for x in given]
        kinds = self._kinds.of_cond(params, [x.invariant for x in operands])

        def branch(which: int) -> Callable[..., Any]:
            def call(*values: Any) -> list[Any]:
                inside = map(_Value, values, (x.invariant for x in given), bare)
                made = self._evaluate(params["branches"][which], inside, (*at, which), lines)
                return [y.value for y in self._meet(made, kinds, (*at, which, -1), lines)]

            return call

        branches = [branch(which) for which in range(len(params["branches"]))]
        results = jax.lax.switch(index.value, branches, *(x.value for x in given))
        return map(_Value, results, kinds)


def _computes(jaxpr: Any, equation: Any) -> Callable[..., Any]:
    """What computes an equation, an allreduce without the comparison of cotangents, which may be wrong here."""
    if equation.primitive is allreduce_p:
        equation = equation.replace(params={"call": dataclasses.replace(equation.params["call"], line=None)})
    alone = jaxprs.of_equation(jaxpr, equation)
    return lambda *operands: jaxprs.evaluate(alone, *operands)


# --- which values are invariant --------------------------------------------------------------------------------------


class Kinds:
    """Whether values of a jaxpr are invariant. `varying` are the identities of its constants and literals that are not
    the same on all ranks."""

    def __init__(self, varying: Container[int]) -> None:
        self._varying = varying

    def same(self, constant: Any) -> bool:
        return id(constant) not in self._varying

    def results(self, jaxpr: Any, given: Sequence[bool]) -> list[bool]:
        """Whether each result is invariant, if those arguments are that are `given`."""
        inner = jaxprs.open_jaxpr(jaxpr)
        constants = map(self.same, jaxprs.constants(jaxpr))
        known = dict(zip((*inner.constvars, *inner.invars), (*constants, *given), strict=True))

        def read(x: Any) -> bool:
            return self.same(x) if isinstance(x, Literal) else known[x]

        for equation in inner.eqns:
            results = self._of_equation(equation, [read(x) for x in equation.invars])
            known.update(zip(equation.outvars, results, strict=True))
        return [read(x) for x in inner.outvars]

    def _of_equation(self, equation: Any, operands: Sequence[bool]) -> list[bool]:
        primitive, params, count = equation.primitive, equation.params, len(equation.outvars)
        if EFFECT not in equation.effects:
            return [all(operands)] * count
        if is_ours(primitive):
            return [primitive in _MAKING_INVARIANT] * count
        if primitive in CALLS:
            return self.results(jaxprs.called(params), operands)
        if primitive is primitives.scan_p:
            return self.results(params["jaxpr"], self.in_scan(params, operands))
        if primitive is primitives.cond_p:
            return self.of_cond(params, operands)
        return [False] * count

    def in_scan(self, params: Any, operands: Sequence[bool]) -> list[bool]:
        """Whether each argument of a scan's body is invariant: what is carried is so if it is after every step."""
        constants, carried = jaxprs.parts_of_scan(params)
        kinds: list[bool] = list(operands)
        before: list[bool] = []
        while kinds != before:
            before, results = list(kinds), self.results(params["jaxpr"], kinds)
            for i in range(carried):
                kinds[constants + i] = kinds[constants + i] and results[i]
        return kinds

    def of_cond(self, params: Any, operands: Sequence[bool]) -> list[bool]:
        each = [self.results(branch, operands[1:]) for branch in params["branches"]]
        return [operands[0] and all(kinds) for kinds in zip(*each, strict=True)]


def constants(jaxpr: Any) -> Iterator[Any]:
    """The constants and the literals of a jaxpr and of those inside of it."""
    yield from jaxprs.constants(jaxpr)
    for equation in jaxprs.open_jaxpr(jaxpr).eqns:
        yield from (x for x in equation.invars if isinstance(x, Literal))
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                if hasattr(jaxprs.open_jaxpr(inner), "eqns"):
                    yield from constants(inner)
