"""Every dtype through every operation, every reduction through every dtype that has it."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import jaxmpi
from support.rows import each, rows
from support.table import CASES, NEW_JAX, UFUNCS, draw, dtype_of

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
FLOAT8 = [name for name in dir(ml_dtypes) if name.startswith("float8") and hasattr(jnp, name)]
EXACT = ["SUM", "PROD", "MAX", "MIN"]
KINDS = ["bool", "int8", "float32", "complex64", "bfloat16", "float8_e5m2"]
"""One of each kind of dtype.def: MPI's own, ours, and what is moved alone. C tests have the others."""


@rows("cases", [case for case in CASES if case.moves])
def test_moves(cases, comm, rank, size):
    """Each operation for one dtype of each kind, and one operation for all dtypes."""
    calls = [(case, dtype) for case in cases for dtype in KINDS]
    calls += [(case, dtype) for case in cases if case.name == "allgather"
              for dtype in (*INTEGERS, *FLOATS, *COMPLEX, *FLOAT8) if dtype not in KINDS]  # fmt: skip
    inputs = [case.inputs((7,), dtype_of(dtype), size, 0) for case, dtype in calls]

    def call(arrays):
        return [case.call(array, comm, 0) for (case, _), array in zip(calls, arrays, strict=True)]

    def check(row):
        (case, dtype), arrays, result = row
        assert result.dtype == dtype_of(dtype)
        expected = np.ascontiguousarray(case.expected(arrays, rank, 0))  # NaN is NaN, bit by bit
        np.testing.assert_array_equal(np.asarray(result).view(np.uint8), expected.view(np.uint8))

    results = jax.jit(call)([jnp.asarray(arrays[rank]) for arrays in inputs])
    each(list(zip(calls, inputs, results, strict=True)), check, lambda row: " ".join(map(str, row[0])))


POSSIBLE = (
    [("bool", op) for op in UFUNCS if op not in ("SUM", "PROD")]
    + [(dtype, op) for dtype in INTEGERS for op in UFUNCS]
    + [(dtype, op) for dtype in FLOATS for op in EXACT]
    + [(dtype, op) for dtype in COMPLEX for op in ("SUM", "PROD")]
)


def check_reductions(calls, inputs, comm):
    """`calls` are pairs of dtype and op, `inputs` what all ranks have for each of them."""
    rank, size = comm.rank, comm.size

    def reductions(dtype, op, x):
        op = getattr(MPI, op)
        if dtype not in KINDS:
            return [jaxmpi.allreduce(x, op)]
        return [jaxmpi.allreduce(x, op), jaxmpi.scan(x, op), jaxmpi.reduce(x, op, size - 1)]

    def check(row):
        (dtype, op), xs, results = row
        with np.errstate(invalid="ignore", over="ignore"):
            done = list(itertools.accumulate(xs, lambda x, y: UFUNCS[op](x, y).astype(y.dtype)))
        expected = (done[-1], done[rank], done[-1] if rank == size - 1 else xs[rank])
        for got, want in zip(results, expected, strict=False):
            assert got.dtype == dtype_of(dtype)
            wide = complex if dtype in COMPLEX else None if dtype in ("bool", *INTEGERS) else float
            np.testing.assert_array_equal(np.asarray(got, wide), np.asarray(want, wide))

    arrays = [jnp.asarray(xs[rank]) for xs in inputs]
    call = jax.jit(lambda arrays: [reductions(*kind, x) for kind, x in zip(calls, arrays, strict=True)])
    each(list(zip(calls, inputs, call(arrays), strict=True)), check, lambda row: " ".join(row[0]))


@rows("calls", POSSIBLE, " ".join)
def test_reduces(calls, comm, size):
    """`allreduce` for all dtypes, other reductions for one of each kind."""

    def drawn(dtype, r):
        x = draw((9,), dtype_of(dtype), r)
        return x + np.asarray(1j, dtype) * draw((9,), dtype, r, 1) if dtype in COMPLEX else x

    check_reductions(calls, [[drawn(dtype, r) for r in range(size)] for dtype, _ in calls], comm)


def test_integers_of_all_values(comm, size):
    """As in NumPy and JAX sums and products are modulo a power of two, at each place of an array of any length."""
    generators = [np.random.default_rng(r) for r in range(size)]
    lengths = (1, 7, 37, 130)
    inputs = [[g.integers(-128, 127, n, np.int8, endpoint=True) for g in generators] for n in lengths for _ in UFUNCS]
    check_reductions([("int8", op) for _ in lengths for op in UFUNCS], inputs, comm)


def test_nan_wins(comm, size):
    """Whichever rank has it, and at each place of an array, as in NumPy and JAX."""
    calls = [(dtype, op) for dtype in ("float16", "bfloat16", "float32") for op in ("MAX", "MIN")]

    def drawn(dtype, r):
        x = np.random.default_rng(r).normal(size=(size, 37)).astype(dtype_of(dtype))
        x[r] = np.nan
        return x

    check_reductions(calls, [[drawn(dtype, r) for r in range(size)] for dtype, _ in calls], comm)


@pytest.mark.skipif(not NEW_JAX, reason="this JAX has no derivatives of communication")
@pytest.mark.alone
@pytest.mark.parametrize("operation", [lambda x: jaxmpi.bcast(x, 0), jaxmpi.replicate], ids=["bcast", "replicate"])
def test_derivative_that_would_sum_float8(operation):
    with pytest.raises(TypeError, match=r"SUM is not defined for dtype float8_e4m3fn.*derivative.*convert"):
        jax.grad(lambda x: operation(x.astype(jnp.float8_e4m3fn)).astype(float).sum())(jnp.ones(3))


@pytest.mark.parametrize("commute", [True, False])
def test_user_operation(commute, rank, size):
    """Operations made in Python: the greatest common divisor, and "the first of the two", which is not commutative."""

    def combine(a, b, datatype):
        x, y = np.frombuffer(a, np.int64), np.frombuffer(b, np.int64)
        y[...] = np.gcd(x, y) if commute else x

    op = MPI.Op.Create(combine, commute=commute)
    x = jnp.asarray([12, 6 * (rank + 1)]) if commute else jnp.asarray([rank, rank + 5])
    expected = [12, 6] if commute else [0, 5]
    call = jax.jit(lambda x: jaxmpi.allreduce(x, op))
    for _ in range(3):
        np.testing.assert_array_equal(call(x), expected)
        np.testing.assert_array_equal(jaxmpi.allreduce(x, op), expected)
    op.Free()


def test_without_x64(rank, size):
    """With 64-bit types off, as by default, NumPy's float64 arrives as float32."""
    with jax.enable_x64(False) if hasattr(jax, "enable_x64") else jax.experimental.disable_x64():
        y = jaxmpi.allreduce(np.ones(3), MPI.SUM)
        assert y.dtype == jnp.float32
        np.testing.assert_array_equal(y, np.full(3, size))
