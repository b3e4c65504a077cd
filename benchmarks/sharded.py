"""The sums of JAX's own sharded programs, carried by MPI and by gloo: `python benchmarks/sharded.py`.

A process has one of the two, so each is measured in jobs of its own, on two processes; short jobs take turns. Gloo has
threads of its own and runs unbound, as in `make bench-quick`. Prints lines `name: value` as quick.py does; a ratio is
the median of the ratios of each turn of two jobs, one right after the other.

In a job a step is the sum over both processes of an array each, by `psum` in `shard_map`, and then a multiplication by
a number that differs from process to process: so data is not zero, changes with every call, and would be wrong if it
had not moved. A step by `jaxmpi.allreduce` under `jaxmpi.jit` is measured beside it. The kinds of call:

  jit    a compiled call per step, which works on the result of the call before and is waited for
  loop   some steps in a `lax.fori_loop` inside one compiled call

What a batch of calls has made of its data is compared with NumPy's, every element, bit by bit, when the clock has
stopped. One job alone prints seconds per step as JSON:

    python -m jaxmpi.run -n 2 --collectives mpi benchmarks/sharded.py --job
"""

import argparse
import sys

import jobs
import numpy as np
from loops import repeated

from jaxmpi._bench.data import count_wrong
from jaxmpi._bench.report import conclude, figure
from jaxmpi._bench.timing import Batch, ratio, take_turns

SIZES = {"4B": 4, "1KiB": 1 << 10, "1MiB": 1 << 20, "16MiB": 16 << 20}
CASES = {  # size, kind of call: calls in a batch, and steps in a call
    ("4B", "jit"): (100, 1),
    ("1KiB", "jit"): (100, 1),
    ("1MiB", "jit"): (10, 1),
    ("16MiB", "jit"): (2, 1),
    ("4B", "loop"): (3, 100),
    ("1MiB", "loop"): (1, 10),
}
GOALS = {"4B": ">= 40", "loop_4B": ">= 80", "1KiB": ">= 15", "1MiB": ">= 1.5", "16MiB": ">= 2"}
FACTORS = (0.4, 0.599)  # after a sum; together a little less than one


# --- a job ---------------------------------------------------------------------------------------------------------


def initial(process: int, count: int, turn: int):
    """What a process starts from: another in every turn, of values in which neighbours and processes differ."""
    return np.float32((1 + turn) * (1 + np.arange(count) * 40503 % 65521 / 65521) * (1 + process / 2))


def after(process: int, count: int, turn: int, steps: int):
    """What these steps must make of it. Two numbers have one sum, whatever the order."""
    both = [initial(other, count, turn) for other in range(2)]
    for _ in range(steps):
        total = both[0] + both[1]
        both = [total * np.float32(factor) for factor in FACTORS]
    return both[process]


def contenders():
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    if jax.process_count() != 2:
        sys.exit("sharded.py --job needs two processes: python -m jaxmpi.run -n 2 --collectives mpi ... --job")
    from mpi4py import MPI

    import jaxmpi

    own = jax.process_index()
    mesh = jax.make_mesh((2,), ("processes",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("processes")
    sharding = NamedSharding(mesh, spec)
    factor = np.float32(FACTORS[own : own + 1])

    def psum(x, factor):
        return jax.lax.psum(x, "processes") * factor

    def allreduce(x, factor):
        return jaxmpi.allreduce(x, MPI.SUM) * factor

    def on_mesh(x):
        return jax.make_array_from_process_local_data(sharding, x)

    def batch(size, calls, steps, step, put):
        count = SIZES[size] // 4

        def run(given):
            x, factor = given
            for _ in range(calls):
                x = jax.block_until_ready(step(x, factor))
            return x

        def wrong(turn, x):
            right = after(own, count, turn, calls * steps)
            return count_wrong(x.addressable_data(0), right) + int(not right.all())

        return Batch(calls * steps, lambda turn: (put(initial(own, count, turn)), put(factor)), run, wrong)

    made = {}
    for (size, kind), (calls, steps) in CASES.items():
        for name, step, put in (("psum", psum, on_mesh), ("allreduce", allreduce, jnp.asarray)):

            def call(x, factor, step=step, steps=steps):
                return step(x, factor) if steps == 1 else repeated(lambda y: step(y, factor), steps)(x)

            if name == "psum":
                compiled = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec))
            else:
                compiled = jaxmpi.jit(call)
            made[f"{name} {kind} {size}"] = batch(size, calls, steps, compiled, put)
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--job", action="store_true", help="measure in this job, which has two processes")
    parser.add_argument("--rounds", type=int, default=5, help="jobs of each kind (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=7, help="batches in a job (default: %(default)s)")
    options = parser.parse_args()
    if options.job:
        jobs.tell(take_turns(contenders(), options.batches))
        return
    kinds = {kind: jobs.sharded(kind, __file__, "--batches", options.batches) for kind in ("gloo", "mpi")}
    samples = jobs.take_turns(kinds, options.rounds)
    for size, kind in CASES:
        name, call = size if kind == "jit" else f"loop_{size}", f"{kind} {size}"
        psum, by_gloo, ours = (("mpi", f"psum {call}"), ("gloo", f"psum {call}"), ("mpi", f"allreduce {call}"))
        figure(f"sharded_psum_gloo_vs_mpi_{name}", ratio(samples, by_gloo, psum), GOALS.get(name, ""))
        figure(f"sharded_psum_mpi_vs_allreduce_{name}", ratio(samples, psum, ours))
        if kind == "loop":
            figure(f"psum_gloo_vs_ours_{size}", ratio(samples, by_gloo, ours), {"4B": ">= 50", "1MiB": ">= 2"}[size])
    shown = {}
    for (kind, name), sample in samples.items():
        ours = kind == "mpi" or name.startswith("allreduce")
        shown[f"{'jaxmpi, ' if ours else ''}{name}, job over {kind}"] = sample
    conclude("sharded_wrong_elements", {"sums over two processes": shown})


if __name__ == "__main__":
    main()
