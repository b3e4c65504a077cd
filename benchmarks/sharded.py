"""The sums of JAX's own sharded programs, carried by MPI and by gloo: `python benchmarks/sharded.py`.

A process has one of the two, so each is measured in jobs of its own, on two processes; short jobs take turns. Gloo has
threads of its own and runs unbound, as in `make bench-quick`. Prints lines `name: value` as quick.py does; a ratio is
the median of the rounds' ratios, each of two jobs one right after the other.

In a job a step is the sum over both processes of an array each, by `psum` in `shard_map`, and then a multiplication by
a number that differs from process to process: so data is not zero, changes with every call, and would be wrong if it
had not moved. A step by `jaxmpi.allreduce` under `jaxmpi.jit` is measured beside it. The kinds of call:

  jit    a compiled call per step, which works on the result of the call before and is waited for
  loop   100 steps in a `lax.fori_loop` inside one compiled call

What a batch of calls has made of its data is compared with NumPy's, every element, bit by bit, when the clock has
stopped. One job alone prints its medians as JSON, in seconds per step:

    python -m jaxmpi.run -n 2 --collectives mpi benchmarks/sharded.py --job
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

SIZES = {"4B": 4, "1KiB": 1 << 10, "1MiB": 1 << 20, "16MiB": 16 << 20}
CALLS = {"4B": 100, "1KiB": 100, "1MiB": 10, "16MiB": 2}
LOOP = 100
GOALS = {"4B": ">= 40", "loop_4B": ">= 80", "1KiB": ">= 15", "1MiB": ">= 1.5", "16MiB": ">= 2"}
FACTORS = (0.4, 0.599)  # after a sum; together a little less than one
WRONG = "wrong_elements"
UNBOUND = {
    "PJRT_NPROC": str(len(os.sched_getaffinity(0))),
    "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=true",
}
"""With these each process may use all cores."""


# --- a job ---------------------------------------------------------------------------------------------------------


def initial(process: int, count: int, turn: int):
    """What a process starts from: another in every turn, of values in which neighbours and processes differ."""
    import numpy as np

    return np.float32((1 + turn) * (1 + np.arange(count) * 40503 % 65521 / 65521) * (1 + process / 2))


def after(process: int, count: int, turn: int, steps: int):
    """What these steps must make of it. Two numbers have one sum, whatever the order."""
    import numpy as np

    both = [initial(other, count, turn) for other in range(2)]
    for _ in range(steps):
        total = both[0] + both[1]
        both = [total * np.float32(factor) for factor in FACTORS]
    return both[process]


def run_job(batches: int) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    if jax.process_count() != 2:
        sys.exit("sharded.py --job needs two processes: python -m jaxmpi.run -n 2 --collectives mpi ... --job")
    from mpi4py import MPI

    import jaxmpi

    own, world = jax.process_index(), MPI.COMM_WORLD
    mesh = jax.make_mesh((2,), ("processes",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("processes")
    sharding = NamedSharding(mesh, spec)
    factor = np.float32(FACTORS[own : own + 1])

    def psum(x: jax.Array, factor: jax.Array) -> jax.Array:
        return jax.lax.psum(x, "processes") * factor

    def allreduce(x: jax.Array, factor: jax.Array) -> jax.Array:
        return jaxmpi.allreduce(x, MPI.SUM) * factor

    def repeated(step: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return lambda x, factor: jax.lax.fori_loop(0, LOOP, lambda _, y: step(y, factor), x)

    def sharded(step: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec))

    def on_mesh(x: np.ndarray) -> jax.Array:
        return jax.make_array_from_process_local_data(sharding, x)

    measures = []  # name, size, steps in a call, calls in a batch, step, where its data is put
    for size, calls in CALLS.items():
        measures += [
            (f"psum_jit_{size}", size, 1, calls, sharded(psum), on_mesh),
            (f"allreduce_jit_{size}", size, 1, calls, jaxmpi.jit(allreduce), jnp.asarray),
        ]
    measures += [
        ("psum_loop_4B", "4B", LOOP, 3, sharded(repeated(psum)), on_mesh),
        ("allreduce_loop_4B", "4B", LOOP, 3, jaxmpi.jit(repeated(allreduce)), jnp.asarray),
    ]
    seconds: dict[str, list[float]] = {name: [] for name, *_ in measures}
    wrong = 0
    for turn in range(batches + 1):  # the first compiles, and its time does not count
        for name, size, steps, calls, step, put in measures:
            count = SIZES[size] // 4
            x, scale = jax.block_until_ready((put(initial(own, count, turn)), put(factor)))
            world.Barrier()
            begin = time.perf_counter()
            for _ in range(calls):
                x = jax.block_until_ready(step(x, scale))
            spent = time.perf_counter() - begin
            seconds[name] += [world.allreduce(spent, MPI.MAX) / (calls * steps)] if turn else []
            right = after(own, count, turn, calls * steps)
            wrong += int(np.count_nonzero(np.asarray(x.addressable_data(0)) != right)) + (not right.all())
    wrong = world.allreduce(wrong)
    if own == 0:
        print(json.dumps({name: statistics.median(times) for name, times in seconds.items()} | {WRONG: wrong}))


# --- jobs that take turns ------------------------------------------------------------------------------------------


def start_job(kind: str, batches: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "jaxmpi.run", "-n", "2", "--collectives", kind]
    environment = dict(os.environ)
    if kind == "gloo":
        command += ["--mpiexec-args=--bind-to none"]
        environment.update(UNBOUND)
    command += [__file__, "--job", "--batches", str(batches)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))  # gloo prints, too


def report(name: str, value: float, goal: str = "") -> None:
    print(f"{name}: {value:.4g}" + (f"  (goal {goal})" if goal else ""), flush=True)


def compare(rounds: int, batches: int) -> None:
    jobs: list[dict[str, dict[str, Any]]] = []
    for turn in range(rounds):
        kinds = ("mpi", "gloo") if turn % 2 else ("gloo", "mpi")
        jobs.append({kind: start_job(kind, batches) for kind in kinds})

    def ratio(of: tuple[str, str], to: tuple[str, str]) -> float:
        return statistics.median(job[of[0]][of[1]] / job[to[0]][to[1]] for job in jobs)

    calls = {"4B": "jit_4B", "loop_4B": "loop_4B", **{size: f"jit_{size}" for size in SIZES}}
    for name, call in calls.items():
        value = ratio(("gloo", f"psum_{call}"), ("mpi", f"psum_{call}"))
        report(f"sharded_psum_gloo_vs_mpi_{name}", value, GOALS[name])
    for name, call in calls.items():
        report(f"sharded_psum_mpi_vs_allreduce_{name}", ratio(("mpi", f"psum_{call}"), ("mpi", f"allreduce_{call}")))
    wrong = sum(figures[WRONG] for job in jobs for figures in job.values())
    report("sharded_wrong_elements", wrong, "0")
    print("\nus per step, median of all jobs, and the least and most of one:")
    for call in calls.values():
        for what, kind in (("psum", "gloo"), ("psum", "mpi"), ("allreduce", "mpi")):
            times = sorted(1e6 * job[kind][f"{what}_{call}"] for job in jobs)
            middle = statistics.median(times)
            print(f"  {call:10} {what:9} {kind:5} {middle:>9.4g}  ({times[0]:.4g} - {times[-1]:.4g})")
    if wrong:
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--job", action="store_true", help="measure in this job, which has two processes")
    parser.add_argument("--rounds", type=int, default=5, help="jobs of each kind (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=7, help="batches in a job (default: %(default)s)")
    options = parser.parse_args()
    if options.job:
        run_job(options.batches)
    else:
        compare(options.rounds, options.batches)


if __name__ == "__main__":
    main()
