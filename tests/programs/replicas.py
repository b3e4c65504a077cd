"""Ranks that are killed at random times while all save a state in a `jaxmpi.survive.Replica`:
python -m jaxmpi.run -n 4 --survive tests/programs/replicas.py --seed 1 --deaths 2. Ranks of --spare 2 step in.

The state of step k is known to all, so what `restore` returns is compared with that of the step that it names, to the
last bit, and that must not be older than the last save that was complete. With as many copies as ranks die nothing may
be lost. Who dies, when, and by which signal is drawn from the seed, as in deaths.py. Each of the others ends with a
line that begins with OK.
"""

import argparse
import random

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import deaths
import jaxmpi

WORLD = MPI.COMM_WORLD
SHAPE = 30, 41


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deaths", type=int, default=1, help="of ranks, fewer than there are")
    parser.add_argument("--seconds", type=float, default=4, help="within which they die")
    return parser.parse_args()


def block(grid, whole, staggered=(0, 0)):
    slices = [slice(s.start, s.stop + extra) for s, extra in zip(grid.slices, staggered, strict=True)]
    return whole[(..., *slices)]


def state(grid, step):
    """That of a step: fields of several dtypes, one staggered, one with an axis in front; and what is no field."""
    ny, nx = grid.global_shape
    cells = np.arange(ny * nx).reshape(ny, nx)
    faces = np.arange(2 * (ny + 1) * nx, dtype=np.int32).reshape(2, ny + 1, nx)
    fields = {
        "h": jnp.pad(block(grid, (cells + 7 * step).astype(np.float32)), 1),
        "v": np.pad(block(grid, faces - step, (1, 0)), [(0, 0), (1, 1), (1, 1)]),
        "half": jnp.pad(block(grid, (cells % 8).astype(jnp.bfloat16)), 1),
        "wet": jnp.pad(block(grid, cells % (step + 2) == 0), 1),
    }
    return {"fields": fields, "step": step, "key": jax.random.key(step), "weights": np.full((3, 3), step)}


def divisions(grid):
    return {"fields": grid, "step": None, "key": None, "weights": None}


def plain(x):
    is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def check(found, expected):
    leaves, structure = jax.tree.flatten(found)
    others, its = jax.tree.flatten(expected)
    assert structure == its
    for x, y in zip(leaves, others, strict=True):
        if type(x) is not type(y) or plain(x).dtype != plain(y).dtype or not np.array_equal(plain(x), plain(y)):
            print(f"WRONG: rank {WORLD.rank}: step {expected['step']}: {x}, not {y}", flush=True)
            raise AssertionError


class Run(deaths.Deaths):
    def __init__(self, options):
        super().__init__(options, random.Random(options.seed))
        deaths.Doing.what = "jaxmpi.get_default"
        self.comm = jaxmpi.get_default()  # a spare rank waits
        deaths.Doing.what = "Python"
        self.grid = self.made()
        self.step, self.complete, self.saves, self.restored = None, 0, 0, 0
        kept = {"grid": divisions(self.grid), "width": {"fields": 1}, "copies": max(1, options.deaths)}
        self.replica = jaxmpi.survive.Replica(state(self.grid, 0), save=False, **kept)

    def made(self):
        return jaxmpi.Grid((0, 0), SHAPE, comm=self.comm)

    def go(self):
        over = False
        while not over:
            try:
                over = self.advance(self.is_over())
                if over:
                    with jaxmpi.survive.deaths(self.comm, uniform=True):
                        self.back()
            except Exception as error:
                if jaxmpi.survive.process_failure(error) is None:
                    raise
                over = False
                self.recover()

    def advance(self, over):
        """One step. Whether it was the last."""
        if self.step is None:
            self.back()
        before = self.step
        deaths.Doing.what = "save"
        self.replica.save(state(self.grid, self.step + 1))
        self.step, self.complete = self.step + 1, before
        self.saves += 1
        deaths.Doing.what = "step"
        halos = self.grid.exchange(jnp.ones([size + 2 for size in self.grid.local_shape]))
        return float(jaxmpi.allreduce(halos[0, 0] * 0 + over, MPI.MAX, comm=self.comm)) > 0

    def recover(self):
        deaths.Doing.what = "recovery"
        self.plan_in_recovery()
        self.comm = jaxmpi.survive.recover(self.comm)
        self.grid, self.step = self.made(), None

    def back(self):
        deaths.Doing.what = "restore"
        found = self.replica.restore(self.grid)
        if found is not None:
            check(found, state(self.grid, found["step"]))
        step = 0 if found is None else found["step"]
        if step < self.complete:
            print(f"WRONG: rank {WORLD.rank}: back to {step}, though {self.complete} was complete", flush=True)
            raise AssertionError
        self.step = self.complete = step
        self.restored += 1


def main():
    run = deaths.through(Run, arguments())
    print(f"OK rank {WORLD.rank}: {run.saves} saves, {run.restored} restored, {run.comm.size} left", flush=True)


if __name__ == "__main__":
    main()
