"""Random programs whose gradients are right, mistakes that are planted in them, and a witness without MPI.

A program is a function of invariant values, which are one for all ranks, and of varying ones, of which each rank has
its own. It is text, with a line for each statement. The witness carries out the same statements in one process in
plain JAX, on a list of all ranks' values where they vary.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import jaxmpi

LENGTH = 3
INVARIANT, VARYING = ("p", "q"), ("x", "y")
FILE = "random program"
WEIGHTS = np.cos(np.arange(8.0))


def rows(x):
    """Combines the rows that all ranks have sent."""
    return jnp.tensordot(WEIGHTS[: len(x)], x, 1)


def step(a, b, total):
    return jnp.tanh(a * total + b)


def loop(a, b):
    def advance(a, _):
        total = jaxmpi.replicate(jaxmpi.allreduce(a * b, MPI.SUM))
        return step(a, b, total), None

    return jax.lax.scan(advance, a, None, length=2)[0]


LOCAL = {
    "jnp.sin({})": jnp.sin,
    "jnp.tanh({} + 0.3)": lambda a: jnp.tanh(a + 0.3),
    "jnp.roll(0.9 * {}, 1)": lambda a: jnp.roll(0.9 * a, 1),
    "jnp.sin({} * {})": lambda a, b: jnp.sin(a * b),
    "(0.7 * {} + {})": lambda a, b: 0.7 * a + b,
}
"""What each rank computes alone: its text, and itself."""

REDUCED = {
    "jaxmpi.allreduce({}, MPI.SUM) / size": lambda xs: sum(xs) / len(xs),
    "jaxmpi.allreduce({}, MPI.MAX)": lambda xs: jnp.max(jnp.stack(xs), 0),
}
"""What makes an invariant value: with the witness on the values of all ranks."""

SENT = {
    "rows(jaxmpi.allgather({}))": lambda xs: rows(jnp.stack(xs)),
    "jaxmpi.bcast({}, size - 1)": lambda xs: xs[-1],
}
"""What makes a varying value that is the same on all ranks."""


def _loop(xs, ys):
    for _ in range(2):
        total = sum(x * y for x, y in zip(xs, ys, strict=True))
        xs = [step(x, y, total) for x, y in zip(xs, ys, strict=True)]
    return xs


EXCHANGED = {
    "jaxmpi.sendrecv({0}, {0}, (rank - 1) % size, (rank + 1) % size)": lambda xs: [xs[-1], *xs[:-1]],
    "jaxmpi.scan({}, MPI.SUM) / size": lambda xs: [sum(xs[: r + 1]) / len(xs) for r in range(len(xs))],
    "rows(jaxmpi.alltoall(jnp.outer(WEIGHTS[:size], {})))": lambda xs: [
        w * rows(jnp.stack(xs)) for w in WEIGHTS[: len(xs)]
    ],
    "(0.5 + rank) * {}": lambda xs: [(0.5 + r) * x for r, x in enumerate(xs)],
    "loop({}, {})": _loop,
}
"""What makes varying values of varying ones."""


@dataclass(frozen=True)
class Statement:
    """A line: the name of a new value, the text of what makes it, the names of its operands."""

    name: str
    text: str
    operands: tuple[str, ...]
    varies: bool
    casts: tuple[str, ...]
    """What each operand passes through first: "replicate" where an invariant one is used with varying ones."""
    after: str = ""
    """What the result passes through."""

    def __str__(self):
        operands = [f"jaxmpi.{c}({x})" if c else x for c, x in zip(self.casts, self.operands, strict=True)]
        text = self.text.format(*operands)
        return f"{self.name} = " + (f"jaxmpi.{self.after}({text})" if self.after else text)

    def __call__(self, values, size):
        """Carries it out on the values of all ranks."""
        operands = [values[name] for name in self.operands]
        if not self.varies and self.text in LOCAL:
            return LOCAL[self.text](*operands)
        lists = [x if isinstance(x, list) else [x] * size for x in operands]
        if self.text in LOCAL:
            return [LOCAL[self.text](*xs) for xs in zip(*lists, strict=True)]
        if self.text in EXCHANGED:
            return EXCHANGED[self.text](*lists)
        result = (REDUCED | SENT)[self.text](*lists)
        return [result] * size if self.varies else result


@dataclass(frozen=True)
class Program:
    statements: tuple[Statement, ...]

    def __str__(self):
        varying = [*VARYING, *(s.name for s in self.statements if s.varies)]
        invariant = [*INVARIANT, *(s.name for s in self.statements if not s.varies)]
        lines = [
            f"def f({', '.join((*INVARIANT, *VARYING))}):",
            *map(str, self.statements),
            f"return jaxmpi.allreduce(jnp.sum({' + '.join(varying)}), MPI.SUM) + jnp.sum({' + '.join(invariant)})",
        ]
        return "\n    ".join(lines) + "\n"

    def function(self, comm):
        names = {**globals(), "rank": comm.rank, "size": comm.size}
        exec(compile(str(self), FILE, "exec"), names)
        return names["f"]

    def witness(self, size):
        """The same function, of lists where it varies."""

        def f(*arguments):
            values = dict(zip((*INVARIANT, *VARYING), arguments, strict=True))
            for statement in self.statements:
                values[statement.name] = statement(values, size)
            return sum(jnp.sum(sum(x)) if isinstance(x, list) else jnp.sum(x) for x in values.values())

        return f


def generate(seed):
    chosen = random.Random(seed)
    known = {**dict.fromkeys(INVARIANT, False), **dict.fromkeys(VARYING, True)}
    statements = []
    for i in range(chosen.randint(3, 7)):
        texts = chosen.choice([LOCAL, LOCAL, REDUCED, REDUCED, SENT, EXCHANGED])
        text = chosen.choice(list(texts))
        operands = tuple(chosen.choice(list(known)[-5:]) for _ in range(max(text.count("{}"), 1)))
        varies = {id(REDUCED): False, id(EXCHANGED): True}.get(id(texts), any(known[x] for x in operands))
        if texts is SENT:
            varies = chosen.random() < 0.4
        needs = varies or texts is not LOCAL
        casts = tuple("replicate" if needs and not known[x] else "" for x in operands)
        after = "invariant" if texts is SENT and not varies else ""
        statements.append(Statement(f"v{i}", text, operands, varies, casts, after))
        known[f"v{i}"] = varies
    return Program(tuple(statements))


def mistakes(program: Program) -> Iterator[Program]:
    """The program with each of the mistakes that may be made in it."""

    def changed(i: int, **more) -> Program:
        s = program.statements
        return Program((*s[:i], replace(s[i], **more), *s[i + 1 :]))

    for i, statement in enumerate(program.statements):
        for j, cast in enumerate(statement.casts):
            other = lambda cast, j=j, casts=statement.casts: (*casts[:j], cast, *casts[j + 1 :])  # noqa: E731
            if cast:
                yield changed(i, casts=other(""))
            elif not statement.varies and statement.text in LOCAL:
                yield changed(i, casts=other("replicate"))
        if statement.after:
            yield changed(i, after="")
        elif not statement.varies:
            yield changed(i, after="replicate")
            if statement.text in REDUCED:
                yield changed(i, after="invariant")


def arguments(seed, rank, size):
    """Those of a rank, and those of the witness."""
    draw = lambda *key: jnp.asarray(np.random.default_rng([seed, *key]).normal(size=LENGTH))  # noqa: E731
    invariant = [draw(0, i) for i in range(len(INVARIANT))]
    varying = [[draw(1, i, r) for r in range(size)] for i in range(len(VARYING))]
    return (*invariant, *(xs[rank] for xs in varying)), (*invariant, *varying)


def expected(program, seed, rank, size):
    """The gradient of a rank, by the witness."""
    _, everything = arguments(seed, rank, size)
    gradient = jax.grad(program.witness(size), argnums=tuple(range(len(everything))))(*everything)
    return [g[rank] if isinstance(g, list) else g for g in gradient]
