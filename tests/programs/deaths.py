"""Ranks that are killed at random times while all are in random operations, each result of which is checked:
python -m jaxmpi.run -n 4 --survive tests/programs/deaths.py --seed 1 --deaths 2.

Each rank executes steps in an order that is drawn from the seed, the same on all ranks: an operation, eagerly,
compiled, in a loop or in a derivative, on data that every rank can compute for all ranks. So NumPy says what is right.
Who dies, when, and by which signal is drawn as well: at a time, whatever the rank does then, or within
`jaxmpi.recover`. The others recover and go on with those that are left. Each ends with a line that begins with OK.
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
from jaxmpi._mpi import communicators
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
            os.kill(os.getpid(), self.signal)

        threading.Thread(target=end, daemon=True).start()


def deaths_of(draw, count, seconds):
    """The deaths by their ranks. Not all of them happen within a recovery: there would be none."""
    together = draw.uniform(0, seconds) if draw.random() < 0.3 else None
    made = [Death(draw, seconds, together) for _ in range(count)]
    if made:
        made[0].in_recovery = None
    return dict(zip(draw.sample(range(WORLD.size), count), made, strict=True))


# --- steps


def halos(x, grid, started):
    """A ring of blocks with a halo of one cell."""
    if not started:
        return grid.exchange(x)
    return grid.finish(grid.start(x))


def expected_of_halos(blocks, rank):
    size = len(blocks)
    result = blocks[rank].copy()
    result[0] = blocks[(rank - 1) % size][-2]
    result[-1] = blocks[(rank + 1) % size][1]
    return result


class Step:
    """One operation on all ranks that are left."""

    def __init__(self, draw):
        self.case = draw.choice([*table.CASES, "halos", "halos, started"])
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
            grid = jaxmpi.Grid((comm.size,), (4 * comm.size,), periodic=True, comm=comm)
            return lambda x: halos(x, grid, "started" in self.case)
        return lambda x: self.case.call(x, comm, self.root % comm.size)

    def _expected(self, inputs, rank):
        if isinstance(self.case, str):
            return expected_of_halos(inputs, rank)
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
        result = np.asarray(self.function(jnp.asarray(inputs[comm.rank])))
        expected = self._expected(inputs, comm.rank)
        if np.array_equal(result, np.asarray(expected, result.dtype)):
            return ""
        return f"step {number}, {self.case}, {self.form}, {self.shape}: {result.ravel()[:4]}, not {expected}"


# --- the run


class Run:
    def __init__(self, options):
        draw = random.Random(options.seed)
        self.deaths = deaths_of(draw, options.deaths, options.seconds)
        self.steps = [Step(draw) for _ in range(options.programs)]
        self.seed, self.seconds = options.seed, options.seconds
        self.comm, self.members = communicators.default_mpi(), list(range(WORLD.size))
        self.number = self.done = self.recovered = 0
        self.slowest = 0.0

    def own_death(self):
        return self.deaths.get(WORLD.rank)

    def go(self):
        begin = time.monotonic()
        if self.own_death() is not None:
            self.own_death().plan()
        while True:
            try:
                if self.step(time.monotonic() - begin > self.seconds + 1):
                    return
            except Exception as error:
                if jaxmpi.process_failure(error) is None:
                    raise
                self.recover()

    def step(self, over):
        """Whether it was the last."""
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
        begin = time.monotonic()
        own = self.own_death()
        if own is not None and own.in_recovery is not None:
            own.after(own.in_recovery)
        while True:
            old, self.comm = self.comm, jaxmpi.recover(self.comm)
            lost = jaxmpi.lost(old, self.comm)
            self.members = [member for rank, member in enumerate(self.members) if rank not in lost]
            self.recovered += 1
            try:
                self.number = self.comm.allreduce(self.number, MPI.MAX) + 1
                break
            except MPI.Exception as error:
                if jaxmpi.process_failure(error) is None:
                    raise
        self.slowest = max(self.slowest, time.monotonic() - begin)


def through(make, options):
    """Makes a run and goes through it, with all stacks if it hangs. A rank that is to die does not return."""
    faulthandler.dump_traceback_later(options.seconds + 45)
    run = make(options)
    run.go()
    faulthandler.cancel_dump_traceback_later()
    if run.own_death() is not None:
        time.sleep(60)  # it has not been hit yet: it dies now, while the others end
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
