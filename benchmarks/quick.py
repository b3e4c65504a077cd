"""The figures that the project is held to, in less than a minute: `make bench-quick`.

    python -m jaxmpi.run -n 2 benchmarks/quick.py
    python -m jaxmpi.run -n 2 benchmarks/quick.py --gloo

Prints lines `name: value`, with the goal where there is one; every ratio is one of medians of batches that took turns
in this run. What is measured, and how, is written in contenders.py. All data is checked: `wrong_elements` counts those
of jaxmpi, and more than none is an error.
"""

import argparse
import statistics

from contenders import EACH, MISSING, RANK, TOGETHER, build, build_donated, build_trees, finish, is_ours, sample

LARGE, LEAVES = 16 << 20, 100
LONG = 0.25
"""Seconds of a batch of large arrays: a compiled call writes to fresh memory, which is not part of a step."""


def measure(operation, nbytes, rounds, seconds, only=None):
    """(kind, contender) -> sample; those that cannot take part are missing."""
    return sample(build(operation, nbytes, seconds, only=only), rounds)


def median(times, key):
    """None where the contender is missing."""
    return statistics.median(times[key].seconds) if key in times else None


def ratio(times, key, reference, floor=None):
    """Median of `key` over that of `reference`, both less that of `floor`; None where one is missing."""
    value, base = median(times, key), median(times, reference)
    least = median(times, floor) if floor else 0.0
    return None if None in (value, base, least) else (value - least) / (base - least)


def report(name, value, goal="", unit=""):
    if RANK == 0:
        text = "-" if value is None else f"{value:.4g}"
        print(f"{name}: {text}{unit}" + (f"  (goal {goal})" if goal else ""), flush=True)


def report_times(title, times):
    if RANK == 0:
        print(f"\n{title}, us per call, median and quartiles, wrong elements:")
        for (kind, name), figures in times.items():
            low, middle, high = (f"{1e6 * value:.4g}" for value in statistics.quantiles(figures.seconds, n=4))
            print(f"  {kind:5} {name:18} {middle:>8}  ({low} - {high})  wrong: {figures.wrong}")


def report_all(name, groups):
    """What was wrong in all that was measured, under this name, and the times behind the figures."""
    ours = [figures for times in groups.values() for (_, who), figures in times.items() if is_ours(who)]
    report(name, sum(figures.wrong for figures in ours), "0")
    for title, times in groups.items():
        report_times(title, times)
    return groups


def compare_with_gloo():
    """JAX's own collectives, in a job of their own."""
    keys = [(kind, name) for kind in ("loop", "jit") for name in ("jaxmpi", "psum, gloo")]
    times = {nbytes: measure("allreduce", nbytes, 9, 0.03, keys) for nbytes in (4, 1 << 20)}
    report("psum_gloo_vs_ours_4B", ratio(times[4], *keys[1::-1]), ">= 50")
    report("psum_gloo_vs_ours_1MiB", ratio(times[1 << 20], *keys[1::-1]), ">= 2")
    return report_all(
        "wrong_elements_beside_gloo",
        {"allreduce of 4 B, beside gloo": times[4], "allreduce of 1 MiB, beside gloo": times[1 << 20]},
    )


def compare():
    ours, peer, plain = (("jit", name) for name in ("jaxmpi", "mpi4jax", "x + 1"))
    eager, peer_eager = (("eager", name) for name in ("jaxmpi", "mpi4jax"))
    donated, peer_donated = (("jit", f"{name}, donated") for name in ("jaxmpi", "mpi4jax"))
    loop, peer_loop, floor = loops = [("loop", name) for name in ("jaxmpi", "mpi4jax", "C")]
    small = measure("allreduce", 4, 25, 0.02)
    traced = "loop", f"{ours[1]}, traced ranks"
    exchanges = build("exchange", 4, 0.02, only=loops)
    exchanges[traced] = build("exchange, traced", 4, 0.02, only=[loop_of_ours := ("loop", "jaxmpi")])[loop_of_ours]
    requests = "loop", f"{ours[1]}, requests"
    exchanges[requests] = build("exchange by requests", 4, 0.02, only=[loop_of_ours])[loop_of_ours]
    exchange = sample(exchanges, 25)
    by_numpy = "loop", "mpi4py"
    counts = {
        nbytes: measure("alltoallv", nbytes, 15, seconds, [loop, floor, by_numpy])
        for nbytes, seconds in ((4 << 10, 0.03), (1 << 20, LONG))
    }
    large = measure("allreduce", LARGE, 9, LONG, [*loops, ("loop", "C, in place")])
    alone = sample(build_donated(LARGE, 10), 9)
    trees = {nbytes: sample(build_trees(LEAVES, nbytes, 0.02), 9) for nbytes in (4, 4096)}

    report("jit_call_us", 1e6 * median(small, ours))
    report("plain_jit_call_us", 1e6 * median(small, plain))
    report("jit_call_vs_plain_jax", ratio(small, ours, plain), "<= 2.0")
    report("jit_call_vs_mpi4jax", ratio(small, peer, ours), ">= 18")
    report("eager_call_us", 1e6 * median(small, eager))
    report("eager_call_vs_mpi4jax", ratio(small, peer_eager, eager), ">= 800")
    report("eager_call_vs_jit_call", ratio(small, eager, ours), "<= 2.5")
    report("loop_allreduce_4B_overhead", ratio(small, loop, peer_loop, floor), "<= 0.4")
    report("loop_sendrecv_4B_overhead", ratio(exchange, loop, peer_loop, floor), "<= 0.3")
    report("loop_sendrecv_traced_peer_vs_static", ratio(exchange, traced, loop), "<= 1.2")
    report("isend_irecv_vs_sendrecv", ratio(exchange, requests, loop), "<= 1.5")
    for nbytes, times in counts.items():
        size = f"{nbytes >> 10}KiB" if nbytes < 1 << 20 else f"{nbytes >> 20}MiB"
        report(f"alltoallv_{size}_overhead", ratio(times, loop, by_numpy, floor), "<= 0.4")
        report(f"alltoallv_{size}_vs_raw_c", ratio(times, loop, floor))
    report("loop_allreduce_16MiB_vs_raw_c", ratio(large, loop, floor), "<= 0.95")
    report("jit_donated_allreduce_16MiB_vs_mpi4jax", ratio(alone, peer_donated, donated), ">= 3")
    for nbytes, times in trees.items():
        for kind in ("loop", "jit", "eager"):
            value = ratio(times, (kind, EACH), (kind, TOGETHER))
            report(f"{kind}_{LEAVES}_leaves_of_{nbytes}B_each_alone_vs_together", value, ">= 1")
    return report_all(
        "wrong_elements",
        {
            **{f"allreduce of {LEAVES} leaves of {nbytes} B": times for nbytes, times in trees.items()},
            "allreduce of 4 B": small,
            "exchange of 4 B": exchange,
            **{f"alltoallv of {nbytes} B to each rank": times for nbytes, times in counts.items()},
            "allreduce of 16 MiB": large,
            "allreduce of 16 MiB, jit, no multiplication": alone,
        },
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gloo", action="store_true", help="the lines about JAX's own collectives; the others without")
    groups = (compare_with_gloo if parser.parse_args().gloo else compare)()
    if RANK == 0:
        for name, why in MISSING.items():
            print(f"{name} is missing: {why}")
    finish((title, name, value.wrong) for title, times in groups.items() for (_, name), value in times.items())


if __name__ == "__main__":
    main()
