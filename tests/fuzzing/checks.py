"""Transforms a program on this rank and in the witness alike, and compares.

Before anything is executed each rank traces what it is going to do. What one rank refuses, none executes, and ranks
whose collective operations differ are wrong, also where the numbers would be right.
"""

import difflib
import math
import re
import traceback
import warnings
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import jaxmpi
from fuzzing.distributed import Deaf, Distributed, prepare
from fuzzing.programs import INPUTS, LENGTH, OPERATIONS, divisions, forgets
from fuzzing.witness import Witness
from jaxmpi import _core
from jaxmpi._jax import jaxprs

BATCH = 2
TOLERANCE = 1e-9


# --- transformations: (f, x, v, w) -> arrays; v is a tangent of x, w a cotangent of f(x) ------------------------------


def gradient(f, w):
    return lambda x: jax.vjp(f, x)[1](w)[0]


def tangent(f, v):
    return lambda x: jax.jvp(f, (x,), (v,))[1]


def _square(tree):
    return jax.tree.map(lambda leaf: jnp.sum(leaf**2), tree)


def _ones(tree):
    return jax.tree.map(jnp.ones_like, tree)


def _of_square(f, x, v, w):
    """The gradient of the sum of squares of a gradient."""
    squares = lambda x: _square(gradient(f, w)(x))  # noqa: E731
    y, pull = jax.vjp(squares, x)
    return pull(_ones(y))[0]


MODES = {
    "value": lambda f, x, v, w: f(x),
    "jvp": lambda f, x, v, w: jax.jvp(f, (x,), (v,)),
    "linearize": lambda f, x, v, w: jax.linearize(f, x)[1](v),
    "vjp": lambda f, x, v, w: (f(x), gradient(f, w)(x)),
    "forward over reverse": lambda f, x, v, w: tangent(gradient(f, w), v)(x),
    "reverse over reverse": lambda f, x, v, w: gradient(gradient(f, w), v)(x),
    "reverse over forward": lambda f, x, v, w: gradient(tangent(f, v), w)(x),
    "forward over forward": lambda f, x, v, w: tangent(tangent(f, v), v)(x),
    "square of gradient": _of_square,
}
FIRST = ("value", "jvp", "linearize", "vjp")
FORWARD = ("jvp", "linearize", "reverse over forward", "forward over forward")  # need forward mode
REVERSE = ("linearize", "vjp", "forward over reverse", "reverse over reverse", "reverse over forward")
REVERSE += ("square of gradient",)

AROUND = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "jaxmpi.jit": jaxmpi.jit,
    "donated": lambda f: jaxmpi.jit(f, donate_argnums=0),
}
INSIDE = {"jit inside": jax.jit, "jaxmpi.jit inside": jaxmpi.jit, "checkpoint inside": jax.checkpoint}
ROUTES = (*AROUND, *INSIDE, "no jit", "same array twice")
BATCHES = ("", "tangents", "all")  # mapped: nothing, what is not the point of the derivative, all


@dataclass(frozen=True)
class Check:
    mode: str
    route: str = "plain"
    batch: str = ""

    def mapped(self):
        """What is mapped: of points, tangents and cotangents.

        docs/autodiff.md excludes forward derivatives of derivatives of which something is mapped, not being the point,
        besides the tangents of the last.
        """
        tangents = "v" if self.mode.startswith("forward over") else "vw"
        return {"": "", "tangents": tangents, "all": "xvw"}[self.batch]

    def __str__(self):
        return ", ".join(filter(None, [self.mode, self.route, self.batch and f"vmap of {self.batch}"]))


def possible(program, order):
    """The checks of a program, up to an order of derivatives."""
    for mode in MODES if order > 1 else FIRST:
        if (mode in FORWARD and not program.forward) or (mode in REVERSE and not program.reverse):
            continue
        for route in ROUTES:
            for batch in BATCHES:
                if not (mode == "value" and batch == "tangents"):
                    yield Check(mode, route, batch)


def choose(program, order, count, random):
    """Some checks: mostly plain ones, as compiling takes the time. All of them where `count` is 0."""
    every = list(possible(program, order))
    if count == 0:
        return every
    highest = [check for check in every if order == 1 or check.mode not in FIRST] or every
    quick = [check for check in highest if check.route == "plain" and not check.batch]
    return [random.choice(quick if random.random() < 0.5 else highest) for _ in range(count)]


# --- both sides of a check -------------------------------------------------------------------------------------------


@dataclass
class Data:
    """Points, tangents and cotangents of all ranks, each with a batch of them."""

    x: list
    v: list
    w: list

    @classmethod
    def draw(cls, program, check):
        def numbers(rank, what):
            generator = np.random.default_rng([program.seed, rank, what])
            return jnp.asarray(generator.normal(size=(BATCH, LENGTH)))

        ranks = range(program.size)
        x = [tuple(numbers(rank, i) for i in range(INPUTS)) for rank in ranks]
        if check.route == "same array twice":
            x = [values[:1] * INPUTS for values in x]
        v = [tuple(numbers(rank, 10 + i) for i in range(INPUTS)) for rank in ranks]
        return cls(x, v, [numbers(rank, 20) for rank in ranks])

    def part(self, check, item):
        """What is mapped, or item 0 of it, or another."""
        mapped = check.mapped()
        at = {name: item if name in mapped else 0 for name in "xvw"}
        return [jax.tree.map(lambda leaf, i=at[name]: leaf[i], getattr(self, name)) for name in "xvw"]


NUMBER = 1
"""What chooses branches: traced in the programs, known to the witness."""


def ours(program, check, data, kind=Distributed):
    """This rank's side of a check: a function, and its arguments."""
    rank = MPI.COMM_WORLD.rank
    mapped = check.mapped()

    def compute(x, v, w, number, zero):
        def once(x, v, w, zero):
            execute = kind(rank, program.size, zero if "x" in mapped else None)
            # docs/autodiff.md excludes results that depend on nothing on a rank, where tangents alone are mapped.
            depends = check.batch == "tangents" and check.mode.startswith("forward over")
            result = lambda x: execute(program, x, number) + (0 * x[0] if depends else 0)  # noqa: E731
            f = INSIDE.get(check.route, lambda f: f)(result)
            return MODES[check.mode](f, x, v, w)

        if not check.batch:
            return once(x, v, w, zero)
        axes = [0 if name in mapped else None for name in "xvw"]
        return jax.vmap(once, in_axes=(*axes, 0 if "x" in mapped else None))(x, v, w, zero)

    x, v, w = (part[rank] for part in data.part(check, 0))
    x, v, w = (getattr(data, name)[rank] if name in mapped else one for name, one in zip("xvw", (x, v, w), strict=True))
    if check.route == "donated":
        x = jax.tree.map(jnp.copy, x)
    if check.route == "same array twice":
        x = (x[0],) * INPUTS
    zero = jnp.zeros(BATCH) if "x" in mapped else jnp.zeros(())
    return AROUND.get(check.route, lambda f: f)(compute), (x, v, w, jnp.int32(NUMBER), zero)


def theirs(program, check, data):
    """The witness's side: results of this rank, as one array for each of ours."""
    witness = Witness(program.size)
    items = []
    for item in range(BATCH if check.batch else 1):
        x, v, w = data.part(check, item)
        y = MODES[check.mode](lambda x: witness(program, x, NUMBER), x, v, w)
        parts = y if check.mode in ("jvp", "vjp") else (y,)
        items.append(jax.tree.leaves([part[MPI.COMM_WORLD.rank] for part in parts]))
    return [jnp.stack(leaf) if check.batch else leaf[0] for leaf in zip(*items, strict=True)]


# --- carrying out ----------------------------------------------------------------------------------------------------


class Judge:
    """Carries out checks on all ranks alike, with messages of its own about how they went."""

    def __init__(self):
        self.comm = MPI.COMM_WORLD.Dup()

    def __call__(self, program, check):
        """("right" | "refused" | "wrong", why)."""
        data = Data.draw(program, check)
        for division in divisions(program.body):
            prepare(division)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            verdict, communicated = self._trace(program, check, data)
            verdict = self._together(verdict)
            if verdict[0] == "right":
                verdict = self._together(self._alike(communicated))
            if verdict[0] == "right":
                with jax.disable_jit(check.route == "no jit"):
                    verdict = self._together(self._compare(program, check, data))
        if forgets(program.body):  # what is in flight then may take a later message
            return verdict
        left_over = self._together(self._left_over())
        return left_over if verdict[0] == "right" else verdict

    def _together(self, verdict):
        """The worst verdict of all ranks."""
        everybody = self.comm.allgather(verdict)
        worst = max(everybody, key=lambda verdict: ("right", "refused", "wrong").index(verdict[0]))
        return worst if worst[0] == "right" else (worst[0], f"rank {everybody.index(worst)}: {worst[1]}")

    def _trace(self, program, check, data):
        """The verdict, and the collective operations of this rank."""
        try:
            function, args = ours(program, check, data)
            with jax.disable_jit(check.route == "no jit"):
                jaxpr = jax.make_jaxpr(function)(*args)
        except Exception as error:
            if is_refusal(error):
                return ("refused", f"{type(error).__name__}: {error}"), []
            reason = "".join(traceback.format_exception_only(error)).strip()
            if self._jax_alone_fails(program, check, data, error):
                return ("refused", f"by JAX itself: {reason}"), []
            return ("wrong", f"while tracing: {reason}\n{where(error)}"), []
        if "custom_lin" in names(jaxpr):  # JAX raises as it executes
            return ("refused", "by JAX itself: the forward derivative of a function with jax.custom_vjp"), []
        return ("right", ""), list(collectives(jaxpr))

    def _alike(self, communicated):
        """All ranks must carry out the same collective operations; if they do not, right results are luck."""
        first = self.comm.bcast(communicated)
        if communicated == first:
            return "right", ""
        difference = "\n".join(difflib.unified_diff(first, communicated, "rank 0", "this rank", n=2, lineterm=""))
        return "wrong", f"ranks differ in what they communicate:\n{difference}"

    def _jax_alone_fails(self, program, check, data, error):
        try:
            function, args = ours(program, check, data, Deaf)
            with jax.disable_jit(check.route == "no jit"):
                jax.make_jaxpr(function)(*args)
        except Exception as other:
            return type(other) is type(error)
        return False

    def _compare(self, program, check, data):
        function, args = ours(program, check, data)
        results = jax.block_until_ready(function(*args))
        jax.effects_barrier()
        expected = theirs(program, check, data)
        for got, wanted in zip(jax.tree.leaves(results), expected, strict=True):
            error = float(jnp.max(jnp.abs(got - wanted)))
            if not error <= TOLERANCE * max(1.0, float(jnp.max(jnp.abs(wanted)))):
                return "wrong", f"got {np.asarray(got).tolist()}, not {np.asarray(wanted).tolist()}"
        return "right", ""

    def _left_over(self):
        """No message of a program may be taken for one of the next, nor any part of a collective operation, and each
        request must have been waited for."""
        if in_flight := _core.requests_in_flight():
            return "wrong", f"{in_flight} requests have not been waited for"
        rank, size = self.comm.rank, self.comm.size
        of_rank = [np.arange(LENGTH) + 100.0 * r for r in range(size)]
        x = jnp.asarray(of_rank[rank])
        pairs = [(jaxmpi.sendrecv(x, x, (rank - 1) % size, (rank + 1) % size), of_rank[rank - 1])]
        pairs += [(jaxmpi.scan(x, MPI.SUM), sum(of_rank[: rank + 1]))]
        for root in range(size):
            stacked = jnp.stack([x] * size) if rank == root else x
            pairs += [(jaxmpi.bcast(x, root), of_rank[root]), (jaxmpi.scatter(stacked, root), of_rank[root])]
            here = rank == root
            pairs += [(jaxmpi.reduce(x, MPI.SUM, root), sum(of_rank) if here else of_rank[rank])]
            pairs += [(jaxmpi.gather(x, root), np.stack(of_rank) if here else of_rank[rank])]
        for got, wanted in pairs:
            if not np.array_equal(got, wanted):
                return "wrong", f"a message was left over: {np.asarray(got).tolist()}, not {wanted.tolist()}"
        return "right", ""


SILENT = ("depends_on", "invariant", "recv", "replicate", "send", "sendrecv", "varying")
SILENT += ("after", "exchange_finish", "hold", "index_finish", "irecv", "isend", "redistribute_finish", "wait")
"""What is no collective operation."""


def collectives(jaxpr):
    """The collective operations of a jaxpr and of those inside, in order."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        library, _, name = equation.primitive.name.partition(".")
        if library == "jaxmpi" and name not in (*SILENT, "region"):
            # Of the operand and the result one is a stack for all ranks in some operations, on some ranks.
            outvars = [] if equation.primitive.starts else equation.outvars  # requests
            size = min((x.aval.size for x in (*equation.invars, *outvars)), default=0)
            call = equation.params["call"]
            if hasattr(call, "rows"):  # of which each rank has its own number
                size = f"of {math.prod(equation.invars[0].aval.shape[1:])}"
            elif name.startswith("redistribute"):  # as it has blocks of its own
                size = f"of {len(call.per_array)} arrays"
            elif name.startswith("index_"):
                shapes = [
                    np.delete(x.aval.shape, at) for x, (at, _) in zip(equation.invars, call.per_array, strict=True)
                ]
                size = f"with map {call.pattern.number}, of {[math.prod(shape.tolist()) for shape in shapes]}"
            yield f"{name} {call.derivative or ''} {size}"
            continue
        for inner in jaxprs.inner_jaxprs(equation.params):
            yield from collectives(inner)


def names(jaxpr):
    """Of the primitives of a jaxpr and of those inside."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation.primitive.name
        for inner in jaxprs.inner_jaxprs(equation.params):
            yield from names(inner)


def is_refusal(error):
    """Whether an exception says clearly what is not possible."""
    operations = "|".join((*OPERATIONS, "send", "recv"))
    named = re.match(rf"(jaxmpi|(Grid|IndexMap)\.start|send|recv|i?({operations}))\b", str(error))
    of_jax = "can't apply forward-mode autodiff" in str(error)  # docs/autodiff.md: also where nothing depends on it
    return isinstance(error, NotImplementedError) or named is not None or of_jax


def where(error):
    """The last frames of an exception."""
    return "".join(traceback.format_tb(error.__traceback__)[-4:])
