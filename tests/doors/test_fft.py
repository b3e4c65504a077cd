"""Transforms of divided arrays against NumPy's of the whole array, which each rank has."""

import copy
import itertools
import math
import os
import pickle
import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.fft
from hypothesis import strategies as st

import jaxmpi
from jaxmpi import fft
from support import simulated
from support.divided import on_first_ranks, some_processes, total
from support.rows import each, row_by_row, rows
from support.table import NEW_JAX

EXAMPLES = int(os.environ.get("JAXMPI_TEST_GRIDS", "16"))
WAYS = {"jit": jaxmpi.jit, "jax.jit": jax.jit}


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
    def ranks(self):
        return math.prod(self.dims)

    @property
    def tolerance(self):
        return 2e-5 if self.single else 1e-12


@st.composite
def cases(draw, size):
    ranks = draw(st.integers(1, size))
    dimensions = draw(st.integers(2 if ranks > 1 else 1, 4))
    axes = draw(st.permutations(range(dimensions)))[: draw(st.integers(1, dimensions))]
    return Case(
        tuple(draw(some_processes(ranks, dimensions))),
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


def check(case, comm):
    """Values, the inverse, batches; derivatives by dot products of real parts, and by linearity."""
    transform = case.transform(comm)
    cut = lambda whole, grid: jnp.asarray(whole[(..., *grid.slices)])  # noqa: E731
    right = [case.expected(case.data(i))[(..., *transform.spectral_grid.slices)] for i in range(case.arrays + 1)]
    *given, tangent = (cut(case.data(i), transform.grid) for i in range(case.arrays + 1))
    cotangent = cut(case.data(9, transform.spectral_grid.global_shape, real=False), transform.spectral_grid)
    at = case.seed % (tangent.ndim + 1)

    def everything(given, tangent, cotangent):
        spectra, forward, backward = transform.forward(given), None, None
        if NEW_JAX:
            _, forward = jax.jvp(transform.forward, (given[0],), (tangent,))
            (backward,) = jax.vjp(jax.checkpoint(transform.forward), given[0])[1](cotangent.conj())
        mapped = jax.vmap(transform.forward, at)(jnp.stack([given[0], tangent], at))
        return spectra, transform.backward(spectra), mapped, forward, backward

    spectra, back, mapped, forward, backward = WAYS[case.way](everything)(given, tangent, cotangent)
    for found, expected in zip((*spectra, *mapped), (*right[:-1], right[0], right[-1]), strict=True):
        assert found.dtype == (np.complex64 if case.single else np.complex128), case
        near(found, expected, case)
    for found, x in zip(back, given, strict=True):
        assert found.dtype == x.dtype, case
        near(found, np.asarray(x), case)
    if NEW_JAX:
        near(forward, right[-1], case)
        left, transposed = total(comm, [cotangent.conj()], [forward]).real, total(comm, [backward], [tangent]).real
        assert abs(left - transposed) <= 1e3 * case.tolerance * max(abs(left), abs(transposed), 1), case
    if case.natural:
        assert transform.spectral_grid.processes == transform.grid.processes


@pytest.mark.seconds(600)
def test_random_transforms(comm):
    on_first_ranks(comm, cases(comm.size), check, EXAMPLES)


@rows("cases", [((2, 1, 1), False), ((2, 1, 1), True), ((1, 1, 2), True), ((2, 1), False)])
@pytest.mark.ranks(2)
@pytest.mark.skipif(bool(simulated.TRANSPORT), reason="on devices XLA composes the messages")
def test_compiled_programs_move_nothing(cases, comm, rank, size):
    """Between the local transforms the redistributions alone change the order of arrays."""

    def check(row):
        dims, real = row
        part = comm.Split(rank // 2)
        if part.size == 2:
            transform = fft.Transform(jaxmpi.Grid(dims, (8, 12, 10)[: len(dims)], comm=part), real=real)
            k = transform.wavenumbers()
            scale = (1 / (1 + sum(n * n for n in k))).astype(np.float32)
            there_and_back = jax.jit(lambda x: transform.backward(transform.forward(x) * scale))
            x = jnp.zeros(transform.physical_grid.local_shape, np.float32 if real else np.complex64)
            text = there_and_back.lower(x).compile().as_text()
            assert re.findall(r"\b(?:fft|custom-call)\(", text)
            assert not re.findall(r".*\b(?:transpose|copy)\(.*", text)
        part.Free()

    each(cases, check)


PADDED = [((6, 8), False), ((4, 5, 6), True), ((1, 3, 2), True)]


@rows("cases", PADDED)
def test_padded_products(cases, size):
    """The product of two padded arrays has the exact convolution of their modes as its spectrum."""

    def inputs(row):
        shape, real = row
        grid, generator, spectra = jaxmpi.Grid((size, *[1] * (len(shape) - 1)), shape), np.random.default_rng(7), []
        transforms = {norm: fft.Transform(grid, real=real, norm=norm, pad=3 / 2) for norm in ("forward", None, "ortho")}
        for _ in range(2):
            points = generator.standard_normal(shape) + (0 if real else 1j * generator.standard_normal(shape))
            whole = np.fft.fftn(points, norm="forward")
            for axis, n in enumerate(shape):
                if n % 2 == 0:  # without partner: dropped
                    whole[(slice(None),) * axis + (n // 2,)] = 0
            spectra.append(whole)
        ours = [jnp.asarray(_kept(whole, real)[transforms[None].spectral_grid.slices]) for whole in spectra]
        return transforms, spectra, ours

    def call(row, transforms, ours):
        a, b = transforms["forward"].backward(ours)
        others = [(other.forward(a), other.backward(ours[0] * _scale(row, norm))) for norm, other in transforms.items()]
        return a, transforms["forward"].forward(a * b), others

    def verify(row, transforms, spectra, ours, results):
        a, product, others = results
        shape, real = row
        assert a.shape == transforms["forward"].physical_grid.local_shape
        right = np.zeros(shape, complex)
        numbers = [np.fft.fftfreq(n, 1 / n).astype(int) for n in shape]
        for i in np.ndindex(*shape):
            for j in np.ndindex(*shape):
                k = [ks[p] + ks[q] for ks, p, q in zip(numbers, i, j, strict=True)]
                if all(-((n - 1) // 2) <= number <= (n - 1) // 2 for n, number in zip(shape, k, strict=True)):
                    right[tuple(k)] += spectra[0][i] * spectra[1][j]
        np.testing.assert_allclose(product, _kept(right, real)[transforms[None].spectral_grid.slices], atol=1e-12)
        for norm, (spectrum, points) in zip(transforms, others, strict=True):  # the same up to scales
            np.testing.assert_allclose(spectrum, np.asarray(ours[0]) * _scale(row, norm), atol=1e-11)
            np.testing.assert_allclose(points, np.asarray(a), atol=1e-11)

    made = {row: inputs(row) for row in cases}
    found = jax.jit(lambda given: [call(row, made[row][0], ours) for row, ours in zip(cases, given, strict=True)])
    found = found([made[row][2] for row in cases])
    each(list(zip(cases, found, strict=True)), lambda pair: verify(pair[0], *made[pair[0]], pair[1]))


def _scale(row, norm):
    return math.prod(row[0]) ** {"forward": 0, None: 1, "ortho": 0.5}[norm]


def _kept(whole, real):
    return whole[..., : whole.shape[-1] // 2 + 1] if real else whole


def test_wavenumbers(size):
    """The Laplacian of a plane wave, of real and of complex arrays; and of half waves between walls, with and without
    slopes there."""
    grid, lengths = jaxmpi.Grid((1, size, 1), (6, 8, 5)), (1.0, 2.0, 3.0)
    x = np.meshgrid(*[np.arange(n) * length / n for n, length in zip((6, 8, 5), lengths, strict=True)], indexing="ij")
    k = [2 * np.pi * m / length for m, length in zip((2, -3, 1), lengths, strict=True)]
    wave = np.cos(sum(a * b for a, b in zip(k, x, strict=True)))[grid.slices]
    rows = [(fft.Transform(grid, real=real), lengths, wave, sum(a**2 for a in k)) for real in (False, True)]
    walls = jaxmpi.Grid((1, size), (8, 6))
    x, y = ((np.arange(n) + 0.5) * length / n for n, length in ((8, 2.0), (6, 3.0)))
    kx, ky = 3 * np.pi / 2.0, 2 * np.pi / 3.0
    for kind, function in (("dct", np.cos), ("dst", np.sin)):
        wave = (function(kx * x)[:, None] * function(ky * y))[walls.slices]
        rows.append((fft.Transform(walls, kind=kind), (2.0, 3.0), wave, kx**2 + ky**2))

    def laplacian(x, transform, lengths):
        return transform.backward(-sum(number**2 for number in transform.wavenumbers(lengths)) * transform.forward(x))

    found = jax.jit(lambda xs: [laplacian(x, *row[:2]) for x, row in zip(xs, rows, strict=True)])(
        [jnp.asarray(row[2]) for row in rows]
    )
    for (transform, _, wave, square), result in zip(rows, found, strict=True):
        np.testing.assert_allclose(result, -square * wave, atol=1e-9, err_msg=str(transform))
    assert all(np.array_equal(n, n.round()) for transform, *_ in rows[:2] for n in transform.wavenumbers())


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


def test_whole_numbers(size):
    """They become floating-point numbers of the same kind on all ranks, also on one without cells."""
    grid = jaxmpi.Grid((size, 1), ([0] * (size - 1) + [3], 4))
    wholes = [(np.arange(12).reshape(3, 4) % 3).astype(dtype) for dtype in ("int8", "int64", "bool")]
    transforms = {real: fft.Transform(grid, real=real) for real in (False, True)}
    call = jax.jit(lambda blocks: {real: transform.forward(blocks) for real, transform in transforms.items()})
    for real, results in call([jnp.asarray(whole[grid.slices]) for whole in wholes]).items():
        for whole, found in zip(wholes, results, strict=True):
            right = (np.fft.rfftn if real else np.fft.fftn)(whole)
            assert found.dtype == np.complex128
            np.testing.assert_allclose(found, right[transforms[real].spectral_grid.slices], atol=1e-12)


@pytest.mark.alone
def test_points_of_padded_axes():
    """No factor gives a point more because it is not exact."""
    for n in range(1, 200):
        transform = fft.Transform(jaxmpi.Grid((1,), (10 * n,)), pad=1.1)
        assert transform.physical_grid.global_shape == (11 * n,)


@rows("cases", [((1, (1, 1.5), (1.5, 1))[k % 3], (None, "ortho", "forward")[k // 3], k % 2 == 1) for k in range(9)])
def test_axes_that_are_not_padded(cases, size):
    """Their modes are all kept, also the one without partner of an even number of modes."""
    grid = jaxmpi.Grid((size, 1), (4, 6))
    transforms = {(pad, norm, real): fft.Transform(grid, real=real, norm=norm, pad=pad) for pad, norm, real in cases}

    def modes_of(row):
        _, norm, real = row
        modes = np.fft.fftn(np.random.default_rng(3).standard_normal((4, 6)), norm="forward")
        for axis, (points, n) in enumerate(zip(transforms[row].physical_grid.global_shape, (4, 6), strict=True)):
            if points > n:
                modes = np.moveaxis(np.moveaxis(modes, axis, 0) * (np.arange(n) != n // 2)[:, None], 0, axis)
        scale = {None: 24, "ortho": 24**0.5, "forward": 1}[norm]
        return modes, jnp.asarray((_kept(modes, real) * scale)[transforms[row].spectral_grid.slices])

    made = {row: modes_of(row) for row in cases}
    names = {str(row): row for row in cases}
    xs = jax.jit(lambda ys: {name: transforms[names[name]].backward(y) for name, y in ys.items()})(
        {name: made[row][1] for name, row in names.items()}
    )
    ys = jax.jit(lambda xs: {name: transforms[names[name]].forward(x) for name, x in xs.items()})(xs)

    def check(row):
        pad, _, real = row
        modes, own = made[row]
        np.testing.assert_allclose(ys[str(row)], own, atol=1e-12)
        if pad == 1:
            right = np.fft.ifftn(modes, norm="forward")[transforms[row].physical_grid.slices]
            np.testing.assert_allclose(xs[str(row)], right.real if real else right, atol=1e-12)

    each(cases, check)


def _wave(row):
    name, norm, type = row
    return name, norm, type, None if type == 2 else 0


HALF_WAVES = [*map(_wave, itertools.product(("dctn", "idctn", "dstn", "idstn"), (None, "ortho"), (2, 3)))]
"""Functions, norms, types, axes."""
MIXED = [("dct", "fft", True), ("fft", "dst", False), ("dst", "dct", False)]


def _two_grids(shape, size):
    """The second has empty blocks."""
    return jaxmpi.Grid((size, 1), shape), jaxmpi.Grid((1, size), (shape[0], [0] * (size - 1) + [shape[1]]))


@rows("cases", HALF_WAVES)
def test_half_waves(cases, comm, size):
    """Cosine and sine transforms against SciPy's, of all types and norms, with empty blocks, derivatives, batches."""
    for empty, grid in enumerate(_two_grids((6, 5), size)):
        own = [row for row in cases if (HALF_WAVES.index(row) + HALF_WAVES.index(row) // 4) % 2 == empty]
        whole = np.random.default_rng(4).standard_normal((2, 6, 5))
        block = jnp.asarray(whole[(..., *grid.slices)])

        def waves(x, rows, grid=grid):
            return [getattr(fft, name)(x, grid, axes, norm=norm, type=type) for name, norm, type, axes in rows]

        def check(pair, grid=grid, whole=whole):
            (name, norm, type, axes), found = pair
            right = getattr(scipy.fft, name)(whole, type, axes=[1, 2] if axes is None else [1], norm=norm)
            np.testing.assert_allclose(found, right[(..., *grid.slices)], atol=1e-12)
            assert found.dtype == np.float64

        each([*zip(own, jax.jit(lambda x, own=own: waves(x, own))(block), strict=True)], check, lambda pair: pair[0])
        if not empty or not own:
            continue
        some = own[::3]
        weights = [jnp.cos(block + i) for i in range(len(some))]

        def in_batches(x, weights, some=some):
            call = lambda x: waves(x, some)  # noqa: E731
            return jax.vmap(call)(x), jax.vjp(call, x)[1](weights)[0] if NEW_JAX else None

        found, backward = jaxmpi.jit(in_batches)(block, weights)
        each([*zip(some, found, strict=True)], check, lambda pair: pair[0])
        assert not NEW_JAX or np.isclose(total(comm, weights, found), total(comm, [backward], [block]))


def test_mixed_transforms(size):
    """A Transform leaves half waves where they are made, also beside a Fourier transform along another axis."""
    for grid in _two_grids((6, 5), size):
        whole = np.random.default_rng(4).standard_normal((2, 6, 5))
        block = jnp.asarray(whole[(..., *grid.slices)])
        transforms = [fft.Transform(grid, kind=kinds, real=real, norm="ortho") for *kinds, real in MIXED]

        def call(x, transforms=transforms):
            spectra = [transform.forward(x) for transform in transforms]
            singles = [transform.forward({"x": x.astype("float32")})["x"] for transform in transforms[::2]]
            points = [transform.backward(y) for transform, y in zip(transforms, spectra, strict=True)]
            return list(zip(spectra, [singles[0], None, singles[1]], points, strict=True))

        def check(row, whole=whole, block=block):
            (*kinds, real), transform, (spectrum, single, points) = row
            right = whole
            for axis, kind in enumerate(kinds, 1):
                local = np.fft.rfft if real and kind == "fft" else getattr(scipy.fft, kind)
                right = local(right.real if real and kind == "fft" else right, axis=axis, norm="ortho")
            right = right[(..., *transform.spectral_grid.slices)]
            np.testing.assert_allclose(spectrum, right, atol=1e-12)
            if single is not None:
                assert single.dtype == ("float32" if "fft" not in kinds else "complex64")
                np.testing.assert_allclose(single, right, atol=1e-5)
            np.testing.assert_allclose(points, block, atol=1e-12)

        each([*zip(MIXED, transforms, jax.jit(call)(block), strict=True)], check, lambda row: str(row[0]))


BAD = [
    (lambda g, x: fft.Transform(g, kind="cosine"), ValueError, "^Transform: kind is 'cosine'. Pass 'fft'"),
    (lambda g, x: fft.Transform(g, kind=("dct",)), ValueError, "^Transform: kind is .* one for each of 2 axes"),
    (lambda g, x: fft.Transform(g, kind=("fft", "dct"), real=True), ValueError, "^Transform: real is .* axis 1 has"),
    (lambda g, x: fft.Transform(g, kind="dst", pad=3 / 2), ValueError, "^Transform: pad is .* Pass 1 for it"),
    (lambda g, x: fft.dctn(x, g, type=1), ValueError, "^dctn: type is 1. Possible are 2, and 3"),
    (lambda g, x: fft.idstn(x[:-1], g), ValueError, "^idstn: x has shape"),
    (lambda g, x: fft.Transform((2, 2)), TypeError, "grid must be a jaxmpi.Grid"),
    (lambda g, x: fft.Transform(jaxmpi.Grid(g.processes)), ValueError, "needs the shape"),
    (lambda g, x: fft.Transform(g, axes=(0, -2)), ValueError, "each of them once"),
    (lambda g, x: fft.Transform(g, axes=()), ValueError, "each of them once"),
    (lambda g, x: fft.Transform(g, axes=2), ValueError, "^Transform: there is no axis 2"),
    (lambda g, x: fft.Transform(g, norm="other"), ValueError, "norm is 'other'"),
    (lambda g, x: fft.Transform(g, pad=0.5), ValueError, "pad is 0.5"),
    (lambda g, x: fft.Transform(g, pad=(1, 1, 1)), ValueError, "one for each of 2 axes"),
    (lambda g, x: fft.Transform(g).wavenumbers((1, 2, 3)), ValueError, "^Transform.wavenumbers: lengths is .* one for"),
    (lambda g, x: fft.Transform(g).wavenumbers(0), ValueError, "lengths is 0. Pass a positive number"),
    (lambda g, x: fft.Transform(g).wavenumbers((1, "a")), ValueError, "lengths is .1, 'a'.. Pass a positive number"),
    (lambda g, x: fft.Transform(g).wavenumbers(np.nan), ValueError, "lengths is nan. Pass a positive number"),
    (lambda g, x: jax.jit(fft.Transform(g).wavenumbers)(1.0), ValueError, "that is not traced"),
    (lambda g, x: fft.Transform(g, real="no"), TypeError, "real must be True or False"),
    (lambda g, x: fft.Transform(g, natural=None), TypeError, "natural must be True or False"),
    (lambda g, x: fft.Transform(jaxmpi.Grid(g.processes, (4, 0))), ValueError, "An axis without cells has no"),
    (lambda g, x: fft.Transform(g).forward(x[:, :-1]), ValueError, "must end with"),
    (lambda g, x: fft.Transform(g, pad=2).forward(x), ValueError, "must end with"),
    (lambda g, x: fft.Transform(g).forward(x[0]), ValueError, "must end with"),
    (lambda g, x: fft.Transform(g, real=True).forward(1j * x), TypeError, "a transform of real arrays"),
    (lambda g, x: fft.fftn("text", g), TypeError, "must hold JAX arrays"),
    (lambda g, x: fft.rfftn(x.astype("bfloat16"), g), TypeError, "bfloat16, which has no Fourier transform"),
    (lambda g, x: fft.fftn(x.astype("float16"), g), TypeError, "Convert it first"),
    (lambda g, x: fft.Transform(g, pad=True), ValueError, "^Transform: pad is True. Pass a Python or NumPy number"),
    (lambda g, x: fft.Transform(g, axes=(0, 1.0)), TypeError, "^Transform: axes must be"),
    (lambda g, x: fft.Transform(g, axes=True), TypeError, "^Transform: axes must be"),
    (lambda g, x: fft.Transform(g).forward("text"), TypeError, "^Transform.forward: x must"),
    (lambda g, x: fft.Transform(g).backward("text"), TypeError, "^Transform.backward: y must"),
    (lambda g, x: fft.fftn(x, 3), TypeError, "^fftn: grid must be a"),
    (lambda g, x: fft.ifftn(x, g, norm="no"), ValueError, "^ifftn: norm is 'no'"),
    (lambda g, x: fft.rfftn(x, jaxmpi.Grid(g.processes)), ValueError, "^rfftn: it needs the shape"),
    (lambda g, x: fft.irfftn(x, g, axes=(0, 0)), ValueError, "^irfftn: axes is .* each of them once"),
    (lambda g, x: fft.rfftn(x + 0j, g), TypeError, "^rfftn: x has dtype .* or use fftn"),
    (lambda g, x: fft.irfftn(x[:-1], g), ValueError, "^irfftn: x has shape"),
]


@pytest.mark.alone
@row_by_row("case", BAD, lambda row: row[2])
def test_bad_calls(case, comm, size):
    grid = jaxmpi.Grid((size, 1), (4, 6))

    call, error, words = case
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
