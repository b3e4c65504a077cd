"""A long mixed run, each result of which is checked: python -m jaxmpi.run -n 4 tests/programs/soak.py.

Each rank has some Python threads, each with a communicator of its own. A thread executes steps in an order that is
drawn from a seed, the same on all ranks: an operation, eagerly, compiled, in a loop or in a derivative, on data that
every rank can compute for all ranks. So NumPy says what is right, and nothing is communicated for that.

Counted are the calls of operations that a rank executes: in a loop one for each iteration, `send` and `recv` each, a
pytree once. What derivatives communicate in addition, and what mpi4py communicates, is not counted.

Memory, threads, files and communicators of each rank are measured after the first half, and at the end. By half each
program has been compiled, and memory that the longest messages need at once has mostly been needed. The exit status is
1 if a result was wrong, a message is left over, the ranks have not done the same, or something has grown.
"""

import argparse
import ctypes
import faulthandler
import gc
import os
import random
import sys
import threading
import time
import zlib
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # of what the tests share
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_ENABLE_X64", "1")
# There are more threads than cores, so those that wait make room for others (Open MPI).
os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
# Threads that communicate need a thread of XLA's each (docs/running.md, "Threads").
os.environ["PJRT_NPROC"] = "8"

import jax
from mpi4py import MPI

from fuzzing import steps
from jaxmpi import _core
from jaxmpi._mpi import communicators
from jaxmpi._primitive import operation

MOST_THREADS = int(os.environ["PJRT_NPROC"])
CHUNK = 3000
"""Elements beyond which arrays are sent in parts."""


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operations", type=int, default=250_000, help="on each rank, by all its threads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="of each rank, each with a communicator")
    number = 3 * len(steps.OPERATIONS)
    parser.add_argument("--programs", type=int, default=number, help="of each thread, from which its steps are drawn")
    parser.add_argument("--operation", action="append", choices=steps.OPERATIONS, help="one of a few; may be repeated")
    parser.add_argument("--duplicate", type=int, default=500, help="steps after which a communicator is made and freed")
    parser.add_argument("--growth", type=float, default=24, help="MiB of memory by which a rank may have grown")
    parser.add_argument("--hang", type=float, default=120, help="seconds without a step after which the job is ended")
    chosen = parser.parse_args()
    if chosen.threads > MOST_THREADS:
        parser.error(f"at most {MOST_THREADS} threads")
    return chosen


class Worker:
    """A thread's part: the same steps on all ranks of its communicator."""

    def __init__(self, number, comm, chosen):
        self.comm, self.chosen = comm, chosen
        self.generator = random.Random(f"{chosen.seed} {number}")
        operations = chosen.operation or steps.OPERATIONS
        self.programs = [steps.draw(self.generator, comm.size, i, operations) for i in range(chosen.programs)]
        self.runner = steps.Runner(comm)
        self.steps, self.operations, self.checksum = 0, 0, 0
        self.counts, self.wrong = Counter(), []

    def warm_up(self):
        for program in self.programs:
            self.execute(program)
        for _ in range(5):
            self.duplicate()

    def run(self, operations):
        """Steps until so many operations are done."""
        while self.operations < operations:
            if self.steps % self.chosen.duplicate == 0:
                self.duplicate()
            self.execute(self.generator.choice(self.programs))

    def duplicate(self):
        """Operations on a communicator that is then freed."""
        comm = self.comm.Dup()
        runner = steps.Runner(comm)
        for way, compiler in (("eager", "no jit"), ("jit", "jaxmpi.jit")):
            program = steps.Program("allreduce", way, compiler, (((3,), "float64"),), "SUM", 0, 1)
            self.execute(program, runner)
        jax.effects_barrier()
        comm.Free()

    def execute(self, program, runner=None):
        """One step, on the thread's communicator or on another one, which does not live long."""
        self.steps += 1
        xs, got, right = (runner or self.runner)(program, self.steps)
        self.check(program, got, right)
        for x in xs:
            self.checksum = zlib.crc32(x[0].tobytes(), self.checksum)

    def check(self, program, got, right):
        if why := steps.difference(program, got, right):
            self.wrong.append(why)
            if len(self.wrong) <= 5:
                name = threading.current_thread().name
                print(f"WRONG: step {self.steps} of {name}, {program}: {why}", file=sys.stderr, flush=True)
        self.operations += program.calls
        self.counts[program.case, program.way, program.compiler] += program.calls


def in_threads(workers, work, chosen, tells=False):
    """Calls `work` for each worker in a thread of its own, and ends the job if nothing is done for so long."""
    threads = [threading.Thread(target=work, args=(worker,), name=f"thread {i}") for i, worker in enumerate(workers)]
    for thread in threads:
        thread.start()
    seen, told = -1, time.monotonic()
    while any(thread.is_alive() for thread in threads):
        if (done := sum(worker.steps for worker in workers)) != seen:
            seen = done
            faulthandler.dump_traceback_later(chosen.hang, exit=True)
        if tells and time.monotonic() > told + 30:
            told, operations = time.monotonic(), sum(worker.operations for worker in workers)
            print(f"{operations} of {chosen.operations} operations", file=sys.stderr, flush=True)
        threads[-1].join(0.5)
        time.sleep(0.01)
    faulthandler.cancel_dump_traceback_later()


def measure():
    """What must not grow, on this rank. Free memory that the C library keeps is given back first."""
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    memory = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20
    return {
        "MiB": round(memory, 1),
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "communicators": len(communicators.known()),
        "eager programs": operation.eager_programs(),
    }


def problems(workers, before, after, chosen):
    """What is wrong on this rank, or between the ranks, in words."""
    yield from (f"{worker.wrong[0]} (and {len(worker.wrong)} such)" for worker in workers if worker.wrong)
    for i, worker in enumerate(workers):
        done = (worker.steps, worker.operations, worker.checksum)
        if any(other != done for other in worker.comm.allgather(done)):
            yield f"thread {i}: the ranks have not done the same: steps, operations and checksum are {done} here"
        if worker.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG):
            yield f"thread {i}: a message has not been received"
    if after["MiB"] > before["MiB"] + chosen.growth:
        yield f"memory has grown by {after['MiB'] - before['MiB']:.1f} MiB"
    yield from (
        f"{name}: {after[name]} after {before[name]}" for name in list(before)[1:] if after[name] > before[name]
    )


def counted(workers, part):
    """How many operations were executed, by a part of what they are counted by."""
    counts = Counter()
    for worker in workers:
        for key, count in worker.counts.items():
            counts[key[part]] += count
    return ", ".join(f"{key} {count}" for key, count in sorted(counts.items()))


def table(workers, seconds, measured):
    world = MPI.COMM_WORLD
    operations, steps = (sum(getattr(worker, name) for worker in workers) for name in ("operations", "steps"))
    version = MPI.Get_library_version().split(",")[0].split("\n")[0]
    print(f"\n{version}, JAX {jax.__version__}: {world.size} ranks, {len(workers)} threads each, {seconds:.0f} s")
    print(f"operations of each rank: {operations}, in {steps} checked steps; of all ranks: {world.size * operations}")
    for part, title in enumerate(("by operation", "by surroundings", "by compiler")):
        print(f"  {title}: {counted(workers, part)}")
    names = list(measured[0][0])
    print("rank, after the first half -> at the end: " + ", ".join(names))
    for rank, (before, after) in enumerate(measured):
        print(f"  {rank}: " + ", ".join(f"{before[name]} -> {after[name]}" for name in names))


def main():
    chosen, world, begun = arguments(), MPI.COMM_WORLD, time.monotonic()
    _core.configure(max_count=CHUNK)
    # The ranks of every other communicator are in reverse order, so that ranks in them are not those of the world.
    comms = [world.Split(0, -world.rank if i % 2 else world.rank) for i in range(chosen.threads)]
    workers = [Worker(i, comm, chosen) for i, comm in enumerate(comms)]
    each = chosen.operations // chosen.threads
    in_threads(workers, Worker.warm_up, chosen)
    in_threads(workers, lambda worker: worker.run(each // 2), chosen, world.rank == 0)
    before = measure()
    in_threads(workers, lambda worker: worker.run(each), chosen, world.rank == 0)
    after = measure()
    found = world.gather(list(problems(workers, before, after, chosen)))
    measured = world.gather((before, after))
    if world.rank == 0:
        table(workers, time.monotonic() - begun, measured)
        print(*(f"rank {rank}: {problem}" for rank, some in enumerate(found) for problem in some), sep="\n")
        print("FAILED" if any(found) else "all results are right, and nothing has grown", flush=True)
    return world.bcast(found and int(any(found)))


if __name__ == "__main__":
    sys.exit(main())
