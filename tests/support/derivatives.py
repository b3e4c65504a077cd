"""What the suites of derivatives share: the dot-product test on all ranks, the data of it, and operations for it.

Stack the arrays of all ranks into one vector: an operation is a map of it with one Jacobian J, of which each rank has
rows and columns. For any v and w, <J v, w> = <v, J' w> summed over the ranks. Finite differences of the operation
itself, at x + h v on all ranks, are the witness of J v.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import jaxmpi
from support.rows import each
from support.table import NEW_JAX

needs_new_jax = pytest.mark.skipif(not NEW_JAX, reason="this JAX drops what has no result that is used")
STEP = 1e-6
"""Of finite differences."""


def normal(shape, dtype, rank, seed):
    """Normal data of a rank, which the pair of seed and rank chooses; complex in a complex dtype."""
    generator = np.random.default_rng([seed, rank])
    x = generator.normal(size=shape)
    if np.issubdtype(dtype, np.complexfloating):
        x = x + 1j * generator.normal(size=shape)
    return jnp.asarray(np.asarray(x).astype(jnp.dtype(dtype)))


def tree_dot(a, b):
    return sum(
        np.sum(np.asarray(x) * np.asarray(y)) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@dataclass(frozen=True)
class Map:
    """A function on all ranks, where `check_all` differentiates it, and what the results are compared with."""

    name: str
    f: Callable[..., Any]
    x: Any
    rtol: float = 1e-12
    replicated: bool = False
    """The results of `f` are one value on all ranks, which counts once."""
    expected: Any = None
    """J v where v is `direction(x, rank)`, or the index of the map that has the same; else finite differences are."""

    def __str__(self):
        return self.name


def direction(x, rank):
    """The tangent of a rank's point."""
    return jax.tree.map(lambda leaf: normal(leaf.shape, leaf.dtype, rank, 1), x)


def _products(maps, xs, vs, noise):
    """Of each map J v by jvp, w, J' w by vjp, and the values at x + h v and x - h v where these are the witness."""
    found = []
    for tested, x, v in zip(maps, xs, vs, strict=True):
        y, jv = jax.jvp(tested.f, (x,), (v,))
        drawn = noise[1 if tested.replicated else 0]
        w = jax.tree.map(lambda leaf, drawn=drawn: _like(leaf, drawn), y)
        (jtw,) = jax.vjp(tested.f, x)[1](w)
        steps = [STEP, -STEP] if tested.expected is None else []
        near = [tested.f(jax.tree.map(lambda a, b, h=h: a + h * b, x, v)) for h in steps]
        found.append((jv, w, jtw, near))
    return found


def _like(leaf, drawn):
    drawn = drawn[: leaf.size].reshape(leaf.shape)
    return (drawn if jnp.issubdtype(leaf.dtype, jnp.complexfloating) else drawn.real).astype(leaf.dtype)


def check_all(maps, comm, ways=(jax.jit,)):
    """J v of each map by jvp against finite differences or what is expected, and J' w by vjp against J v: all maps in
    one program, in each of the ways to execute it."""
    rank, size = comm.rank, comm.size
    xs = [tested.x for tested in maps]
    vs = [direction(x, rank) for x in xs]
    noise = [normal((512,), complex, r, 2) for r in (rank, 0)]
    for way in ways:
        found = way(lambda xs, vs, noise: _products(maps, xs, vs, noise))(xs, vs, noise)
        found = jax.tree.map(np.asarray, found)
        sides = [(tree_dot(jv, w), tree_dot(v, jtw)) for v, (jv, w, jtw, _) in zip(vs, found, strict=True)]
        sides = comm.allreduce(np.asarray(sides, complex))

        def check(row, found=found, sides=sides):
            i, tested = row
            jv, _, _, near = found[i]
            if tested.expected is None:
                differences = jax.tree.map(lambda up, down: (up - down) / (2 * STEP), *near)
                _close(jv, differences, 1e-6, 1e-7)
            else:
                same = isinstance(tested.expected, int)
                _close(jv, found[tested.expected][0] if same else tested.expected, tested.rtol, tested.rtol)
            left, right = sides[i]
            np.testing.assert_allclose(
                right, left / (size if tested.replicated else 1), rtol=tested.rtol, atol=tested.rtol
            )

        each(list(enumerate(maps)), check, lambda row: str(row[1]))


def _close(ours, theirs, rtol, atol):
    for got, wanted in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert got.shape == wanted.shape
        wide = [np.asarray(x, complex) for x in (got, wanted)]
        np.testing.assert_allclose(*wide, rtol=rtol, atol=atol)


def check_wrapped(f, x, wraps, comm, rtol=1e-12, ways=(jax.jit,)):
    """`check_all` of `f(wrap)` for each of the wraps, which all have the same J v."""
    maps = [Map(name, f(wrap), x, rtol, expected=0 if i else None) for i, (name, wrap) in enumerate(wraps.items())]
    check_all(maps, comm, ways)


def check(f, x, comm, rtol=1e-12, ways=(jax.jit,)):
    """`check_all` of one function that does not return one value on all ranks."""
    check_all([Map("function", f, x, rtol)], comm, ways)


def between_ranks(rank, size):
    """Each operation of an array (size, ...) in which what other ranks pass matters to this one, or the reverse."""
    return {
        "allgather": jaxmpi.allgather,
        "alltoall": jaxmpi.alltoall,
        "bcast": lambda x: jaxmpi.bcast(x, 0),
        "gather": lambda x: jaxmpi.gather(x, size - 1),
        "reduce": lambda x: jaxmpi.reduce(x, MPI.SUM, size - 1),
        "scan": lambda x: jaxmpi.scan(x, MPI.SUM),
        "scatter": lambda x: jaxmpi.scatter(x if rank == 0 else x[0], 0),
        "sendrecv": lambda x: jaxmpi.sendrecv(x, x, (rank - 1) % size, (rank + 1) % size),
    }
