"""A Fourier transform in two dimensions, and Poisson's equation by it, on one or many processes with some rows each.

Each process transforms rows, `lax.all_to_all` turns rows into columns, and each process transforms columns. The
spectrum stays divided by columns, because the inverse transform begins there. There is not a word of MPI in the
program. The launcher makes one mesh of the devices of all processes, and sends the exchange by MPI.

    python sharded_fft.py                                               # one process
    python -m jaxmpi.run -n 4 --collectives mpi sharded_fft.py          # the same result on four
    python -m jaxmpi.run -n 4 --collectives gloo sharded_fft.py         # by gloo, JAX's default

Any number of processes will do: the size is rounded up to a multiple of it, and printed.

The transform is compared with NumPy's. Then it solves, on a square with edges of 2 pi that is periodic in x and y,

    -lap(u) = f,        that is        (k^2 + l^2) U(k, l) = F(k, l)        with U(0, 0) = 0,

for an f whose solution is known. Needs JAX 0.6.1 or newer.
"""

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_enable_x64", True)

MESH = jax.make_mesh((jax.device_count(),), ("parts",), axis_types=(AxisType.Auto,))
ROWS, COLUMNS = P("parts", None), P(None, "parts")


def fft2(x: jax.Array) -> jax.Array:
    """Return this device's columns of the spectrum, shape (N, M / devices), from rows `x`, shape (N / devices, M)."""
    x = jnp.fft.fft(x, axis=1)
    x = lax.all_to_all(x, "parts", split_axis=1, concat_axis=0, tiled=True)
    return jnp.fft.fft(x, axis=0)


def ifft2(x: jax.Array) -> jax.Array:
    """Return the inverse of `fft2`: from columns to rows."""
    x = jnp.fft.ifft(x, axis=0)
    x = lax.all_to_all(x, "parts", split_axis=0, concat_axis=1, tiled=True)
    return jnp.fft.ifft(x, axis=1)


def solve(f: jax.Array) -> jax.Array:
    """Return this device's rows of the u with -lap(u) = f - mean(f) whose mean is zero."""
    spectrum = fft2(f)
    n, width = spectrum.shape
    k = jnp.fft.fftfreq(n, 1 / n)
    own = lax.dynamic_slice_in_dim(k, lax.axis_index("parts") * width, width)
    square = k[:, None] ** 2 + own**2
    return ifft2(jnp.where(square > 0, spectrum / jnp.maximum(square, 1), 0)).real


@jax.jit
def largest_difference(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(x - y))


def sampled(values: Callable[[np.ndarray, np.ndarray], np.ndarray], n: int) -> jax.Array:
    """Return `values(y, x)` at the n times n points. Each process computes only local rows."""
    points = 2 * np.pi * np.arange(n) / n
    return jax.make_array_from_callback(
        (n, n), NamedSharding(MESH, ROWS), lambda part: values(points[part[0], None], points[None, part[1]])
    )


def potential(y: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.exp(np.sin(x) + np.cos(2 * y))


def charge(y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return -lap(potential)."""
    return (np.sin(x) - np.cos(x) ** 2 + 4 * np.cos(2 * y) - 4 * np.sin(2 * y) ** 2) * potential(y, x)


def milliseconds(function: Callable[[jax.Array], jax.Array], x: jax.Array, repeats: int) -> float:
    """Return the median time of a call, without the first, which compiles."""
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        jax.block_until_ready(function(x))
        times.append(time.perf_counter() - begin)
    return 1e3 * float(np.median(times[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=int, default=512, metavar="N", help="rows and columns (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=10, help="of what is timed (default: %(default)s)")
    options = parser.parse_args()
    if min(options.size, options.repeats) < 1:
        parser.error("--size and --repeats must be at least 1")
    n = options.size + -options.size % jax.device_count()
    say = print if jax.process_index() == 0 else lambda *_: None
    say(f"{n} x {n} points, processes: {jax.process_count()}")

    transform = jax.jit(jax.shard_map(fft2, mesh=MESH, in_specs=ROWS, out_specs=COLUMNS))
    poisson = jax.jit(jax.shard_map(solve, mesh=MESH, in_specs=ROWS, out_specs=ROWS))
    f, u = sampled(charge, n), sampled(potential, n)

    # Only for NumPy each process has the whole array. It takes the local columns of the result.
    points = 2 * np.pi * np.arange(n) / n
    whole = np.fft.fft2(charge(points[:, None], points))
    expected = jax.make_array_from_callback((n, n), NamedSharding(MESH, COLUMNS), lambda part: whole[part])
    error = largest_difference(transform(f), expected) / np.abs(whole).max()
    say(f"fft2: max error {float(error):.1e}, {milliseconds(transform, f, options.repeats):.3g} ms")

    solution = poisson(f)
    error = largest_difference(solution, u - jnp.mean(u))
    say(f"Poisson: max error {float(error):.1e}, {milliseconds(poisson, f, options.repeats):.3g} ms")
    say(f"largest potential {float(jnp.max(solution)):.12f}")


if __name__ == "__main__":
    main()
