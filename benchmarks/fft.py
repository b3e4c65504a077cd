"""Fourier transforms in three dimensions, there and back, on slabs of two or more processes.

    python -m jaxmpi.run -n 2 benchmarks/fft.py       beside mpi4py-fft with FFTW, and beside the local transforms alone
    python benchmarks/fft.py --sharded                beside jaxDecomp, over gloo and over MPI

All numbers are of single precision. The contenders take turns, some round trips at a time, and figures are medians of
the ratios of each turn:

  jaxmpi          `jaxmpi.fft.Transform`, forward and backward, in a `lax.fori_loop` inside one compiled call
  jaxmpi, alone   the same local transforms along each axis, of arrays of the same shapes, without communication
  mpi4py-fft      `PFFT` on slabs, planned with FFTW_MEASURE
  jaxDecomp       `pfft3d` and `pifft3d` of a sharded array on the same slabs, compiled, in a `lax.fori_loop`; a
                  process has one kind of JAX's collectives, so each kind has jobs of its own, with jaxmpi beside it

After each turn what came back is compared with what was given, every element, and the spectrum of the first turn with
NumPy's. Prints lines `name: value` as quick.py does. A peer that is not installed leaves its lines empty.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

STEPS = {64: 16, 128: 4, 256: 1}
GOALS = {"mpi4py_fft": "<= 0.9", "jaxdecomp_gloo": "<= 0.8"}
TOLERANCE = 2e-5


def ratio(seconds, peer):
    return statistics.median(a / b for a, b in zip(seconds["jaxmpi"], seconds[peer], strict=True))


def report(name, value, goal=""):
    print(f"{name}: {'-' if value is None else f'{value:.4g}'}" + (f"  (goal {goal})" if goal else ""), flush=True)


def report_times(title, seconds):
    print(f"\n{title}, ms per round trip, median and quartiles:")
    for who, times in seconds.items():
        low, middle, high = (f"{1e3 * value:.4g}" for value in statistics.quantiles(times, n=4))
        print(f"  {who:15} {middle:>8}  ({low} - {high})")


# --- in a job --------------------------------------------------------------------------------------------------------


class Contender:
    """Round trips of a block of an array, and one spectrum."""

    def __init__(self, run, spectrum=None, where=None):
        self.run, self.spectrum, self.where = run, spectrum, where


def by_jaxmpi(grid, real, steps):
    import jax
    import jax.numpy as jnp

    import jaxmpi
    from jaxmpi.fft import Transform

    transform = Transform(grid, real=real)
    back = jaxmpi.jit(lambda x: jax.lax.fori_loop(0, steps, lambda _, x: transform.backward(transform.forward(x)), x))
    run = lambda x: jax.block_until_ready(back(x))  # noqa: E731
    spectrum = jaxmpi.jit(transform.forward)
    return jnp.array, Contender(run, lambda x: np_of(spectrum(jnp.asarray(x))), transform.spectral_grid.slices)


def alone(grid, real, steps):
    """The local transforms of each step of a `Transform`, of zeros in the place of what other ranks would send."""
    import jax
    import jax.numpy as jnp

    from jaxmpi.fft import Transform

    transform = Transform(grid, real=real)

    def forward(x):
        for step in transform._steps:
            x = transform._to_modes(x.reshape(step.target.local_shape), step)
        return x

    def backward(y):
        for step in transform._steps[::-1]:
            y = transform._to_points(y.reshape(step.result.local_shape), step)
        return y.reshape(grid.local_shape)

    back = jax.jit(lambda x: jax.lax.fori_loop(0, steps, lambda _, x: backward(forward(x)), x))
    return jnp.array, Contender(lambda x: jax.block_until_ready(back(x)))


def by_mpi4py_fft(grid, real, steps):
    from mpi4py_fft import PFFT, newDistArray

    plan = PFFT(grid.comm, grid.global_shape, dtype="f" if real else "F", grid=(-1,))
    array, spectrum = newDistArray(plan, False), newDistArray(plan, True)

    def put(x):
        array[...] = x
        return array

    def run(x):
        for _ in range(steps):
            plan.forward(x, spectrum)  # divides by the number of points
            plan.backward(spectrum, x)
        return x

    def once(x):
        return np_of(plan.forward(put(x), spectrum)) * float(array.global_shape[0]) ** 3

    return put, Contender(run, once, spectrum.local_slice())


def by_jaxdecomp(grid, real, steps):
    import jax
    from jax.sharding import AxisType, NamedSharding, PartitionSpec
    from jaxdecomp import fft

    mesh = jax.make_mesh((grid.comm.size, 1), ("z", "y"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("z", "y"))

    def step(_, x):
        y = fft.pifft3d(fft.pfft3d(x))
        return y.real if real else y

    back = jax.jit(lambda x: jax.lax.fori_loop(0, steps, step, x), out_shardings=sharding)
    put = lambda x: jax.make_array_from_process_local_data(sharding, x)  # noqa: E731
    return put, Contender(lambda x: jax.block_until_ready(back(x)))


def np_of(x):
    import numpy as np

    shards = getattr(x, "addressable_shards", None)
    return np.asarray(shards[0].data if shards else x)


def given(n, real, turn):
    """The whole array."""
    import numpy as np

    numbers = np.random.default_rng([n, turn]).standard_normal((1 if real else 2, n, n, n), np.float32)
    return numbers[0] if real else numbers[0] + 1j * numbers[1]


def measure(builders, n, real, rounds):
    """Seconds of a round trip by contender, one per turn; how many elements were wrong; which are missing, and why."""
    import numpy as np
    from mpi4py import MPI

    import jaxmpi

    comm = MPI.COMM_WORLD
    grid = jaxmpi.Grid((comm.size, 1, 1), (n, n, n))
    steps = STEPS.get(n, 1)
    made, missing = {}, {}
    for name, build in builders.items():
        try:
            built, why = build(grid, real, steps), ""
        except ImportError as error:
            built, why = None, f"{type(error).__name__}: {error}"
        reasons = [reason for reason in comm.allgather(why) if reason]
        if reasons:
            missing[name] = reasons[0]
        else:
            made[name] = built
    seconds = {name: [] for name in made}
    wrong = 0
    for turn in range(rounds + 1):  # the first compiles, and its time does not count
        whole = given(n, real, turn)
        block = np.ascontiguousarray(whole[grid.slices])
        for name, (put, contender) in made.items():
            if turn == 0 and contender.spectrum is not None:
                right = (np.fft.rfftn if real else np.fft.fftn)(whole.astype(complex if not real else float))
                difference = np.abs(contender.spectrum(block) - right[contender.where])
                wrong += np.count_nonzero(~(difference < TOLERANCE * np.abs(right).max()))
            x = put(block)
            comm.Barrier()
            begin = time.perf_counter()
            result = contender.run(x)
            spent = time.perf_counter() - begin
            seconds[name] += [comm.allreduce(spent, MPI.MAX) / steps] if turn else []
            if name != "jaxmpi, alone":
                wrong += np.count_nonzero(~(np.abs(np_of(result) - block) < TOLERANCE * np.abs(block).max()))
    return seconds, comm.allreduce(int(wrong)), missing


def cases(sizes):
    return [(n, real) for n in sizes for real in (False, True)]


def compare(sizes, rounds):
    from mpi4py import MPI

    builders = {"jaxmpi": by_jaxmpi, "mpi4py-fft": by_mpi4py_fft, "jaxmpi, alone": alone}
    found = {case: measure(builders, *case, rounds) for case in cases(sizes)}
    if MPI.COMM_WORLD.rank > 0:
        return
    ranks = MPI.COMM_WORLD.size
    for (n, real), (seconds, _, _) in found.items():
        value = ratio(seconds, "mpi4py-fft") if "mpi4py-fft" in seconds else None
        report(f"fft_{n}_{'real' if real else 'complex'}_vs_mpi4py_fft_{ranks}_ranks", value, GOALS["mpi4py_fft"])
    for (n, real), (seconds, _, _) in found.items():
        value = ratio(seconds, "jaxmpi, alone")
        report(f"fft_{n}_{'real' if real else 'complex'}_vs_local_transforms_{ranks}_ranks", value)
    wrong = sum(its for _, its, _ in found.values())
    report(f"fft_wrong_elements_{ranks}_ranks", wrong, "0")
    for why in {why for _, _, missing in found.values() for why in missing.items()}:
        print("{} is missing: {}".format(*why))
    for (n, real), (seconds, _, _) in found.items():
        report_times(f"{n}^3, {'real' if real else 'complex'}, on {ranks} ranks", seconds)
    if wrong:
        sys.exit(1)


# --- jobs of sharded programs ----------------------------------------------------------------------------------------


def run_job(sizes, rounds):
    from mpi4py import MPI

    builders = {"jaxmpi": by_jaxmpi, "jaxDecomp": by_jaxdecomp}
    found = [(n, *measure(builders, n, False, rounds)) for n in sizes]
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(found))


def start_job(kind, options):
    """What a job has found, over MPI or gloo: that has threads of its own, and runs unbound."""
    command = [sys.executable, "-m", "jaxmpi.run", "-n", "2", "--collectives", kind]
    environment = dict(os.environ)
    if kind == "gloo" or options.unbound:
        cores = str(len(os.sched_getaffinity(0)))
        command += ["--mpiexec-args=--bind-to none"]
        environment.update(PJRT_NPROC=cores, OMP_NUM_THREADS=cores, XLA_FLAGS="--xla_cpu_multi_thread_eigen=true")
    sizes = list(map(str, options.sizes))
    command += [__file__, "--job", "--rounds", str(options.rounds), "--sizes", *sizes]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[[")))  # gloo prints, too


def compare_sharded(options):
    seconds, wrong, missing = {}, 0, {}
    for turn in range(options.jobs):
        for kind in ("gloo", "mpi") if turn % 2 == 0 else ("mpi", "gloo"):
            for n, times, its, why in start_job(kind, options):
                wrong, missing = wrong + its, missing | why
                for name, values in times.items():
                    seconds.setdefault((n, kind), {}).setdefault(name, []).extend(values)
    for (n, kind), times in sorted(seconds.items()):
        value = ratio(times, "jaxDecomp") if "jaxDecomp" in times else None
        report(f"fft_{n}_vs_jaxdecomp_{kind}_2_ranks", value, GOALS.get(f"jaxdecomp_{kind}", ""))
    report("fft_sharded_wrong_elements", wrong, "0")
    for name, why in missing.items():
        print(f"{name} is missing: {why}")
    for (n, kind), times in sorted(seconds.items()):
        report_times(f"{n}^3, complex, beside jaxDecomp over {kind}", times)
    if wrong:
        sys.exit(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender (default: %(default)s)")
    parser.add_argument("--sizes", type=int, nargs="+", default=[128, 256], help="points along each axis")
    parser.add_argument("--sharded", action="store_true", help="start jobs beside jaxDecomp")
    parser.add_argument("--jobs", type=int, default=2, help="of each kind, with --sharded (default: %(default)s)")
    parser.add_argument("--unbound", action="store_true", help="let the processes over MPI use all cores, too")
    parser.add_argument("--job", action="store_true", help="measure sharded programs in this job")
    options = parser.parse_args()
    if options.job:
        run_job(options.sizes, options.rounds)
    elif options.sharded:
        compare_sharded(options)
    else:
        compare(options.sizes, options.rounds)


if __name__ == "__main__":
    main()
