"""Decaying turbulence in two dimensions, by Fourier transforms without aliasing, and a derivative of the energy.

Vortices in a periodic square drive each other and merge, while viscosity takes their energy. Derivatives are computed
in Fourier space and products in physical space, on three points for two modes: so no product is aliased. The derivative
of the final energy with respect to the viscosity, through all time steps, is compared with a difference quotient. The
energy of a Taylor-Green vortex is compared with a formula.

    python turbulence.py                                                 # one process
    python -m jaxmpi.run -n 2 turbulence.py --save-animation             # the same result on two, or any other number
    python -m jaxmpi.run -n 3 turbulence.py --case taylor-green --size 32
    python -m jaxmpi.run -n 2 turbulence.py --steps 200 --output w.zarr --checkpoints saved
    python -m jaxmpi.run -n 3 turbulence.py --steps 400 --output w.zarr --checkpoints saved --restart

A run shows a progress bar, prints the comparisons, writes `turbulence.png` (if asked, `turbulence.gif` too) and prints
where they are. `--output` writes the vorticity of many times. `--checkpoints` keeps the last states. `--restart` goes
on from them, on any number of processes (`pip install 'zarr>=3'`).

The equation of the vorticity w, for a square of side 2 pi and times without units:

    dw/dt + u dw/dx + v dw/dy = nu laplace(w),    u = d psi/dy,  v = -d psi/dx,  laplace(psi) = -w

A step is one of Runge and Kutta's method of fourth order, in which viscosity is exact.
"""

import argparse
import contextlib
import math
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from mpi4py import MPI
from tqdm import tqdm

import jaxmpi
from jaxmpi import allreduce, io
from jaxmpi.fft import Transform

VISCOSITY = {"turbulence": 1e-3, "taylor-green": 2e-2}
TIME_STEP = 0.02
STEPS = 400
FRAMES = 40  # how often a run stops for the progress bar and a frame of the animation
BAND = 6, 10  # the wavenumbers of the first vortices
STEP = 1e-3  # of the difference quotient, relative to the viscosity
SEED = 0

COMM = MPI.COMM_WORLD
RANK = COMM.rank


def make_transform(size: int) -> Transform:
    """Return a transform from 3/2 of `size` points along each axis to `size` modes. Each process has some rows."""
    return Transform(jaxmpi.Grid((0, 1), (size, size), periodic=True), real=True, pad=3 / 2, norm="forward")


def velocity_modes(w: jax.Array, transform: Transform) -> tuple[jax.Array, jax.Array]:
    """Return the modes of u and v, from the modes of the vorticity."""
    kx, ky = transform.wavenumbers()
    square = kx**2 + ky**2
    psi = w * np.divide(1, square, out=np.zeros_like(square), where=square != 0)
    return 1j * ky * psi, -1j * kx * psi


def advection(w: jax.Array, transform: Transform) -> jax.Array:
    """Return -(u dw/dx + v dw/dy), by five transforms. Four of them travel in the same messages."""
    kx, ky = transform.wavenumbers()
    u, v, dx, dy = transform.backward([*velocity_modes(w, transform), 1j * kx * w, 1j * ky * w])
    return -transform.forward(u * dx + v * dy)


def advance(w: jax.Array, viscosity: jax.Array, steps: int, transform: Transform) -> jax.Array:
    """Do `steps` time steps."""
    kx, ky = transform.wavenumbers()
    half = jnp.exp(-viscosity * (kx**2 + ky**2) * TIME_STEP / 2)  # the part that viscosity leaves after half a step

    def step(_: int, w: jax.Array) -> jax.Array:
        a = advection(w, transform)
        b = advection(half * (w + TIME_STEP / 2 * a), transform)
        c = advection(half * w + TIME_STEP / 2 * b, transform)
        d = advection(half * (half * w + TIME_STEP * c), transform)
        return half * (half * (w + TIME_STEP / 6 * a) + TIME_STEP / 3 * (b + c)) + TIME_STEP / 6 * d

    return lax.fori_loop(0, steps, step, w)


def energy(w: jax.Array, transform: Transform) -> jax.Array:
    """Return the mean of half the square of the velocity."""
    u, v = transform.backward(list(velocity_modes(w, transform)))
    return allreduce(jnp.sum(u**2 + v**2), MPI.SUM) / (2 * math.prod(transform.physical_grid.global_shape))


def final_energy(viscosity: jax.Array, w: jax.Array, steps: int, transform: Transform) -> jax.Array:
    viscosity = jaxmpi.replicate(viscosity)  # each process damps other modes by it, so the cotangents are added
    return energy(advance(w, viscosity, steps, transform), transform)


def make_vorticity(case: str, size: int, transform: Transform) -> jax.Array:
    """Return the modes, the same on any number of processes: each makes all of them and takes its part."""
    if case == "taylor-green":
        x = 2 * np.pi * np.arange(size) / size
        modes = np.fft.rfft2(2 * np.cos(x)[:, None] * np.cos(x), norm="forward")
    else:
        kx, ky = np.fft.fftfreq(size, 1 / size)[:, None], np.fft.rfftfreq(size, 1 / size)
        length = np.hypot(kx, ky)
        noise = np.fft.rfft2(np.random.default_rng(SEED).standard_normal((size, size)), norm="forward")
        modes = noise * ((length >= BAND[0]) & (length <= BAND[1]))
        modes *= 5 / np.sqrt(np.mean(np.fft.irfft2(modes, s=(size, size), norm="forward") ** 2))
    return jnp.asarray(modes[transform.spectral_grid.slices])


def load_checkpoint(folder: Path, transform: Transform) -> tuple[jax.Array, int]:
    """Return the modes of the last state that is complete, and the number of steps."""
    newest = io.latest(folder)
    if newest is None:
        raise SystemExit(f"--restart: there is no complete state in {folder}")
    state = io.load(newest, grid=transform.spectral_grid)
    return state["w"], state["steps"]


def save_picture(path: Path, frames: list[np.ndarray], times: list[float], energies: list[float]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    limit = np.quantile(np.abs(frames[0]), 0.995)
    for place, which in zip(axes, (0, -1), strict=False):
        place.imshow(frames[which].T, extent=(0, 2 * np.pi) * 2, origin="lower", cmap="RdBu_r", vmin=-limit, vmax=limit)
        place.set_title(f"vorticity at time {times[which]:.1f}", loc="left")
    axes[2].plot(times, energies)
    axes[2].set(xlabel="time", ylim=(0, None))
    axes[2].set_title("energy", loc="left")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def save_animation(path: Path, frames: list[np.ndarray], times: list[float]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.animation import PillowWriter

    figure, axes = plt.subplots(figsize=(4.2, 4.4), layout="constrained")
    limit = np.quantile(np.abs(frames[0]), 0.995)
    artist = axes.imshow(frames[0].T, origin="lower", cmap="RdBu_r", vmin=-limit, vmax=limit)
    axes.set(xticks=[], yticks=[])
    writer = PillowWriter(fps=8)
    with writer.saving(figure, path, dpi=90):
        for frame, now in zip(frames, times, strict=True):
            artist.set_data(frame.T)
            axes.set_title(f"vorticity at time {now:.1f}", loc="left")
            writer.grab_frame()
    plt.close(figure)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", choices=VISCOSITY, default="turbulence", help="(default: %(default)s)")
    parser.add_argument("--size", type=int, default=128, help="modes per axis (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="time steps (default: %(default)s)")
    parser.add_argument("--save-animation", action="store_true", help="write turbulence.gif")
    parser.add_argument("--save-state", type=Path, metavar="FILE.npz", help="write the last vorticity and the energies")
    parser.add_argument("--output", type=Path, metavar="FILE.zarr", help="write the vorticity of many times")
    parser.add_argument("--checkpoints", type=Path, metavar="DIR", help="keep the last states there")
    parser.add_argument("--restart", action="store_true", help="go on from the last state in the --checkpoints")
    parser.add_argument("--output-dir", type=Path, default=Path(), metavar="DIR", help="where the picture goes")
    options = parser.parse_args()
    if options.restart and not options.checkpoints:
        parser.error("--restart needs the folder of --checkpoints")
    return options


def main() -> None:
    options = parse_options()
    jax.config.update("jax_enable_x64", True)
    transform, viscosity = make_transform(options.size), VISCOSITY[options.case]
    first = w = make_vorticity(options.case, options.size, transform)
    begin = 0
    if options.restart:
        w, begin = load_checkpoint(options.checkpoints, transform)
    run = jaxmpi.jit(partial(advance, transform=transform), static_argnames="steps")
    points, energy_of = jaxmpi.jit(transform.backward), jaxmpi.jit(partial(energy, transform=transform))
    frames, times, energies = [], [], []

    def keep(w: jax.Array, done: int) -> None:
        frames.append(transform.physical_grid.gather(points(w)))
        times.append(done * TIME_STEP)
        energies.append(float(energy_of(w)))

    keep(w, begin)
    batch = max(1, options.steps // FRAMES)
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(
            tqdm(total=options.steps, initial=begin, desc="time steps", unit="", disable=RANK != 0)
        )
        out = None
        if options.output:
            out = io.Writer(options.output, transform.physical_grid, resume=options.restart, dims=("x", "y"))
            out = stack.enter_context(out)
        for done in range(begin, options.steps, batch):
            steps = min(batch, options.steps - done)
            w = jax.block_until_ready(run(w, viscosity, steps=steps))
            bar.update(steps)
            keep(w, done + steps)
            if out:
                out.append((done + steps) * TIME_STEP, {"vorticity": points(w)})
            if options.checkpoints:
                state = {"w": w, "steps": done + steps}
                io.checkpoint(options.checkpoints, state, grid=transform.spectral_grid, keep=2)

    value = jaxmpi.jit(partial(final_energy, steps=options.steps, transform=transform))
    slope = jaxmpi.jit(jax.jacfwd(value))(viscosity, first)
    short = min(options.steps, 20)  # the backward pass keeps the results of each step
    backward = jaxmpi.jit(jax.grad(partial(final_energy, steps=short, transform=transform)))(viscosity, first)
    forward = jaxmpi.jit(jax.jacfwd(partial(final_energy, steps=short, transform=transform)))(viscosity, first)
    h = STEP * viscosity
    quotient = (value(viscosity + h, first) - value(viscosity - h, first)) / (2 * h)
    if RANK != 0:
        return
    print(f"{COMM.size} processes, {options.size} x {options.size} modes, final energy {energies[-1]:.9f}")
    print(f"d energy / d viscosity: relative error {abs(float(slope / quotient) - 1):.1e}")
    print(f"Reverse mode, over {short} steps, beside forward mode: {abs(float(backward / forward) - 1):.1e}")
    if options.case == "taylor-green":
        exact = energies[0] * np.exp(-4 * viscosity * np.array(times))
        print(f"Energy, compared with the formula: relative error {np.abs(energies / exact - 1).max():.1e}")
    frames = [np.asarray(frame) for frame in frames]
    options.output_dir.mkdir(parents=True, exist_ok=True)
    picture = (options.output_dir / "turbulence.png").resolve()
    save_picture(picture, frames, times, energies)
    print(f"Picture: {picture}")
    if options.save_animation:
        save_animation(picture.with_suffix(".gif"), frames, times)
        print(f"Animation: {picture.with_suffix('.gif')}")
    if options.save_state:
        np.savez(options.save_state, w=frames[-1], energies=energies)
        print(f"State: {options.save_state.resolve()}")


if __name__ == "__main__":
    main()
