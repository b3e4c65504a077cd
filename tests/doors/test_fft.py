"""Transforms of divided arrays against NumPy's of the whole array, which each rank has."""

import copy
import itertools
import math
import os
import pickle
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.fft
from hypothesis import strategies as st
from mpi4py import MPI

import jaxmpi
from jaxmpi import fft
from support import drawing
from support.table import NEW_JAX

EXAMPLES = int(os.environ.get("JAXMPI_TEST_GRIDS", "16"))
WAYS = {"eager": lambda f: f, "jit": jaxmpi.jit, "jax.jit": jax.jit}
derivatives = pytest.mark.skipif(not NEW_JAX, reason="this JAX has no derivatives of communication")


@dataclass(frozen=True)
class Case:
    dims: tuple[int, ...]
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    real: bool
    norm: str | None
    natural: bool
    front: tuple[int, ...]
    single: bool
    """Numbers of single precision."""
    arrays: int
    way: str
    seed: int

    def data(self, seed, shape=None, real=None):
        generator = np.random.default_rng([self.seed, seed])
        shape = (*self.front, *(shape or self.shape))
        x = generator.standard_normal(shape)
        if not (self.real if real is None else real):
            x = x + 1j * generator.standard_normal(shape)
        return x.astype({np.dtype(float): np.float32, np.dtype(complex): np.complex64}[x.dtype]) if self.single else x

    def transform(self, comm):
        grid = jaxmpi.Grid(self.dims, self.shape, comm=comm)
        return fft.Transform(grid, self.axes, real=self.real, norm=self.norm, natural=self.natural)

    def expected(self, whole):
        function = np.fft.rfftn if self.real else np.fft.fftn
        return function(whole, axes=[axis - len(self.shape) for axis in self.axes], norm=self.norm)

    @property
    def tolerance(self):
        return 2e-5 if self.single else 1e-12


@st.composite
def cases(draw, size):
    ranks = draw(st.integers(1, size))
    dimensions = draw(st.integers(2 if ranks > 1 else 1, 4))
    dims, left = [], ranks
    for _ in range(dimensions - 1):
        dims.append(draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0])))
        left //= dims[-1]
    dims = tuple(draw(st.permutations([*dims, left])))
    axes = draw(st.permutations(range(dimensions)))[: draw(st.integers(1, dimensions))]
    return Case(
        dims,
        tuple(draw(st.integers(1, 6)) for _ in range(dimensions)),
        tuple(axes),
        draw(st.booleans()),
        draw(st.sampled_from([None, "backward", "ortho", "forward"])),
        draw(st.booleans()),
        tuple(draw(st.lists(st.integers(0, 3), max_size=2))),
        draw(st.booleans()),
        draw(st.integers(1, 3)),
        draw(st.sampled_from(list(WAYS))),
        draw(st.integers(0, 1000)),
    )


def near(found, right, case):
    found = np.asarray(found)
    assert found.shape == right.shape, case
    if right.size:
        scale = max(np.abs(right).max(), 1e-3)
        assert np.abs(found - right).max() <= case.tolerance * scale * math.prod(case.shape), case


def check_values(case, comm):
    transform = case.transform(comm)
    wholes = [case.data(i) for i in range(case.arrays)]
    given = [jnp.asarray(whole[(..., *transform.grid.slices)]) for whole in wholes]
    spectra = WAYS[case.way](transform.forward)(given)
    for found, whole in zip(spectra, wholes, strict=True):
        right = case.expected(whole)[(..., *transform.spectral_grid.slices)]
        assert found.dtype == (np.complex64 if case.single else np.complex128), case
        near(found, right, case)
    back = WAYS[case.way](transform.backward)(spectra)
    for found, x in zip(back, given, strict=True):
        assert found.dtype == x.dtype, case
        near(found, np.asarray(x), case)
    if case.natural:
        assert transform.spectral_grid.processes == transform.grid.processes


def total(comm, xs, ys):
    return comm.allreduce(sum(np.vdot(np.asarray(x), np.asarray(y)).real for x, y in zip(xs, ys, strict=True)))


def check_derivatives(case, comm):
    """By dot products of real parts, and by linearity."""
    transform = case.transform(comm)
    cut = lambda whole, grid: jnp.asarray(whole[(..., *grid.slices)])  # noqa: E731
    x, tangent = (cut(case.data(seed), transform.grid) for seed in (0, 1))
    spectrum = case.data(2, transform.spectral_grid.global_shape, real=False)
    cotangent = cut(spectrum, transform.spectral_grid)
    value, forward = jax.jvp(transform.forward, (x,), (tangent,))
    near(value, case.expected(case.data(0))[(..., *transform.spectral_grid.slices)], case)
    near(forward, case.expected(case.data(1))[(..., *transform.spectral_grid.slices)], case)
    (backward,) = jax.vjp(jax.checkpoint(transform.forward), x)[1](cotangent.conj())
    left, right = total(comm, [cotangent], [forward]), total(comm, [backward.conj()], [tangent])
    assert abs(left - right) <= 1e3 * case.tolerance * max(abs(left), abs(right), 1), case


def check_batches(case, comm):
    transform = case.transform(comm)
    blocks = [jnp.asarray(case.data(i)[(..., *transform.grid.slices)]) for i in range(2)]
    at = case.seed % (blocks[0].ndim + 1)
    mapped = jax.vmap(transform.forward, at)(jnp.stack(blocks, at))
    for i, block in enumerate(blocks):
        near(mapped[i], np.asarray(transform.forward(block)), case)


def run_cases(comm, check, examples):
    def together(case):
        ranks = math.prod(case.dims)
        part = comm.Split(0 if comm.rank < ranks else MPI.UNDEFINED)
        try:
            if comm.rank < ranks:
                check(case, part)
        finally:
            if comm.rank < ranks:
                part.Free()

    drawing.on_all_ranks(comm, cases(comm.size), together, examples)


@pytest.mark.seconds(600)
def test_random_transforms(comm):
    run_cases(comm, check_values, 2 * EXAMPLES)


@derivatives
@pytest.mark.two_ranks_suffice
@pytest.mark.seconds(600)
def test_random_derivatives(comm):
    run_cases(comm, check_derivatives, EXAMPLES // 2)


@pytest.mark.two_ranks_suffice
@pytest.mark.seconds(600)
def test_random_batches(comm):
    run_cases(comm, check_batches, EXAMPLES // 2)


@pytest.mark.slow("real")
@pytest.mark.two_ranks_suffice
@pytest.mark.parametrize("shape", [(6, 8), (5, 7), (4, 5, 6), (1, 3, 2)])
@pytest.mark.parametrize("real", [False, True])
def test_padded_products(shape, real, comm, rank, size):
    """The product of two padded arrays has the exact convolution of their modes as its spectrum."""
    grid = jaxmpi.Grid((size, *[1] * (len(shape) - 1)), shape)
    transform = fft.Transform(grid, real=real, norm="forward", pad=3 / 2)
    generator = np.random.default_rng(7)
    spectra = []
    for _ in range(2):
        points = generator.standard_normal(shape) + (0 if real else 1j * generator.standard_normal(shape))
        whole = np.fft.fftn(points, norm="forward")
        for axis, n in enumerate(shape):
            if n % 2 == 0:  # without partner: dropped
                whole[(slice(None),) * axis + (n // 2,)] = 0
        spectra.append(whole)
    ours = [jnp.asarray(_kept(whole, real)[transform.spectral_grid.slices]) for whole in spectra]
    a, b = transform.backward(ours)
    assert a.shape == transform.physical_grid.local_shape
    found = transform.forward(a * b)
    right = np.zeros(shape, complex)
    numbers = [np.fft.fftfreq(n, 1 / n).astype(int) for n in shape]
    for i in np.ndindex(*shape):
        for j in np.ndindex(*shape):
            k = [ks[p] + ks[q] for ks, p, q in zip(numbers, i, j, strict=True)]
            if all(-((n - 1) // 2) <= number <= (n - 1) // 2 for n, number in zip(shape, k, strict=True)):
                right[tuple(k)] += spectra[0][i] * spectra[1][j]
    np.testing.assert_allclose(found, _kept(right, real)[transform.spectral_grid.slices], atol=1e-12)
    for norm in (None, "ortho"):  # the same up to scales
        other = fft.Transform(grid, real=real, norm=norm, pad=3 / 2)
        scale = math.prod(shape) ** (1.0 if norm is None else 0.5)
        np.testing.assert_allclose(other.forward(a), np.asarray(ours[0]) * scale, atol=1e-11)
        np.testing.assert_allclose(other.backward(ours[0] * scale), np.asarray(a), atol=1e-11)


def _kept(whole, real):
    return whole[..., : whole.shape[-1] // 2 + 1] if real else whole


def test_wavenumbers(comm, rank, size):
    """The Laplacian of a plane wave, of real and of complex arrays."""
    grid = jaxmpi.Grid((1, size, 1), (6, 8, 5))
    lengths = (1.0, 2.0, 3.0)
    x = np.meshgrid(*[np.arange(n) * length / n for n, length in zip((6, 8, 5), lengths, strict=True)], indexing="ij")
    k = [2 * np.pi * m / length for m, length in zip((2, -3, 1), lengths, strict=True)]
    wave = np.cos(sum(a * b for a, b in zip(k, x, strict=True)))
    for real in (False, True):
        transform = fft.Transform(grid, real=real)
        square = sum(number**2 for number in transform.wavenumbers(lengths))
        block = jnp.asarray(wave[grid.slices])
        laplacian = transform.backward(-square * transform.forward(block))
        np.testing.assert_allclose(laplacian, -sum(a**2 for a in k) * np.asarray(block), atol=1e-9)
        assert all(np.array_equal(n, n.round()) for n in transform.wavenumbers())


def test_single_calls(comm, rank, size):
    grid = jaxmpi.Grid((size, 1), (6, 5))
    whole = np.random.default_rng(3).standard_normal((2, 6, 5))
    block = jnp.asarray(whole[(..., *grid.slices)])
    np.testing.assert_allclose(fft.fftn(block, grid), np.fft.fftn(whole, axes=(1, 2))[(..., *grid.slices)], atol=1e-12)
    np.testing.assert_allclose(fft.ifftn(fft.fftn(block, grid), grid), block, atol=1e-12)
    rows = fft.rfftn(block, grid, norm="ortho")
    right = np.fft.rfftn(whole, axes=(1, 2), norm="ortho")
    np.testing.assert_allclose(rows, right[:, grid.slices[0]], atol=1e-12)
    np.testing.assert_allclose(fft.irfftn(rows, grid, norm="ortho"), block, atol=1e-12)
    along = fft.fftn(block, grid, axes=0)
    np.testing.assert_allclose(along, np.fft.fft(whole, axis=1)[(..., *grid.slices)], atol=1e-12)


@pytest.mark.parametrize("dtype", ["int8", "int64", "bool"])
def test_whole_numbers(dtype, comm, size):
    """They become floating-point numbers of the same kind on all ranks, also on one without cells."""
    grid = jaxmpi.Grid((size, 1), ([0] * (size - 1) + [3], 4))
    whole = (np.arange(12).reshape(3, 4) % 3).astype(dtype)
    for real in (False, True):
        transform = fft.Transform(grid, real=real)
        found = transform.forward(jnp.asarray(whole[grid.slices]))
        right = (np.fft.rfftn if real else np.fft.fftn)(whole)
        assert found.dtype == np.complex128
        np.testing.assert_allclose(found, right[transform.spectral_grid.slices], atol=1e-12)


@pytest.mark.one_rank
def test_points_of_padded_axes():
    """No factor gives a point more because it is not exact."""
    for n in range(1, 200):
        transform = fft.Transform(jaxmpi.Grid((1,), (10 * n,)), pad=1.1)
        assert transform.physical_grid.global_shape == (11 * n,)


@pytest.mark.slow("pad")
@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("norm", [None, "ortho", "forward"])
@pytest.mark.parametrize("pad", [1, (1, 1.5), (1.5, 1)])
def test_axes_that_are_not_padded(pad, norm, real, comm, rank, size):
    """Their modes are all kept, also the one without partner of an even number of modes."""
    grid = jaxmpi.Grid((size, 1), (4, 6))
    transform = fft.Transform(grid, real=real, norm=norm, pad=pad)
    shape = transform.physical_grid.global_shape
    whole = np.random.default_rng(3).standard_normal((4, 6))
    modes = np.fft.fftn(whole, norm="forward")
    for axis, (points, n) in enumerate(zip(shape, (4, 6), strict=True)):
        if points > n:
            modes = np.moveaxis(np.moveaxis(modes, axis, 0) * (np.arange(n) != n // 2)[:, None], 0, axis)
    scale = {None: 24, "ortho": 24**0.5, "forward": 1}[norm]
    spectrum = modes[:, :4] * scale if real else modes * scale
    own = jnp.asarray(spectrum[transform.spectral_grid.slices])
    x = transform.backward(own)
    np.testing.assert_allclose(transform.forward(x), own, atol=1e-12)
    if pad == 1:
        right = np.fft.ifftn(modes, norm="forward")[transform.physical_grid.slices]
        np.testing.assert_allclose(x, right.real if real else right, atol=1e-12)


def test_in_scan(comm, rank, size):
    grid = jaxmpi.Grid((1, size), (4, 6))
    transform = fft.Transform(grid, real=True)
    damping = 1 / (1 + sum(k**2 for k in transform.wavenumbers()))

    @jaxmpi.jit
    def smoothed(x):
        return jax.lax.scan(lambda x, _: (transform.backward(damping * transform.forward(x)), None), x, None, 3)[0]

    whole = np.random.default_rng(5).standard_normal((4, 6))
    square = np.fft.fftfreq(4, 1 / 4)[:, None] ** 2 + np.fft.rfftfreq(6, 1 / 6) ** 2
    right = np.fft.irfftn(np.fft.rfftn(whole) / (1 + square) ** 3, s=(4, 6), axes=(0, 1))
    np.testing.assert_allclose(smoothed(jnp.asarray(whole[grid.slices])), right[grid.slices], atol=1e-12)


def test_half_waves(comm, rank, size):
    """Cosine and sine transforms against SciPy's, of all types and norms; with derivatives, batches and empty blocks.

    A Transform leaves them where they are made, also beside a Fourier transform along another axis."""
    shape = (6, 5)
    names = ("dctn", "idctn", "dstn", "idstn")
    rows = [*itertools.product(names, (None, "ortho", "forward"), (2, 3))]
    for processes, blocks in (((size, 1), shape), ((1, size), (6, [0] * (size - 1) + [5]))):
        grid = jaxmpi.Grid(processes, blocks)
        whole, *other = np.random.default_rng(4).standard_normal((5, 2, *shape))
        block, *weights = (jnp.asarray(its[(..., *grid.slices)]) for its in (whole, *other))

        def call(x, row, grid=grid):
            name, norm, type = rows[row]
            return getattr(fft, name)(x, grid, (None, 0)[row % 2], norm=norm, type=type)

        def check(found, row, grid=grid, whole=whole):
            name, norm, type = rows[row]
            right = getattr(scipy.fft, name)(whole, type, axes=([1, 2], [1])[row % 2], norm=norm)
            np.testing.assert_allclose(found, right[(..., *grid.slices)], atol=1e-12, err_msg=str(rows[row]))
            assert found.dtype == np.float64, rows[row]

        for row in range(len(rows)):
            check(call(block, row), row)
        some = (0, 9, 14, 23)  # of each function one, along all axes or one

        def several(x, call=call, some=some):
            return [call(x, row) for row in some]

        found = jax.jit(jax.vmap(several))(block)
        for x, row in zip(found, some, strict=True):
            check(x, row)
        if NEW_JAX:
            (backward,) = jaxmpi.jit(lambda x, w, several=several: jax.vjp(several, x)[1](w))(block, weights)
            assert np.isclose(total(comm, weights, found), total(comm, [backward], [block]))
        for kinds, real in ((("dct", "fft"), True), (("dst", "fft"), True), (("fft", "dct"), False), ("dst", False)):
            transform = fft.Transform(grid, kind=kinds, real=real, norm="ortho")
            right = whole
            for axis, kind in enumerate(["dst", "dst"] if kinds == "dst" else kinds, 1):
                local = np.fft.rfft if real and kind == "fft" else getattr(scipy.fft, kind)
                right = local(right.real if real and kind == "fft" else right, axis=axis, norm="ortho")
            single = transform.forward({"x": block.astype("float32")})["x"]
            assert single.dtype == ("float32" if kinds == "dst" else "complex64")
            spectrum = transform.forward(block)
            right = right[(..., *transform.spectral_grid.slices)]
            np.testing.assert_allclose(spectrum, right, atol=1e-12, err_msg=str(kinds))
            np.testing.assert_allclose(single, right, atol=1e-5, err_msg=str(kinds))
            np.testing.assert_allclose(transform.backward(spectrum), block, atol=1e-12, err_msg=str(kinds))


def test_wavenumbers_of_half_waves(comm, rank, size):
    """The second derivative of half waves between walls, with and without slopes there."""
    grid = jaxmpi.Grid((1, size), (8, 6))
    x, y = ((np.arange(n) + 0.5) * length / n for n, length in ((8, 2.0), (6, 3.0)))
    kx, ky = 3 * np.pi / 2.0, 2 * np.pi / 3.0
    for kind, wave in (("dct", np.cos), ("dst", np.sin)):
        transform = fft.Transform(grid, kind=kind)
        square = sum(k**2 for k in transform.wavenumbers((2.0, 3.0)))
        block = jnp.asarray((wave(kx * x)[:, None] * wave(ky * y))[grid.slices])
        found = transform.backward(-square * transform.forward(block))
        np.testing.assert_allclose(found, -(kx**2 + ky**2) * np.asarray(block), atol=1e-10)


BAD = [
    (lambda g, x: fft.Transform(g, kind="cosine"), ValueError, "^Transform: kind is 'cosine': pass 'fft'"),
    (lambda g, x: fft.Transform(g, kind=("dct",)), ValueError, "^Transform: kind is .* one for each of 2 axes"),
    (lambda g, x: fft.Transform(g, kind=("fft", "dct"), real=True), ValueError, "^Transform: real is .* axis 1 has"),
    (lambda g, x: fft.Transform(g, kind="dst", pad=3 / 2), ValueError, "^Transform: pad is .* Pass 1 for it"),
    (lambda g, x: fft.dctn(x, g, type=1), ValueError, "^dctn: type is 1: possible are 2, and 3"),
    (lambda g, x: fft.idstn(x[:-1], g), ValueError, "^idstn: x has shape"),
    (lambda g, x: fft.Transform((2, 2)), TypeError, "grid must be a jaxmpi.Grid"),
    (lambda g, x: fft.Transform(jaxmpi.Grid(g.processes)), ValueError, "needs the shape"),
    (lambda g, x: fft.Transform(g, axes=(0, 0)), ValueError, "each of them once"),
    (lambda g, x: fft.Transform(g, axes=(0, -2)), ValueError, "each of them once"),
    (lambda g, x: fft.Transform(g, axes=()), ValueError, "each of them once"),
    (lambda g, x: fft.Transform(g, axes=2), ValueError, "no axis 2"),
    (lambda g, x: fft.Transform(g, norm="other"), ValueError, "norm is 'other'"),
    (lambda g, x: fft.Transform(g, pad=0.5), ValueError, "pad is 0.5"),
    (lambda g, x: fft.Transform(g, pad=(1, 1, 1)), ValueError, "one for each of 2 axes"),
    (lambda g, x: fft.Transform(g).wavenumbers((1,)), ValueError, "one for each of 2 axes"),
    (lambda g, x: fft.Transform(g).wavenumbers(0), ValueError, "lengths is 0: pass a positive number"),
    (lambda g, x: fft.Transform(g).wavenumbers((1, "a")), ValueError, "lengths is .1, 'a'.: pass a positive number"),
    (lambda g, x: fft.Transform(g).wavenumbers(np.nan), ValueError, "lengths is nan: pass a positive number"),
    (lambda g, x: jax.jit(fft.Transform(g).wavenumbers)(1.0), ValueError, "that is not traced"),
    (lambda g, x: fft.Transform(g, real="no"), TypeError, "real must be True or False"),
    (lambda g, x: fft.Transform(g, natural=None), TypeError, "natural must be True or False"),
    (
        lambda g, x: fft.Transform(jaxmpi.Grid(g.processes, (4, 0))),
        ValueError,
        "an axis without cells has no transform",
    ),
    (lambda g, x: fft.Transform(g).forward(x[:, :-1]), ValueError, "must end with"),
    (lambda g, x: fft.Transform(g, pad=2).forward(x), ValueError, "must end with"),
    (lambda g, x: fft.Transform(g).forward(x[0]), ValueError, "must end with"),
    (lambda g, x: fft.Transform(g, real=True).forward(1j * x), TypeError, "a transform of real arrays"),
    (lambda g, x: fft.rfftn(1j * x, g), TypeError, "a transform of real arrays"),
    (lambda g, x: fft.fftn("text", g), TypeError, "must hold JAX arrays"),
    (lambda g, x: fft.rfftn(x.astype("bfloat16"), g), TypeError, "bfloat16, which has no Fourier transform"),
    (lambda g, x: fft.fftn(x.astype("float16"), g), TypeError, "convert it first"),
    (lambda g, x: fft.Transform(g, pad=1e9), ValueError, "^Transform: pad is 1000000000.0: .* do not fit in"),
    (lambda g, x: fft.Transform(g, 1, pad=1e12), ValueError, "^Transform: pad is 1000000000000.0: .* do not fit in"),
    (lambda g, x: fft.Transform(g, pad=(1, 1.7e308)), ValueError, "^Transform: pad is .* do not fit in"),
    (lambda g, x: fft.Transform(g, pad=10**400), ValueError, "^Transform: pad is .* do not fit in"),
    (lambda g, x: fft.Transform(g, pad=True), ValueError, "^Transform: pad is True: pass a number from 1 on"),
    (lambda g, x: fft.Transform(g, axes=True), TypeError, "^Transform: axes must be"),
    (lambda g, x: fft.Transform(g, axes=(0, 1.0)), TypeError, "^Transform: axes must be"),
    (lambda g, x: fft.Transform(g, axes=2), ValueError, "^Transform: there is no axis 2"),
    (lambda g, x: fft.Transform(g).wavenumbers((1, 2, 3)), ValueError, "^Transform.wavenumbers: lengths is"),
    (lambda g, x: fft.Transform(g).forward("text"), TypeError, "^Transform.forward: x must"),
    (lambda g, x: fft.Transform(g).backward("text"), TypeError, "^Transform.backward: y must"),
    (lambda g, x: fft.fftn(x, 3), TypeError, "^fftn: grid must be a"),
    (lambda g, x: fft.ifftn(x, g, norm="no"), ValueError, "^ifftn: norm is 'no'"),
    (lambda g, x: fft.rfftn(x, jaxmpi.Grid(g.processes)), ValueError, "^rfftn: it needs the shape"),
    (lambda g, x: fft.irfftn(x, g, axes=(0, 0)), ValueError, "^irfftn: axes is"),
    (lambda g, x: fft.rfftn(x + 0j, g), TypeError, "^rfftn: x has dtype .* or use fftn"),
    (lambda g, x: fft.irfftn(x[:-1], g), ValueError, "^irfftn: x has shape"),
]


@pytest.mark.parametrize(("call", "error", "words"), BAD)
def test_bad_calls(call, error, words, comm, size):
    grid = jaxmpi.Grid((size, 1), (4, 6))
    with pytest.raises(error, match=words):
        call(grid, jnp.ones(grid.local_shape))


@pytest.mark.ranks(2)
def test_one_axis_cannot_be_made_whole(comm, size):
    with pytest.raises(ValueError, match="a grid of one axis that is cut among"):
        fft.Transform(jaxmpi.Grid(size, 16))


def test_copies(comm, size):
    """A copy is the transform itself, so that `jax.jit` compiles for one of them. None can be pickled."""
    transform = fft.Transform(jaxmpi.Grid((size, 1), (4, 6)), pad=3 / 2)
    assert copy.copy(transform) is transform
    assert copy.deepcopy([transform]) == [transform]
    with pytest.raises(TypeError, match=r"^Transform: it cannot be pickled.* make it again on each rank"):
        pickle.dumps([transform])


def test_a_freed_communicator(comm, size):
    part = comm.Dup()
    grid = jaxmpi.Grid((size, 1), (4, 6), comm=part)
    transform = fft.Transform(grid)
    block = jnp.ones(grid.local_shape)
    part.Free()
    for function, call in (
        ("Transform", lambda: fft.Transform(grid)),
        ("Transform.forward", lambda: transform.forward(block)),
        ("Transform.backward", lambda: transform.backward(jnp.ones(transform.spectral_grid.local_shape))),
        ("ifftn", lambda: fft.ifftn(block, grid)),
    ):
        with pytest.raises(ValueError, match=f"^{function}: the communicator of the grid has been freed"):
            call()
