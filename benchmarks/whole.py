"""The efficiency of whole programs on several ranks: the programs of examples/ alone on each rank, and together on all.

    python -m jaxmpi.run -n 4 benchmarks/whole.py

Both ways take turns in the same processes. Alone, each rank computes a problem of its own. All ranks do so at the same
time, so that they share cores and memory, as they do together. Together, the ranks compute one problem, with as much
work for each rank. The efficiency is the work per second together over the work per second alone. It is 1 if ranks lose
no time by communication and by waiting for each other.

For more ranks than the job has, `scaling_model.py` computes the time of the messages of a step. The efficiency is then
the measured time alone over the sum of both times.
"""

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from mpi4py import MPI
from scaling_model import OURS, allreduce, exchange

import jaxmpi
from jaxmpi._bench.report import say
from jaxmpi._bench.timing import COMM, Batch, ratio, take_turns

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))  # before benchmarks/
import lattice_boltzmann as flow
import particles as gas
import shallow_water as sea
import transformer as adder
import turbulence as vortices

ROUNDS, SECONDS = 9, 0.1
BEYOND = (100, 1000, 10_000)


@dataclass
class Problem:
    """A problem that the ranks of a communicator compute."""

    work: float
    """The number of cells, particles, modes or lines of all ranks."""
    state: Any
    advance: Callable[[Any, int], Any]
    """(state, steps) -> the state after the steps."""


@dataclass(frozen=True)
class Program:
    name: str
    unit: str
    make: Callable[[MPI.Comm, int], Problem]
    """(communicator, size) -> the problem. The work of a rank hardly depends on the number of ranks."""
    sizes: tuple[int, ...]
    messages: Callable[[int, int], float]
    """(size, ranks) -> the seconds that the messages of a step take by the model."""


def nearest(size: float) -> int:
    """Return an even number near `size` with fast Fourier transforms, also if padded to three points for two modes."""
    fast = [2**a * 3**b * 5**c for a in range(1, 20) for b in range(9) for c in range(6)]
    return min(fast, key=lambda n: abs(n - size))


def around(side: float, cell_bytes: float) -> list[float]:
    """Return the bytes that go to each of the eight neighbours of a square block."""
    return [side * cell_bytes] * 4 + [cell_bytes] * 4


# --- the programs ----------------------------------------------------------------------------------------------------


def shallow_water(comm: MPI.Comm, side: int) -> Problem:
    dims = MPI.Compute_dims(comm.size, 2)
    ny, nx = (side * ranks for ranks in dims)
    grid = jaxmpi.Grid(dims, (ny, nx), periodic=(False, True), comm=comm)
    model = sea.make_model(grid)
    fields = sea.initial_fields(nx, ny)
    state = model.start(*(jnp.asarray(field, jnp.float32) for field in fields))
    return Problem(nx * ny, state, model.advance)


def lattice_boltzmann(comm: MPI.Comm, radius: int) -> Problem:
    channel = flow.Channel(round(radius * math.sqrt(comm.size)), comm)
    viscosity = 2 * flow.SPEED * channel.radius / 60

    @jaxmpi.jit
    def advance(f: jax.Array, steps: int) -> jax.Array:
        return jax.lax.fori_loop(0, steps, lambda _, f: channel.advance(viscosity, f)[0], f)

    return Problem(math.prod(channel.grid.global_shape), channel.start(), advance)


def turbulence(comm: MPI.Comm, side: int) -> Problem:
    size = nearest(side * math.sqrt(comm.size))
    grid = jaxmpi.Grid((0, 1), (size, size), periodic=True, comm=comm)
    transform = jaxmpi.fft.Transform(grid, real=True, pad=3 / 2, norm="forward")
    viscosity = vortices.VISCOSITY["turbulence"]

    @jaxmpi.jit
    def advance(w: jax.Array, steps: int) -> jax.Array:
        vortices.TIME_STEP = 1.5 / size  # stable on this grid
        return vortices.advance(w, viscosity, steps, transform)

    return Problem(size * size, vortices.make_vorticity("turbulence", size, transform), advance)


def particles(comm: MPI.Comm, side: int) -> Problem:
    size = round(side * math.sqrt(comm.size))
    square = gas.Square(size, math.ceil(1.3 * size * size / comm.size), 12, comm)
    state = jaxmpi.jit(lambda *given: gas.begin(square, *given))(*gas.make_particles(square, gas.TEMPERATURE))
    advance_ten = jaxmpi.jit(lambda state: gas.advance(square, state, 10))  # compiled once, for all multiples of ten

    def advance(state: Any, steps: int) -> Any:
        for _ in range(steps // 10):
            state = advance_ten(state)
        return state

    return Problem(size * size, state, advance)


def transformer(comm: MPI.Comm, width: int) -> Problem:
    """Make a data-parallel problem: each rank has 64 lines."""
    adder.WIDTH, adder.HIDDEN = width, 2 * width
    groups = adder.Groups(MPI.COMM_SELF, comm)
    lines = jnp.asarray(adder.share(adder.additions()[0][: 64 * comm.size], comm))
    derive = jax.grad(lambda parameters: adder.loss_of(parameters, lines, groups))

    @jaxmpi.jit
    def advance(parameters: Any, steps: int) -> Any:
        def step(_: int, parameters: Any) -> Any:
            gradient = adder.clip(derive(parameters), MPI.COMM_SELF)
            return jax.tree.map(lambda x, dx: x - 1e-2 * dx, parameters, gradient)

        return jax.lax.fori_loop(0, steps, step, parameters)

    return Problem(64 * comm.size, adder.make_parameters(jax.random.key(0)), advance)


def parameters_of(width: int) -> int:
    """Return the number of parameters of the transformer: of the two layers, and of the symbols and places."""
    return 2 * 8 * width * width + 20 * width


def transforms(side: int, ranks: int) -> float:
    """Return the time of the messages of a step of the turbulence. Each of the four stages transforms four fields to
    points, and one back.

    If there are so many ranks that a slab would be thinner than a row, the model divides the fields in pencils.
    """
    field = 16 * 1.5 * side * side / 2  # bytes of complex modes on a rank: half of the modes, padded along one axis
    group = ranks if ranks <= 64 else math.isqrt(ranks)
    turns = 1 if ranks <= 64 else 2
    return turns * 4 * sum(exchange(OURS, group, [n * field / group] * (group - 1)) for n in (4, 1))


PROGRAMS = (
    Program(
        "shallow water, float32",
        "cells",
        shallow_water,
        (128, 512),
        lambda side, ranks: exchange(OURS, ranks, around(side, 3 * 4)),
    ),
    Program(
        "lattice Boltzmann, float64",
        "cells",
        lattice_boltzmann,
        (8, 24),
        lambda radius, ranks: exchange(OURS, ranks, around(17 * radius, 9 * 8)) + allreduce(OURS, ranks, 8),
    ),
    Program("turbulence (Fourier), float64", "modes", turbulence, (128, 512), transforms),
    Program(
        "particles that migrate, float64",
        "particles",
        particles,
        (36, 72),
        lambda side, ranks: exchange(OURS, ranks, around(0.676 * side, 12 * 17)) + 2 * (ranks - 1) * OURS.g,
    ),
    Program(
        "transformer, data parallel, float32",
        "parameters",
        transformer,
        (64, 256),
        lambda width, ranks: allreduce(OURS, ranks, 4 * parameters_of(width)) + 20 * allreduce(OURS, ranks, 8),
    ),
)


# --- measuring -------------------------------------------------------------------------------------------------------


def contender(problem: Problem, steps: int) -> Batch:
    """Return a contender of which each batch goes on where the last batch has ended."""

    def run(state: Any) -> Any:
        problem.state = jax.block_until_ready(problem.advance(state, steps))
        return problem.state

    def wrong(_: int, state: Any) -> int:
        values = (x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.inexact))
        return sum(int(jnp.sum(~jnp.isfinite(x))) for x in values)

    return Batch(steps, lambda turn: problem.state, run, wrong)


def measure(program: Program, size: int) -> tuple[float, float, float]:
    """Return the work of a rank, the seconds of a step alone, and the efficiency."""
    jax.config.update("jax_enable_x64", "float64" in program.name)
    alone, together = (program.make(comm, size) for comm in (MPI.COMM_SELF, COMM))
    steps = 10
    seconds = take_turns({"": contender(alone, steps)}, 3)[""].median
    steps = 10 * max(1, round(SECONDS / seconds / 10))  # on all ranks the same, because the slowest one counts
    samples = take_turns({"alone": contender(alone, steps), "together": contender(together, steps)}, ROUNDS)
    if samples["alone"].wrong or samples["together"].wrong:
        sys.exit(f"{program.name}: {samples}")
    share = together.work / COMM.size / alone.work
    return alone.work, samples["alone"].median, share / ratio(samples, "together", "alone")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--programs", nargs="+", default=[""], metavar="NAME", help="beginnings of names of programs")
    options = parser.parse_args()
    say(f"| program | on each rank | a step, ms | {COMM.size} ranks | " + " | ".join(f"{n:,}" for n in BEYOND) + " |")
    for program in PROGRAMS:
        if not program.name.startswith(tuple(options.programs)):
            continue
        for size in program.sizes:
            work, seconds, efficiency = measure(program, size)
            work = parameters_of(size) if program.unit == "parameters" else work
            beyond = (f"{seconds / (seconds + program.messages(size, ranks)):.2f}" for ranks in BEYOND)
            cells = [program.name, f"{work:,.0f} {program.unit}", f"{1e3 * seconds:.3g}", f"{efficiency:.2f}", *beyond]
            say(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
