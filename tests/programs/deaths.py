"""Ranks that are killed at random times while all are in random operations, each result of which is checked:
python -m jaxmpi.run -n 4 --survive tests/programs/deaths.py --seed 1 --deaths 2. Ranks of --spare 2 step in.

Each rank executes steps in an order that is drawn from the seed, the same on all ranks: an operation, eagerly,
compiled, in a loop or in a derivative, on data that every rank can compute for all ranks. So NumPy says what is right.
Who dies, when, and by which signal is drawn as well: at a time, whatever the rank does then, or within
`jaxmpi.recover`; it says what it is in. The others recover and go on with those that are left. Each ends with a line
that begins with OK.
"""

import argparse
import faulthandler
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # of what the tests share
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import jaxmpi
from jaxmpi import _core
from support import table

WORLD = MPI.COMM_WORLD
ROUND = 8
"""Steps after which the ranks agree on whether to go on."""
SHAPES = [(), (3,), (200, 3), (1000, 30)]
FORMS = ["eager", "jaxmpi.jit", "jax.jit", "loop", "gradient"]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deaths", type=int, default=1, help="of ranks, fewer than there are")
    parser.add_argument("--seconds", type=float, default=4, help="within which they die")
    parser.add_argument("--programs", type=int, default=10, help="from which the steps are drawn")
    return parser.parse_args()


class Doing:
    """What this rank does, for the line that it leaves as it dies."""

    what = "the start"


class Death:
    """What ends one rank."""

    def __init__(self, draw, seconds, together):
        self.rank = None
        self.signal = draw.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
        self.time = together if together is not None else draw.uniform(0, seconds)
        self.in_recovery = draw.uniform(0, 0.03) if draw.random() < 0.25 else None

    def plan(self):
        """On the rank itself: it dies at that time."""
        if self.in_recovery is None:
            self.after(self.time)

    def after(self, seconds):
        def end():
            time.sleep(seconds)
            os.write(1, f"DEATH of rank {WORLD.rank} in {Doing.what}\n".encode())
            os.kill(os.getpid(), self.signal)

        threading.Thread(target=end, daemon=True).start()


class Deaths:
    """Who dies in a run, and how. Made by all ranks, also those that are spare: they may die as they wait."""

    def __init__(self, options, draw):
        self.seconds, self._begin = options.seconds, time.monotonic()
        together = draw.uniform(0, options.seconds) if draw.random() < 0.3 else None
        made = [Death(draw, options.seconds, together) for _ in range(options.deaths)]
        for death in made[:1]:  # not all of them happen within a recovery: there would be none
            death.in_recovery = None
        self.own_death = dict(zip(draw.sample(range(WORLD.size), len(made)), made, strict=True)).get(WORLD.rank)
        if self.own_death is not None:
            self.own_death.plan()

    def plan_in_recovery(self):
        if self.own_death is not None and self.own_death.in_recovery is not None:
            self.own_death.after(self.own_death.in_recovery)

    def is_over(self):
        return time.monotonic() - self._begin > self.seconds + 1


# --- steps


def ring(comm):
    return jaxmpi.Grid((comm.size,), (4 * comm.size,), periodic=True, comm=comm)


def started_halos(x, comm):
    grid = ring(comm)
    return grid.finish(grid.start(x))


def expected_of_halos(blocks, rank):
    size = len(blocks)
    result = blocks[rank].copy()
    result[0] = blocks[(rank - 1) % size][-2]
    result[-1] = blocks[(rank + 1) % size][1]
    return result


def parts(size):
    """The sizes of blocks unlike those of 6 cells each."""
    return [5 + size, *[5] * (size - 1)]


def redistributed(x, comm):
    size = comm.size
    grids = [jaxmpi.Grid((size,), (whole,), comm=comm) for whole in (6 * size, parts(size))]
    return jaxmpi.redistribute(x, *grids)


def expected_of_redistributed(blocks, rank):
    return np.split(np.concatenate(blocks), np.cumsum(parts(len(blocks)))[:-1])[rank]


def after_barrier(x, comm):
    jaxmpi.notoken.barrier(comm=comm)
    return x


def after_ibarrier(x, comm):
    jaxmpi.notoken.wait(jaxmpi.notoken.ibarrier(comm=comm))
    return x


def own(blocks, rank):
    return blocks[rank]


BESIDE = {
    "halos": (lambda x, comm: ring(comm).exchange(x), expected_of_halos),
    "halos, started": (started_halos, expected_of_halos),
    "redistribute": (redistributed, expected_of_redistributed),
    "barrier": (after_barrier, own),
    "ibarrier": (after_ibarrier, own),
}
"""Operations that are not in the table: calls on 6 cells of this rank, and results of a rank by those of all."""


class Step:
    """One operation on all ranks that are left."""

    def __init__(self, draw):
        self.case = draw.choice([*table.CASES, *BESIDE])
        self.form = draw.choice(FORMS)
        self.shape = draw.choice(SHAPES)
        self.root = draw.randrange(1000)
        self.comm, self.function = None, None

    def _inputs(self, size, number):
        if isinstance(self.case, str):
            return [(10 * r + number % 5 + np.arange(6)).astype(np.float32) for r in range(size)]
        return self.case.inputs(self.shape, np.float32, size, self.root % size, seed=number % 1000)

    def _call(self, comm):
        if isinstance(self.case, str):
            return lambda x: BESIDE[self.case][0](x, comm)
        return lambda x: self.case.call(x, comm, self.root % comm.size)

    def _expected(self, inputs, rank):
        if isinstance(self.case, str):
            return BESIDE[self.case][1](inputs, rank)
        return self.case.expected(inputs, rank, self.root % len(inputs))

    def _function(self, comm):
        call = self._call(comm)
        if self.form == "jaxmpi.jit":
            return jaxmpi.jit(call)
        if self.form == "jax.jit":
            return jax.jit(call)
        if self.form == "loop":  # the same each time: the last result counts
            return jax.jit(lambda x: jax.lax.fori_loop(0, 4, lambda _, y: call(x), call(x)))
        if self.form == "gradient":  # its value is checked, and all ranks communicate for the derivative
            return jaxmpi.jit(lambda x: jax.linearize(call, x)[0])
        return call

    def run(self, comm, number):
        """The text of what is wrong; empty: nothing."""
        if comm is not self.comm:
            self.comm, self.function = comm, self._function(comm)
        inputs = self._inputs(comm.size, number)
        Doing.what = f"{self.case}, {self.form}"
        result = np.asarray(self.function(jnp.asarray(inputs[comm.rank])))
        Doing.what = "Python"
        expected = self._expected(inputs, comm.rank)
        if np.array_equal(result, np.asarray(expected, result.dtype)):
            return ""
        return f"step {number}, {self.case}, {self.form}, {self.shape}: {result.ravel()[:4]}, not {expected}"


# --- the run


class Run(Deaths):
    def __init__(self, options):
        draw = random.Random(options.seed)
        super().__init__(options, draw)
        self.steps, self.seed = [Step(draw) for _ in range(options.programs)], options.seed
        Doing.what = "jaxmpi.get_default"
        self.comm = jaxmpi.get_default()  # a spare rank waits
        Doing.what = "Python"
        self.number = self.done = self.recovered = 0
        self.slowest, self.is_in_step = 0.0, False

    def go(self):
        over = False
        while not over:
            try:
                over = self.step(self.is_over())
            except Exception as error:
                if jaxmpi.process_failure(error) is None:
                    raise
                self.recover()

    def step(self, over):
        """Whether it was the last."""
        if not self.is_in_step:  # it has begun, as a spare rank has where the others have recovered
            self.number = self.comm.allreduce(self.number, MPI.MAX) + 1
            self.is_in_step = True
        drawn = random.Random(self.seed * 1_000_003 + self.number).choice(self.steps)
        wrong = drawn.run(self.comm, self.number)
        if wrong:
            print(f"WRONG: rank {WORLD.rank}: {wrong}", flush=True)
            raise AssertionError(wrong)
        self.done += 1
        self.number += 1
        if self.number % ROUND:
            return False
        return bool(jaxmpi.notoken.allreduce(np.float32(over), MPI.MAX, comm=self.comm) > 0)

    def recover(self):
        begin, Doing.what = time.monotonic(), "recovery"
        self.plan_in_recovery()
        self.comm, self.is_in_step = jaxmpi.recover(self.comm), False
        self.recovered += 1
        self.slowest = max(self.slowest, time.monotonic() - begin)


def through(make, options):
    """Makes a run and goes through it, with all stacks if it hangs. A rank that is to die does not return."""
    faulthandler.dump_traceback_later(options.seconds + 45)
    try:
        run = make(options)
    except SystemExit:
        print(f"OK rank {WORLD.rank}, which was spare and nobody needed, 0 in flight", flush=True)
        raise
    run.go()
    Doing.what = "its end"
    faulthandler.cancel_dump_traceback_later()
    if run.own_death is not None:  # within a recovery, of which there was none: it dies now, while the others end
        run.own_death.after(0)
        time.sleep(60)
    return run


def main():
    run = through(Run, arguments())
    left = _core.requests_in_flight()
    print(
        f"OK rank {WORLD.rank}: {run.done} steps, {run.recovered} recoveries, {run.slowest:.2f} s at most, "
        f"{run.comm.size} of {WORLD.size} left, {left} in flight",
        flush=True,
    )


if __name__ == "__main__":
    main()
