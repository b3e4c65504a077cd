"""The timing of an operation: many times in a row, between a barrier and the end of the slowest rank.

Each turn calls the operation, keeps one element of the result, and changes one element of each part of the operand
(data.py). The changes take some instructions and copy no array. For comparison, a turn with a message to nobody is
timed as well. The next turn needs the operand again, so the result is another array, as in the C programs of OSU.
The exceptions are `bcast` and `grid_exchange`, whose result is the next operand. A reduction of less than 8 MiB works
in place, on a copy of the operand that XLA makes.

  loop    the turns are a `lax.fori_loop` in one compiled program.
  call    each turn is a call of `jaxmpi.jit`, followed by a wait for the result.
  eager   each turn is the operation alone, on one of two operands, followed by a wait for the result.
"""

import functools
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from mpi4py import MPI

import jaxmpi
from jaxmpi._bench.data import Numbers, Oracle
from jaxmpi._bench.operations import NOBODY, Case, Operation
from jaxmpi._primitive.jit import jit

COMM = MPI.COMM_WORLD
HOW = ("loop", "call", "eager")
FEWEST, MOST = 5, 10_000
"""Turns in a round, unless the user gives a number."""
_CHANGES = 1 << 18
"""The largest number of elements that change in a round. They are prepared before it."""

_COPIED = 16 << 10
"""Bytes from which on a copy takes longer than an operation that does nothing."""

_runs = itertools.count(1)
"""The data of each run differ from all others, so that an old result is a wrong one."""


@dataclass(frozen=True)
class Plan:
    """The number and length of the measurements of each size."""

    how: str = "loop"
    rounds: int = 5
    seconds: float = 0.2
    iterations: int | None = None
    warmup: int = 5
    check: bool = True


@dataclass(frozen=True)
class Point:
    """The measurements of one operation at one size."""

    operation: Operation
    case: Case
    iterations: int
    """The number of iterations in the last round. Earlier rounds have as many or more."""
    seconds: list[float]
    """The time of one operation on the slowest rank, in each round."""
    wrong: int | None
    """The number of wrong elements, on all ranks and in all rounds."""
    checked: int | None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


Run = Callable[[int, int, bool], tuple[float, int, int]]
"""(number of the run, turns, whether the data is checked) -> seconds of this rank, wrong elements, compared
elements."""


def _turn(operation: Operation, case: Case, state: Any, changes: Any) -> tuple[Any, Any]:
    """Do one turn. Return the state for the next one, and the result, or None if the result is the operand in it."""
    turn, x, kept = state
    where, what, watched = (_row(values, turn) for values in changes)
    y = operation.call(case, x)
    kept = lax.dynamic_update_slice(kept, lax.dynamic_slice(y, tuple(watched), (1,) * y.ndim).reshape(1), (turn,))
    # XLA copies an array if it does not know that the read comes before the change. So the place of the change depends
    # on the value read. Where the operation has no result, it depends on a further operation behind it.
    read = [_row(kept, turn)]
    if operation.blind(case) and x.nbytes >= _COPIED:
        read.append(jaxmpi.recv(jnp.zeros((), x.dtype), MPI.PROC_NULL))
    zero = jnp.minimum(sum(lax.population_count(value.real.astype(jnp.int32)) for value in read), 0)
    repeats = operation.repeats(case)
    x = lax.dynamic_update_slice(y if repeats else x, what, tuple(where + zero.astype(where.dtype)))
    return (turn + 1, x, kept), None if repeats else y


def _row(values: jax.Array, turn: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(values, turn, keepdims=False)


def _loop(operation: Operation, case: Case) -> Callable[..., Any]:
    step = functools.partial(_turn, operation, case)

    def program(state: Any, changes: Any, turns: Any) -> Any:
        # The last turn is outside of the loop, so that the loop need not carry results.
        return step(lax.fori_loop(0, turns - 1, lambda _, state: step(state, changes)[0], state), changes)

    compiled = jit(program, donate_argnums=0)
    return lambda state, changes, turns: jax.block_until_ready(compiled(state, changes, np.int32(turns)))


def _calls(operation: Operation, case: Case) -> Callable[..., Any]:
    compiled = jit(functools.partial(_turn, operation, case), donate_argnums=0)

    def run(state: Any, changes: Any, turns: Any) -> Any:
        for _ in range(turns):
            state, y = jax.block_until_ready(compiled(state, changes))
        return state, y

    return run


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    COMM.Barrier()
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def _compiled(oracle: Oracle, how: str, most: int) -> Run:
    """Compile programs for up to `most` turns."""
    operation, case = oracle.operation, oracle.case
    run_turns = (_loop if how == "loop" else _calls)(operation, case)
    shape = jax.ShapeDtypeStruct(operation.shape(case), oracle.numbers.dtype)
    received = jax.eval_shape(functools.partial(operation.call, case), shape).shape
    where, watched = jnp.array(oracle.changed(most)), jnp.array(oracle.watched(most, received))

    def run(number: Any, turns: Any, check: Any) -> Any:
        changes = where, jnp.array(oracle.changes(number, most)), watched
        # A copy, because NumPy's memory cannot be donated.
        x = jnp.array(oracle.operand(number), copy=True)
        state = jax.block_until_ready((jnp.int32(0), x, jnp.zeros(most, x.dtype)))
        seconds, ((_, x, kept), y) = _timed(lambda: run_turns(state, changes, turns))
        if not check:
            return seconds, 0, 0
        # An operand has already changed for the next turn.
        wrong, size = oracle.wrong(*((x, number, turns, True) if y is None else (y, number, turns)))
        return seconds, wrong + oracle.wrong_kept(kept, number, turns, received), size + turns

    return run


def _eager(oracle: Oracle) -> Run:
    operation, case = oracle.operation, oracle.case

    def run(number: Any, turns: Any, check: Any) -> Any:
        # The last turn uses the operand of this run, the other turns also one of no run.
        operands = [jnp.array(oracle.operand(which)) for which in (number, number + (1 << 31))]
        jax.block_until_ready(operands)

        def calls() -> Any:
            for left in reversed(range(turns)):
                y = jax.block_until_ready(operation.call(case, operands[left % 2]))
                if operation.hidden:
                    jax.effects_barrier()
            return y

        seconds, y = _timed(calls)
        return (seconds, *oracle.wrong(y, number, 0)) if check else (seconds, 0, 0)

    return run


def _slowest(seconds: float) -> float:
    return COMM.allreduce(seconds, MPI.MAX)


def _turns(run: Run, plan: Plan, most: int) -> int:
    """Warm up, and find how many turns take the seconds of a round. Return the same number on all ranks."""
    run(next(_runs), max(1, min(plan.warmup, most)), False)  # at least once, which compiles it
    if plan.iterations is not None:
        return plan.iterations
    turns = FEWEST
    for _ in range(3):  # few turns take longer each
        seconds = _slowest(run(next(_runs), turns, False)[0]) / turns
        wanted = _fitting(seconds, plan, most)
        if wanted <= 4 * turns:
            return wanted
        turns = min(wanted, 20 * turns)
    return wanted


def _fitting(seconds: float, plan: Plan, most: int) -> int:
    """Return how many turns of `seconds` make a round."""
    return max(FEWEST, min(most, int(plan.seconds / plan.rounds / seconds)))


def measure(operation: Operation, case: Case, dtype: np.dtype, plan: Plan) -> Point:
    """Measure one case. All ranks call it alike. Raise ValueError, on all, if the data cannot be checked."""
    reduction = case.reduction if operation.reduces(case.size) else ""
    oracle = Oracle(operation, case, Numbers.for_reduction(dtype, reduction, case.size))
    parts = max(1, operation.stacked(Case(0, case.size, case.elements)))
    most = max(FEWEST, min(MOST, _CHANGES // parts)) if plan.iterations is None else plan.iterations
    most = max(most, min(plan.warmup, MOST))
    run = _eager(oracle) if plan.how == "eager" else _compiled(oracle, plan.how, most)
    turns = _turns(run, plan, most)
    seconds, wrong, checked = [], 0, 0
    for _ in range(plan.rounds):
        own_seconds, own_wrong, own_checked = run(next(_runs), turns, plan.check)
        turn = _slowest(own_seconds) / turns
        seconds.append(turn / operation.messages)
        wrong, checked = wrong + own_wrong, checked + own_checked
        if plan.iterations is None:  # on a busy machine a round may take much longer than the round before
            turns = min(turns, _fitting(turn, plan, most))
    if not plan.check or not operation.size:
        return Point(operation, case, turns, seconds, None, None)
    return Point(operation, case, turns, seconds, COMM.allreduce(wrong), COMM.allreduce(checked))


def to_nobody(dtype: np.dtype, plan: Plan) -> float:
    """Return the seconds of a turn that communicates nothing."""
    return min(measure(NOBODY, Case(0, 1, 1), dtype, plan).seconds)
