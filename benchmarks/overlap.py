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
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from compiled import compile_c
from mpi4py import MPI

import jaxmpi
from jaxmpi import jaxmpi as mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
LEFT, RIGHT = (RANK - 1) % SIZE, (RANK + 1) % SIZE
EXCHANGE, COMPUTE, BLOCKING, OVERLAPPED = KINDS = ("exchange", "computation", "one after the other", "overlapped")
ELEMENTS = 1 << 14


def _compute(x, steps):
    return jax.lax.fori_loop(0, steps, lambda _, x: x * np.float32(0.999) + np.float32(0.001), x)


def _exchange(data):
    return mpi.sendrecv(data, data, LEFT, RIGHT, comm=COMM)


def _overlap(data, x, steps):
    begun = [mpi.irecv(data, LEFT, comm=COMM), mpi.isend(data, RIGHT, comm=COMM)]
    (got, _), x = mpi.waitall(begun, after=_compute(x, steps))
    return got, x


def programs(steps):
    """Functions of (array to send, array to compute with) in the order of KINDS."""
    return [
        jaxmpi.jit(lambda data, x: (_exchange(data), x)),
        jaxmpi.jit(lambda data, x: (data, _compute(x, steps))),
        jaxmpi.jit(lambda data, x: (_exchange(data), _compute(x, steps))),
        jaxmpi.jit(lambda data, x: _overlap(data, x, steps)),
    ]


def seconds(program, data, x, calls):
    """Of one call; the data that came is the second result."""
    COMM.Barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        got, x = program(data, x)
        jax.block_until_ready(x)
    jax.block_until_ready(got)
    return COMM.allreduce((time.perf_counter() - begin) / calls, MPI.MAX), got


def _by_c(library, kind, data, out, x, calls, steps):
    pointer = lambda array: array.ctypes.data_as(ctypes.c_void_p)  # noqa: E731
    numbers = (pointer(data), pointer(out), data.size, pointer(x), x.size, steps, LEFT, RIGHT, COMM.py2f())
    return COMM.allreduce(library.run(kind, calls, *numbers) / calls, MPI.MAX)


def steps_for(length, one):
    """Steps of a computation that take as long, given a function that takes their number."""
    steps = 1
    while (taken := one(steps)) < length and steps < 1 << 20:
        steps = max(steps + 1, min(2 * steps, int(steps * length / taken) + 1))
    return steps


def hidden(times):
    of = {kind: statistics.median(times[kind]) for kind in KINDS}
    return 1 - (of[OVERLAPPED] - of[COMPUTE]) / of[EXCHANGE], of


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, default=4 << 20)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=4, help="in a batch")
    parser.add_argument("--name", default="", help="of what the messages go through, for the names of the figures")
    options = parser.parse_args()
    count = options.bytes // 4
    data = jnp.arange(count, dtype=jnp.float32) * (RANK + 1)
    x = jnp.ones(ELEMENTS, jnp.float32)
    wanted = np.arange(count, dtype=np.float32) * (LEFT + 1)

    exchange = programs(1)[0]
    seconds(exchange, data, x, 2)
    length = statistics.median(seconds(exchange, data, x, options.calls)[0] for _ in range(5))

    def computation(steps):
        program = programs(steps)[1]
        seconds(program, data, x, 1)
        return min(seconds(program, data, x, options.calls)[0] for _ in range(3))

    ours = programs(steps_for(length, computation))
    library = compile_c("overlap.c")
    library.run.restype = ctypes.c_double
    send, out, other = np.asarray(data), np.empty(count, np.float32), np.ones(ELEMENTS, np.float32)
    by_c = lambda kind, steps: _by_c(library, kind, send, out, other, options.calls, steps)  # noqa: E731
    by_c(0, 1)
    length_in_c = statistics.median(by_c(0, 1) for _ in range(5))
    steps_in_c = steps_for(length_in_c, lambda steps: min(by_c(1, steps) for _ in range(3)))
    times = {kind: [] for kind in KINDS}
    times_in_c = {kind: [] for kind in KINDS}
    wrong = 0
    for program in ours:
        seconds(program, data, x, 1)
    for _ in range(options.rounds):
        for number, (kind, program) in enumerate(zip(KINDS, ours, strict=True)):
            taken, got = seconds(program, data, x, options.calls)
            times[kind].append(taken)
            wrong += 0 if kind == COMPUTE else int((np.asarray(got) != wanted).sum())
            out[:] = 0
            times_in_c[kind].append(by_c(number, steps_in_c))
            wrong += 0 if kind == COMPUTE else int((out != wanted).sum())
    wrong = COMM.allreduce(wrong)
    spare = len(set().union(*COMM.allgather(os.sched_getaffinity(0)))) / SIZE - 1
    if RANK == 0:
        name = f"_{options.name}" if options.name else ""
        for who, measured in (("", times), ("_in_c", times_in_c)):
            fraction, medians = hidden(measured)
            print(f"overlap_hidden_fraction{name}{who}: {fraction:.3g}")
            print("  " + ", ".join(f"{kind} {1e6 * value:.4g} us" for kind, value in medians.items()))
        print(f"spare_cores_per_rank: {spare:.3g}")
        print(f"wrong_elements: {wrong}")
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
