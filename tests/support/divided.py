"""What tests of divided arrays share: random divisions, cases on some of the ranks, dot products over all of them."""

import itertools

import jax
import numpy as np
from hypothesis import strategies as st
from mpi4py import MPI

import jaxmpi
from support import drawing

WAYS = {"eager": lambda f: f, "jit": jaxmpi.jit, "jax.jit": jax.jit}


@st.composite
def some_processes(draw, ranks, dimensions):
    """The numbers of processes along the axes of a grid of so many ranks."""
    dims = []
    for _ in range(dimensions - 1):
        dims.append(draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0])))
        ranks //= dims[-1]
    return draw(st.permutations([*dims, ranks]))


@st.composite
def some_blocks(draw, number, total, least=0):
    """Sizes of so many blocks with this sum, each of so many cells at least."""
    room = total - number * least
    ends = sorted(draw(st.lists(st.integers(0, room), min_size=number - 1, max_size=number - 1)))
    return tuple(b - a + least for a, b in itertools.pairwise([0, *ends, room]))


def shape_of(sizes, others, trailing):
    """Of an array whose axes that are not the grid's come last, or first."""
    return (*sizes, *others) if trailing else (*others, *sizes)


def on_first_ranks(comm, strategy, check, examples):
    """Calls `check(case, part)` for random cases on the first ranks, as many as `case.ranks` says; they are `part`."""

    def together(case):
        part = comm.Split(0 if comm.rank < case.ranks else MPI.UNDEFINED)
        if comm.rank < case.ranks:
            try:
                check(case, part)
            finally:
                part.Free()

    drawing.on_all_ranks(comm, strategy, together, examples)


def total(comm, xs, ys):
    """The dot product of the arrays of all ranks."""
    wide = lambda x: np.asarray(x).astype(np.complex128)  # noqa: E731
    return comm.allreduce(complex(sum(np.sum(wide(x) * wide(y)) for x, y in zip(xs, ys, strict=True))))


def derivatives(call):
    """Of a linear function of a list of arrays, as a function of point, tangent and cotangent: the tangent, the
    cotangent, and the tangent once more, by the adjoint of the adjoint."""

    def everything(primals, tangents, cotangents):
        _, forward = jax.jvp(call, (primals,), (tangents,))
        pullback = jax.vjp(call, primals)[1]
        (again,) = jax.vjp(lambda cts: pullback(cts)[0], cotangents)[1](tangents)
        return forward, pullback(cotangents)[0], again

    return everything
