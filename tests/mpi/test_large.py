"""Counts beyond what an int holds: lowering the limit drives the same code at any size.

What does not fit is in tests/c/test_large.c and test_receive.c."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import jaxmpi
from jaxmpi import _core
from jaxmpi._mpi import communicators
from support.rows import each, rows
from support.table import CASES, draw, dtype_of

pytestmark = pytest.mark.ranks(1, 3)


@pytest.fixture
def limit():
    previous = []

    def lower(n):
        previous.append(_core.configure(max_count=n)["max_count"])

    yield lower
    if previous:
        _core.configure(max_count=previous[0])


@pytest.mark.parametrize("n", [2, pytest.param(1, marks=pytest.mark.nightly)])
@rows("cases", CASES)
def test_chunks(cases, n, limit, comm, rank, size):
    """Every operation with at most n elements a call: several chunks and, of 15 elements, a rest."""
    limit(n)

    def check(case):
        for root in case.roots(size)[-1:]:
            inputs = case.inputs((5, 3), np.float32, size, root)
            result = case.call(jnp.asarray(inputs[rank]), comm, root)
            np.testing.assert_array_equal(np.asarray(result), case.expected(inputs, rank, root))

    each(cases, check)


@pytest.fixture
def piece(comm):
    """Sets the length of the pieces of an allreduce on the default communicator."""
    number = communicators.default().number
    yield lambda nbytes: _core.configure_communicator(number, piece=nbytes)
    _core.configure_communicator(number, piece=max(communicators._PIECE, comm.size * communicators._LEAST_SHARE))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pieces(dtype, piece, comm, rank, size):
    """A long allreduce in pieces of 8 elements or more, in place or not, is that of the whole."""
    kind = dtype_of(dtype)
    piece(max(16, 8 * kind.itemsize))
    for donated in ((), (0,)):
        call = jax.jit(lambda x: jaxmpi.allreduce(x, MPI.SUM), donate_argnums=donated)
        for count in (0, 8, 9, 31, 1000):
            xs = [draw((count,), kind, r) for r in range(size)]
            expected = np.sum(np.stack(xs), axis=0, dtype=kind)
            np.testing.assert_array_equal(np.asarray(call(jnp.asarray(xs[rank]))), expected, err_msg=str(count))
