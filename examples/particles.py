"""A lattice of particles that attract each other becomes a dense gas: molecular dynamics in a periodic square.

The square is divided in cells, and the cells among the processes. When a particle enters a cell of another process,
`jaxmpi.migrate` moves it there in the same step, with all data. Forces are short-ranged. Each process sorts
particles into an array with room for some in each cell, and `Grid.exchange` brings the neighbours' cells around it. The
result is the same on any number of processes, and is compared with one process alone. The derivative of the kinetic
energy with respect to the temperature at the beginning is compared with a difference quotient.

    python particles.py                                                 # one process
    python -m jaxmpi.run -n 4 particles.py --save-animation             # the same result on four, or any other number

A run shows a progress bar, prints the comparisons, writes `particles.png` (if asked, `particles.gif` too) and prints
where they are.

The potential of Lennard and Jones, 4 (r^-12 - r^-6), is shifted so that potential and force end at r = 2.5. The
potential and the mass define the units. Steps are Verlet's with velocities.
"""

import argparse
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from mpi4py import MPI
from tqdm import tqdm

import jaxmpi
from jaxmpi import allreduce, gatherv

REACH = 2.5  # of the force
DENSITY, TEMPERATURE = 0.35, 0.45  # at the beginning
TIME_STEP = 0.005
FRAMES = 40  # how often a run stops for the progress bar and a frame of the animation
COMPARED = 100  # steps that one process also does alone
DERIVED = 20  # steps of the derivative
STEP = 1e-4  # of the difference quotient, relative to the temperature
SEED = 0

COMM = MPI.COMM_WORLD
RANK = COMM.rank


class Particles(NamedTuple):
    """The arrays that move between processes, with room for more particles than there are."""

    place: jax.Array
    velocity: jax.Array
    label: jax.Array


class State(NamedTuple):
    """This process's particles (the first `count`), the forces on them, and figures of the run."""

    particles: Particles
    count: jax.Array
    force: jax.Array
    potential: jax.Array
    fullest: jax.Array  # the most particles that any cell has had


@dataclass(frozen=True)
class Square:
    """A square with size times size particles, divided among the processes of a communicator."""

    size: int
    room: int  # particles for which each process has memory
    in_cell: int  # and each cell
    comm: MPI.Comm

    @property
    def side(self) -> float:
        return self.size / math.sqrt(DENSITY)

    @property
    def cells(self) -> int:
        """The number of cells along a side, each as long as forces reach."""
        return int(self.side / REACH)

    @cached_property
    def grid(self) -> jaxmpi.Grid:
        return jaxmpi.Grid((0, 0), (self.cells, self.cells), periodic=True, comm=self.comm)

    @cached_property
    def owners(self) -> np.ndarray:
        """The process that has each cell."""
        owners = np.empty((self.cells, self.cells), np.int32)
        for rank in range(self.comm.size):
            owners[self.grid.slices_of(rank)] = rank
        return owners

    def cell(self, place: jax.Array) -> jax.Array:
        return jnp.clip((place * (self.cells / self.side)).astype(jnp.int32), 0, self.cells - 1)

    def owner(self, place: jax.Array) -> jax.Array:
        cell = self.cell(place)
        return jnp.asarray(self.owners)[cell[:, 0], cell[:, 1]]


def make_particles(square: Square, temperature: float) -> tuple[Particles, jax.Array]:
    """Return a lattice with random velocities: each process makes all particles and takes the local ones."""
    generator, number = np.random.default_rng(SEED), square.size**2
    place = (
        np.stack(np.divmod(np.arange(number), square.size), axis=1) + 0.5 + generator.uniform(-0.1, 0.1, (number, 2))
    )
    velocity = generator.standard_normal((number, 2))
    velocity -= velocity.mean(axis=0)
    velocity *= math.sqrt(2 * temperature / np.mean(np.sum(velocity**2, axis=1)))
    place *= square.side / square.size
    own = np.flatnonzero(np.asarray(square.owner(jnp.asarray(place))) == square.comm.rank)
    if len(own) > square.room:
        raise SystemExit(f"a process has {len(own)} particles and room for {square.room}: use a larger --room")
    more = square.room - len(own)
    padded = [np.pad(x[own], ((0, more), (0, 0))[: x.ndim]) for x in (place, velocity)]
    label = np.pad(np.arange(number, dtype=np.int32)[own], (0, more))
    return Particles(*map(jnp.asarray, (*padded, label))), jnp.int32(len(own))


def pair(square_of_distance: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the potential of two particles, and the force between them divided by their distance."""
    at_end = REACH**-6
    slope = -24 / REACH * (2 * at_end**2 - at_end)
    distance = jnp.sqrt(square_of_distance)
    sixth = square_of_distance**-3
    potential = 4 * (sixth**2 - sixth) - 4 * (at_end**2 - at_end) - slope * (distance - REACH)
    return potential, 24 * (2 * sixth**2 - sixth) / square_of_distance + slope / distance


def forces(square: Square, particles: Particles, count: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the forces on this process's particles, their potential energy, and the number in the fullest cell."""
    grid, room = square.grid, square.in_cell
    ny, nx = grid.local_shape
    # By cells, and in a cell by label: so the order of the sums does not depend on the division.
    first = jnp.asarray([its.start for its in grid.slices], jnp.int32)
    cell = (square.cell(particles.place) - first) @ jnp.asarray([nx, 1], jnp.int32)
    cell = jnp.where(jnp.arange(square.room) < count, cell, ny * nx)  # padding comes last
    order = jnp.lexsort((particles.label, cell))
    cell = cell[order]
    slot = jnp.arange(square.room) - jnp.searchsorted(cell, cell)
    fullest = jnp.max(jnp.where(cell < ny * nx, slot + 1, 0))

    place = jnp.zeros((2, room, ny * nx)).at[:, slot, cell].set(particles.place[order].T, mode="drop")
    there = jnp.zeros((room, ny * nx), bool).at[slot, cell].set(True, mode="drop")
    place, there = place.reshape(2, room, ny, nx), there.reshape(room, ny, nx)
    around, there_around = grid.exchange(grid.pad((place, there)))

    @jax.checkpoint  # else the derivative would keep all pairs of all steps
    def add(total: tuple[jax.Array, jax.Array], shift: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        """Add the forces by the particles of cells at some distance, and half of the potential."""
        other = lax.dynamic_slice(around, shift, place.shape)
        possible = there[:, None] & lax.dynamic_slice(there_around, shift[1:], there.shape)
        possible &= ~np.eye(room, dtype=bool)[:, :, None, None] | jnp.any(shift[2:] != 1)
        between = place[:, :, None] - other[:, None]
        between -= square.side * jnp.round(between / square.side)
        distance = jnp.sum(between**2, axis=0)
        near = possible & (distance < REACH**2)
        potential, strength = pair(jnp.where(near, distance, 1.0))
        force = jnp.sum(jnp.where(near, strength, 0.0) * between, axis=2)
        return (total[0] + force, total[1] + jnp.sum(jnp.where(near, potential, 0.0)) / 2), None

    shifts = jnp.asarray(list(np.ndindex(1, 1, 3, 3)), jnp.int32)
    (force, potential), _ = lax.scan(add, (jnp.zeros_like(place), jnp.zeros(())), shifts)
    of_sorted = force.reshape(2, room, ny * nx).at[:, slot, cell].get(mode="fill", fill_value=0.0).T
    return jnp.zeros_like(particles.place).at[order].set(of_sorted, unique_indices=True), potential, fullest


def begin(square: Square, particles: Particles, count: jax.Array) -> State:
    return State(particles, count, *forces(square, particles, count))


def advance(square: Square, state: State, steps: int) -> State:
    """Do `steps` time steps."""

    def step(state: State, _: None) -> tuple[State, None]:
        (place, velocity, label), count, force, _, fullest = state
        velocity += TIME_STEP / 2 * force
        place = jnp.mod(place + TIME_STEP * velocity, square.side)
        moved = Particles(place, velocity, label)
        particles, count, _ = jaxmpi.migrate(moved, square.owner(place), count=count, comm=square.comm)
        force, potential, now = forces(square, particles, count)
        particles = particles._replace(velocity=particles.velocity + TIME_STEP / 2 * force)
        return State(particles, count, force, potential, jnp.maximum(fullest, now)), None

    return lax.scan(step, state, None, length=steps)[0]


def kinetic_energy(square: Square, state: State) -> jax.Array:
    there = jnp.arange(square.room) < state.count
    own = jnp.sum(jnp.where(there[:, None], state.particles.velocity**2, 0.0)) / 2
    return allreduce(own, MPI.SUM, comm=square.comm)


def measure(square: Square, state: State) -> dict[str, jax.Array]:
    """Return energies and momentum of all particles, and the number in the fullest of all cells."""
    there = jnp.arange(square.room) < state.count
    momentum = jnp.sum(jnp.where(there[:, None], state.particles.velocity, 0.0), axis=0)
    return {
        "kinetic": kinetic_energy(square, state),
        "potential": allreduce(state.potential, MPI.SUM, comm=square.comm),
        "momentum": allreduce(momentum, MPI.SUM, comm=square.comm),
        "fullest": allreduce(state.fullest, MPI.MAX, comm=square.comm),
    }


def gather(square: Square, state: State) -> tuple[np.ndarray, ...] | None:
    """Return places, velocities and owners of all particles in the order of their labels, on rank 0; None elsewhere."""
    owner = jnp.full(square.room, square.comm.rank)
    gathered, _ = gatherv((*state.particles, owner), state.count, 0, rows=square.size**2, comm=square.comm)
    if square.comm.rank != 0:
        return None
    place, velocity, label, owner = map(np.asarray, gathered)
    order = np.argsort(label)
    assert np.array_equal(label[order], np.arange(square.size**2)), "a particle is lost"
    return place[order], velocity[order], owner[order]


def later_energy(square: Square, particles: Particles, count: jax.Array, factor: jax.Array) -> jax.Array:
    """Return the kinetic energy after some steps, with `factor` times the temperature at the beginning."""
    factor = jaxmpi.replicate(factor)  # each process scales other particles, so the cotangents are added
    particles = particles._replace(velocity=particles.velocity * jnp.sqrt(factor))
    return kinetic_energy(square, advance(square, begin(square, particles, count), DERIVED))


def draw(axes, square: Square, place: np.ndarray, owner: np.ndarray):
    """Draw particles in the colours of their owners, and lines between the owners' parts; return the artist."""
    for axis, line in enumerate((axes.axhline, axes.axvline)):
        for rank in range(square.comm.size):
            line(square.grid.slices_of(rank)[axis].start * square.side / square.cells, color="0.8", linewidth=0.8)
    axes.set(xlim=(0, square.side), ylim=(0, square.side), aspect="equal", xticks=[], yticks=[])
    size = (250 / square.side) ** 2 / 4
    return axes.scatter(place[:, 1], place[:, 0], c=owner, cmap="tab10", vmin=0, vmax=9, s=size, linewidth=0)


def save_picture(path: Path, square: Square, frames: list[tuple[np.ndarray, ...]], history: dict[str, list]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    for place, which in zip(axes, (0, -1), strict=False):
        draw(place, square, frames[which][0], frames[which][2])
        place.set_title(f"time {history['time'][which]:g}", loc="left")
    total = np.add(history["kinetic"], history["potential"])
    for name, values in (("kinetic", history["kinetic"]), ("potential", history["potential"]), ("total", total)):
        axes[2].plot(history["time"], np.divide(values, square.size**2), label=name)
    axes[2].set(xlabel="time")
    axes[2].set_title("energy of a particle", loc="left")
    axes[2].legend(loc="center right")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def save_animation(path: Path, square: Square, frames: list[tuple[np.ndarray, ...]], times: list[float]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.animation import PillowWriter

    figure, axes = plt.subplots(figsize=(4.2, 4.4), layout="constrained")
    artist = draw(axes, square, frames[0][0], frames[0][2])
    writer = PillowWriter(fps=8)
    with writer.saving(figure, path, dpi=90):
        for (place, _, owner), now in zip(frames, times, strict=True):
            artist.set_offsets(place[:, ::-1])
            artist.set_array(owner)
            axes.set_title(f"time {now:g}", loc="left")
            writer.grab_frame()
    plt.close(figure)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=int, default=36, help="particles along a side (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2000, help="time steps (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=TEMPERATURE, help="(default: %(default)s)")
    parser.add_argument("--room", type=int, help="particles that a process can hold (default: 3 times its share)")
    parser.add_argument("--in-cell", type=int, default=12, help="particles that a cell can hold (default: %(default)s)")
    parser.add_argument("--save-animation", action="store_true", help="write particles.gif")
    parser.add_argument("--save-state", type=Path, metavar="FILE.npz", help="write the last places and velocities")
    parser.add_argument("--output-dir", type=Path, default=Path(), metavar="DIR", help="where the picture goes")
    return parser.parse_args()


def run(square: Square, options: argparse.Namespace) -> tuple[list, dict[str, list]]:
    """Advance with a progress bar. Return frames, on rank 0, and the measurements at their times."""
    step = jaxmpi.jit(lambda state, steps: advance(square, state, steps), static_argnums=1, donate_argnums=0)
    measured = jaxmpi.jit(lambda state: measure(square, state))
    state = jaxmpi.jit(lambda *given: begin(square, *given))(*make_particles(square, options.temperature))
    frames, history = [], {}

    def keep(done: int) -> None:
        frames.append(gather(square, state))
        for name, value in {"time": done * TIME_STEP, **measured(state)}.items():
            history.setdefault(name, []).append(np.asarray(value))
        if history["fullest"][-1] > square.in_cell:
            raise SystemExit(f"a cell has had {history['fullest'][-1]} particles: use a larger --in-cell")

    keep(0)
    batch = max(1, options.steps // FRAMES)
    with tqdm(total=options.steps, desc="time steps", unit="", disable=square.comm.rank != 0) as bar:
        for done in range(0, options.steps, batch):
            steps = min(batch, options.steps - done)
            state = jax.block_until_ready(step(state, steps))
            bar.update(steps)
            keep(done + steps)
    return frames, history


def after_some_steps(square: Square, temperature: float) -> tuple[np.ndarray, ...] | None:
    """Return all particles after COMPARED steps, on rank 0."""
    particles, count = make_particles(square, temperature)
    state = jaxmpi.jit(lambda *given: advance(square, begin(square, *given), COMPARED))(particles, count)
    return gather(square, state)


def main() -> None:
    options = parse_options()
    jax.config.update("jax_enable_x64", True)
    number = options.size**2
    share = 3 * number // COMM.size + options.size if options.room is None else options.room
    square = Square(options.size, min(number, share), options.in_cell, COMM)
    if square.cells < 3:
        raise SystemExit(f"{square.cells} cells along a side, and 3 are needed: use a larger --size")
    frames, history = run(square, options)

    together = after_some_steps(square, options.temperature)
    value = jaxmpi.jit(lambda factor, *given: later_energy(square, *given, factor))
    given = make_particles(square, options.temperature)
    slope = jaxmpi.jit(jax.grad(lambda factor, *given: later_energy(square, *given, factor)))(1.0, *given)
    quotient = (value(1 + STEP, *given) - value(1 - STEP, *given)) / (2 * STEP)
    if RANK != 0:
        return

    alone = after_some_steps(Square(options.size, number, options.in_cell, MPI.COMM_SELF), options.temperature)
    apart = max(np.abs(a - b).max() for a, b in zip(together[:2], alone[:2], strict=True))
    energies = np.add(history["kinetic"], history["potential"])
    momentum = np.abs(history["momentum"]).max()
    moved = np.mean(frames[0][2] != frames[-1][2])
    print(f"{COMM.size} processes, {number} particles, final kinetic energy {float(history['kinetic'][-1]):.6f}")
    print(f"Momentum, at most: {momentum:.1e}")
    print(f"Energy, drift relative to the first kinetic one: {np.ptp(energies) / history['kinetic'][0]:.1e}")
    print(f"Particles that another process has at the end: {100 * moved:.1f} %")
    print(f"Beside one process, after {COMPARED} steps: {apart:.1e}")
    print(f"d energy / d temperature, over {DERIVED} steps: relative error {abs(float(slope / quotient) - 1):.1e}")
    options.output_dir.mkdir(parents=True, exist_ok=True)
    picture = (options.output_dir / "particles.png").resolve()
    save_picture(picture, square, frames, history)
    print(f"Picture: {picture}")
    if options.save_animation:
        save_animation(picture.with_suffix(".gif"), square, frames, history["time"])
        print(f"Animation: {picture.with_suffix('.gif')}")
    if options.save_state:
        np.savez(options.save_state, place=frames[-1][0], velocity=frames[-1][1], energies=energies)
        print(f"State: {options.save_state.resolve()}")


if __name__ == "__main__":
    main()
