"""Every dtype through every operation, every reduction through every dtype that has it."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import jaxmpi
from jaxmpi import notoken
from support.table import CASES, NEW_JAX, UFUNCS, draw, dtype_of, max_ranks

pytestmark = pytest.mark.two_ranks_suffice

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
FLOAT8 = [name for name in dir(ml_dtypes) if name.startswith("float8") and hasattr(jnp, name)]
EXACT = ["SUM", "PROD", "MAX", "MIN"]
# One of each kind of dtype.def: MPI's own, ours, and what is moved alone. On more than 2 ranks the others are the
# same but for their size; how the half types are reduced there is ours.
KINDS = ["bool", "int32", "float32", "complex64", "float16", "bfloat16", "float8_e5m2"]


@pytest.mark.parametrize("dtype", max_ranks(2, ["bool", *INTEGERS, *FLOATS, *COMPLEX, *FLOAT8], but=KINDS))
def test_moves(dtype, comm):
    """All operations in one program, as most of the time goes into compiling."""
    check_moves(dtype, jax.jit, comm)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", KINDS)
def test_moves_eagerly(dtype, comm):
    check_moves(dtype, lambda f: f, comm)


def check_moves(dtype, way, comm):
    rank, size = comm.rank, comm.size
    cases = [case for case in CASES if case.moves]
    inputs = [case.inputs((7,), dtype_of(dtype), size, 0) for case in cases]

    def call(arrays):
        return [case.call(array, comm, 0) for case, array in zip(cases, arrays, strict=True)]

    results = way(call)([jnp.asarray(arrays[rank]) for arrays in inputs])
    for case, arrays, result in zip(cases, inputs, results, strict=True):
        assert result.dtype == dtype_of(dtype), case
        expected = np.ascontiguousarray(case.expected(arrays, rank, 0))  # NaN is NaN, bit by bit
        np.testing.assert_array_equal(np.asarray(result).view(np.uint8), expected.view(np.uint8), err_msg=str(case))


POSSIBLE = (
    [("bool", op) for op in UFUNCS if op not in ("SUM", "PROD")]
    + [(dtype, op) for dtype in INTEGERS for op in UFUNCS]
    + [(dtype, op) for dtype in FLOATS for op in EXACT]
    + [(dtype, op) for dtype in COMPLEX for op in ("SUM", "PROD")]
)


@pytest.mark.parametrize(
    ("dtype", "op"),
    [pytest.param(*pair, marks=[] if pair[0] in KINDS else pytest.mark.max_ranks(2)) for pair in POSSIBLE],
)
def test_reduces(dtype, op, comm, rank, size):
    inputs = [draw((9,), dtype_of(dtype), r) for r in range(size)]
    if dtype in COMPLEX:
        inputs = [x + np.asarray(1j, dtype) * draw((9,), dtype, r, 1) for r, x in enumerate(inputs)]
    expected = inputs[0]
    prefix = inputs[0]
    for r, x in enumerate(inputs[1:], 1):
        expected = UFUNCS[op](expected, x).astype(expected.dtype)
        if r <= rank:
            prefix = expected
    x = jnp.asarray(inputs[rank])
    mpi_op = getattr(MPI, op)

    @jax.jit  # one program for all three
    def reductions(x):
        return notoken.allreduce(x, mpi_op), notoken.scan(x, mpi_op), notoken.reduce(x, mpi_op, size - 1)

    total, scanned, reduced = map(np.asarray, reductions(x))
    assert total.dtype == scanned.dtype == reduced.dtype == x.dtype
    np.testing.assert_array_equal(total, expected, err_msg="allreduce")
    np.testing.assert_array_equal(scanned, prefix, err_msg="scan")
    np.testing.assert_array_equal(reduced, expected if rank == size - 1 else inputs[rank], err_msg="reduce")


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_of_all_values(dtype, comm, rank, size):
    """As in NumPy and JAX sums and products are modulo a power of two, at each place of an array of any length."""
    for length in (1, 7, 37, 130):
        info = np.iinfo(dtype)
        rng = np.random.default_rng(length)
        inputs = [rng.integers(info.min, info.max, length, dtype, endpoint=True) for _ in range(size)]
        x = jnp.asarray(inputs[rank])
        reductions = jax.jit(
            lambda x: {
                name: [
                    notoken.allreduce(x, getattr(MPI, name)),
                    notoken.scan(x, getattr(MPI, name)),
                    notoken.reduce(x, getattr(MPI, name), 0),
                ]
                for name in UFUNCS
            }
        )
        for name, results in reductions(x).items():
            prefixes = functools.reduce(lambda done, x: [*done, UFUNCS[name](done[-1], x)], inputs[1:], inputs[:1])
            prefixes = [prefix.astype(dtype) for prefix in prefixes]
            expected = [prefixes[-1], prefixes[rank], prefixes[-1] if rank == 0 else inputs[rank]]
            for got, want in zip(results, expected, strict=True):
                np.testing.assert_array_equal(got, want, err_msg=name)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ["MAX", "MIN"])
def test_nan_wins(op, dtype, comm, rank, size):
    """Whichever rank has it, and at each place of an array, as in NumPy and JAX."""
    kind = dtype_of(dtype)
    inputs = [np.random.default_rng(r).normal(size=(size, 37)).astype(kind) for r in range(size)]
    for r in range(size):
        inputs[r][r] = np.nan
    with np.errstate(invalid="ignore"):  # of bfloat16
        prefixes = functools.reduce(lambda done, x: [*done, UFUNCS[op](done[-1], x)], inputs[1:], inputs[:1])
    total, scanned = jax.jit(lambda x: (notoken.allreduce(x, getattr(MPI, op)), notoken.scan(x, getattr(MPI, op))))(
        jnp.asarray(inputs[rank])
    )
    for got, want in ((total, prefixes[-1]), (scanned, prefixes[rank])):
        np.testing.assert_array_equal(np.asarray(got).astype(float), want.astype(float))


@pytest.mark.skipif(not NEW_JAX, reason="this JAX has no derivatives of communication")
@pytest.mark.parametrize("operation", [lambda x: notoken.bcast(x, 0), jaxmpi.replicate], ids=["bcast", "replicate"])
def test_derivative_that_would_sum_float8(operation):
    with pytest.raises(TypeError, match=r"SUM is not defined for dtype float8_e4m3fn.*derivative.*convert"):
        jax.grad(lambda x: operation(x.astype(jnp.float8_e4m3fn)).astype(float).sum())(jnp.ones(3))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_rounding(dtype, comm, rank, size):
    """Each step of a sum is rounded once, from float, to the nearest even."""
    kind = dtype_of(dtype)
    values = np.random.default_rng(rank).normal(scale=3, size=1000).astype(kind)
    everyone = comm.allgather(values.astype(np.float32))
    total = np.asarray(notoken.allreduce(jnp.asarray(values), MPI.SUM)).astype(np.float32)
    if size <= 2:
        expected = everyone[0] if size == 1 else (everyone[0] + everyone[1]).astype(kind).astype(np.float32)
        np.testing.assert_array_equal(total, expected)
    else:  # the order of the sum is MPI's
        np.testing.assert_allclose(total, np.sum(everyone, axis=0), atol=size * 40 * float(ml_dtypes.finfo(kind).eps))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_special_values(dtype, rank, size):
    kind = dtype_of(dtype)
    x = jnp.asarray(np.array([np.inf, -np.inf, np.nan, 0.0], kind))
    np.testing.assert_array_equal(
        np.asarray(notoken.allreduce(x, MPI.SUM)).astype(np.float32), [np.inf, -np.inf, np.nan, 0.0]
    )
    y = jnp.where(rank == 0, x, jnp.zeros(4, kind))
    result = np.asarray(notoken.allreduce(y, MPI.MAX)).astype(np.float32)
    np.testing.assert_array_equal(result, [np.inf, 0.0 if size > 1 else -np.inf, np.nan, 0.0])


@pytest.mark.parametrize("commute", [True, False])
def test_user_operation(commute, rank, size):
    """Operations made in Python: the greatest common divisor, and "the first of the two", which is not commutative."""

    def combine(a, b, datatype):
        x, y = np.frombuffer(a, np.int64), np.frombuffer(b, np.int64)
        y[...] = np.gcd(x, y) if commute else x

    op = MPI.Op.Create(combine, commute=commute)
    x = jnp.asarray([12, 6 * (rank + 1)]) if commute else jnp.asarray([rank, rank + 5])
    expected = [12, 6] if commute else [0, 5]
    call = jax.jit(lambda x: notoken.allreduce(x, op))
    for _ in range(3):
        np.testing.assert_array_equal(call(x), expected)
        np.testing.assert_array_equal(notoken.allreduce(x, op), expected)
    op.Free()


def test_without_x64(rank, size):
    """With 64-bit types off, as by default, NumPy's float64 arrives as float32."""
    with jax.enable_x64(False) if hasattr(jax, "enable_x64") else jax.experimental.disable_x64():
        y = notoken.allreduce(np.ones(3), MPI.SUM)
        assert y.dtype == jnp.float32
        np.testing.assert_array_equal(y, np.full(3, size))
