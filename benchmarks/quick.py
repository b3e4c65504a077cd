"""The figures that the project is held to, in less than a minute: `make bench-quick`.

    python -m jaxmpi.run -n 2 benchmarks/quick.py

Prints lines `name: value`, with the goal where there is one; every ratio is the median of the ratios of each turn. What
is measured, and how, is written in contenders.py. All data is checked: `wrong_elements` counts
elements of jaxmpi, and more than none is an error.
"""

from contenders import EACH, TOGETHER, build, build_donated, build_trees
from peers import MISSING

from jaxmpi._bench.report import conclude, figure
from jaxmpi._bench.timing import ratio, take_turns

LARGE, LEAVES = 16 << 20, 100
LONG = 0.25
"""Seconds of a batch of large arrays: a compiled call writes to fresh memory, which is not part of a step."""

OURS, PEER, PLAIN = (("jit", name) for name in ("jaxmpi", "mpi4jax", "x + 1"))
EAGER, PEER_EAGER = (("eager", name) for name in ("jaxmpi", "mpi4jax"))
DONATED, PEER_DONATED = (("jit", f"{name}, donated") for name in ("jaxmpi", "mpi4jax"))
LOOP, PEER_LOOP, FLOOR, BY_NUMPY = (("loop", name) for name in ("jaxmpi", "mpi4jax", "C", "mpi4py"))
TRACED, REQUESTS = ("loop", "jaxmpi, traced ranks"), ("loop", "jaxmpi, requests")


def measure(operation, nbytes, rounds, seconds, only=None):
    return take_turns(build(operation, nbytes, seconds, only=only), rounds)


def measure_sendrecv():
    """As it is, with ranks that are known at run time only, and by requests."""
    contenders = build("sendrecv", 4, 0.02, only=[LOOP, PEER_LOOP, FLOOR])
    for name, operation in ((TRACED, "sendrecv, traced"), (REQUESTS, "sendrecv by requests")):
        contenders[name] = build(operation, 4, 0.02, only=[LOOP])[LOOP]
    return take_turns(contenders, 25)


def main():
    small, exchange = measure("allreduce", 4, 25, 0.02), measure_sendrecv()
    counts = {
        "4KiB": measure("alltoallv", 4 << 10, 15, 0.03, [LOOP, FLOOR, BY_NUMPY]),
        "1MiB": measure("alltoallv", 1 << 20, 15, LONG, [LOOP, FLOOR, BY_NUMPY]),
    }
    large = measure("allreduce", LARGE, 9, LONG, [LOOP, PEER_LOOP, FLOOR, ("loop", "C, in place")])
    alone = take_turns(build_donated(LARGE, 10), 9)
    trees = {nbytes: take_turns(build_trees(LEAVES, nbytes, 0.02), 9) for nbytes in (4, 4096)}

    figure("jit_call_us", 1e6 * small[OURS].median)
    figure("plain_jit_call_us", 1e6 * small[PLAIN].median)
    figure("jit_call_vs_plain_jax", ratio(small, OURS, PLAIN), "<= 2.0")
    figure("jit_call_vs_mpi4jax", ratio(small, PEER, OURS), ">= 18")
    figure("eager_call_us", 1e6 * small[EAGER].median)
    figure("eager_call_vs_mpi4jax", ratio(small, PEER_EAGER, EAGER), ">= 800")
    figure("eager_call_vs_jit_call", ratio(small, EAGER, OURS), "<= 2.5")
    figure("loop_allreduce_4B_overhead", ratio(small, LOOP, PEER_LOOP, less=FLOOR), "<= 0.4")
    figure("loop_sendrecv_4B_overhead", ratio(exchange, LOOP, PEER_LOOP, less=FLOOR), "<= 0.3")
    figure("loop_sendrecv_traced_peer_vs_static", ratio(exchange, TRACED, LOOP), "<= 1.2")
    figure("isend_irecv_vs_sendrecv", ratio(exchange, REQUESTS, LOOP), "<= 1.5")
    for size, samples in counts.items():
        figure(f"alltoallv_{size}_overhead", ratio(samples, LOOP, BY_NUMPY, less=FLOOR), "<= 0.4")
        figure(f"alltoallv_{size}_vs_raw_c", ratio(samples, LOOP, FLOOR))
    figure("loop_allreduce_16MiB_vs_raw_c", ratio(large, LOOP, FLOOR), "<= 0.95")
    figure("jit_donated_allreduce_16MiB_vs_mpi4jax", ratio(alone, PEER_DONATED, DONATED), ">= 3")
    for nbytes, samples in trees.items():
        for kind in ("loop", "jit", "eager"):
            value = ratio(samples, (kind, EACH), (kind, TOGETHER))
            figure(f"{kind}_{LEAVES}_leaves_of_{nbytes}B_each_alone_vs_together", value, ">= 1")
    groups = {f"allreduce of {LEAVES} leaves of {nbytes} B": samples for nbytes, samples in trees.items()}
    groups |= {"allreduce of 4 B": small, "sendrecv of 4 B": exchange}
    groups |= {f"alltoallv of {size} to each rank": samples for size, samples in counts.items()}
    groups |= {"allreduce of 16 MiB": large, "allreduce of 16 MiB, jit, no multiplication": alone}
    conclude("wrong_elements", groups, missing=MISSING)


if __name__ == "__main__":
    main()
