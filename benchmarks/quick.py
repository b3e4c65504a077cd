"""The figures that the project is held to, in less than a minute: `make bench-quick`.

    python -m jaxmpi.run -n 2 benchmarks/quick.py

Prints lines `name: value`, with the goal where there is one; every ratio is one of medians of batches that took turns
in this run. What is measured, and how, is written in contenders.py.
"""

import argparse
import statistics

import jax
import jax.numpy as jnp
import numpy as np
from contenders import COMM, MISSING, MPI, MPI4JAX, RANK, build, chain, sample

import jaxmpi
from jaxmpi import notoken

LARGE = 16 << 20


def medians(operation, nbytes, rounds, seconds, only):
    """(kind, contender) -> median seconds of one call; those that cannot take part are missing."""
    times = sample(build(operation, nbytes, seconds, only=only), rounds)
    return {key: statistics.median(values) for key, values in times.items()}


def donated(nbytes, rounds, calls):
    """Contender -> median seconds of a jit call of allreduce alone whose operand is donated, or is not."""

    def doubled(mpi):  # the sum doubles with every call, from a value so small that it stays finite
        return lambda x: mpi.allreduce(x, op=MPI.SUM, comm=COMM)

    values = np.full(nbytes // 4, 1e-30, np.float32)
    measures = {}
    for name, mpi, jit in (("jaxmpi", notoken, jaxmpi.jit), ("mpi4jax", MPI4JAX, jax.jit)):
        if name not in MISSING:
            measures[name] = chain(jit(doubled(mpi)), calls, lambda: jnp.array(values))
            measures[f"{name}, donated"] = chain(jit(doubled(mpi), donate_argnums=0), calls, lambda: jnp.array(values))
    return {name: statistics.median(times) for name, times in sample(measures, rounds).items()}


def shallow_water():
    """The shallow-water model on 2 ranks: seconds of mpi4jax's own example over ours. Not part of this file yet."""
    return None


def ratio(times, key, reference, floor=None):
    """times[key] / times[reference], both less times[floor]; None where one is missing."""
    if any(name not in times for name in (key, reference, *([floor] if floor else []))):
        return None
    base = times[floor] if floor else 0.0
    return (times[key] - base) / (times[reference] - base)


def report(name, value, goal="", unit=""):
    if RANK == 0:
        text = "-" if value is None else f"{value:.4g}"
        print(f"{name}: {text}{unit}" + (f"  (goal {goal})" if goal else ""), flush=True)


def report_times(title, times):
    if RANK == 0:
        print(f"\n{title}, us per call:")
        for key, value in times.items():
            print(f"  {' '.join(key) if isinstance(key, tuple) else key}: {value * 1e6:.4g}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-gloo", action="store_true", help="leave JAX's own collectives out, here and in set-up")
    parser.parse_args()
    ours, peer, gloo = ("jit", "jaxmpi"), ("jit", "mpi4jax"), ("jit", "psum, gloo")
    eager, peer_eager = ("eager", "jaxmpi"), ("eager", "mpi4jax")
    loop, peer_loop, floor, gloo_loop = (("loop", name) for name in ("jaxmpi", "mpi4jax", "C", "psum, gloo"))
    loops = (floor, loop, peer_loop)

    small = medians("allreduce", 4, 25, 0.02, None)
    exchange = medians("exchange", 4, 25, 0.02, loops)
    medium = medians("allreduce", 1 << 20, 9, 0.02, (ours, loop, gloo, gloo_loop))
    large = medians("allreduce", LARGE, 9, 0.2, (*loops, ("loop", "C, in place")))
    in_place = donated(LARGE, 7, 10)

    report("jit_call_us", small[ours] * 1e6)
    report("plain_jit_call_us", small["jit", "x + 1"] * 1e6)
    report("jit_call_vs_plain_jax", ratio(small, ours, ("jit", "x + 1")), "<= 2.0")
    report("jit_call_vs_mpi4jax", ratio(small, peer, ours), ">= 18")
    report("eager_call_us", small[eager] * 1e6)
    report("eager_call_vs_mpi4jax", ratio(small, peer_eager, eager), ">= 800")
    report("eager_call_vs_jit_call", ratio(small, eager, ours), "<= 2.5")
    report("loop_allreduce_4B_overhead", ratio(small, loop, peer_loop, floor), "<= 0.4")
    report("loop_sendrecv_4B_overhead", ratio(exchange, loop, peer_loop, floor), "<= 0.3")
    report("loop_allreduce_16MiB_vs_raw_c", ratio(large, loop, floor), "<= 0.95")
    report(
        "jit_donated_allreduce_16MiB_vs_mpi4jax", ratio(in_place, "mpi4jax, donated", "jaxmpi, donated"), ">= 3"
    )
    report("psum_gloo_vs_ours_4B", ratio(small, gloo_loop, loop), ">= 50")
    report("psum_gloo_vs_ours_1MiB", ratio(medium, gloo_loop, loop), ">= 2")
    report("shallow_water_2_ranks_vs_mpi4jax", shallow_water(), ">= 1.5")
    report_times("allreduce of 4 B", small)
    report_times("exchange of 4 B", exchange)
    report_times("allreduce of 1 MiB", medium)
    report_times("allreduce of 16 MiB", large)
    report_times("allreduce of 16 MiB, jit, no multiplication", in_place)
    if RANK == 0:
        for name, why in MISSING.items():
            print(f"{name} is missing: {why}")


if __name__ == "__main__":
    main()
