"""What tests of divided arrays share: random divisions, cases on some of the ranks, dot products over all of them."""

import itertools
import math
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from mpi4py import MPI

import jaxmpi
from support import drawing
from support.derivatives import needs_new_jax

LARGEST = 2**63 - 1
"""The largest index."""
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


@dataclass(frozen=True)
class Field:
    dtype: str
    staggered: tuple[bool, ...]
    others: tuple[int, ...]
    """The sizes of axes that are not the grids'."""


@dataclass(frozen=True)
class Divisions:
    """Fields that two grids divide."""

    blocks: tuple[tuple[tuple[int, ...], ...], ...]
    """Of each grid, along each axis the cells of each process."""
    widths: tuple[tuple[tuple[int, int], ...], ...]
    trailing: bool
    """The axes that are not the grids' come last."""
    fields: tuple[Field, ...]
    seed: int

    @property
    def ranks(self):
        return math.prod(map(len, self.blocks[0]))

    @property
    def axes(self):
        return tuple(range(len(self.blocks[0]))) if self.trailing else None

    def grid(self, which, comm):
        return jaxmpi.Grid(tuple(map(len, self.blocks[which])), self.blocks[which], comm=comm)

    def shape(self, field):
        """Of the whole field."""
        sizes = [sum(blocks) + extra for blocks, extra in zip(self.blocks[0], field.staggered, strict=True)]
        return shape_of(sizes, field.others, self.trailing)

    def block(self, which, field, at, whole, halo):
        """The block of the process `at` these coordinates, cut from the whole field, in a halo of this value, or, if
        it is None, of neighbours and of zeros at walls."""
        widths, others, index = self.widths[which], len(field.others), []
        for place, blocks, extra in zip(at, self.blocks[which], field.staggered, strict=True):
            start = sum(blocks[:place])
            index.append(slice(start, start + blocks[place] + extra))
        pads = shape_of(widths, [(0, 0)] * others, self.trailing)
        if halo is None:  # the whole with zeros around it has the block and its halo where the block lies
            whole = np.pad(whole, pads)
            index = [slice(its.start, its.stop + sum(pair)) for its, pair in zip(index, widths, strict=True)]
        cut = whole[shape_of(index, [slice(None)] * others, self.trailing)]
        return cut if halo is None else np.pad(cut, pads, constant_values=halo)


@st.composite
def some_divisions(draw, dims, dtypes, least=0, widest=2, empty=False):
    """The arguments of Divisions by two grids of so many processes along their axes, whose blocks have `least` cells
    along each axis, and halos of `widest` at most. Axes without cells are among them if `empty`."""
    shape = [draw(st.integers(max(n * least, not empty), n * least + 7)) for n in map(max, *dims)]
    none, narrow = st.just((0, 0)), st.tuples(st.integers(0, widest), st.integers(0, widest))
    stagger = st.booleans() if draw(st.booleans()) else st.just(False)
    others = st.lists(st.integers(0, 3), max_size=2).map(tuple)
    field = st.builds(Field, st.sampled_from(dtypes), st.tuples(*[stagger] * len(shape)), others)
    return {
        "blocks": tuple(tuple(draw(some_blocks(*its, least)) for its in zip(one, shape, strict=True)) for one in dims),
        "widths": tuple(draw(st.tuples(*[none if draw(st.booleans()) else narrow] * len(shape))) for _ in dims),
        "trailing": draw(st.booleans()),
        "fields": tuple(draw(st.lists(field, min_size=1, max_size=4))),
        "seed": draw(st.integers(0, 1000)),
    }


@dataclass(frozen=True)
class Rows:
    """Rows with global indices: of each rank those that it owns, in its order, and those that it reads."""

    owned: tuple[tuple[int, ...], ...]
    ghosts: tuple[tuple[int, ...], ...]

    @property
    def ranks(self):
        return len(self.owned)

    def owner(self):
        return {index: rank for rank, its in enumerate(self.owned) for index in its}

    def of(self, rank):
        """The ghosts of a rank, each once, by owner and index."""
        owner = self.owner()
        return sorted({i for i in self.ghosts[rank] if owner[i] != rank}, key=lambda i: (owner[i], i))

    def on(self, comm, owners=None):
        own = (np.array(its[comm.rank]) for its in (self.owned, self.ghosts))
        return jaxmpi.IndexMap(*own, owners=owners, comm=comm)


@st.composite
def some_rows(draw, size):
    """The arguments of Rows: without gaps, with small or with huge ones; ranks that own nothing or read nothing."""
    ranks = draw(st.integers(1, size))
    count = draw(st.integers(0, 60))
    largest = draw(st.sampled_from([count, 4 * count, 2**31 + 5, LARGEST]))
    rows = (
        list(range(count))
        if largest == count
        else draw(st.lists(st.integers(0, largest), min_size=count, max_size=count, unique=True))
    )
    if draw(st.booleans()):  # in blocks of consecutive ones
        rows = sorted(rows)
        ends = sorted(draw(st.lists(st.integers(0, count), min_size=ranks - 1, max_size=ranks - 1)))
        owned = [rows[a:b] for a, b in zip([0, *ends], [*ends, count], strict=True)]
    else:
        owned = [[] for _ in range(ranks)]
        some = draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=ranks))  # the others own nothing
        for row in draw(st.permutations(rows)):
            owned[draw(st.sampled_from(some))].append(row)
    read = st.lists(st.sampled_from(rows), max_size=80) if rows else st.just([])
    ghosts = [draw(read) if draw(st.integers(0, 4)) else [] for _ in range(ranks)]
    return tuple(map(tuple, owned)), tuple(map(tuple, ghosts))


def for_each(checks):
    """A test for each of these random checks, by name; those of derivatives need a new JAX."""
    marks = {"derivatives": needs_new_jax}
    return pytest.mark.parametrize("what", [pytest.param(name, marks=marks.get(name, ())) for name in checks])


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
