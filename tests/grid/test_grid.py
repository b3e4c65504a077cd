"""Halos against a witness: NumPy fills the halos of the blocks of all ranks, axis by axis, on each rank alone.

`exchange` fills them region by region instead, all at once. hypothesis draws the geometries on rank 0, which the other
ranks are told; data are small integers, so that all sums are exact.
"""

import copy
import itertools
import math
import os
import pickle
import re
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from mpi4py import MPI

import jaxmpi
from jaxmpi._grid import arguments as grid_arguments
from jaxmpi._grid import grid as grids
from jaxmpi._grid import halos as cells
from support import simulated
from support.divided import WAYS, derivatives, for_each, on_first_ranks, shape_of, some_processes, total
from support.rows import each
from support.table import NEW_JAX, draw, dtype_of

EXAMPLES = int(os.environ.get("JAXMPI_TEST_GRIDS", "16"))
DTYPES = [
    "float32",
    "float64",
    "int32",
    "bool",
    "complex64",
    "bfloat16",
    "float16",
    "complex128",
    "uint8",
    "float8_e5m2",
]
SUMMED = ["float32", "float64", "complex64", "complex128", "bfloat16", "float16"]
RULES = [None, "edge", "reflect", "symmetric", 0, 1]


@dataclass(frozen=True)
class FieldCase:
    dtype: str
    staggered: tuple[bool, ...]
    others: tuple[int, ...]
    swapped: bool
    """Its rules are those of the other sides."""


@dataclass(frozen=True)
class Case:
    blocks: tuple[tuple[int, ...], ...]
    periodic: tuple[bool, ...]
    widths: tuple[tuple[int, int], ...]
    rules: tuple[tuple[Any, Any], ...]
    corners: bool
    trailing: bool
    """The axes that are not the grid's come last."""
    fields: tuple[FieldCase, ...]
    way: str
    starts: bool
    """Its exchanges are started and waited for."""
    seed: int

    @property
    def dims(self):
        return tuple(map(len, self.blocks))

    @property
    def ranks(self):
        return math.prod(self.dims)

    @property
    def axes(self):
        return tuple(range(len(self.dims))) if self.trailing else None

    def shape(self, field, at):
        """Of the block, with its halo, of the process with these coordinates."""
        sizes = [self.blocks[i][j] for i, j in enumerate(at)]
        own = tuple(n + s + sum(w) for n, s, w in zip(sizes, field.staggered, self.widths, strict=True))
        return shape_of(own, field.others, self.trailing)

    def data(self, field, at, seed):
        number = sum(digit * 1000**i for i, digit in enumerate((seed, *at)))
        return draw(self.shape(field, at), dtype_of(field.dtype), number, self.seed)

    def given(self, at, seed):
        """The fields of this process."""
        return [jnp.asarray(self.data(field, at, seed)) for field in self.fields]

    def wholes(self):
        """Global arrays for the fields."""
        for i, field in enumerate(self.fields):
            sizes = [sum(b) + s for b, s in zip(self.blocks, field.staggered, strict=True)]
            shape = shape_of(sizes, field.others, self.trailing)
            yield field, draw(shape, dtype_of(field.dtype), 0, self.seed + i)

    def grid(self, comm):
        return jaxmpi.Grid(self.dims, self.blocks, periodic=self.periodic, comm=comm)

    def rules_of(self, field):
        return tuple(pair[::-1] for pair in self.rules) if field.swapped else self.rules

    def exchange(self, grid, fields, function="exchange"):
        more = {"axes": self.axes, "corners": self.corners}
        call = getattr(grid, function)
        if self.starts and function == "exchange":
            call = lambda x, *args, **more: grid.finish(grid.start(x, *args, **more), after=x)[0]  # noqa: E731
        if not any(field.swapped for field in self.fields) or type(fields) is not list:
            return call(fields, self.widths, **more, boundary=self.rules)
        rules = {str(i): self.rules_of(field) for i, field in enumerate(self.fields)}
        named = {str(i): field for i, field in enumerate(fields)}
        results = call(named, self.widths, **more, boundary=rules)
        return [results[str(i)] for i in range(len(fields))]


@st.composite
def cases(draw, size, dtypes=DTYPES):
    ranks = draw(st.integers(1, size))
    dimensions = draw(st.integers(1, 3))
    widths, rules, blocks, periodic = [], [], [], []
    for number in draw(some_processes(ranks, dimensions)):
        low, high = draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
        rule = draw(st.tuples(st.sampled_from(RULES), st.sampled_from(RULES)))
        least = max(low, high) + ("reflect" in rule) if low + high else 0
        least = max(least, int("edge" in rule and low + high > 0))
        widths.append((low, high))
        rules.append(rule)
        periodic.append(draw(st.booleans()))
        blocks.append(tuple(draw(st.integers(least, least + 2)) for _ in range(number)))
    field = st.builds(
        FieldCase,
        st.sampled_from(dtypes),
        st.tuples(*[st.booleans()] * dimensions),
        st.lists(st.integers(0, 2), max_size=2).map(tuple),
        st.booleans(),
    )
    return Case(
        blocks=tuple(blocks),
        periodic=tuple(periodic),
        widths=tuple(widths),
        rules=tuple(rules),
        corners=draw(st.booleans()),
        trailing=draw(st.booleans()),
        fields=tuple(draw(st.lists(field, min_size=1, max_size=4))),
        way=draw(st.sampled_from(list(WAYS))),
        starts=draw(st.booleans()),
        seed=draw(st.integers(0, 999)),
    )


# --- the witness -----------------------------------------------------------------------------------------------------


def filled(case, field, blocks):
    """The blocks of all processes, by their coordinates, with their halos filled."""
    done = {at: block.copy() for at, block in blocks.items()}
    offset = 0 if case.trailing else len(field.others)
    for axis, (low, high) in enumerate(case.widths):
        before = {at: block.copy() for at, block in done.items()}
        for at, block in done.items():
            number, size = case.dims[axis], case.blocks[axis][at[axis]] + field.staggered[axis]
            for side, width in ((-1, low), (1, high)):
                there = at[axis] + side
                halo = slice(0, low) if side < 0 else slice(low + size, low + size + high)
                if case.periodic[axis] or 0 <= there < number:
                    other = before[(*at[:axis], there % number, *at[axis + 1 :])]
                    own = take(other, axis + offset, slice(low, other.shape[axis + offset] - high))
                    cells = own.shape[axis + offset] - field.staggered[axis]  # without the point in common
                    first = cells - width if side < 0 else int(field.staggered[axis])
                    put(block, axis + offset, halo, take(own, axis + offset, slice(first, first + width)))
                else:
                    fill_at_wall(block, axis + offset, (low, high), side, case.rules_of(field)[axis][side > 0])
    if case.corners:
        return done
    return {at: np.where(outside(case, field, at) <= 1, done[at], blocks[at]) for at in done}


def take(x, axis, part):
    return x[(slice(None),) * axis + (part,)]


def put(x, axis, part, values):
    x[(slice(None),) * axis + (part,)] = values


def fill_at_wall(block, axis, widths, side, rule):
    low, high = widths
    inner = take(block, axis, slice(low, block.shape[axis] - high))
    pads = [(0, 0)] * block.ndim
    pads[axis] = (low, 0) if side < 0 else (0, high)
    if rule is None or sum(pads[axis]) == 0:
        return
    more = {"constant_values": rule} if rule in (0, 1) else {}
    padded = np.pad(inner, pads, mode="constant" if more else rule, **more)
    end = block.shape[axis]
    halo = slice(0, low) if side < 0 else slice(end - high, end)
    put(block, axis, halo, take(padded, axis, slice(0, low) if side < 0 else slice(inner.shape[axis], None)))


def outside(case, field, at):
    """Along how many axes each element lies in the halo."""
    shape = case.shape(field, at)
    offset = 0 if case.trailing else len(field.others)
    count = np.zeros(shape, int)
    for axis, (low, high) in enumerate(case.widths):
        index = np.arange(shape[axis + offset])
        is_halo = (index < low) | (index >= len(index) - high)
        count += is_halo.reshape([-1 if i == axis + offset else 1 for i in range(len(shape))])
    return count


def everywhere(case):
    return list(itertools.product(*map(range, case.dims)))


def expected(case, seed=0):
    """Of each field the blocks of all processes with their halos filled."""
    return [filled(case, field, {at: case.data(field, at, seed) for at in everywhere(case)}) for field in case.fields]


# --- properties ------------------------------------------------------------------------------------------------------


_wrong: list[str] = []


def expect_equal(found, right, about=""):
    """What is wrong is told when the check is done: it communicates, and the other ranks do not know of it."""
    try:
        np.testing.assert_array_equal(found, right)
    except AssertionError as error:
        _wrong.append(f"{about} {error}")


def check_values(case, grid):
    at = grid.coordinates
    given = case.given(at, 0)
    results = WAYS[case.way](lambda fields: case.exchange(grid, fields))(given)
    for field, result, right in zip(case.fields, results, expected(case), strict=True):
        assert result.dtype == right[at].dtype, field
        expect_equal(np.asarray(result), right[at], about=str((case, field, at)))
    for field, x in zip(case.fields, given, strict=True):  # an operand that the caller still has is as it was
        expect_equal(np.asarray(x), case.data(field, at, 0))


def check_derivatives(case, grid):
    at, comm = grid.coordinates, grid.comm
    primals, tangents, cotangents = (case.given(at, seed) for seed in range(3))
    exchange = lambda fields: case.exchange(grid, fields)  # noqa: E731
    linear = replace(case, rules=tuple(tuple(0 if r in (0, 1) else r for r in pair) for pair in case.rules))

    @jaxmpi.jit
    def everything(*given):
        checkpointed = jax.vjp(jax.checkpoint(exchange), given[0])[1](given[2])[0]
        return *derivatives(exchange)(*given), checkpointed

    forward, backward, again, checkpointed = everything(primals, tangents, cotangents)
    for field, result, right in zip(case.fields, forward, expected(linear, 1), strict=True):
        expect_equal(np.asarray(result), right[at], about=str((case, field, at)))
    assert total(comm, forward, cotangents) == total(comm, tangents, backward), case
    for x, y, z, w in zip(backward, checkpointed, again, forward, strict=True):
        expect_equal(np.asarray(x), np.asarray(y))
        expect_equal(np.asarray(z), np.asarray(w))  # the adjoint of the adjoint is the exchange itself


def sources(case, field):
    """Number the elements of all processes' blocks with halos consecutively. Return for each element the number of the
    element that `filled` copies to it, or -1 if a number of a rule fills it."""
    shapes = {at: case.shape(field, at) for at in everywhere(case)}
    numbered, first = {}, 2  # 0 and 1 are numbers of the rules
    for at, shape in shapes.items():
        numbered[at] = np.arange(first, first + math.prod(shape)).reshape(shape)
        first += math.prod(shape)
    found = filled(case, field, numbered)
    return {at: np.where(found[at] < 2, -1, found[at] - 2) for at in shapes}


def accumulated(case, field, seed):
    """The transpose of `filled`, by NumPy: each element is added to where it comes from."""
    blocks = {at: case.data(field, at, seed) for at in everywhere(case)}
    dtype = next(iter(blocks.values())).dtype
    count = sum(block.size for block in blocks.values())
    added = np.zeros(count + 1, np.complex128)
    for at, places in sources(case, field).items():
        np.add.at(added, places.reshape(-1), blocks[at].astype(np.complex128).reshape(-1))
    results, first = {}, 0
    for at, block in blocks.items():
        flat = added[first : first + block.size]
        results[at] = (flat if dtype.kind == "c" else flat.real).astype(dtype).reshape(block.shape)
        first += block.size
    return results


def check_accumulate(case, grid):
    """Values, tangents and cotangents, and a batch, of what is added."""
    at, comm = grid.coordinates, grid.comm
    given, tangents, cotangents = (case.given(at, seed) for seed in range(3))
    accumulate = lambda fields: case.exchange(grid, fields, "accumulate")  # noqa: E731
    inexact = all(x.dtype.name in SUMMED for x in given)
    differentiated = NEW_JAX and not comm.allreduce(not inexact, MPI.LOR)

    def everything(given, tangents, cotangents):
        stacked = jax.vmap(lambda *fields: accumulate(list(fields)))(*map(jnp.stack, zip(given, tangents, strict=True)))
        if not differentiated:
            return accumulate(given), stacked, None
        return accumulate(given), stacked, derivatives(accumulate)(given, tangents, cotangents)

    results, stacked, derived = WAYS[case.way](everything)(given, tangents, cotangents)
    for i, (field, result) in enumerate(zip(case.fields, results, strict=True)):
        right = accumulated(case, field, 0)[at]
        assert result.dtype == right.dtype, field
        expect_equal(np.asarray(result), right, about=str((case, field, at)))
        expect_equal(np.asarray(stacked[i][0]), right, about=str((case, field, at)))
        expect_equal(np.asarray(given[i]), case.data(field, at, 0))
    if derived is None:
        return
    forward, backward, again = derived
    for field, result in zip(case.fields, forward, strict=True):
        expect_equal(np.asarray(result), accumulated(case, field, 1)[at], about=str((case, field, at)))
    assert total(comm, forward, cotangents) == total(comm, tangents, backward), case
    for x, y in zip(again, forward, strict=True):
        expect_equal(np.asarray(x), np.asarray(y))


def check_batches(case, grid):
    """A batch of some of the fields, along any axis."""
    at = grid.coordinates
    rights, ins, ways = [], [], []
    for i, field in enumerate(case.fields):
        mapped = i == 0 or case.seed % (i + 2) == 0
        where = case.seed % (len(case.shape(field, at)) + 1)
        seeds = [2 * i, 2 * i + mapped]
        rights.append([filled(case, field, {a: case.data(field, a, s) for a in everywhere(case)})[at] for s in seeds])
        stack = [case.data(field, at, seed) for seed in seeds]
        ins.append(jnp.stack(stack, axis=where) if mapped else jnp.asarray(stack[0]))
        ways.append(where if mapped else None)
    outs = jax.jit(jax.vmap(lambda *fields: case.exchange(grid, list(fields)), tuple(ways)))(*ins)
    for out, right in zip(outs, rights, strict=True):
        for j in range(2):
            expect_equal(np.asarray(out[j]), right[j], about=str(case))


def check_whole(case, grid):
    """scatter, with halos and without, and gather, of global arrays."""
    root = case.seed % grid.comm.size
    for field, whole in case.wholes():
        for sender in (root, None):
            owned = sender in (None, grid.comm.rank)
            given = whole if owned else jax.ShapeDtypeStruct(whole.shape, whole.dtype)
            block = grid.scatter(given, sender, axes=case.axes)
            cut = [slice(s.start, s.stop + extra) for s, extra in zip(grid.slices, field.staggered, strict=True)]
            index = (*cut, Ellipsis) if case.trailing else (Ellipsis, *cut)
            expect_equal(np.asarray(block), whole[index])
            back = grid.gather(block, sender, axes=case.axes)
            expect_equal(np.asarray(back), whole if owned else np.asarray(block))
        halos = grid.scatter(whole, None, width=case.widths, axes=case.axes, boundary=case.rules)
        back = grid.gather(halos, None, width=case.widths, axes=case.axes)
        expect_equal(np.asarray(back), whole)
        again = case.exchange(grid, halos)
        expect_equal(np.asarray(again), np.asarray(halos))


def check_planes(case, grid):
    """Planes and lines of fields and of their batches, on one rank and on all, and what their sum is sent back to."""
    random = np.random.default_rng(case.seed)
    dimensions, root = len(case.dims), case.seed % grid.comm.size
    fields, index, rights = [], {}, []
    for axis in random.permutation(dimensions)[: random.integers(1, dimensions + 1)]:
        least = min(sum(case.blocks[axis]) + field.staggered[axis] for field in case.fields)
        if least == 0:
            return
        index[int(axis) - dimensions * int(random.integers(2))] = int(random.integers(-least, least))
    for _, whole in case.wholes():
        fields.append(grid.scatter(whole, None, width=case.widths, axes=case.axes))
        at = [index.get(axis, index.get(axis - dimensions, slice(None))) for axis in range(dimensions)]
        rights.append(whole[(*at, Ellipsis) if case.trailing else (Ellipsis, *at)])
    for to in (root, None):
        gather = lambda x, to=to: grid.gather(x, to, width=case.widths, axes=case.axes, index=index)  # noqa: E731
        found = jax.jit(gather)(fields)
        stacked = jax.vmap(gather)([jnp.stack([x, x]) for x in fields])
        for x, y, right, given in zip(found, stacked, rights, fields, strict=True):
            expected = right if to in (None, grid.comm.rank) else np.asarray(given)
            assert x.dtype == given.dtype
            expect_equal(np.asarray(x), expected, about=str((case, index, to)))
            expect_equal(np.asarray(y[1]), expected, about=str((case, index, to)))
    xs = [x for x in fields if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype != jnp.float8_e5m2]
    gather = lambda x: grid.gather(x, None, width=case.widths, axes=case.axes, index=index)  # noqa: E731
    if NEW_JAX and xs:
        ys, pullback = jax.vjp(gather, xs)
        weights = [jnp.asarray(draw(y.shape, y.dtype, grid.comm.rank, i)) for i, y in enumerate(ys)]
        (backward,) = pullback(weights)
        assert total(grid.comm, ys, weights) == total(grid.comm, xs, backward), case


RANDOM = {
    "values": (check_values, DTYPES, 1),
    "derivatives": (check_derivatives, SUMMED, 3),
    "accumulations": (check_accumulate, [*SUMMED, "int32", "uint8"], 2),
    "batches": (check_batches, DTYPES, 3),
    "whole arrays": (check_whole, DTYPES, 3),
    "planes": (check_planes, DTYPES, 4),
}
"""Of each check the dtypes, and which part of the examples it gets."""


@pytest.mark.seconds(600)
@for_each(RANDOM)
def test_random(what, comm, size):
    check, dtypes, part = RANDOM[what]

    def checked(case, part):
        _wrong.clear()
        check(case, case.grid(part))
        assert not _wrong, _wrong[0]

    on_first_ranks(comm, cases(size, dtypes), checked, EXAMPLES // part)


# --- what a grid is --------------------------------------------------------------------------------------------------


def test_processes_are_chosen(comm, size):
    grid = jaxmpi.Grid((0, 0), comm=comm)
    assert grid.processes == tuple(MPI.Compute_dims(size, 2))
    assert jaxmpi.Grid((0, 1), comm=comm).processes == (size, 1)
    assert jaxmpi.Grid(size, comm=comm).processes == (size,)


def test_numbering_is_that_of_a_cartesian_communicator(comm, size):
    dims = MPI.Compute_dims(size, 3)
    cart = comm.Create_cart(dims, periods=(True, False, True))
    for grid in (jaxmpi.Grid(comm=cart), jaxmpi.Grid(tuple(dims), periodic=(True, False, True), comm=comm)):
        assert (grid.processes, grid.periodic) == (tuple(dims), (True, False, True))
        assert list(grid.coordinates) == list(cart.coords)
        for axis in range(3):
            assert (grid.neighbor(axis, -1), grid.neighbor(axis, 1)) == cart.Shift(axis, 1)
    # Another division among its ranks: of as many axes with its periods.
    shape = [2 * n for n in dims]
    source, target = jaxmpi.Grid(shape=shape, comm=cart), jaxmpi.Grid((1, 1, size), shape, comm=cart)
    assert target.periodic == source.periodic
    assert jaxmpi.Grid(size, comm=cart).periodic == (False,)
    whole = np.arange(np.prod(shape)).reshape(shape)
    moved = jaxmpi.redistribute(jnp.asarray(whole[source.slices]), source, target)
    np.testing.assert_array_equal(moved, whole[target.slices])
    cart.Free()


def test_blocks_cover_the_array(comm, size):
    grid = jaxmpi.Grid((0, 0), (11, 6), comm=comm)
    covered = np.zeros((11, 6), int)
    for rank in range(size):
        covered[grid.slices_of(rank)] += 1
    assert (covered == 1).all()
    assert covered[grid.slices].shape == grid.local_shape
    assert grid.global_shape == (11, 6)
    uneven = tuple(range(1, size + 1))
    grid = jaxmpi.Grid(size, (uneven,), comm=comm)
    assert grid.local_shape == (comm.rank + 1,)
    assert grid.slices == (slice(sum(uneven[: comm.rank]), sum(uneven[: comm.rank + 1])),)


BAD_CALLS = [
    (lambda g: jaxmpi.Grid((2, 1)), "their product must be that number"),
    (lambda g: jaxmpi.Grid((-1, 0)), "their product must be that number"),
    (lambda g: jaxmpi.Grid((0.5, 1)), "processes must be a Python or NumPy integer"),
    (lambda g: jaxmpi.Grid(None), "pass the numbers of processes"),
    (lambda g: jaxmpi.Grid(1, (3, 3)), "the grid has 1 axes"),
    (lambda g: jaxmpi.Grid(1, -3), "no size may be negative"),
    (lambda g: jaxmpi.Grid(1, ((1,) * 2,)), "blocks"),
    (lambda g: jaxmpi.Grid(1, 3, periodic=(True, False)), "periodic"),
    (lambda g: jaxmpi.Grid(1, 3, periodic="no"), "periodic"),
    (lambda g: jaxmpi.Grid(1, 8, comm=MPI.COMM_NULL), "COMM_NULL"),
    (lambda g: jaxmpi.Grid(1, 8, comm="world"), "must be an mpi4py communicator"),
    (lambda g: g.exchange(jnp.ones(9)), "fields has (9,) cells along the axes of the grid"),
    (lambda g: g.exchange({"h": jnp.ones(10), "u": jnp.ones(13)}), "fields['u'] has (13,) cells"),
    (lambda g: g.exchange(jnp.ones(())), "and no axis -1"),
    (lambda g: g.exchange(jnp.ones(26), 9), "smaller than the halo"),
    (lambda g: g.exchange(jnp.ones(10), -1), "a number of cells (0 or more)"),
    (lambda g: g.exchange(jnp.ones(10), (1, 1)), "the grid has 1 axes"),
    (lambda g: g.exchange(jnp.ones(10), ((1, 1, 1),)), "or (before, behind)"),
    (lambda g: g.exchange(jnp.ones(10), axes=(0, 1)), "the grid has 1 axes"),
    (lambda g: g.exchange(jnp.ones(10), axes=(1,)), "and no axis 1"),
    (lambda g: g.exchange(jnp.ones(10), boundary="wrap"), "'wrap'"),
    (lambda g: g.exchange(jnp.ones(10), boundary=("edge", "edge", "edge")), "pass one rule"),
    (lambda g: g.exchange(jnp.ones(10, int), boundary=0.5), "cannot hold"),
    (lambda g: g.exchange(jnp.ones(10, int), boundary=math.nan), "cannot hold"),
    (lambda g: g.exchange([jnp.ones(10), object()]), "fields[1]"),
    (lambda g: g.exchange({"u": jnp.ones(10)}, boundary={"v": 0}), "the structure of the fields"),
    (lambda g: g.exchange({"u": jnp.ones(10)}, boundary={"u": "wrap"}), "'wrap'"),
    (lambda g: g.gather({"a": jnp.ones(8), "b": jnp.ones(5)}), "Grid.gather: blocks['b'] has (5,) cells"),
    (lambda g: g.scatter(jnp.ones(8 * g.comm.size), None, axes=(0, 0)), "Grid.scatter: axes is (0, 0)"),
    (lambda g: g.scatter(jnp.ones(8 * g.comm.size), None, width=9), "Grid.scatter: a block of 8 cells"),
    (lambda g: jax.jit(lambda w: g.exchange(jnp.ones(10), w))(1), "traced"),
    (lambda g: g.exchange(jnp.ones(10), corners="no"), "corners must be True or False"),
    (lambda g: g.exchange(jnp.ones(10, jnp.float16), boundary=1e6), "cannot hold"),
    (lambda g: g.exchange(jnp.ones(10), boundary=1j), "cannot hold"),
    (lambda g: g.exchange(jnp.ones(10), boundary=10**400), "has the rule"),
    (lambda g: g.gather(jnp.ones(8), index={0: -8 * g.comm.size - 1}), "Grid.gather: index is -"),
    (lambda g: g.gather(jnp.ones(8), index={1: 0}), "Grid.gather: there is no axis 1"),
    (lambda g: g.gather(jnp.ones(8), index={0: 1, -1: 1}), "an axis is named twice"),
    (lambda g: g.gather(jnp.ones(8), index={0: 0.5}), "index must be a Python or NumPy integer"),
    (lambda g: g.gather(jnp.ones(8), index=3), "Grid.gather: index is 3: pass a dict"),
    (lambda g: g.accumulate(jnp.ones(9)), "Grid.accumulate: fields has (9,) cells along the axes of the grid"),
    (lambda g: g.accumulate(jnp.ones(10, bool)), "Grid.accumulate: op MPI.SUM is not defined for dtype bool"),
    (lambda g: g.accumulate(jnp.ones(10), boundary="wrap"), "'wrap'"),
    (lambda g: jaxmpi.Grid(g.comm), "pass a communicator as comm="),
    (lambda g: jaxmpi.Grid((1,) * 7, comm=MPI.COMM_SELF), "more than 6 are not possible"),
    (lambda g: g.scatter(jnp.ones(10), 0), "cells along the axes of the grid"),
    (lambda g: g.scatter(jnp.ones(8), 99), "root"),
    (lambda g: g.gather(jnp.ones(4)), "cells along the axes of the grid"),
]
BEGINNINGS = [
    ("Grid", "processes must be", lambda g: jaxmpi.Grid("two")),
    ("Grid", "shape must be", lambda g: jaxmpi.Grid(g.comm.size, "two")),
    ("Grid.global_shape", "needs the shape", lambda g: jaxmpi.Grid(g.processes).global_shape),
    ("Grid.local_shape", "needs the shape", lambda g: jaxmpi.Grid(g.processes).local_shape),
    ("Grid.slices", "needs the shape", lambda g: jaxmpi.Grid(g.processes).slices),
    ("Grid.slices_of", "needs the shape", lambda g: jaxmpi.Grid(g.processes).slices_of(0)),
    ("Grid.slices_of", "rank must be", lambda g: g.slices_of(g.comm.size)),
    ("Grid.neighbor", "there is no axis 1", lambda g: g.neighbor(1)),
    ("Grid.neighbor", "axis must be", lambda g: g.neighbor(False)),
    ("Grid.neighbor", "distance must be", lambda g: g.neighbor(0, 0.5)),
    ("Grid.is_wall", "there is no axis -2", lambda g: g.is_wall(-2, 1)),
    ("Grid.is_wall", "side is 2", lambda g: g.is_wall(0, 2)),
    ("Grid.is_wall", "side must be known", lambda g: jax.jit(lambda side: g.is_wall(0, side))(1)),
    ("Grid.pencil", "needs the shape", lambda g: jaxmpi.Grid(g.processes).pencil(0)),
    ("Grid.pencil", "there is no axis 1", lambda g: g.pencil(1)),
    ("Grid.pencil", "axis must be .* got True of type bool", lambda g: g.pencil(True)),
    ("Grid.exchange", "needs the shape", lambda g: jaxmpi.Grid(g.processes).exchange(jnp.ones(3))),
    ("Grid.exchange", "width must be", lambda g: g.exchange(jnp.ones(10), "1")),
    ("Grid.exchange", "axes must be", lambda g: g.exchange(jnp.ones(10), axes=0.5)),
    ("Grid.exchange", "axes must be", lambda g: g.exchange(jnp.ones(10), axes=(False,))),
    ("Grid.exchange", "boundary is tr", lambda g: jax.jit(lambda b: g.exchange(jnp.ones(10), boundary=b))(1.0)),
    ("Grid.start", "width must be", lambda g: g.start(jnp.ones(10), 1.0)),
    ("Grid.pad", "width must be", lambda g: g.pad(jnp.ones(8), "1")),
    ("Grid.pad", "axes must be", lambda g: g.pad(jnp.ones(8), axes="x")),
    ("Grid.scatter", "root must be", lambda g: g.scatter(jnp.ones(8), "0")),
    ("Grid.scatter", "boundary is 0.5", lambda g: g.scatter(jnp.ones(8 * g.comm.size, int), width=1, boundary=0.5)),
    ("Grid.gather", "axes must be", lambda g: g.gather(jnp.ones(8), axes=(0.5,))),
    ("Grid.sharding", "needs the shape", lambda g: jaxmpi.Grid(g.processes).sharding(("x",))),
    ("Grid.sharding", "names is None: pass different names", lambda g: g.sharding(None)),
    ("Grid.sharding", "ndim must be", lambda g: g.sharding(("x",), 1.0)),
    ("Grid.to_sharded", "needs the shape", lambda g: jaxmpi.Grid(g.processes).to_sharded(jnp.ones(8), ("x",))),
    ("Grid.to_sharded", "names is None: pass different names", lambda g: g.to_sharded(jnp.ones(8), None)),
    ("Grid.to_sharded", r"names is \(None,\)", lambda g: g.to_sharded(jnp.ones(8), (None,))),
    ("Grid.to_sharded", "names is .*'x'.*'x'", lambda g: g.to_sharded(jnp.ones(8), ["x", "x"])),
    ("Grid.from_sharded", "needs the shape", lambda g: jaxmpi.Grid(g.processes).from_sharded(jnp.ones(8))),
]


@pytest.mark.alone
def test_bad_calls():
    """Errors begin with what was called, and say what is wrong."""
    grid = jaxmpi.Grid(1, 8, periodic=True)
    beginnings = [(call, f"^{re.escape(name)}: .*{words}") for name, words, call in BEGINNINGS]

    def check(row):
        with pytest.raises((ValueError, TypeError), match=row[1]):
            row[0](grid)

    each([*((call, re.escape(words)) for call, words in BAD_CALLS), *beginnings], check, lambda row: row[1])


def test_copies(comm, size):
    """A copy is the grid itself, also in a tree and in a request. None can be pickled."""
    part = comm.Dup()
    for grid in (jaxmpi.Grid(size, 2 * size), jaxmpi.Grid(size, 2 * size, comm=part)):
        assert copy.copy(grid) is grid
        assert copy.deepcopy({"grid": [grid]}) == {"grid": [grid]}
        request = copy.deepcopy(grid.start(grid.pad(jnp.ones(2))))
        np.testing.assert_array_equal(grid.finish(request)[1:3], [1, 1])
        for what in (grid, {"grid": grid}, grid._comm):
            with pytest.raises(TypeError, match=r"^(Grid|Communicator): it cannot be pickled.* make it again on each"):
                pickle.dumps(what)
    part.Free()


def test_empty_tree(comm, size):
    grid = jaxmpi.Grid(size, 8 * size, comm=comm)
    assert grid.exchange({}) == {}
    assert grid.scatter([], None) == []


def test_reflect_needs_one_cell_more(comm, size):
    grid = jaxmpi.Grid(size, 2 * size, comm=comm)
    grid.exchange(jnp.ones(6), 2, boundary="symmetric")
    with pytest.raises(ValueError, match="smaller than the halo that is copied from it, 3"):
        grid.exchange(jnp.ones(6), 2, boundary="reflect")


def test_a_boundary_for_each_field(comm, size):
    grid = jaxmpi.Grid(size, 2 * size, comm=comm)
    fields = {"h": jnp.ones(4), "uv": (jnp.ones(4), 2 * jnp.ones(4))}
    results = grid.exchange(fields, boundary={"h": 7, "uv": ("edge", None)[:1]})
    for low in (results["h"], *results["uv"]):
        assert low[0] == (7 if low is results["h"] else low[1]) or not grid.is_wall(0, -1)
    padded = grid.pad({"a": jnp.ones(2), "b": jnp.ones((3, 2))}, [(1, 2)])
    assert padded["a"].tolist() == [0, 1, 1, 0, 0]
    assert padded["b"].shape == (3, 5)


def test_numbers_that_are_equal_are_not_the_same(comm, size):
    grid = jaxmpi.Grid(size, 2 * size, comm=comm)
    for number in (0.0, -0.0, 0, -0.0):
        result = np.asarray(grid.exchange(jnp.ones(4), boundary=number))
        if grid.is_wall(0, -1):
            assert np.signbit(result[0]) == np.signbit(number)


def test_scatter_of_a_batch(comm, rank, size):
    """From any root, with the batch mapped on all ranks; and its gradient."""
    cells = 5
    grid = jaxmpi.Grid(size, cells * size, comm=comm)
    whole = np.arange(3.0 * cells * size).reshape(3, -1)

    def scatter(x, root):
        return jax.vmap(lambda x: grid.scatter(x, root, width=1))(x)

    def gradient(x, root):
        return jax.grad(lambda x: jnp.sum((rank + 1) * scatter(x, root)[:, 1:-1]))(x)

    found = jaxmpi.jit(lambda x: [(scatter(x, root), gradient(x, root)) for root in range(size)])(jnp.asarray(whole))
    for root, (block, of_x) in enumerate(found):
        np.testing.assert_array_equal(block[:, 1:-1], whole[:, grid.slices[0]])
        right = np.repeat(np.arange(1.0, size + 1), cells) if rank == root else np.zeros(cells * size)
        np.testing.assert_array_equal(of_x, np.tile(right, (3, 1)))


def test_many_fields(comm, size):
    """More than one operation takes."""
    grid = jaxmpi.Grid(size, 2 * size, periodic=True, comm=comm)
    fields = [jnp.arange(4.0) + 10 * comm.rank + 100 * i for i in range(205)]
    results = grid.exchange(fields)
    for i, result in enumerate(results):
        left, right = (10 * ((comm.rank + side) % size) + 100 * i for side in (-1, 1))
        own = 10 * comm.rank + 100 * i
        np.testing.assert_array_equal(result, [left + 2, own + 1, own + 2, right + 1])


def test_boundaries_of_nan_compile_once(comm, size):
    grid = jaxmpi.Grid(size, 2 * size, comm=comm)
    traced = []
    f = jaxmpi.jit(lambda x: (traced.append(1), grid.exchange(x, boundary=float("nan")))[1])
    for _ in range(3):
        result = f(jnp.ones(4))
    assert len(traced) == 1
    assert np.isnan(result[0]) == grid.is_wall(0, -1)
    assert np.isnan(result[-1]) == grid.is_wall(0, 1)


@pytest.mark.skipif(not NEW_JAX, reason="this JAX has no derivatives of communication")
def test_a_float8_field_has_tangents_and_no_cotangents(comm, rank, size):
    """The exchange moves, its transpose adds."""
    grid = jaxmpi.Grid(size, 2 * size, periodic=True, comm=comm)
    x = jnp.full(4, 1 + rank, jnp.float8_e5m2)
    y = jnp.full(4, 1.0 + rank)
    expected = grid.exchange(y)
    for exchange in (grid.exchange, lambda x: grid.finish(grid.start(x))):
        value, tangent = jax.jit(lambda x, exchange=exchange: jax.jvp(exchange, (x,), (x,)))(x)
        for found in (value, tangent):
            assert found.dtype == x.dtype
            np.testing.assert_array_equal(found.astype(float), expected)
        beside = jax.jit(lambda y, exchange=exchange: jax.jvp(lambda y: exchange([y, x])[0], (y,), (y,))[1])(y)
        np.testing.assert_array_equal(beside, expected)
        with pytest.raises(NotImplementedError, match="cannot be transposed: its transpose adds, and float8_e5m2"):
            jax.vjp(exchange, x)[1](x)
        np.testing.assert_array_equal(grid.exchange(y), expected)


@pytest.mark.usefixtures("own_errors")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("rows", [1, 20_000])
def test_ranks_that_differ_get_an_error(rows, comm, rank, size):
    """Each rank that receives something of another call raises, and later calls are right again: with short messages
    and with long ones, of which the other rank is told first."""
    part = comm.Split(rank // 2)
    if part.size == 2:
        grid = jaxmpi.Grid(2, 16, periodic=True, comm=part)
        x = jnp.arange(10.0 * rows).reshape(rows, 10)
        others = (
            lambda: grid.exchange(x.astype("float32")),
            lambda: grid.exchange(jnp.ones((2, 10))),
            lambda: grid.exchange(jnp.ones((30_000, 10))),
            lambda: grid.exchange((x, x)),
            lambda: grid.exchange(x, boundary="edge"),
            lambda: grid.accumulate(x),
            lambda: grid.exchange({"another name": x}),
        )
        for other in others if rows == 1 else others[:1]:
            with pytest.raises(jax.errors.JaxRuntimeError, match=r"has sent something else|the ranks differ") as caught:
                jax.block_until_ready(other() if part.rank else grid.exchange(x))
            name = "accumulate" if part.rank and other is others[5] else "exchange"
            assert f"jaxmpi.Grid.{name} on rank" in str(caught.value)
            right = grid.exchange(x + part.rank)
            np.testing.assert_array_equal(right[:, 1:-1], x[:, 1:-1] + part.rank)
            np.testing.assert_array_equal(right[:, 0], x[:, 8] + 1 - part.rank)
            np.testing.assert_array_equal(right[:, 9], x[:, 1] + 1 - part.rank)
    part.Free()


@pytest.mark.ranks(2)
@pytest.mark.skipif(simulated.BY_NCCL, reason="NCCL carries one of them alone: tests/mpi/test_nccl.py")
@pytest.mark.parametrize("rows", [1, 20_000])
def test_what_blocks_and_what_starts_are_one_exchange(rows, comm, rank, size):
    part = comm.Split(rank // 2)
    if part.size == 2:
        grid = jaxmpi.Grid(2, 16, periodic=True, comm=part)
        x = jnp.arange(10.0 * rows).reshape(rows, 10) + 1000 * part.rank
        for turn in range(4):
            y = x + turn
            result = grid.finish(grid.start(y)) if turn % 2 == part.rank else grid.exchange(y)
            np.testing.assert_array_equal(result[:, 1:-1], y[:, 1:-1])
            np.testing.assert_array_equal(result[:, 0], y[:, 8] + 1000 * (1 - 2 * part.rank))
            np.testing.assert_array_equal(result[:, 9], y[:, 1] + 1000 * (1 - 2 * part.rank))
    part.Free()


@pytest.mark.usefixtures("own_errors")
@pytest.mark.ranks(2)
@pytest.mark.skipif(simulated.BY_NCCL, reason="with NCCL an exchange waits for the other ranks")
@pytest.mark.parametrize(
    ("first", "rows"),  # a rank that waits in recv lets another's long messages wait
    [("recv", 200), ("irecv", 1), ("exchange", 20_000)],
)
def test_messages_of_exchanges_are_for_no_tag(first, rows, comm, rank, size):
    """A receive with any tag leaves them alone: while it waits, while it is posted, and where they have come before."""
    part = comm.Split(rank // 2)
    if part.size == 2:
        grid = jaxmpi.Grid(2, 16, comm=part)
        x = 1 + jnp.arange(9.0 * rows).reshape(rows, 9) + 1000 * part.rank
        template = jnp.zeros(3)
        for turn in range(2):
            if part.rank == 0:  # it receives nothing, so it need not wait for the other
                grid.exchange(x + turn, ((1, 0),))
                grid.exchange(x - turn, ((1, 0),))
                jaxmpi.send(template + turn + 1, 1, tag=3, comm=part)
                continue
            if first == "irecv":
                request = jaxmpi.irecv(template, MPI.ANY_SOURCE, tag=MPI.ANY_TAG, comm=part)
            if first == "recv":
                got = jaxmpi.recv(template, MPI.ANY_SOURCE, tag=MPI.ANY_TAG, comm=part)
            results = [grid.exchange(x + turn, ((1, 0),)), grid.exchange(x - turn, ((1, 0),))]
            if first == "irecv":
                got = jaxmpi.wait(request)
            if first == "exchange":
                got = jaxmpi.recv(template, MPI.ANY_SOURCE, tag=MPI.ANY_TAG, comm=part)
            np.testing.assert_array_equal(got, np.full(3, turn + 1.0))
            for result, sign in zip(results, (1, -1), strict=True):
                right = np.array(x + sign * turn)
                right[:, 0] = right[:, -1] - 1000
                np.testing.assert_array_equal(result, right)
        jaxmpi.allreduce(template, MPI.SUM, comm=part).block_until_ready()  # and all that was sent before it
    part.Free()


def test_a_freed_communicator(comm, size):
    part = comm.Dup()
    grid = jaxmpi.Grid(size, 8 * size, comm=part)
    f = jaxmpi.jit(grid.exchange)
    f(jnp.ones(10))
    part.Free()
    with pytest.raises(jax.errors.JaxRuntimeError, match="has been freed"):
        jax.block_until_ready(f(jnp.ones(10)))


def layout_of(processes, shape):
    """What cuts use of a grid, of any number of processes."""
    grid = SimpleNamespace(_layout=cells.Layout(grid_arguments.blocks(shape, processes), (False,) * len(processes)))
    grid.processes = processes
    grid._extents = lambda rank, staggered: grids.Grid._extents(grid, rank, staggered)
    return grid


@pytest.mark.alone
def test_blocks_of_any_number_of_processes():
    """Random grids, blocks and axes: what root sends is each rank's block, and what it receives is the array again."""
    random = np.random.default_rng(0)
    drawn = [_random_cut(random) for _ in range(10)]
    xs = [random.normal(size=cut.shape).astype(np.float32) for _, cut, _, _ in drawn]
    each_divided = jax.jit(lambda xs: [cut.divided(grid, x) for x, (grid, cut, _, _) in zip(xs, drawn, strict=True)])
    received = [np.array(divided) for divided in each_divided(xs)]
    for (grid, _, axes, staggered), x, divided in zip(drawn, xs, received, strict=True):
        expected = np.zeros_like(divided)
        for rank, at in enumerate(np.ndindex(*grid.processes)):
            block, to = [slice(None)] * x.ndim, [slice(n) for n in x.shape]
            for axis, i, blocks, extra in zip(axes, at, grid._layout.blocks, staggered, strict=True):
                block[axis] = slice(sum(blocks[:i]), sum(blocks[: i + 1]) + extra)
                to[axis] = slice(blocks[i] + extra)
            expected[rank][tuple(to)] = x[tuple(block)]
        np.testing.assert_array_equal(divided, expected)
        for rank, at in enumerate(np.ndindex(*grid.processes)):  # the second one's of common points; nothing behind
            for axis, i, blocks, extra in zip(axes, at, grid._layout.blocks, staggered, strict=True):
                kept = blocks[i] + (extra if i + 1 == len(blocks) else 0)
                divided[(rank, *(slice(None),) * (axis % x.ndim), slice(kept, None))] = np.nan
    joined = jax.jit(lambda ys: [cut.joined(grid, y) for y, (grid, cut, _, _) in zip(ys, drawn, strict=True)])
    for x, found in zip(xs, joined(received), strict=True):
        np.testing.assert_array_equal(found, x)


def _random_cut(random):
    count = random.integers(1, 4)
    processes = tuple(map(int, random.integers(1, 5, count)))
    sizes = [
        tuple(map(int, random.integers(1, 4, n))) if random.random() < 0.5 else int(random.integers(n, 3 * n + 1))
        for n in processes
    ]
    grid = layout_of(processes, sizes)
    ndim = int(count + random.integers(0, 3))
    axes = tuple(int(axis) - ndim for axis in random.permutation(ndim)[:count])
    staggered = tuple(map(int, random.integers(0, 2, count)))
    shape = list(map(int, random.integers(1, 4, ndim)))
    for axis, blocks, extra in zip(axes, grid._layout.blocks, staggered, strict=True):
        shape[axis] = sum(blocks) + extra
    return grid, grids.Cut(tuple(shape), axes, staggered), axes, staggered


@pytest.mark.alone
@pytest.mark.parametrize("function", ["divided", "joined"])
def test_programs_do_not_grow_with_the_processes(function):
    def equations(side):
        grid, cut = layout_of((side, side), (1009, 1009)), grids.Cut((1009, 1010), (-2, -1), (0, 1))
        x = jnp.zeros((side**2, *cut.largest(grid)) if function == "joined" else cut.shape)
        return len(jax.make_jaxpr(lambda x: getattr(cut, function)(grid, x))(x).eqns)

    assert equations(100) <= equations(10) + 10


@pytest.mark.alone
def test_equal_facts_have_one_signature():
    """Plans are kept by facts that are equal. A rank that has seen a dtype with a byte order, or 1.0 in the place of 1,
    before another rank has seen the usual one, would be refused, if the signature came from how they are written."""
    from jaxmpi._grid.halos import Field
    from jaxmpi._mpi import plans

    usual = np.dtype(np.int32)
    other = usual.newbyteorder("<")
    assert usual == other
    fields = [Field((0,), (), (False,), dtype, ((1, None),), "x") for dtype in (usual, other)]
    fields += [
        Field((np.int64(0),), (), (np.False_,), usual, ((number, None),), "x") for number in (1.0, True, np.int8(1))
    ]
    assert len({*fields}) == 1
    assert len({plans.signature("exchange", field, 2) for field in fields}) == 1
    others = [
        Field((0,), (), (False,), np.dtype(np.int64), ((1, None),), "x"),
        Field((0,), (), (False,), usual, ((1.5, None),), "x"),
        Field((0,), (), (False,), usual, (("1", None),), "x"),
        Field((0,), (), (True,), usual, ((1, None),), "x"),
        Field((0,), (), (False,), usual, ((1, None),), "y"),
    ]
    assert len({plans.signature("exchange", field, 2) for field in [fields[0], *others]}) == 6
