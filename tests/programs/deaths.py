"""Ranks that are killed at random times while all are in random operations, each result of which is checked:
python -m jaxmpi.run -n 4 --survive tests/programs/deaths.py --seed 1 --deaths 2. Ranks of --spare 2 step in.

Each rank executes steps as soak.py does, in an order that is drawn from the seed, the same on all ranks: an operation,
eagerly, compiled, in a loop or in a derivative, on data that every rank can compute. So NumPy says what is right. Who
dies, when, and by which signal is drawn as well: at a time, whatever the rank does then, or within
`jaxmpi.survive.recover`; it says what it is in. The others recover and go on with those that are left. Each ends with a
line that begins with OK.
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
os.environ.setdefault("JAX_ENABLE_X64", "1")

import numpy as np
from mpi4py import MPI

import jaxmpi
from fuzzing import steps
from jaxmpi import _core

WORLD = MPI.COMM_WORLD
ROUND = 8
"""Steps after which the ranks agree on whether to go on."""


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


# --- the run


class Run(Deaths):
    def __init__(self, options):
        draw = random.Random(options.seed)
        super().__init__(options, draw)
        self.programs = [steps.draw(draw, WORLD.size, draw.randrange(1000)) for _ in range(options.programs)]
        self.seed = options.seed
        Doing.what = "jaxmpi.get_default"
        self.runner = steps.Runner(jaxmpi.get_default())  # a spare rank waits
        Doing.what = "Python"
        self.number = self.done = self.recovered = 0
        self.slowest, self.is_in_step = 0.0, False

    def go(self):
        over = False
        while not over:
            try:
                over = self.step(self.is_over())
            except Exception as error:
                if jaxmpi.survive.process_failure(error) is None:
                    raise
                self.recover()

    def step(self, over):
        """Whether it was the last."""
        if not self.is_in_step:  # it has begun, as a spare rank has where the others have recovered
            self.number = self.runner.comm.allreduce(self.number, MPI.MAX) + 1
            self.is_in_step = True
        program = random.Random(self.seed * 1_000_003 + self.number).choice(self.programs)
        Doing.what = f"{program.case}, {program.way}"
        _, got, right = self.runner(program, self.number)
        Doing.what = "Python"
        if wrong := steps.difference(program, got, right):
            print(f"WRONG: rank {WORLD.rank}: step {self.number}, {program}: {wrong}", flush=True)
            raise AssertionError(wrong)
        self.done += 1
        self.number += 1
        if self.number % ROUND:
            return False
        return bool(jaxmpi.allreduce(np.float32(over), MPI.MAX, comm=self.runner.comm) > 0)

    def recover(self):
        begin, Doing.what = time.monotonic(), "recovery"
        self.plan_in_recovery()
        self.runner, self.is_in_step = steps.Runner(jaxmpi.survive.recover(self.runner.comm)), False
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
        f"{run.runner.comm.size} of {WORLD.size} left, {left} in flight",
        flush=True,
    )


if __name__ == "__main__":
    main()
