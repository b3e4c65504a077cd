"""Programs in which everything meets: rows with ghosts that get new owners, blocks with halos on other grids, and
states in files between them, against NumPy on the whole arrays, of which all ranks know all.

What is computed is linear in integers, so results are exact, and so is the dot-product test of derivatives.
"""

import itertools
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from mpi4py import MPI

import jaxmpi
from jaxmpi import io, notoken
from support import drawing
from support.table import NEW_JAX

zarr = pytest.importorskip("zarr", minversion="3")

EXAMPLES = int(os.environ.get("JAXMPI_TEST_PROGRAMS", "8"))
ROWS = 18
INDICES = np.random.default_rng(0).permutation(1000)[:ROWS]
COMPUTED = ("ghosts", "sums", "halo", "total")
MOVED = ("migrate", "redistribute", "store", "series")
WAYS = ("eager", "jit", "jaxmpi.jit", "scan", "vmap", *(("vjp", "vmap of vjp") if NEW_JAX else ()))
COMPILERS = {"jit": jax.jit, "jaxmpi.jit": jaxmpi.jit}


@dataclass(frozen=True)
class Segment:
    """What is computed in one function, or how arrays are divided anew."""

    steps: tuple[str, ...]
    way: str
    seed: int


@dataclass(frozen=True)
class Case:
    segments: tuple[Segment, ...]
    shape: tuple[int, int]
    periodic: bool
    reverse: bool
    """The ranks of the communicator are in the reverse order."""
    seed: int


def segments(kinds, most):
    return st.builds(
        Segment,
        st.lists(st.sampled_from(kinds), min_size=1, max_size=most).map(tuple),
        st.sampled_from(WAYS),
        st.integers(0, 10**6),
    )


@st.composite
def cases(draw, size):
    chosen = draw(st.lists(st.tuples(segments(COMPUTED, 3), segments(MOVED, 1)), min_size=1, max_size=4))
    return Case(
        tuple(itertools.chain(*chosen)),
        (draw(st.integers(size, size + 4)), draw(st.integers(size, size + 4))),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(0, 10**6)),
    )


class Run:
    """The arrays of this rank, and the whole ones."""

    def __init__(self, case, comm, folder, judge):
        self.case, self.comm, self.folder, self.judge = case, comm, folder, judge
        rng = np.random.default_rng(case.seed)
        self.rows = rng.integers(-9, 9, (ROWS, 2)).astype(float)
        self.field = rng.integers(-9, 9, case.shape).astype(float)
        self.steps = []
        """The whole arrays of the steps of a series, each with its time."""
        self.divide(rng)
        self.own, self.inner = jnp.asarray(self.rows[self.mine]), jnp.asarray(self.field[self.grid.slices])

    # --- divisions -----------------------------------------------------------------------------------------------

    def divide(self, rng):
        self.divide_rows(rng.integers(0, self.comm.size, ROWS), rng)
        self.grid = self.new_grid(rng)

    def divide_rows(self, owner, rng, mine=None):
        """`owner` of each row; `mine` are this rank's, in their order."""
        self.owner = owner
        copies = [np.flatnonzero(rng.random(ROWS) < 0.4) for _ in range(self.comm.size)]
        self.there = [{*np.flatnonzero(owner == r), *copies[r]} for r in range(self.comm.size)]
        self.mine = np.flatnonzero(owner == self.comm.rank) if mine is None else mine
        self.map = jaxmpi.IndexMap(INDICES[self.mine], INDICES[copies[self.comm.rank]], comm=self.comm)
        back = {index: row for row, index in enumerate(INDICES.tolist())}
        self.local = np.array([back[index] for index in self.map.to_global(np.arange(sum(self.map.sizes)))], int)

    def new_grid(self, rng):
        first = rng.choice([n for n in range(1, self.comm.size + 1) if self.comm.size % n == 0])
        blocks = []
        for cells, count in zip(self.case.shape, (first, self.comm.size // first), strict=True):
            ends = np.sort(rng.choice(np.arange(1, cells), count - 1, replace=False))
            blocks.append(tuple(np.diff([0, *ends, cells]).tolist()))
        return jaxmpi.Grid(tuple(map(len, blocks)), blocks, periodic=self.case.periodic, comm=self.comm)

    # --- what is computed: here, and of the whole ----------------------------------------------------------------

    def edges(self, rng):
        """Pairs of rows and weights, those of each rank: it owns the first row, and has the second."""
        pairs, weights = rng.integers(0, ROWS, (2, 30)), rng.integers(1, 3, (30, 1)).astype(float)
        seen = np.array([b in self.there[self.owner[a]] for a, b in pairs.T])
        ours = seen & (self.owner[pairs[0]] == self.comm.rank)
        return (pairs[:, seen], weights[seen]), (pairs[:, ours], weights[ours])

    def at(self, rows):
        return self.map.to_local(INDICES[rows])

    def step(self, kind, rng):
        """A step as a function of this rank's rows and block, and as one of the whole arrays."""
        (whole, weights), ((first, second), own_weights) = self.edges(rng)
        owned = self.map.sizes[0]
        first, second = self.at(first), self.at(second)

        def ghosts(own, inner):
            x = self.map.exchange(self.map.pad(own))
            return x.at[first].add(own_weights * x[second])[:owned], inner

        def all_ghosts(rows, field):
            result = rows.copy()
            np.add.at(result, whole[0], weights * rows[whole[1]])
            return result, field

        def sums(own, inner):
            x = jnp.zeros((sum(self.map.sizes), 2)).at[second].add(own_weights * own[first])
            return own + self.map.accumulate(x)[:owned], inner

        def all_sums(rows, field):
            result = rows.copy()
            np.add.at(result, whole[1], weights * rows[whole[0]])
            return result, field

        def halo(own, inner):
            boundary = None if self.case.periodic else 0.0
            x = self.grid.exchange(self.grid.pad(inner, 1), boundary=boundary)
            return own, inner + 2 * x[:-2, 1:-1] + x[2:, 2:]

        def all_halos(rows, field):
            x = np.pad(field, 1, mode="wrap" if self.case.periodic else "constant")
            return rows, field + 2 * x[:-2, 1:-1] + x[2:, 2:]

        def total(own, inner):
            return own, inner + jaxmpi.replicate(
                notoken.allreduce(jnp.sum(own), MPI.SUM, comm=self.comm), comm=self.comm
            )

        def all_totals(rows, field):
            return rows, field + rows.sum()

        steps = {"ghosts": (ghosts, all_ghosts), "sums": (sums, all_sums), "halo": (halo, all_halos)}
        return {**steps, "total": (total, all_totals)}[kind]

    def compute(self, segment):
        rng = np.random.default_rng(segment.seed)
        pairs = [self.step(kind, rng) for kind in segment.steps]

        def here(own, inner):
            for function, _ in pairs:
                own, inner = function(own, inner)
            return own, inner

        def everywhere(rows, field):
            for _, function in pairs:
                rows, field = function(rows, field)
            return rows, field

        arrays, wholes = (self.own, self.inner), everywhere(self.rows, self.field)
        match segment.way:
            case "scan":
                results = jax.lax.scan(lambda carry, _: (here(*carry), None), arrays, None, length=2)[0]
                wholes = everywhere(*wholes)
            case "vmap":
                both = jax.vmap(here)(*(jnp.stack([x, 3 * x]) for x in arrays))
                results = tuple(x[0] for x in both)
                self.check([x[1] for x in both], [3 * x for x in wholes], segment)
            case "vjp" | "vmap of vjp":
                results, pull = jax.vjp(here, *arrays)
                ws = tuple(
                    jnp.asarray(rng.integers(-4, 4, x.shape).astype(float)) * (1 + self.comm.rank) for x in results
                )
                if segment.way == "vjp":
                    cotangents = pull(ws)
                else:
                    cotangents, twice = zip(*(jax.vmap(pull)(tuple(jnp.stack([w, 2 * w]) for w in ws))), strict=True)
                    for one, two in zip(cotangents, twice, strict=True):
                        self.equal(2 * one, two, segment)
                self.equal(self.dot(ws, results), self.dot(cotangents, arrays), segment)
            case way:
                results = COMPILERS.get(way, lambda f: f)(here)(*arrays)
        self.check(results, wholes, segment)
        self.rows, self.field = (np.mod(x, 17) - 8 for x in wholes)
        self.own, self.inner = (jnp.mod(x, 17) - 8 for x in results)

    def dot(self, xs, ys):
        return self.judge.allreduce(sum(float(jnp.vdot(x, y)) for x, y in zip(xs, ys, strict=True)))

    def check(self, found, wholes, about):
        for x, right in zip(found, (wholes[0][self.mine], wholes[1][self.grid.slices]), strict=True):
            self.equal(x, right, about)

    def equal(self, found, right, about):
        """Raises on all ranks if one has something else than what is right: none goes on, and waits for others."""
        wrong = "" if np.array_equal(found, right) else f"rank {self.comm.rank}: {about}\n{found}\n{right}"
        assert not any(self.judge.allgather(bool(wrong))), wrong or "on another rank"

    # --- other divisions -----------------------------------------------------------------------------------------

    def move(self, segment, number):
        rng = np.random.default_rng(segment.seed)
        compiler = COMPILERS.get(segment.way, lambda f: f)
        getattr(self, f"_{segment.steps[0]}")(rng, compiler, number)
        self.check((self.own, self.inner), (self.rows, self.field), segment)

    def _migrate(self, rng, compiler, number):
        owner = rng.integers(0, self.comm.size, ROWS)
        call = compiler(lambda rows, to: jaxmpi.migrate(rows, to, rows=ROWS, comm=self.comm))
        rows, count, received = call({"at": jnp.asarray(self.mine), "x": self.own}, owner[self.mine])
        before = [np.flatnonzero((self.owner == r) & (owner == self.comm.rank)) for r in range(self.comm.size)]
        self.equal(received, list(map(len, before)), "received")
        mine = np.asarray(rows["at"][: int(count)])
        self.divide_rows(owner, rng, mine)
        self.own = rows["x"][: int(count)]

    def _redistribute(self, rng, compiler, number):
        grid = self.new_grid(rng)
        self.inner = compiler(lambda x: jaxmpi.redistribute(x, self.grid, grid))(self.inner)
        self.grid = grid

    def stored(self):
        """The arrays with ghosts and halos, of which nothing may get into files; and how they are divided."""
        rows = self.map.pad(self.own).at[self.map.sizes[0] :].set(7)
        tree = {"rows": rows, "field": jnp.pad(self.inner, 1, constant_values=7)}
        return tree, {"rows": self.map, "field": self.grid}

    def _store(self, rng, compiler, number):
        path, chunks = self.folder / f"{number}.zarr", [None, 1, 2, 5][rng.integers(4)]
        tree, divisions = self.stored()
        io.save(path, {**tree, "n": number}, grid={**divisions, "n": None}, width={"field": 1}, chunks=chunks)
        self.divide(rng)
        found = io.load(path, grid={"rows": self.map, "field": self.grid, "n": None}, width={"field": 1})
        self.equal(found["n"], number, "n")
        self.equal(found["rows"], self.rows[self.local], "rows")
        around = np.pad(self.field, 1, mode="wrap" if self.case.periodic else "constant")
        start = [its.start for its in self.grid.slices]
        block = around[tuple(slice(low, low + n + 2) for low, n in zip(start, self.grid.local_shape, strict=True))]
        self.equal(found["field"], block, "field")
        self.own, self.inner = found["rows"][: self.map.sizes[0]], found["field"][1:-1, 1:-1]

    def _series(self, rng, compiler, number):
        """Goes on with one file, however the arrays are divided now."""
        tree, divisions = self.stored()
        options = {"width": {"field": 1}, "resume": True, "behind": int(rng.integers(1, 3))}
        with io.Writer(self.folder / f"series{self.case.seed}", divisions, **options) as out:
            for part in range(rng.integers(1, 4)):
                time = number + part / 10
                out.append(time, jax.tree.map(lambda x, part=part: x + part, tree))
                self.steps.append((time, self.rows + part, self.field + part))

    def check_series(self):
        if not self.steps:
            return
        found = {}
        if self.judge.rank == 0:
            file = self.folder / f"series{self.case.seed}"
            found = {name: array[...] for name, array in zarr.open_group(str(file), mode="r").arrays()}
            shutil.rmtree(file)
        times, rows, fields = map(np.array, zip(*self.steps, strict=True))
        order = np.argsort(INDICES)
        right = {"time": times, "index": INDICES[order], "rows": rows[:, order], "field": fields}
        for name, its in right.items():
            self.equal(found.get(name, its), its, name)


@pytest.mark.seconds(600)
def test_random_programs(comm, tmp_path):
    folder, numbers = Path(comm.bcast(str(tmp_path))), itertools.count()
    ordered, reversed_ = comm.Dup(), comm.Split(0, -comm.rank)

    def check(case):
        run = Run(case, reversed_ if case.reverse else ordered, folder, comm)
        for segment in case.segments:
            if segment.steps[0] in MOVED:
                run.move(segment, next(numbers))
            else:
                run.compute(segment)
        run.check_series()

    drawing.on_all_ranks(comm, cases(comm.size), check, EXAMPLES)
    ordered.Free()
    reversed_.Free()
