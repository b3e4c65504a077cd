"""The programs by which `jaxmpi.bench` calls an operation many times in a row.

Each turn calls the operation, keeps one element of the result, and changes one element of each part of the operand
(data.py). The changes take some instructions and copy no array. For comparison, a turn with a message to nobody is
timed as well. The next turn needs the operand again, so the result is another array, as in the C programs of OSU.
The exceptions are `bcast` and `grid_exchange`, whose result is the next operand. A reduction of less than 8 MiB works
in place, on a copy of the operand that XLA makes.

  loop    the turns are a `lax.fori_loop` in one compiled program.
  call    each turn is a call of `jaxmpi.jit`, followed by a wait for the result.
  eager   each turn is the operation alone, on one of two operands, followed by a wait for the result.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from mpi4py import MPI

import jaxmpi
from jaxmpi._bench.data import Numbers, Oracle
from jaxmpi._bench.operations import NOBODY, Case, Operation
from jaxmpi._bench.timing import COMM, Batch, Sample, take_turns
from jaxmpi._primitive.jit import jit

HOW = {
    "loop": "in a fori_loop of one compiled program",
    "call": "each a call of jaxmpi.jit",
    "eager": "each an eager one",
}
"""How the turns call the operation, and the words for it."""
FEWEST, MOST = 5, 10_000
"""Turns in a round."""
_CHANGES = 1 << 18
"""The largest number of elements that change in a round. They are prepared before it."""

_COPIED = 16 << 10
"""Bytes from which on a copy takes longer than an operation that does nothing."""

_runs = itertools.count(1)
"""The data of each run differ from all others, so that an old result is a wrong one."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The number and length of the measurements of each size."""

    how: str = "loop"
    rounds: int = 5
    seconds: float = 0.2


Batches = Callable[[int], Batch]
"""turns -> a batch of so many turns, whose data is that of a run."""


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


def _compiled(oracle: Oracle, how: str, most: int) -> Batches:
    """Compile programs for up to `most` turns."""
    operation, case = oracle.operation, oracle.case
    run_turns = (_loop if how == "loop" else _calls)(operation, case)
    shape = jax.ShapeDtypeStruct(operation.shape(case), oracle.numbers.dtype)
    received = jax.eval_shape(functools.partial(operation.call, case), shape).shape
    where, watched = jnp.array(oracle.changed(most)), jnp.array(oracle.watched(most, received))

    def start(run: int) -> Any:
        # A copy, because NumPy's memory cannot be donated.
        x = jnp.array(oracle.operand(run), copy=True)
        return (jnp.int32(0), x, jnp.zeros(most, x.dtype)), (where, jnp.array(oracle.changes(run, most)), watched)

    def batch(turns: int) -> Batch:
        def wrong(run: int, result: Any) -> int:
            (_, x, kept), y = result
            # An operand has already changed for the next turn.
            last = oracle.wrong(x, run, turns, changed=True) if y is None else oracle.wrong(y, run, turns)
            return last + oracle.wrong_kept(kept, run, turns, received)

        return Batch(turns, start, lambda data: run_turns(*data, turns), wrong)

    return batch


def _eager(oracle: Oracle) -> Batches:
    operation, case = oracle.operation, oracle.case

    def start(run: int) -> Any:
        # The last turn uses the operand of this run, the other turns also one of no run.
        return [jnp.array(oracle.operand(which)) for which in (run, run + (1 << 31))]

    def batch(turns: int) -> Batch:
        def calls(operands: Any) -> Any:
            for left in reversed(range(turns)):
                y = jax.block_until_ready(operation.call(case, operands[left % 2]))
                if operation.hidden:
                    jax.effects_barrier()
            return y

        return Batch(turns, start, calls, lambda run, y: oracle.wrong(y, run, 0))

    return batch


def _fitting(seconds: float, plan: Plan, most: int) -> int:
    """Return how many turns of `seconds` on this rank make a round, the same number on all ranks."""
    slowest = COMM.allreduce(seconds, MPI.MAX)
    return max(FEWEST, min(most, int(plan.seconds / (plan.rounds + 1) / slowest)))


def _turns(batches: Batches, plan: Plan, most: int) -> int:
    """Compile, and find how many turns take the seconds of a round. Return the same number on all ranks."""

    def seconds(turns: int) -> float:
        return dataclasses.replace(batches(turns), wrong=lambda run, result: 0)(next(_runs))[0]

    seconds(FEWEST)
    turns = FEWEST
    for _ in range(3):  # few turns take longer each
        wanted = _fitting(seconds(turns), plan, most)
        if wanted <= 4 * turns:
            return wanted
        turns = min(wanted, 20 * turns)
    return wanted


def measure(operation: Operation, case: Case, dtype: np.dtype, plan: Plan) -> Sample:
    """Measure one case. All ranks call it alike. Raise ValueError, on all, if the data cannot be checked."""
    oracle = Oracle(operation, case, Numbers.for_operands(dtype, case.size if operation.reduces(case.size) else 1))
    parts = max(1, operation.stacked(Case(0, case.size, case.elements)))
    most = max(FEWEST, min(MOST, _CHANGES // parts))
    batches = _eager(oracle) if plan.how == "eager" else _compiled(oracle, plan.how, most)
    turns = _turns(batches, plan, most)

    def contender(_: int) -> tuple[float, int]:
        nonlocal turns
        seconds, wrong = batches(turns)(next(_runs))
        # On a busy machine a round may take much longer than the round before.
        turns = min(turns, _fitting(seconds, plan, most))
        return seconds / operation.messages, wrong

    return take_turns({"": contender}, plan.rounds)[""]


def to_nobody(dtype: np.dtype, plan: Plan) -> float:
    """Return the seconds of a turn that communicates nothing."""
    return min(measure(NOBODY, Case(0, 1, 1), dtype, plan).seconds)
