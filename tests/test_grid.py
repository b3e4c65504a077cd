"""Halos against a witness: NumPy fills the halos of the blocks of all ranks, axis by axis, on each rank alone.

`exchange` fills them region by region instead, all at once. hypothesis draws the geometries on rank 0, which the other
ranks are told; data are small integers, so that all sums are exact.
"""

import itertools
import math
import os
import re
from dataclasses import dataclass
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from mpi4py import MPI
from table import NEW_JAX, draw, dtype_of

import jaxmpi
from jaxmpi import notoken

EXAMPLES = int(os.environ.get("JAXMPI_TEST_GRIDS", "40"))
DTYPES = ["float32", "float64", "int32", "bool", "complex64", "bfloat16", "float16", "complex128", "uint8", "float8_e5m2"]
SUMMED = ["float32", "float64", "complex64", "complex128", "bfloat16", "float16"]
RULES = [None, "edge", "reflect", "symmetric", 0, 1]


@dataclass(frozen=True)
class FieldCase:
    dtype: str
    staggered: tuple[bool, ...]
    others: tuple[int, ...]


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
    seed: int

    @property
    def dims(self):
        return tuple(map(len, self.blocks))

    @property
    def axes(self):
        return tuple(range(len(self.dims))) if self.trailing else None

    def shape(self, field, at):
        """Of the block, with its halo, of the process with these coordinates."""
        sizes = [self.blocks[i][j] for i, j in enumerate(at)]
        own = tuple(n + s + sum(w) for n, s, w in zip(sizes, field.staggered, self.widths, strict=True))
        return (*own, *field.others) if self.trailing else (*field.others, *own)

    def data(self, field, at, seed):
        return draw(self.shape(field, at), dtype_of(field.dtype), [seed, *at], self.seed)

    def grid(self, comm):
        return jaxmpi.Grid(self.dims, self.blocks, periodic=self.periodic, comm=comm)

    def exchange(self, grid, fields):
        return grid.exchange(fields, self.widths, axes=self.axes, corners=self.corners, boundary=self.rules)


@st.composite
def cases(draw, size, dtypes=DTYPES):
    ranks = draw(st.integers(1, size))
    dimensions = draw(st.integers(1, 3))
    dims, left = [], ranks
    for _ in range(dimensions - 1):
        dims.append(draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0])))
        left //= dims[-1]
    dims = draw(st.permutations([*dims, left]))
    widths, rules, blocks, periodic = [], [], [], []
    for number in dims:
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
    )
    return Case(
        blocks=tuple(blocks),
        periodic=tuple(periodic),
        widths=tuple(widths),
        rules=tuple(rules),
        corners=draw(st.booleans()),
        trailing=draw(st.booleans()),
        fields=tuple(draw(st.lists(field, min_size=1, max_size=4))),
        way=draw(st.sampled_from(["eager", "jit", "jax.jit"])),
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
                    fill_at_wall(block, axis + offset, (low, high), side, case.rules[axis][side > 0])
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


def check_values(case, grid):
    at = grid.coordinates
    given = [jnp.asarray(case.data(field, at, 0)) for field in case.fields]
    ways = {"eager": lambda f: f, "jit": jaxmpi.jit, "jax.jit": jax.jit}
    results = ways[case.way](lambda fields: case.exchange(grid, fields))(given)
    for field, result, right in zip(case.fields, results, expected(case), strict=True):
        assert result.dtype == right[at].dtype, field
        np.testing.assert_array_equal(np.asarray(result), right[at], err_msg=str((case, field, at)))
    for field, x in zip(case.fields, given, strict=True):  # an operand that the caller still has is as it was
        np.testing.assert_array_equal(np.asarray(x), case.data(field, at, 0))


def total(comm, xs, ys):
    wide = lambda x: np.asarray(x).astype(np.complex128)  # noqa: E731
    return comm.allreduce(complex(sum(np.sum(wide(x) * wide(y)) for x, y in zip(xs, ys, strict=True))))


def check_derivatives(case, grid):
    at, comm = grid.coordinates, grid.comm
    primals, tangents, cotangents = (
        [jnp.asarray(case.data(field, at, seed)) for field in case.fields] for seed in range(3)
    )
    exchange = lambda fields: case.exchange(grid, fields)  # noqa: E731
    linear = Case(**{**vars(case), "rules": tuple(tuple(0 if r in (0, 1) else r for r in pair) for pair in case.rules)})
    _, forward = jax.jvp(exchange, (primals,), (tangents,))
    for field, result, right in zip(case.fields, forward, expected(linear, 1), strict=True):
        np.testing.assert_array_equal(np.asarray(result), right[at], err_msg=str((case, field, at)))
    (backward,) = jax.vjp(exchange, primals)[1](cotangents)
    assert total(comm, forward, cotangents) == total(comm, tangents, backward), case
    (checkpointed,) = jax.vjp(jax.checkpoint(exchange), primals)[1](cotangents)
    adjoint = lambda cts: jax.vjp(exchange, primals)[1](cts)[0]  # noqa: E731
    (again,) = jax.vjp(adjoint, cotangents)[1](tangents)  # the adjoint of the adjoint is the exchange itself
    for x, y, z, w in zip(backward, checkpointed, again, forward, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
        np.testing.assert_array_equal(np.asarray(z), np.asarray(w))


def check_batches(case, grid):
    """A batch of some of the fields, along any axis, against one after the other."""
    at = grid.coordinates
    stacks, ins, ways = [], [], []
    for i, field in enumerate(case.fields):
        mapped = i == 0 or case.seed % (i + 2) == 0
        where = case.seed % (len(case.shape(field, at)) + 1)
        stacks.append([case.data(field, at, 2 * i + (j if mapped else 0)) for j in range(2)])
        ins.append(jnp.stack(stacks[-1], axis=where) if mapped else jnp.asarray(stacks[-1][0]))
        ways.append(where if mapped else None)
    outs = jax.vmap(lambda *fields: case.exchange(grid, list(fields)), tuple(ways))(*ins)
    for j in range(2):
        alone = case.exchange(grid, [jnp.asarray(stack[j]) for stack in stacks])
        for out, one in zip(outs, alone, strict=True):
            np.testing.assert_array_equal(np.asarray(out[j]), np.asarray(one), err_msg=str(case))


def check_whole(case, grid):
    """scatter, with halos and without, and gather, of global arrays."""
    for i, field in enumerate(case.fields):
        sizes = [sum(b) + s for b, s in zip(case.blocks, field.staggered, strict=True)]
        shape = (*sizes, *field.others) if case.trailing else (*field.others, *sizes)
        whole = draw(shape, dtype_of(field.dtype), 0, case.seed + i)
        root = case.seed % grid.comm.size
        for sender in (root, None):
            owned = sender in (None, grid.comm.rank)
            given = whole if owned else jax.ShapeDtypeStruct(whole.shape, whole.dtype)
            block = grid.scatter(given, sender, axes=case.axes)
            cut = [
                slice(s.start, s.stop + extra) for s, extra in zip(grid.slices, field.staggered, strict=True)
            ]
            index = (*cut, Ellipsis) if case.trailing else (Ellipsis, *cut)
            np.testing.assert_array_equal(np.asarray(block), whole[index])
            back = grid.gather(block, sender, axes=case.axes)
            np.testing.assert_array_equal(np.asarray(back), whole if owned else np.asarray(block))
        halos = grid.scatter(whole, None, width=case.widths, axes=case.axes, boundary=case.rules)
        back = grid.gather(halos, None, width=case.widths, axes=case.axes)
        np.testing.assert_array_equal(np.asarray(back), whole)
        again = case.exchange(grid, halos)
        np.testing.assert_array_equal(np.asarray(again), np.asarray(halos))


def run_cases(comm, strategy, check, examples):
    """hypothesis runs on rank 0 alone; the other ranks do what it does. A case fails on all ranks alike."""

    def together(case):
        ranks = math.prod(case.dims)
        part = comm.Split(0 if comm.rank < ranks else MPI.UNDEFINED)
        failure = None
        try:
            if comm.rank < ranks:
                check(case, case.grid(part))
        except Exception as error:
            failure = f"rank {comm.rank}: {type(error).__name__}: {error}"
        finally:
            if comm.rank < ranks:
                part.Free()
        return next(filter(None, comm.allgather(failure)), None)

    if comm.rank > 0:
        failures = []
        while (case := comm.bcast(None)) is not None:
            failures += filter(None, [together(case)])
        assert not failures, failures[0]
        return

    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(strategy)
    def run(case):
        failure = together(comm.bcast(case))
        assert failure is None, f"{case}\n{failure}"

    try:
        run()
    finally:
        comm.bcast(None)


@pytest.mark.seconds(600)
def test_random_geometries(comm, size):
    run_cases(comm, cases(size), check_values, EXAMPLES)


@pytest.mark.seconds(600)
def test_random_derivatives(comm, size):
    run_cases(comm, cases(size, SUMMED), check_derivatives, EXAMPLES // 4)


@pytest.mark.seconds(600)
def test_random_batches(comm, size):
    run_cases(comm, cases(size), check_batches, EXAMPLES // 4)


@pytest.mark.seconds(600)
def test_random_whole_arrays(comm, size):
    run_cases(comm, cases(size), check_whole, EXAMPLES // 4)
