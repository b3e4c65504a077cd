"""Sparse matrices in blocks of rows: products, adjoint products and solutions, against scipy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg
from mpi4py import MPI

import jaxmpi
from jaxmpi.notoken import allreduce
from support.table import NEW_JAX

derivatives = pytest.mark.skipif(not NEW_JAX, reason="this JAX has no derivatives of communication")


def laplacian():
    """Of five points, on a rectangle with walls at zero."""
    one, other = (scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(n, n)) for n in (13, 17))
    return scipy.sparse.kronsum(one, other, format="csr")


def scattered():
    """Random, not symmetric, some rows and columns without an element."""
    matrix = scipy.sparse.random_array((211, 211), density=0.01, rng=np.random.default_rng(5), format="csr")
    assert np.diff(matrix.indptr).min() == 0
    return matrix


def airfoil():
    """Of finite elements around an airfoil, which PyAMG ships."""
    gallery = pytest.importorskip("pyamg.gallery")
    return gallery.load_example("airfoil")["A"].tocsr()


MATRICES = {"laplacian": laplacian, "scattered": scattered, "airfoil": airfoil}


class Rows:
    """The rows of a square matrix that a rank owns: consecutive or scattered ones, on the last of three ranks none."""

    def __init__(self, matrix, comm, consecutive):
        generator = np.random.default_rng(len(matrix.indptr))
        n, filled = matrix.shape[0], comm.size if comm.size < 3 else comm.size - 1
        owner = generator.integers(filled, size=n)
        owner = np.sort(owner) if consecutive else owner
        self.rows = np.flatnonzero(owner == comm.rank)
        part = matrix[self.rows]
        self.map, columns = jaxmpi.IndexMap.from_csr(part.indptr, part.indices, rows=self.rows, comm=comm)
        self.owned, self.ghosts = self.map.sizes
        assert self.owned == len(self.rows)
        np.testing.assert_array_equal(self.map.to_global(columns), part.indices)
        self.columns, self.elements = jnp.asarray(columns), jnp.asarray(part.data)
        self.places = np.repeat(np.arange(self.owned), np.diff(part.indptr))

    def times(self, x):
        """The product; x and it are what this rank owns of vectors, or of several vectors side by side."""
        x = self.map.exchange(self.map.pad(x))
        elements = self.elements.reshape(-1, *[1] * (x.ndim - 1))
        return jax.ops.segment_sum(elements * x[self.columns], self.places, self.owned)

    def transposed_times(self, y):
        sums = jax.ops.segment_sum(self.elements * y[self.places], self.columns, self.owned + self.ghosts)
        return self.map.accumulate(sums)[: self.owned]


EACH_TIME = {("laplacian", True), ("scattered", False)}


@pytest.fixture(
    params=[
        pytest.param(row, marks=() if row in EACH_TIME else pytest.mark.nightly, id=f"{row[0]}-{row[1]}")
        for row in itertools.product(MATRICES, (True, False))
    ]
)
def matrix(request):
    """The matrix, and whether a rank's rows are consecutive."""
    name, consecutive = request.param
    return MATRICES[name](), consecutive


@pytest.fixture
def part(matrix, comm):
    return Rows(matrix[0], comm, matrix[1])


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * max(1, np.abs(expected).max(initial=0)))


def test_products(matrix, part):
    """The transpose of JAX is the product with the transpose, without a word about communication; twice it is the
    product."""
    matrix, _ = matrix
    x, several = np.random.default_rng(1).random(matrix.shape[0]), np.random.default_rng(2).random((matrix.shape[0], 3))
    own = jnp.asarray(x[part.rows])

    def transposed(y):
        return jax.linear_transpose(part.times, own)(y)[0]

    def products(x, several):
        transposes = (transposed(x), jax.linear_transpose(transposed, own)(x)[0]) if NEW_JAX else ()
        return part.times(x), part.times(several), part.transposed_times(x), *transposes

    expected = matrix @ x, matrix @ several, matrix.T @ x, matrix.T @ x, matrix @ x
    for found, right in zip(jaxmpi.jit(products)(own, several[part.rows]), expected, strict=False):
        close(found, right[part.rows])


def dot(a, b):
    return allreduce(jnp.vdot(a, b), MPI.SUM)


def conjugate_gradients(apply, b):
    def iterate(state):
        x, r, p, square, done = state
        q = apply(p)
        step = square / dot(p, q)
        r = r - step * q
        new = dot(r, r)
        return x + step * p, r, r + new / square * p, new, done + 1

    def goes_on(state):
        return (state[3] > 1e-26 * dot(b, b)) & (state[4] < 3000)

    return jax.lax.while_loop(goes_on, iterate, (jnp.zeros_like(b), b, b, dot(b, b), 0))[0]


def test_solution(matrix, part):
    """By conjugate gradients, of (1 + A^T A) x = b where A is not symmetric."""
    matrix, _ = matrix
    b = np.random.default_rng(4).random(matrix.shape[0])
    if abs(matrix - matrix.T).max() < 1e-14:
        whole, apply = matrix, part.times
    else:
        whole = scipy.sparse.eye_array(matrix.shape[0]) + matrix.T @ matrix
        apply = lambda x: x + part.transposed_times(part.times(x))  # noqa: E731
    expected = scipy.sparse.linalg.spsolve(whole.tocsc(), b)
    found = jaxmpi.jit(lambda b: conjugate_gradients(apply, b))(b[part.rows])
    np.testing.assert_allclose(found, expected[part.rows], rtol=0, atol=1e-9 * np.abs(expected).max())


@derivatives
def test_gradient_of_a_solution(matrix, part):
    """Of the solution's square with respect to the right-hand side: another solution, that of the transpose."""
    matrix, _ = matrix
    if abs(matrix - matrix.T).max() > 1e-14:
        pytest.skip("conjugate gradients need a symmetric matrix")
    b = np.random.default_rng(6).random(matrix.shape[0])

    def square(b):
        x = jax.lax.custom_linear_solve(part.times, b, conjugate_gradients, symmetric=True)
        return dot(x, x) / 2

    solve = scipy.sparse.linalg.splu(matrix.tocsc()).solve
    expected = solve(solve(b))
    found = jaxmpi.jit(jax.grad(square))(b[part.rows])
    np.testing.assert_allclose(found, expected[part.rows], rtol=0, atol=1e-8 * np.abs(expected).max())
