"""The exchange of ghosts on a mesh: `python -m jaxmpi.run -n 2 benchmarks/index_exchange.py`, on 2 or 4 ranks.

A structured triangulation of jittered points, whose vertices are numbered at random, is cut along coordinates into one
part for each rank. A rank has rows of float32, one for each vertex that it owns and one for each neighbour of another
rank. After every 50 exchanges the first rows, which others have as ghosts, are multiplied by 0.9999, so that data
changes. The contenders take turns, some hundred exchanges in a loop at a time:

  jaxmpi      `IndexMap.exchange` in a `lax.fori_loop` inside one compiled call, to which the array is donated
  take        what users write: `take` of the rows to be sent, `jaxmpi.alltoallv`, and a scatter into the ghosts
  allgather   `jaxmpi.allgatherv` of all rows, of which the ghosts are taken
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
import statistics
import sys
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from compiled import compile_c
from in_place import multiply
from mpi4py import MPI

import jaxmpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
FACTOR, CHANGED, EACH = np.float32(0.9999), 16, 50
SIZES, WIDTHS = (100_000, 1_000_000), (1, 4, 64)
OF_MAP = 1_000_000
"""How many vertices each rank owns of the map whose making is timed."""
SECONDS = 0.03
"""Of a turn, about."""
GOALS = {"raw_c": "<= 1.2", "take": ">= 1.5", "allgather": ">= 5", "petsc": ""}


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
    counts: list[int]
    """How many each rank owns."""
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
        [len(order) for order in orders],
        changes,
    )


def values(numbers, width, turn):
    """The rows of vertices with these numbers: between 1 and 2, others in each turn."""
    cells = numbers[:, None].astype(np.uint32) * np.uint32(width) + np.arange(width, dtype=np.uint32)
    mixed = cells * np.uint32(2654435761) + np.uint32(turn) * np.uint32(40503)
    return 1 + (mixed >> np.uint32(8)).astype(np.float32) / np.float32(1 << 24)


def right(mesh, given, steps):
    """All rows of this rank after so many steps, which are some exchanges and one multiplication each: ghosts are what
    their owners had before the last one."""
    rows = given.copy()
    changed = np.isin(mesh.ghosts, mesh.changes)
    own, ghosts = rows[:CHANGED], rows[len(mesh.owned) :]
    for step in range(steps):
        own *= FACTOR
        ghosts[changed] *= FACTOR if step else 1
    return rows


# --- contenders ------------------------------------------------------------------------------------------------------


def looped(exchange, steps, each, *constants):
    """exchange(x, *constants): constants are arguments of the compiled function."""

    def run(x, once, *constants):
        def step(_, x):
            x = jax.lax.fori_loop(0, each, lambda _, x: exchange(x, *constants), x)
            return multiply(x, slice(CHANGED), FACTOR, once)

        return jax.lax.fori_loop(0, steps, step, x)

    compiled, constants = jaxmpi.jit(run, donate_argnums=0), [jnp.asarray(of) for of in (1, *constants)]

    def batch(given):
        x = jax.block_until_ready(jnp.array(given))
        COMM.Barrier()
        begin = time.perf_counter()
        result = jax.block_until_ready(compiled(x, *constants))
        return time.perf_counter() - begin, result

    return batch


def by_take(mesh, steps, each):
    sends = [len(mesh.sends.get(rank, ())) for rank in range(SIZE)]
    receives = [mesh.receives.get(rank, 0) for rank in range(SIZE)]
    rows = np.concatenate([np.zeros(0, np.int32), *mesh.sends.values()])
    ghosts = np.arange(len(mesh.ghosts), dtype=np.int32) + np.int32(len(mesh.owned))

    def exchange(x, rows, ghosts):
        return x.at[ghosts].set(jaxmpi.alltoallv(jnp.take(x, rows, axis=0), sends, receives))

    return looped(exchange, steps, each, rows, ghosts)


def by_allgather(mesh, steps, each):
    at = np.empty(len(mesh.everything), np.int32)
    at[mesh.everything] = np.arange(len(mesh.everything))

    def exchange(x, places):
        everything = jaxmpi.allgatherv(x[: len(mesh.owned)], mesh.counts)
        return x.at[len(mesh.owned) :].set(everything[places])

    return looped(exchange, steps, each, at[mesh.ghosts])


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


def in_c(library, mesh, width, steps, each, in_place):
    rows = np.zeros((len(mesh.owned) + len(mesh.ghosts), width), np.float32)
    sent = list(mesh.sends), [len(of) for of in mesh.sends.values()]
    received = list(mesh.receives), list(mesh.receives.values())
    sent, received = ([np.array(of, np.int32) for of in lists] for lists in (sent, received))
    sent.append(np.concatenate([np.zeros(0, np.int32), *mesh.sends.values()]))
    counts = len(sent[0]), len(received[0])
    made = library.index_exchange_make(
        rows, len(mesh.owned), width, counts[0], *sent, counts[1], *received, int(in_place)
    )

    def batch(given, kept=(sent, received)):
        rows[...] = given
        COMM.Barrier()
        begin = time.perf_counter()
        library.index_exchange_run(made, steps, each, FACTOR, CHANGED)
        return time.perf_counter() - begin, rows

    return batch


def by_petsc(mesh, width, steps, each):
    from petsc4py import PETSc  # which initializes MPI where that has not been done

    at = np.empty(len(mesh.everything), PETSc.IntType)
    at[mesh.everything] = np.arange(len(mesh.everything))  # PETSc numbers what rank 0 owns first
    shape = len(mesh.owned) + len(mesh.ghosts), width
    vector = PETSc.Vec().createGhost(at[mesh.ghosts], (len(mesh.owned) * width, None), bsize=width, comm=COMM)
    insert, forward = PETSc.InsertMode.INSERT_VALUES, PETSc.ScatterMode.FORWARD

    def batch(given):
        with vector.localForm() as local:
            rows = local.getArray().reshape(shape)
        rows[...] = given
        COMM.Barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            for _ in range(each):
                vector.ghostUpdate(insert, forward)
            rows[:CHANGED] *= FACTOR
        return time.perf_counter() - begin, rows

    return batch


def measure(library, mesh, width, rounds, dtype):
    """Seconds of an exchange by contender, one per turn, and the elements that were wrong. Without C: beside PETSc."""
    vertices = jaxmpi.IndexMap(mesh.owned, mesh.ghosts)
    travelling = COMM.allreduce(len(mesh.ghosts), MPI.MAX) * width * dtype.itemsize
    everything = len(mesh.everything) * width * dtype.itemsize
    few, many = (max(2, min(5000, int(SECONDS / (5e-6 + size / 2e9)))) for size in (everything, travelling))
    few, many = (few, 1), (max(2, many // EACH), EACH)  # steps, and exchanges of each
    made = {"jaxmpi": (looped(vertices.exchange, *many), many)}
    if library is None:
        made["petsc"] = by_petsc(mesh, width, *many), many
    else:
        made |= {
            "C, in place": (in_c(library, mesh, width, *many, True), many),
            "C, unpacked": (in_c(library, mesh, width, *many, False), many),
            "take": (by_take(mesh, *many), many),
            "allgather": (by_allgather(mesh, *few), few),
        }
    seconds = {name: [] for name in made}
    wrong = dict.fromkeys(made, 0)
    for turn in range(rounds + 1):  # the first compiles, and its time does not count
        given = values(np.concatenate([mesh.owned, mesh.ghosts]), width, turn).astype(dtype)
        expected = {steps: right(mesh, given, steps) for steps in {few[0], many[0]}}
        given[len(mesh.owned) :] = 0
        for name, (batch, (steps, each)) in made.items():
            spent, result = batch(given)
            seconds[name] += [COMM.allreduce(spent, MPI.MAX) / (steps * each)] if turn else []
            wrong[name] += np.count_nonzero(np.asarray(result) != expected[steps])
    return seconds, {name: COMM.allreduce(count) for name, count in wrong.items()}


def time_of_map(rounds=5):
    """Seconds that it takes to make one, on the slowest rank, where each owns a million vertices; all rounds."""
    mesh = make_mesh(SIZE * OF_MAP)
    seconds = []
    for _ in range(rounds):
        COMM.Barrier()
        begin = time.perf_counter()
        jaxmpi.IndexMap(mesh.owned, mesh.ghosts)
        seconds.append(COMM.allreduce(time.perf_counter() - begin, MPI.MAX))
    return seconds


def ratios(seconds, peer):
    """One for each turn, as the goals are."""
    ours, theirs = (seconds["jaxmpi"], seconds[peer])
    return [a / b if peer == "raw_c" else b / a for a, b in zip(ours, theirs, strict=True)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contender (default: %(default)s)")
    parser.add_argument("--vertices", type=int, nargs="+", default=SIZES, help="of the meshes (default: %(default)s)")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, help="floats of a row (default: %(default)s)")
    parser.add_argument("--no-map", action="store_true", help="do not time how a map is made")
    parser.add_argument("--petsc", action="store_true", help="compare with PETSc alone, in float64")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", options.petsc)
    library, dtype = (None, np.dtype(np.float64)) if options.petsc else (load_c(), np.dtype(np.float32))
    found = {}
    for vertices in options.vertices:
        mesh = make_mesh(vertices)
        for width in options.widths:
            found[vertices, width] = measure(library, mesh, width, options.rounds, dtype)
    made = [] if options.no_map else time_of_map()
    if RANK > 0:
        return
    for (vertices, width), (seconds, _) in found.items():
        if library is not None:
            seconds["raw_c"] = min((seconds["C, in place"], seconds["C, unpacked"]), key=statistics.median)
        for peer, goal in GOALS.items():
            if peer not in seconds:
                continue
            value = statistics.median(ratios(seconds, peer))
            name = "index_exchange_vs_raw_c" if peer == "raw_c" else f"{peer}_vs_index_exchange"
            name = name.replace("take", "take_alltoallv")
            print(f"{name}_{vertices}_x_{width}_{SIZE}_ranks: {value:.4g}" + (f"  (goal {goal})" if goal else ""))
    if made:
        print(f"index_map_of_a_million_s_{SIZE}_ranks: {statistics.median(made):.3g}  (goal <= 1)")
    total = sum(sum(wrong.values()) for _, wrong in found.values())
    print(f"index_exchange_wrong_elements_{SIZE}_ranks: {total}  (goal 0)")
    for (vertices, width), (seconds, wrong) in found.items():
        print(f"\n{vertices} vertices, {width} floats each, on {SIZE} ranks, us per exchange, median and quartiles:")
        for who in wrong:
            low, middle, high = (f"{1e6 * value:.4g}" for value in statistics.quantiles(seconds[who], n=4))
            print(f"  {who:12} {middle:>8}  ({low} - {high})  wrong: {wrong[who]}")
    if total:
        sys.exit(1)


if __name__ == "__main__":
    main()
