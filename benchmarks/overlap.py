"""How much of an exchange disappears behind a computation of the same length: part of `make bench-quick`.

    python -m jaxmpi.run -n 2 benchmarks/overlap.py --name shared_memory

Each rank sends an array to the next one while it computes with another. Four programs take turns, in jitted code and in
C: the exchange alone, the computation alone, one after the other, and overlapped: started, computed, waited for. The
computation is set to take as long as the exchange does. The hidden fraction is 1 - (overlapped - computation) /
exchange: 1 where the exchange costs nothing, 0 where nothing is gained, and below that where overlapping costs time.
What is received is checked in every round.

A message is moved by processors, be it through shared memory or by TCP of the kernel on one machine: where ranks leave
no core free, overlapping can hide waiting but no work. `spare_cores_per_rank` says how many are free.
"""

import argparse
import ctypes
import os

import jax
import jax.numpy as jnp
import numpy as np
from peers import compile_c

import jaxmpi
from jaxmpi._bench.data import count_wrong
from jaxmpi._bench.report import conclude, figure
from jaxmpi._bench.timing import COMM, Batch, take_turns

RANK, SIZE = COMM.rank, COMM.size
LEFT, RIGHT = (RANK - 1) % SIZE, (RANK + 1) % SIZE
COMPUTE = "computation"
KINDS = ("exchange", COMPUTE, "one after the other", "overlapped")
BYTES, ELEMENTS, CALLS, ROUNDS = 4 << 20, 1 << 14, 4, 15


def _compute(x, steps):
    return jax.lax.fori_loop(0, steps, lambda _, x: x * np.float32(0.999) + np.float32(0.001), x)


def _exchange(data):
    return jaxmpi.sendrecv(data, data, LEFT, RIGHT, comm=COMM)


def _overlap(data, x, steps):
    begun = [jaxmpi.irecv(data, LEFT, comm=COMM), jaxmpi.isend(data, RIGHT, comm=COMM)]
    (got, _), x = jaxmpi.waitall(begun, after=_compute(x, steps))
    return got, x


def by_jaxmpi(data, wanted):
    """steps -> the contenders in the order of KINDS."""
    x, given = jnp.ones(ELEMENTS, jnp.float32), jnp.asarray(data)

    def batch(function, check=True):
        program = jaxmpi.jit(function)

        def run(data):
            for _ in range(CALLS):
                result = jax.block_until_ready(program(data, x))
            return result[0]

        return Batch(CALLS, lambda turn: given, run, lambda turn, got: count_wrong(got, wanted) if check else 0)

    return lambda steps: [
        batch(lambda data, x: (_exchange(data), x)),
        batch(lambda data, x: (data, _compute(x, steps)), check=False),
        batch(lambda data, x: (_exchange(data), _compute(x, steps))),
        batch(lambda data, x: _overlap(data, x, steps)),
    ]


def in_c(data, wanted):
    library = compile_c("overlap.c")
    out, x = np.empty_like(data), np.ones(ELEMENTS, np.float32)
    pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (data, out, x)]

    def start(turn):
        out[:] = 0
        return data

    def batch(kind, steps):
        def run(data):
            sizes = (data.size, x.size, steps, LEFT, RIGHT, COMM.py2f())
            library.run(KINDS.index(kind), CALLS, *pointers, *sizes)
            return out

        return Batch(CALLS, start, run, lambda turn, out: 0 if kind == COMPUTE else count_wrong(out, wanted))

    return lambda steps: [batch(kind, steps) for kind in KINDS]


def balanced(programs):
    """The contenders, with as many steps as take as long as the exchange."""

    def seconds(contender, rounds):
        return take_turns({"": contender}, rounds)[""].median

    length, steps = seconds(programs(1)[0], 5), 1
    while (taken := seconds(programs(steps)[1], 3)) < length and steps < 1 << 20:
        steps = max(steps + 1, min(2 * steps, int(steps * length / taken) + 1))
    return programs(steps)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", required=True, help="of what the messages go through, for the names of the figures")
    options = parser.parse_args()
    numbers = np.arange(BYTES // 4, dtype=np.float32)
    contenders = {}
    for who, programs in (("jaxmpi", by_jaxmpi), ("C", in_c)):
        of_kinds = balanced(programs(numbers * (RANK + 1), numbers * (LEFT + 1)))
        contenders |= {(kind, who): contender for kind, contender in zip(KINDS, of_kinds, strict=True)}
    samples = take_turns(contenders, ROUNDS)
    for who, suffix in (("jaxmpi", ""), ("C", "_in_c")):
        exchange, compute, _, overlapped = (samples[kind, who].median for kind in KINDS)
        figure(f"overlap_hidden_fraction_{options.name}{suffix}", 1 - (overlapped - compute) / exchange)
    figure("spare_cores_per_rank", len(set().union(*COMM.allgather(os.sched_getaffinity(0)))) / SIZE - 1)
    conclude("overlap_wrong_elements", {f"{BYTES} B, by {options.name}": samples})


if __name__ == "__main__":
    main()
