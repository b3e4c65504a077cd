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
import functools

import jobs
import numpy as np
from loops import looped
from peers import MISSING, load

from jaxmpi._bench.report import conclude, figure
from jaxmpi._bench.timing import COMM, Batch, ratio, take_turns

STEPS = {64: 16, 128: 4, 256: 1}
TOLERANCE = 2e-5


# --- in a job --------------------------------------------------------------------------------------------------------


class Work:
    """Round trips of one array on a grid, in each turn another one."""

    def __init__(self, grid, real):
        self.grid, self.real = grid, real
        self.steps = STEPS.get(grid.global_shape[0], 1)

    def whole(self, turn):
        shape = (1 if self.real else 2, *self.grid.global_shape)
        numbers = np.random.default_rng([*self.grid.global_shape, turn]).standard_normal(shape, np.float32)
        return numbers[0] if self.real else numbers[0] + 1j * numbers[1]

    def block(self, turn):
        return np.ascontiguousarray(self.whole(turn)[self.grid.slices])

    def batch(self, put, run, spectrum=None, where=None):
        """Return a contender. `spectrum`: a block -> the part of the spectrum at `where`."""

        def wrong(turn, result):
            found = distant(np_of(result), self.block(turn))
            if turn == 0 and spectrum is not None:
                whole = self.whole(turn)
                right = np.fft.rfftn(whole.astype(float)) if self.real else np.fft.fftn(whole.astype(complex))
                found += distant(spectrum(self.block(turn)), right[where], np.abs(right).max())
            return found

        return Batch(self.steps, lambda turn: put(self.block(turn)), run, wrong)


def distant(found, right, largest=None):
    """Return how many elements differ by more than rounding, relative to the largest one."""
    return np.count_nonzero(~(np.abs(found - right) < TOLERANCE * (largest or np.abs(right).max())))


def by_jaxmpi(work):
    import jax.numpy as jnp

    import jaxmpi
    from jaxmpi.fft import Transform

    transform = Transform(work.grid, real=work.real)
    run = looped(lambda x, once: transform.backward(transform.forward(x)), work.steps)
    spectrum = jaxmpi.jit(transform.forward)
    return work.batch(jnp.array, run, lambda x: np.asarray(spectrum(jnp.asarray(x))), transform.spectral_grid.slices)


def alone(work):
    """The local transforms of each step of a `Transform`, of zeros in the place of what other ranks would send."""
    import jax
    import jax.numpy as jnp

    from jaxmpi.fft import Transform

    transform = Transform(work.grid, real=work.real)

    def block(x, grid, step):
        return x.reshape([grid.local_shape[axis] for axis in step.order])

    def forward(x):
        for step in transform._steps:
            x = transform._to_modes(block(x, step.target, step), step)
        return x

    def backward(y):
        for step in transform._steps[::-1]:
            y = transform._to_points(block(y, step.result, step), step)
        return y.reshape(work.grid.local_shape)

    run = looped(lambda x, once: backward(forward(x)), work.steps, jit=jax.jit)
    return Batch(work.steps, lambda turn: jnp.array(work.block(turn)), run)


def by_mpi4py_fft(work):
    from mpi4py_fft import PFFT, newDistArray

    plan = PFFT(work.grid.comm, work.grid.global_shape, dtype="f" if work.real else "F", grid=(-1,))
    array, spectrum = newDistArray(plan, False), newDistArray(plan, True)

    def put(x):
        array[...] = x
        return array

    def run(x):
        for _ in range(work.steps):
            plan.forward(x, spectrum)  # divides by the number of points
            plan.backward(spectrum, x)
        return x

    def once(x):
        return np.asarray(plan.forward(put(x), spectrum)) * float(array.global_shape[0]) ** 3

    return work.batch(put, run, once, spectrum.local_slice())


def by_jaxdecomp(work):
    import jax
    from jax.sharding import AxisType, NamedSharding, PartitionSpec
    from jaxdecomp import fft

    mesh = jax.make_mesh((work.grid.comm.size, 1), ("z", "y"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("z", "y"))
    jit = functools.partial(jax.jit, out_shardings=sharding)
    run = looped(lambda x, once: fft.pifft3d(fft.pfft3d(x)), work.steps, jit=jit)
    return work.batch(lambda x: jax.make_array_from_process_local_data(sharding, x), run)


def np_of(x):
    """Return this rank's block."""
    shards = getattr(x, "addressable_shards", None)
    return np.asarray(shards[0].data if shards else x)


def measure(builders, n, real, rounds):
    """Measure a cube of n points along each axis."""
    import jaxmpi

    work = Work(jaxmpi.Grid((COMM.size, 1, 1), (n, n, n)), real)
    made = {name: load(name, functools.partial(build, work)) for name, build in builders.items()}
    return take_turns({name: batch for name, batch in made.items() if batch}, rounds)


def compare(sizes, rounds):
    """Beside mpi4py-fft."""
    builders = {"jaxmpi": by_jaxmpi, "mpi4py-fft": by_mpi4py_fft, "jaxmpi, alone": alone}
    groups = {}
    for n in sizes:
        for real in (False, True):
            samples = measure(builders, n, real, rounds)
            kind = "real" if real else "complex"
            groups[f"round trips of {n}^3, {kind}, on {COMM.size} ranks"] = samples
            name = f"fft_{n}_{kind}_vs"
            figure(f"{name}_mpi4py_fft_{COMM.size}_ranks", ratio(samples, "jaxmpi", "mpi4py-fft"), "<= 0.9")
            figure(f"{name}_local_transforms_{COMM.size}_ranks", ratio(samples, "jaxmpi", "jaxmpi, alone"))
    conclude(f"fft_wrong_elements_{COMM.size}_ranks", groups, unit="ms", missing=MISSING)


def compare_sharded(options):
    """Beside jaxDecomp, in jobs over gloo and over MPI."""
    words = ["--rounds", options.rounds, "--sizes", *options.sizes]
    kinds = {kind: jobs.sharded(kind, __file__, *words, unbound=options.unbound) for kind in ("gloo", "mpi")}
    found = jobs.take_turns(kinds, options.jobs)
    groups = {}
    for n in options.sizes:
        for kind, goal in (("gloo", "<= 0.8"), ("mpi", "")):
            samples = {name: found.get((kind, f"{name} {n}")) for name in ("jaxmpi", "jaxDecomp")}
            samples = {name: sample for name, sample in samples.items() if sample}
            groups[f"round trips of {n}^3, complex, beside jaxDecomp over {kind}"] = samples
            figure(f"fft_{n}_vs_jaxdecomp_{kind}_2_ranks", ratio(samples, "jaxmpi", "jaxDecomp"), goal)
    conclude("fft_sharded_wrong_elements", groups, unit="ms")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender (default: %(default)s)")
    parser.add_argument("--sizes", type=int, nargs="+", default=[128, 256], help="points along each axis")
    parser.add_argument("--sharded", action="store_true", help="start jobs beside jaxDecomp")
    parser.add_argument("--jobs", type=int, default=2, help="of each kind, with --sharded (default: %(default)s)")
    parser.add_argument("--unbound", action="store_true", help="let the processes over MPI use all cores, too")
    parser.add_argument("--job", action="store_true", help="measure sharded programs in this job")
    options = parser.parse_args()
    if options.sharded:
        compare_sharded(options)
    elif options.job:
        builders = {"jaxmpi": by_jaxmpi, "jaxDecomp": by_jaxdecomp}
        found = {n: measure(builders, n, False, options.rounds) for n in options.sizes}
        jobs.tell({f"{name} {n}": sample for n, samples in found.items() for name, sample in samples.items()})
    else:
        compare(options.sizes, options.rounds)


if __name__ == "__main__":
    main()
