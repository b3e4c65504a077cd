"""The exchange of ghosts on a mesh: `python -m jaxmpi.run -n 2 benchmarks/index_exchange.py`, on 2 or 4 ranks.

A structured triangulation of jittered points, whose vertices are numbered at random, is cut along coordinates into one
part for each rank. A rank has rows of float32, one for each vertex that it owns and one for each neighbour of another
rank. After every 50 exchanges the first rows, which others have as ghosts, are multiplied by 0.9999, so that data
changes. The contenders take turns, some hundred exchanges in a loop at a time:

  jaxmpi      `IndexMap.exchange` in a `lax.fori_loop` inside one compiled call, to which the array is donated
  take        what users write: `take` of the rows to be sent, `jaxmpi.alltoallv`, and a scatter into the ghosts
  C           index_exchange.c: packed messages, MPI_Isend and MPI_Irecv; the faster of two ways, with messages that
              are received into their places, or unpacked

With `--petsc` there are two, with rows of float64: jaxmpi, and the ghost update of a vector of PETSc, a VecScatter,
which petsc4py calls from Python. It must use the MPI library of the job (docs/beside.md).

The figures are medians of the ratios of each turn, and the time that it takes to make a map where each rank owns a
million vertices. All rows are compared with NumPy's on every rank, in each turn. Prints lines `name: value` as quick.py
does.
"""

import argparse
import ctypes
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from loops import looped, multiply, repeated
from mpi4py import MPI
from peers import compile_c

import jaxmpi
from jaxmpi._bench.data import count_wrong
from jaxmpi._bench.report import conclude, figure
from jaxmpi._bench.timing import COMM, Batch, ratio, take_turns

RANK, SIZE = COMM.rank, COMM.size
FACTOR, CHANGED, EACH = np.float32(0.9999), 16, 50
SIZES, WIDTHS = (100_000, 1_000_000), (1, 4, 64)
OF_MAP = 1_000_000
"""How many vertices each rank owns of the map whose making is timed."""
SECONDS = 0.03
"""Of a turn, about."""


# --- the mesh, and what is right -----------------------------------------------------------------------------------


def bisect(points, parts):
    """The part of each point: halves along the longer side, halves of these and so on."""
    part = np.zeros(len(points), np.int32)

    def divide(chosen, first, count):
        part[chosen] = first
        if count > 1:
            along = points[chosen, np.ptp(points[chosen], axis=0).argmax()]
            low = count // 2
            cut = len(chosen) * low // count
            order = np.argpartition(along, cut)
            divide(chosen[order[:cut]], first, low)
            divide(chosen[order[cut:]], first + low, count - low)

    divide(np.arange(len(points)), 0, parts)
    return part


@dataclass
class Mesh:
    """This rank's part, by global numbers."""

    owned: np.ndarray
    ghosts: np.ndarray
    """In the order of their owners, and of one owner by number."""
    receives: dict[int, int]
    """How many ghosts are of each rank."""
    sends: dict[int, np.ndarray]
    """The rows of this rank that others have as ghosts, in their order."""
    everything: np.ndarray
    """The vertices of rank 0, then those of rank 1 and so on, as the ranks order them."""
    changes: np.ndarray
    """The vertices of all ranks that are multiplied: the first of each."""


def make_mesh(vertices):
    """Of about so many vertices."""
    generator = np.random.default_rng(vertices)
    side = round(vertices**0.5)
    places = np.arange(side * side).reshape(side, side)
    points = np.stack(np.divmod(places.ravel(), side), axis=1) + generator.random((side * side, 2), np.float32)
    owner, number = bisect(points, SIZE), generator.permutation(side * side)
    edges = (places[1:], places[:-1]), (places[:, 1:], places[:, :-1]), (places[1:, 1:], places[:-1, :-1])
    a, b = (np.concatenate([ends[i].ravel() for ends in edges]) for i in (0, 1))
    a, b = a[owner[a] != owner[b]], b[owner[a] != owner[b]]  # the edges that are cut, of which there are few
    a, b = np.concatenate([a, b]), np.concatenate([b, a])
    orders = []
    for rank in range(SIZE):  # first some vertices that are ghosts elsewhere, then all others by number
        boundary = np.unique(number[a[owner[a] == rank]])[:CHANGED]
        orders.append(np.concatenate([boundary, np.setdiff1d(number[owner == rank], boundary)]))
    changes = np.concatenate([order[:CHANGED] for order in orders])
    ghosts = {rank: np.unique(number[b[(owner[a] == RANK) & (owner[b] == rank)]]) for rank in range(SIZE)}
    sent = {rank: np.unique(number[a[(owner[a] == RANK) & (owner[b] == rank)]]) for rank in range(SIZE)}
    row = np.empty(side * side, np.int32)
    row[orders[RANK]] = np.arange(len(orders[RANK]))
    return Mesh(
        orders[RANK],
        np.concatenate(list(ghosts.values())),
        {rank: len(of) for rank, of in ghosts.items() if len(of)},
        {rank: row[to] for rank, to in sent.items() if len(to)},
        np.concatenate(orders),
        changes,
    )


def values(numbers, width, turn):
    """The rows of vertices with these numbers: between 1 and 2, others in each turn."""
    cells = numbers[:, None].astype(np.uint32) * np.uint32(width) + np.arange(width, dtype=np.uint32)
    mixed = cells * np.uint32(2654435761) + np.uint32(turn) * np.uint32(40503)
    return 1 + (mixed >> np.uint32(8)).astype(np.float32) / np.float32(1 << 24)


@dataclass(frozen=True)
class Task:
    """What the contenders do: so many steps of so many exchanges and one multiplication each."""

    mesh: Mesh
    width: int
    dtype: np.dtype
    steps: int
    each: int

    def given(self, turn):
        """All rows of this rank, as they are with right ghosts."""
        rows = values(np.concatenate([self.mesh.owned, self.mesh.ghosts]), self.width, turn)
        return rows.astype(self.dtype)

    def start(self, turn):
        rows = self.given(turn)
        rows[len(self.mesh.owned) :] = 0
        return rows

    def wrong(self, turn, result):
        return count_wrong(result, right(self.mesh, self.given(turn), self.steps))

    def batch(self, start, run):
        return Batch(self.steps * self.each, start, run, self.wrong)


def right(mesh, given, steps):
    """All rows of this rank after these steps: ghosts are what their owners had before the last multiplication."""
    rows = given.copy()
    changed = np.isin(mesh.ghosts, mesh.changes)
    own, ghosts = rows[:CHANGED], rows[len(mesh.owned) :]
    for step in range(steps):
        own *= FACTOR
        ghosts[changed] *= FACTOR if step else 1
    return rows


# --- contenders ------------------------------------------------------------------------------------------------------


def in_loop(exchange, task, *constants):
    """exchange(x, *constants): constants are arguments of the compiled function."""

    def step(x, once, *constants):
        x = repeated(lambda x: exchange(x, *constants), task.each)(x)
        return multiply(x, slice(CHANGED), FACTOR, once)

    return task.batch(lambda turn: jnp.array(task.start(turn)), looped(step, task.steps, *constants))


def by_take(task):
    mesh = task.mesh
    sends = [len(mesh.sends.get(rank, ())) for rank in range(SIZE)]
    receives = [mesh.receives.get(rank, 0) for rank in range(SIZE)]
    rows = np.concatenate([np.zeros(0, np.int32), *mesh.sends.values()])
    ghosts = np.arange(len(mesh.ghosts), dtype=np.int32) + np.int32(len(mesh.owned))

    def exchange(x, rows, ghosts):
        return x.at[ghosts].set(jaxmpi.alltoallv(jnp.take(x, rows, axis=0), sends, receives))

    return in_loop(exchange, task, rows, ghosts)


def load_c():
    library = compile_c("index_exchange.c")
    rows = np.ctypeslib.ndpointer(np.float32, flags="C")
    ints = np.ctypeslib.ndpointer(np.int32, flags="C")
    library.index_exchange_make.restype = ctypes.c_void_p
    library.index_exchange_make.argtypes = [
        rows, *2 * [ctypes.c_int], ctypes.c_int, ints, ints, ints, ctypes.c_int, ints, ints, ctypes.c_int
    ]  # fmt: skip
    library.index_exchange_run.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_float, ctypes.c_int]
    return library


def in_c(library, task, in_place):
    mesh, rows = task.mesh, task.start(0)
    sent = list(mesh.sends), [len(of) for of in mesh.sends.values()]
    received = list(mesh.receives), list(mesh.receives.values())
    sent, received = ([np.array(of, np.int32) for of in lists] for lists in (sent, received))
    sent.append(np.concatenate([np.zeros(0, np.int32), *mesh.sends.values()]))
    counts = len(sent[0]), len(received[0])
    made = library.index_exchange_make(
        rows, len(mesh.owned), task.width, counts[0], *sent, counts[1], *received, int(in_place)
    )

    def put(turn, kept=(sent, received)):
        rows[...] = task.start(turn)
        return rows

    def run(rows):
        library.index_exchange_run(made, task.steps, task.each, FACTOR, CHANGED)
        return rows

    return task.batch(put, run)


def by_petsc(task):
    from petsc4py import PETSc  # which initializes MPI where that has not been done

    mesh, width = task.mesh, task.width
    at = np.empty(len(mesh.everything), PETSc.IntType)
    at[mesh.everything] = np.arange(len(mesh.everything))  # PETSc numbers what rank 0 owns first
    shape = len(mesh.owned) + len(mesh.ghosts), width
    vector = PETSc.Vec().createGhost(at[mesh.ghosts], (len(mesh.owned) * width, None), bsize=width, comm=COMM)
    insert, forward = PETSc.InsertMode.INSERT_VALUES, PETSc.ScatterMode.FORWARD

    def put(turn):
        with vector.localForm() as local:
            rows = local.getArray().reshape(shape)
        rows[...] = task.start(turn)
        return rows

    def run(rows):
        for _ in range(task.steps):
            for _ in range(task.each):
                vector.ghostUpdate(insert, forward)
            rows[:CHANGED] *= FACTOR
        return rows

    return task.batch(put, run)


def contenders(library, mesh, width, dtype):
    """All contenders. Without C there are two: jaxmpi and PETSc."""
    vertices = jaxmpi.IndexMap(mesh.owned, mesh.ghosts)
    travelling = COMM.allreduce(len(mesh.ghosts), MPI.MAX) * width * dtype.itemsize
    exchanges = max(2, min(5000, int(SECONDS / (5e-6 + travelling / 2e9))))
    task = Task(mesh, width, dtype, max(2, exchanges // EACH), EACH)
    ours = in_loop(vertices.exchange, task)
    if library is None:
        return {"jaxmpi": ours, "petsc": by_petsc(task)}
    return {
        "jaxmpi": ours,
        "C, in place": in_c(library, task, True),
        "C, unpacked": in_c(library, task, False),
        "jaxmpi, take": by_take(task),
    }


def time_of_map():
    """A contender that makes a map in which each rank owns a million vertices."""
    mesh = make_mesh(SIZE * OF_MAP)
    return Batch(1, lambda turn: None, lambda _: jaxmpi.IndexMap(mesh.owned, mesh.ghosts))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contender (default: %(default)s)")
    parser.add_argument("--petsc", action="store_true", help="compare with PETSc alone, in float64")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", options.petsc)
    library, dtype = (None, np.dtype(np.float64)) if options.petsc else (load_c(), np.dtype(np.float32))
    groups = {}
    for vertices in SIZES:
        mesh = make_mesh(vertices)
        for width in WIDTHS:
            samples = take_turns(contenders(library, mesh, width, dtype), options.rounds)
            groups[f"{vertices} vertices, {width} floats each, on {SIZE} ranks"] = samples
            case = f"{vertices}_x_{width}_{SIZE}_ranks"
            if options.petsc:
                figure(f"petsc_vs_index_exchange_{case}", ratio(samples, "petsc", "jaxmpi"))
                continue
            c = min(("C, in place", "C, unpacked"), key=lambda name: samples[name].median)
            figure(f"index_exchange_vs_raw_c_{case}", ratio(samples, "jaxmpi", c), "<= 1.2")
            figure(f"take_alltoallv_vs_index_exchange_{case}", ratio(samples, "jaxmpi, take", "jaxmpi"), ">= 1.5")
    made = take_turns({"map": time_of_map()}, 5)["map"]
    figure(f"index_map_of_a_million_s_{SIZE}_ranks", made.median, "<= 1")
    conclude(f"index_exchange_wrong_elements_{SIZE}_ranks", groups)


if __name__ == "__main__":
    main()
