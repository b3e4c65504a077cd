"""Steps of long runs (soak.py) and of runs in which ranks die (deaths.py): one operation, and what NumPy says of it.

A program is what a step executes: an operation in some surroundings, with dtypes and shapes. Its data are a function of
the step and the rank, so each rank knows the data of all, and nothing is communicated to know what is right.
"""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from mpi4py import MPI

import jaxmpi
from support.table import (
    CASES,
    NEW_JAX,
    REDUCING,
    REPLICATED,
    UFUNCS,
    dtype_of,
    exchange_at_run_time,
    send_recv_at_run_time,
)

WIDE = ["int32", "int64", "float32", "float64"]
"""What holds all sums exactly, or to `TOLERANCE` if the summands are fractions."""
TOLERANCE = {"float32": 3e-5, "float64": 1e-13}
MOVED = [*WIDE, "bool", "int8", "uint8", "int16", "uint32", "float16", "bfloat16", "complex64", "complex128"]
MOVED += ["float8_e5m2"]
SHAPES = [(), (1,), (3,), (2, 3), (0,), (0, 3), (64,), (1000,)]
LARGE_SHAPES = [*SHAPES, (40, 100), (20000,)]
MORE_LEAVES = (((5,), "int32"), ((2, 2), "float64"))
REDUCTIONS = ["SUM", "SUM", "PROD", "MAX", "MIN"]
LOOPS = ("fori_loop", "scan", "while_loop")
DERIVATIVES = ("vjp", "jvp")
WAYS = ["eager", "jit", *LOOPS, *(DERIVATIVES if NEW_JAX else ())]
CASE = {case.name: case for case in CASES}
OF_MAPS = {
    "index_exchange": lambda rows, x, op: rows.exchange(x),
    "index_start": lambda rows, x, op: jaxmpi.wait(rows.start(x)),
    "index_accumulate": lambda rows, x, op: rows.accumulate(x, op),
}
"""Of a map of rows that have global indices."""
OF_ROWS = [*OF_MAPS, "migrate"]
BLOCK = 2
"""Elements of each rank on a grid of one axis; where halos are exchanged it has one of each neighbour besides."""
OF_GRIDS = {
    "exchange": lambda grid, x: grid.exchange(x, axes=(0,)),
    "exchange_start": lambda grid, x: grid.finish(grid.start(x, axes=(0,))),
}
BARRIERS = {
    "barrier": lambda comm: jaxmpi.barrier(comm=comm),
    "ibarrier": lambda comm: jaxmpi.wait(jaxmpi.ibarrier(comm=comm)),
}
REDISTRIBUTIONS = {
    "redistribute": jaxmpi.redistribute,
    "iredistribute": lambda *args, **more: jaxmpi.wait(jaxmpi.iredistribute(*args, **more)),
}
OPERATIONS = [*CASE, *BARRIERS, *OF_GRIDS, *REDISTRIBUTIONS, *OF_ROWS]
AT_RUN_TIME = {"sendrecv_traced": exchange_at_run_time, "send_recv_traced": send_recv_at_run_time}
"""Messages whose ranks and tags are traced, also in an eager step: a compiled program of their own."""


# --- programs: what a step executes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    case: str
    way: str
    compiler: str
    leaves: tuple
    """(shape, dtype) of each array of the operand."""
    op: str
    root: int
    length: int

    def __str__(self):
        of = " and ".join(f"{dtype}{list(shape)}" for shape, dtype in self.leaves)
        loop = f" of {self.length}" if self.way in LOOPS else ""
        return f"{self.case} {self.op} ({self.way}{loop}, {self.compiler}), root {self.root}, of {of}"

    @property
    def calls(self):
        """The operations that one execution counts."""
        return (2 if self.case.startswith("send_recv") else 1) * (self.length if self.way in LOOPS else 1)

    def fractions(self, dtype):
        """Whether the values are fractions, so that sums are rounded."""
        return self.op == "SUM" and dtype in TOLERANCE and self.way not in DERIVATIVES


def draw(generator, size, number, operations=OPERATIONS):
    """A program; successive numbers go through all operations."""
    case, way = operations[number % len(operations)], generator.choice(WAYS)
    wide = way not in ("eager", "jit")
    reduces = case in REDUCING or case == "index_accumulate"
    kinds = MOVED[:-1] if reduces else MOVED  # there are no reductions of float8
    dtype = generator.choice(WIDE[2:] if way in DERIVATIVES else WIDE if wide else kinds)
    op = _draw_op(generator, case, dtype, wide) if reduces else ""
    leaves = ((generator.choice(SHAPES if wide else LARGE_SHAPES), dtype),)
    if generator.random() < 0.25 and op in ("", "SUM", "MAX", "MIN"):
        leaves += MORE_LEAVES[1:] if way in DERIVATIVES else MORE_LEAVES
    # A loop that is not compiled as a whole would be compiled again in each call.
    compilers = ["jax.jit", "jaxmpi.jit"] + (["no jit"] if way in DERIVATIVES else [])
    compiler = "no jit" if way == "eager" else generator.choice(compilers)
    return Program(case, way, compiler, leaves, op, generator.randrange(size), generator.choice([2, 10, 30, 100]))


def _draw_op(generator, case, dtype, wide):
    kind = dtype_of(dtype).kind
    if case == "index_accumulate":
        sums = ["SUM", "SUM"] if kind != "b" else []
        return "SUM" if wide or kind == "c" else generator.choice([*sums, "MAX", "MIN"])
    if kind == "b":
        return "LXOR"
    if kind == "u":
        return "BXOR"
    return "SUM" if wide or kind == "c" else generator.choice(REDUCTIONS)


def values(program, step, rank, size):
    """What a rank passes in a step: small integers, with which everything is exact, or fractions."""
    return [_values(program, step, rank, size, shape, dtype) for shape, dtype in program.leaves]


def _values(program, step, rank, size, shape, dtype):
    most = {"float8_e5m2": 5, "bool": 2}.get(dtype, 97)
    if program.op == "PROD":
        most = 3
    elif program.op == "SUM" and dtype in ("float16", "bfloat16"):
        most = max(240 // size, 2)
    if program.case in CASE:
        shape = CASE[program.case].shape(shape, rank, size, program.root)
    elif program.case in OF_GRIDS:
        shape = (BLOCK + 2, *shape)
    elif program.case in REDISTRIBUTIONS:
        shape = (BLOCK, *shape)
    elif program.case in OF_ROWS:
        shape = (rows_of(size, program.root)[rank].at.size, *shape)
    numbers = (17 * np.arange(int(np.prod(shape))) + 29 * rank + 41 * step) % most
    return (numbers / 10 if program.fractions(dtype) else numbers).astype(dtype_of(dtype)).reshape(shape)


def cut(size):
    """How many elements each rank has after a redistribution: the first has more than the others."""
    return [BLOCK * size - size + 1, *[1] * (size - 1)]


@dataclass(frozen=True)
class Rows:
    """The rows of a map on one rank."""

    owned: np.ndarray
    """The global indices of those that it owns, in any order."""
    ghosts: np.ndarray
    """The global indices of those of which it has copies, by owner and index."""
    owners: np.ndarray
    """The owner of each row, own ones and copies; and where the row lies there."""
    at: np.ndarray


@functools.cache
def rows_of(size, number):
    """The rows of a map on each rank: some of a hundred indices, and copies of a third of those of others."""
    generator = np.random.default_rng([size, number])
    indices = generator.permutation(100)[: 12 * size]
    owner = generator.integers(0, size, indices.size)
    owner[owner == number] = 0  # so one of the ranks owns nothing, if that is not rank 0
    order = np.lexsort((indices, owner))
    indices, owner = indices[order], owner[order]
    at = np.empty_like(owner)
    owned = [generator.permutation(np.flatnonzero(owner == rank)) for rank in range(size)]
    for its in owned:
        at[its] = np.arange(its.size)
    made = []
    for rank, its in enumerate(owned):
        ghosts = np.flatnonzero((owner != rank) & (generator.random(indices.size) < 0.3))
        local = np.concatenate([its, ghosts])
        made.append(Rows(indices[its], indices[ghosts], owner[local], at[local]))
    return made


# --- by jaxmpi -------------------------------------------------------------------------------------------------------


def _once(program, comm):
    """The operation, as a function of its operand."""
    if program.case in OF_GRIDS:
        grid = jaxmpi.Grid((comm.size,), (BLOCK * comm.size,), periodic=True, comm=comm)
        return lambda x: OF_GRIDS[program.case](grid, x)
    if program.case in REDISTRIBUTIONS:
        grids = [jaxmpi.Grid((comm.size,), whole, comm=comm) for whole in ((BLOCK * comm.size,), (cut(comm.size),))]
        return lambda x: REDISTRIBUTIONS[program.case](x, *grids, axes=(0,))
    if program.case in OF_MAPS:
        its = rows_of(comm.size, program.root)[comm.rank]
        rows = jaxmpi.IndexMap(its.owned, its.ghosts[::-1], comm=comm)
        return lambda x: OF_MAPS[program.case](rows, x, getattr(MPI, program.op or "SUM"))
    if program.case == "migrate":
        rows = rows_of(comm.size, program.root)
        owners, room = rows[comm.rank].owners, sum(its.owners.size for its in rows)
        return lambda x: jaxmpi.migrate(x, owners, rows=room, comm=comm)[0]
    if program.case in AT_RUN_TIME:
        return AT_RUN_TIME[program.case](comm)

    def once(x):
        if program.case in BARRIERS:
            BARRIERS[program.case](comm)
            return x
        if program.op:
            return REDUCING[program.case](x, getattr(MPI, program.op), comm, program.root)
        return CASE[program.case].call(x, comm, program.root)

    return once


def _square(x):
    return jax.tree.map(lambda leaf: leaf * leaf, x)


def packed(program, leaves):
    """The leaves as an argument: an array, or a pytree."""
    arrays = tuple(jnp.asarray(leaf) for leaf in leaves)
    return arrays if len(program.leaves) > 1 else arrays[0]


def build(program, comm, right):
    """The function of a program, whose results are like those in `right`."""
    like = packed(program, right[: len(program.leaves)])
    once = _once(program, comm)
    shifted = lambda x, k: once(jax.tree.map(lambda leaf: leaf + k.astype(leaf.dtype), x))  # noqa: E731
    plus = lambda total, x, k: jax.tree.map(jnp.add, total, shifted(x, k))  # noqa: E731
    zeros = lambda: jax.tree.map(jnp.zeros_like, like)  # noqa: E731

    def while_loop(x):
        step = lambda carry: (carry[0] + 1, plus(carry[1], x, carry[0]))  # noqa: E731
        return lax.while_loop(lambda carry: carry[0] < program.length, step, (jnp.int32(0), zeros()))[1]

    def vjp(x, w):
        y, pull = jax.vjp(lambda x: once(_square(x)), x)
        return y, pull(w)[0]

    ways = {
        "eager": once,
        "jit": once,
        "fori_loop": lambda x: lax.fori_loop(0, program.length, lambda k, total: plus(total, x, k), zeros()),
        "scan": lambda x: lax.scan(lambda none, k: (none, shifted(x, k)), None, jnp.arange(program.length))[1],
        "while_loop": while_loop,
        "vjp": vjp,
        "jvp": lambda x, t: jax.jvp(lambda x: once(_square(x)), (x,), (t,)),
    }
    compiler = {"jax.jit": jax.jit, "jaxmpi.jit": jaxmpi.jit}.get(program.compiler, lambda f: f)
    return compiler(ways[program.way])


# --- by NumPy --------------------------------------------------------------------------------------------------------


def expected(program, xs, rank):
    """The result of the operation on a rank, given the arrays of all ranks."""
    if program.case in BARRIERS or (program.case == "reduce" and rank != program.root):
        return xs[rank]
    if program.case in REDISTRIBUTIONS:
        return np.split(np.concatenate(xs), np.cumsum(cut(len(xs)))[:-1])[rank]
    if program.case in OF_GRIDS:
        before, after = xs[rank - 1], xs[(rank + 1) % len(xs)]
        return np.concatenate([before[-2:-1], xs[rank][1:-1], after[1:2]])
    if program.case in OF_MAPS:
        return _of_rows(program, xs, rank)
    if program.case == "migrate":
        rows = rows_of(len(xs), program.root)
        parts = [x[its.owners == rank] for its, x in zip(rows, xs, strict=True)]
        others = [np.zeros_like(x[its.owners != rank]) for its, x in zip(rows, xs, strict=True)]
        return np.concatenate(parts + others)
    if program.case == "exscan" and rank == 0:
        return np.full_like(xs[0], _identity(program.op, xs[0].dtype))
    if program.case in REDUCING:
        ranks = xs[: {"scan": rank + 1, "exscan": rank}.get(program.case, len(xs))]
        result = functools.reduce(UFUNCS[program.op], ranks).astype(xs[0].dtype)
        if not program.case.startswith("reduce_scatter"):
            return result
        xs = [result, *(np.zeros_like(x) for x in xs[1:])]  # whose sum the table divides
    return CASE[program.case].expected(xs, rank, program.root)


def _of_rows(program, xs, rank):
    """The result of an operation of a map."""
    rows = rows_of(len(xs), program.root)
    result = xs[rank].copy()
    for r, (its, x) in enumerate(zip(rows, xs, strict=True)):
        if r == rank:
            continue
        if program.case == "index_accumulate":
            copies = its.owners == rank
            at = its.at[copies]
            result[at] = UFUNCS[program.op](result[at], x[copies])
        else:
            copies = rows[rank].owners == r
            result[copies] = x[rows[rank].at[copies]]
    if program.op == "SUM":
        result[rows[rank].owned.size :] = 0
    return result


def _identity(op, dtype):
    """What a reduction with it does not change."""
    if UFUNCS[op].identity is not None:
        return UFUNCS[op].identity
    limits = jnp.iinfo(dtype) if dtype.kind in "iu" else None
    if op == "MAX":
        return limits.min if limits else -np.inf
    return limits.max if limits else np.inf


def adjoint(program, ws, xs, rank):
    """The cotangent of a rank's operand, given the cotangents of all ranks' results (docs/autodiff.md).

    An element gets the cotangents of all elements of results that it is in: where its number is, if this rank passes
    numbers and the others zeros.
    """
    if program.case in REPLICATED:
        return ws[rank]
    numbers = [np.zeros(x.shape, np.int64) for x in xs]
    numbers[rank] += 1 + np.arange(xs[rank].size).reshape(xs[rank].shape)
    total = np.zeros(1 + xs[rank].size, xs[rank].dtype)
    for i, w in enumerate(ws):
        np.add.at(total, expected(program, numbers, i), w)
    return total[1:].reshape(xs[rank].shape)


def witness(program, xs, more, rank):
    """The leaves of what the program's function returns. `xs`, `more`: its arguments on all ranks, lists of leaves."""
    columns = list(zip(*xs, strict=True))
    if program.way in LOOPS:
        return [_of_loop(program, column, rank) for column in columns]
    if program.way not in DERIVATIVES:
        return [expected(program, column, rank) for column in columns]
    pairs = list(zip(columns, zip(*more, strict=True), strict=True))
    results = [expected(program, [x * x for x in column], rank) for column in columns]
    if program.way == "vjp":
        return results + [2 * x[rank] * adjoint(program, w, x, rank) for x, w in pairs]
    tangents = ([2 * x * t for x, t in zip(*pair, strict=True)] for pair in pairs)
    return results + [expected(program, tangent, rank) for tangent in tangents]


def _of_loop(program, column, rank):
    rows = ([x + np.asarray(k, x.dtype) for x in column] for k in range(program.length))
    rows = np.stack([expected(program, row, rank) for row in rows])
    return rows if program.way == "scan" else rows.sum(axis=0, dtype=rows.dtype)


def cotangents(program, xs, step):
    """What each rank passes to the transpose: integers in the shape of its result."""
    columns = list(zip(*xs, strict=True))
    shapes = ([expected(program, column, r).shape for column in columns] for r in range(len(xs)))
    numbers = lambda r, i: (np.arange(i) * 5 + 13 * r + step) % 89  # noqa: E731
    return [
        [numbers(r, int(np.prod(shape))).astype(x.dtype).reshape(shape) for shape, x in zip(row, xs[r], strict=True)]
        for r, row in enumerate(shapes)
    ]


def difference(program, got, right):
    """In what a result is wrong, in words; empty if it is right."""
    if len(got) != len(right):
        return f"{len(got)} arrays in the place of {len(right)}"
    for i, (mine, theirs) in enumerate(zip(got, right, strict=True)):
        if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
            return f"array {i} is {mine.dtype}{list(mine.shape)}, not {theirs.dtype}{list(theirs.shape)}"
        tolerance = TOLERANCE[str(mine.dtype)] if program.fractions(str(mine.dtype)) else 0
        wrong = ~(abs(mine - theirs) <= tolerance * abs(theirs)) if tolerance else mine != theirs
        if wrong.any():
            place = tuple(int(n) for n in np.argwhere(wrong)[0])
            return f"array {i}{list(place)} is {mine[place]}, not {theirs[place]}; {wrong.sum()} elements are wrong"
    return ""


class Runner:
    """Executes programs on a communicator, each of which is built once. Roots beyond the last rank begin at 0 again."""

    def __init__(self, comm):
        self.comm, self.functions = comm, {}

    def __call__(self, program, step):
        """What all ranks pass, and the leaves of the result, by jaxmpi and by NumPy."""
        comm, ranks, more = self.comm, range(self.comm.size), None
        program = replace(program, root=program.root % comm.size)
        xs = [values(program, step, r, comm.size) for r in ranks]
        if program.way == "jvp":
            more = [values(program, step + 7, r, comm.size) for r in ranks]
        if program.way == "vjp":
            more = cotangents(program, xs, step)
        right = witness(program, xs, more, comm.rank)
        if program not in self.functions:
            self.functions[program] = build(program, comm, right)
        operands = [packed(program, arguments[comm.rank]) for arguments in (xs, more) if arguments]
        return xs, [np.array(leaf) for leaf in jax.tree.leaves(self.functions[program](*operands))], right
