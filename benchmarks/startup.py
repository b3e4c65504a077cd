"""What comes before and beside the calls: import, the first call, memory. Part of `make bench`.

    python benchmarks/startup.py

Starts jobs of 2 ranks in turn, each measuring one package in fresh processes: jaxmpi, mpi4jax, and mpi4py alone, which
is what both need beside JAX. The slowest or largest rank counts. Memory is the proportional set size: what is the
process's own, and its share of what it has in common with others.
"""

import argparse
import gc
import importlib.util
import json
import resource
import statistics
import time

import jobs
import scale

from jaxmpi._bench.report import figure

PACKAGES = ("mpi4py", "jaxmpi", "mpi4jax")
EAGER_CALLS = 200


def job(package):
    """Measure on every rank. Rank 0 prints."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from mpi4py import MPI

    def seconds(function):
        MPI.COMM_WORLD.Barrier()
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    def memory():
        gc.collect()
        MPI.COMM_WORLD.Barrier()
        size = scale.memory() / 1024
        MPI.COMM_WORLD.Barrier()
        return size

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    def through_host(x):
        result = np.empty_like(x)
        MPI.COMM_WORLD.Allreduce(np.asarray(x), result, MPI.SUM)
        return jnp.asarray(result)

    def eager():
        y = x
        for _ in range(EAGER_CALLS):
            y = allreduce(x).block_until_ready()
        return y

    x = jnp.arange(1.0, 1025.0).block_until_ready()  # starts JAX's backend
    before = memory()
    figures = {"import [s]": seconds(lambda: importlib.import_module(package))}
    figures["memory of the import [MiB]"] = memory() - before
    mpi = importlib.import_module("jaxmpi" if package == "jaxmpi" else package)
    jit = importlib.import_module(package).jit if package == "jaxmpi" else jax.jit
    allreduce = through_host if package == "mpi4py" else lambda x: mpi.allreduce(x, op=MPI.SUM)
    halved = jit(lambda v: (v if package == "mpi4py" else allreduce(v)) * 0.5)
    figures["first call of a jitted allreduce [s]"] = seconds(lambda: halved(x).block_until_ready())
    before_calls = peak()
    eager()
    figures[f"peak memory, growth in {EAGER_CALLS} eager calls [MiB]"] = peak() - before_calls
    figures["memory of the import and the calls [MiB]"] = memory() - before
    largest = np.array(list(figures.values()))
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, largest, MPI.MAX)
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(dict(zip(figures, largest.tolist(), strict=True))))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", choices=PACKAGES, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.job:
        job(options.job)
        return
    found = {}
    for _ in range(options.rounds):
        for package in PACKAGES:
            if importlib.util.find_spec(package) is None:
                continue
            for name, value in jobs.result(jobs.run("jaxmpi.run", "-n", 2, __file__, "--job", package)[1]).items():
                found.setdefault(f"{package}, {name}", []).append(value)
    for name, values in found.items():
        figure(name, statistics.median(values))


if __name__ == "__main__":
    main()
