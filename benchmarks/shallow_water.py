"""A shallow-water model on 1, 2 or 4 ranks against the example of mpi4jax and a C program: time and results.

    python -m jaxmpi.run -n 2 benchmarks/shallow_water.py --days 1 --peer .../examples/shallow_water.py

The three take turns in the same processes. Ratios, times and the largest differences of the results are printed.

The model is the one of mpi4jax's example: the same equations, sea, initial state and number of steps, and the state is
kept after every 100 of them. (The example exchanges before friction, so that the velocities in its halos lack a step's
friction, and depends on the number of ranks by that much, which is less than rounding; here they do not lack it.) How
it is made fast:

- Ranks exchange once in `LEAP` steps, by `jaxmpi.Grid`. Each array is surrounded by a halo of two cells for every step
  of the leap, all six arrays travel in one message for each neighbour, and what a step needs beyond this rank's cells
  is computed here as well. A step returns arrays that are two cells smaller on each side, so that nothing is copied
  until the next exchange.
- XLA is told where the intermediate results are that should be in memory (`stage`).
"""

import argparse
import contextlib
import ctypes
import functools
import io
import runpy
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata
from mpi4py import MPI
from peers import MISSING, compile_c, load

import jaxmpi
from jaxmpi._bench.report import digits, figure, say
from jaxmpi._bench.timing import COMM, ratio, take_turns

NX, NY = 360, 180  # cells of the sea
DX = 5e3  # edge of a cell [m]
GRAVITY = 9.81  # [m/s2]
DEPTH = 100.0  # mean thickness of the layer [m]
CORIOLIS, BETA = 2e-4, 2e-11  # f = CORIOLIS + BETA y [1/s, 1/(m s)]
VISCOSITY = 1e-3 * CORIOLIS * DX**2  # [m2/s]
DT = 0.125 * DX / (GRAVITY * DEPTH) ** 0.5  # [s]
NEW, OLD = 1.6, -0.6  # weights of this step's tendency and the last one's (Adams-Bashforth, damped)
DAY = 86400.0  # [s]

BLOCK = 100  # steps after which the state is kept
LEAP = 4  # steps for which one exchange suffices; divides BLOCK
HALO = 2 * LEAP  # cells: a step's tendencies need one more on each side, its friction another


class State(NamedTuple):
    """Layer thickness, velocity and their tendencies in the step before, each of shape (ny, nx) and a halo.

    Cell (j, i) has h in its middle, u in the middle of its eastern and v in the middle of its northern edge.
    """

    h: jax.Array
    u: jax.Array
    v: jax.Array
    dh: jax.Array
    du: jax.Array
    dv: jax.Array


def make_grid() -> jaxmpi.Grid:
    if COMM.size not in (1, 2, 4):
        raise ValueError(f"cannot divide {NX} x {NY} cells among {COMM.size} ranks: run on 1, 2 or 4")
    return jaxmpi.Grid((min(COMM.size, 2), -(-COMM.size // 2)), (NY, NX), periodic=(False, True))


# Arithmetic on shifted arrays. Sums and differences of neighbours are one cell shorter in that direction.


def sum_x(a):
    return a[:, :-1] + a[:, 1:]


def sum_y(a):
    return a[:-1] + a[1:]


def diff_x(a):
    return a[:, 1:] - a[:, :-1]


def diff_y(a):
    return a[1:] - a[:-1]


def crop(a, shape: tuple[int, int]):
    """The middle of `a`; a column of length-one rows stays one."""
    rows, columns = ((have - min(have, want)) // 2 for have, want in zip(a.shape, shape, strict=True))
    return a[rows : a.shape[0] - rows, columns : a.shape[1] - columns]


def inner(a):
    return a[1:-1, 1:-1]


def stage(function: Callable) -> Callable:
    """Compile `function` on its own, also within another jitted function: results are in memory, not recomputed.

    XLA fuses as much as it can. Without such a fence every point of the friction computes the tendencies of all points
    around it again, and these the fluxes of all around them. `jax.lax.optimization_barrier` does not help: XLA removes
    it on CPUs before it fuses.
    """
    jitted = jax.jit(function)

    @functools.wraps(function)
    def call(*arguments):
        with set_xla_metadata(inlineable="false"):
            return jitted(*arguments)

    return call


# One step. `f` is the Coriolis parameter of each row, `is_open` is 0 where a row's northern edge is a wall or beyond
# one, else 1; both have shape (rows, 1) and are cropped to fit.


@stage
def fluxes(h, u, v, f, is_open):
    """Mass fluxes to east and north, potential vorticity at north-eastern corners, Bernoulli potential.

    The last has its first cell one row north and one column east of the others'.
    """
    f, is_open = crop(f, h.shape), crop(is_open, h.shape)
    flux_x = 0.5 * sum_x(h) * u[:, :-1]
    flux_y = 0.5 * sum_y(h) * (is_open * v)[:-1]
    vorticity = f[:-1] + (diff_x(v)[:-1] - diff_y(u)[:, :-1]) / DX
    q = vorticity / (0.25 * sum_x(sum_y(h)))
    potential = GRAVITY * (h - DEPTH)[1:, 1:] + 0.25 * (sum_x(u * u)[1:] + sum_y(v * v)[:, 1:])
    return flux_x, flux_y, q, potential


@stage
def tendencies(flux_x, flux_y, q, potential):
    dh = -(diff_x(flux_x)[1:-1] + diff_y(flux_y)[:, 1:-1]) / DX
    du = 0.25 * sum_y(q * sum_x(flux_y))[:, 1:] - diff_x(potential)[:-1] / DX
    dv = -0.25 * sum_x(q * sum_y(flux_x))[1:] - diff_y(potential)[:, :-1] / DX
    return dh, du, dv


def make_advance(new: float, old: float) -> Callable:
    """Return the stage that adds tendencies with these weights; h gets as small as friction will make u and v."""

    @stage
    def advance(state, dh, du, dv, is_open):
        is_open, dh_old, du_old, dv_old = (crop(a, dh.shape) for a in (is_open, *state[3:]))
        h = inner(inner(state.h) + DT * (new * dh + old * dh_old))
        u = inner(state.u) + DT * (new * du + old * du_old)
        v = inner(state.v) + DT * (new * dv + old * dv_old)
        return h, u, is_open * v

    return advance


@stage
def friction(u, v, is_open):
    """u and v with lateral friction.

    In the model of the example the flux of v is proportional to the difference between a v and the u of the cell west
    or south of it, and v on the northern wall keeps what friction gives it until the next step begins.
    """
    is_open = crop(is_open, u.shape)[:-1]
    factor = DT * VISCOSITY / DX**2
    u_new = inner(u) + factor * (diff_x(diff_x(u))[1:-1] + diff_y(is_open * diff_y(u))[:, 1:-1])
    v_x, v_y = v[:, 1:] - u[:, :-1], v[1:] - u[:-1]
    v_new = inner(v) + factor * (diff_x(v_x)[1:-1] + diff_y(is_open * v_y)[:, 1:-1])
    return u_new, v_new


advance, advance_first = make_advance(NEW, OLD), make_advance(1.0, 0.0)


def step(state: State, f, is_open, advance=advance) -> State:
    """One step; the arrays get two cells smaller on each side, the tendencies one."""
    changes = tendencies(*fluxes(*state[:3], f, is_open))
    h, u, v = advance(state, *changes, is_open)
    return State(h, *friction(u, v, is_open), *changes)


# Exchange.

AT_WALLS = State(DEPTH, 0.0, 0.0, 0.0, 0.0, 0.0)


def exchange(state: State, grid: jaxmpi.Grid) -> State:
    """Return the state with a halo of `HALO` cells, whatever halo it has."""

    @stage
    def surround(*fields):
        cells = (crop(a, grid.local_shape) for a in fields)
        return tuple(jax.lax.pad(a, jnp.zeros((), a.dtype), 2 * ((HALO, HALO, 0),)) for a in cells)

    return grid.exchange(State(*surround(*state)), HALO, boundary=AT_WALLS)


# The model.


def initial_fields(grid: jaxmpi.Grid) -> list[np.ndarray]:
    """h, u and v of this rank's cells with a halo: a jet in geostrophic balance (f u = -g dh/dy) and a ripple.

    The mean of h is taken over the sea and one cell around it, as the example does.
    """
    j, i = np.arange(-HALO, NY + HALO)[:, None], np.arange(-HALO, NX + HALO)
    around = (j[:, 0] >= -1) & (j[:, 0] <= NY)
    u = 10.0 * np.exp(-(((j - 0.5 * (NY - 1)) / (0.02 * (NX - 1))) ** 2))
    slope = -(CORIOLIS + BETA * DX * j) * u / GRAVITY
    h = np.cumsum(np.where(around[:, None], slope * DX, 0.0), axis=0)
    ripple = 0.2 * np.sin(10 * np.pi * (i % NX) / (NX - 1)) * np.cos(8 * np.pi * j / (NY - 1))
    h = DEPTH + h - h[around].mean() + ripple

    sea = (j >= 0) & (j < NY)
    rows, columns = (slice(cells.start, cells.stop + 2 * HALO) for cells in grid.slices)
    fields = np.where(sea, h, DEPTH), np.where(sea, u + 0.0 * i, 0.0), np.zeros_like(h)
    return [a[rows, columns].astype(np.float32) for a in fields]


@functools.cache
def make_model() -> tuple[jaxmpi.Grid, Callable[[], State], Callable[[State], State]]:
    """The grid, `start()`, which does the first step (Euler's), and `run(state)`, which does the next `BLOCK`."""
    grid = make_grid()
    rows = grid.slices[0]
    j = np.arange(rows.start - HALO, rows.stop + HALO)[:, None]
    f = jnp.asarray(CORIOLIS + BETA * DX * j, jnp.float32)
    is_open = jnp.asarray((j >= 0) & (j < NY - 1), jnp.float32)

    @jaxmpi.jit
    def first(h, u, v):
        zero = jnp.zeros_like(h)
        return exchange(step(State(h, u, v, zero, zero, zero), f, is_open, advance_first), grid)

    def leap(_, state: State) -> State:
        for _ in range(LEAP):
            state = step(state, f, is_open)
        return exchange(state, grid)

    @jaxmpi.jit
    def run(state: State) -> State:
        return jax.lax.fori_loop(0, BLOCK // LEAP, leap, state)

    fields = initial_fields(grid)
    return grid, lambda: first(*fields), run


def count_blocks(days: float) -> int:
    """How many blocks the example computes after the first step."""
    blocks, t = 0, DT
    while t < days * DAY:
        blocks, t = blocks + 1, t + DT * BLOCK
    return blocks


# The contenders. Each returns the time from a barrier to a barrier, and h, u and v of this rank's cells at the end.

Result = tuple[float, np.ndarray]


def ours(days: float) -> Result:
    grid, start, run = make_model()
    first = start()
    jax.block_until_ready(run(first))  # compiles
    states = [first]
    grid.comm.Barrier()
    begin = time.perf_counter()
    for _ in range(count_blocks(days)):
        states.append(jax.block_until_ready(run(states[-1])))
    grid.comm.Barrier()
    seconds = time.perf_counter() - begin
    return seconds, np.stack([crop(np.asarray(a), grid.local_shape) for a in states[-1][:3]])


class Watch:
    """Stands in for the module `time` in the example, which asks for the time before and after its loop.

    What it has begun before (a call that compiles, but is not waited for) is done before its time starts.
    """

    def __init__(self):
        self.times: list[float] = []

    def perf_counter(self) -> float:
        jax.effects_barrier()
        MPI.COMM_WORLD.Barrier()
        self.times.append(time.perf_counter())
        return self.times[-1]


def load_peer(path: Path) -> Callable[[float], Result]:
    """The example of mpi4jax as a contender."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about tqdm, which it does without
        solve = runpy.run_path(str(path), run_name="example")["solve_shallow_water"]

    def peer(days: float) -> Result:
        solve.__globals__["time"] = watch = Watch()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            states = solve(t1=days * DAY, num_multisteps=BLOCK)
        return watch.times[1] - watch.times[0], np.stack([inner(np.asarray(a)) for a in states[-1][:3]])

    return peer


def load_c() -> Callable[[float], Result]:
    """The C program as a contender."""
    function = compile_c("shallow_water.c").shallow_water_solve
    function.restype = ctypes.c_double
    function.argtypes = [ctypes.c_int, ctypes.c_int, np.ctypeslib.ndpointer(np.float32, flags="C")]

    def program(days: float) -> Result:
        fields = np.empty((3, *make_model()[0].local_shape), np.float32)
        return function(count_blocks(days), BLOCK, fields), fields

    return program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--days", type=float, default=10.0, help="model days (default: %(default)s)")
    parser.add_argument("--peer", type=Path, metavar="PATH", help="mpi4jax's examples/shallow_water.py")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender (default: %(default)s)")
    options = parser.parse_args()
    contenders = {"jaxmpi": ours, "C": load("C", load_c)}
    if options.peer:
        contenders["mpi4jax"] = load("mpi4jax", lambda: load_peer(options.peer))
    steps, grid = count_blocks(options.days) * BLOCK, make_model()[0]
    seas = {}

    def per_step(name: str) -> Callable[[int], tuple[float, int]]:
        def contender(_: int) -> tuple[float, int]:
            seconds, fields = contenders[name](options.days)
            seas[name] = np.asarray(grid.gather(fields))  # on rank 0 h, u and v of all ranks, shape (3, NY, NX)
            return seconds / steps, 0

        return contender

    samples = take_turns({name: per_step(name) for name, there in contenders.items() if there}, options.rounds)
    for name, goal in (("mpi4jax", ">= 3"), ("C", ">= 0.8")):
        figure(f"shallow_water_{COMM.size}_ranks_vs_{name.lower()}", ratio(samples, name, "jaxmpi"), goal)
    for name, why in MISSING.items():
        say(f"{name} is missing: {why}")
    for name, sea in seas.items() if COMM.rank == 0 else ():
        say(f"{name}: {digits(1e6 * samples[name].median)} us per step, of {steps} steps")
        largest = np.abs(sea - seas["jaxmpi"]).max(axis=(1, 2))
        say(f"  largest difference from jaxmpi in h [m], u and v [m/s]: {' '.join(map(digits, largest))}")


if __name__ == "__main__":
    main()
