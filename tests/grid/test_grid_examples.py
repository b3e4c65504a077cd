"""The examples of divided fields and weights: any number of ranks, with parts that are not equal, gives what one alone
does."""

import itertools
import re

import numpy as np
import pytest

from support import examples
from support.examples import assert_same, run, run_on_each

RANKS = examples.ranks()
pytestmark = examples.MARKS


def conduction(k):
    """The matrix of -div(k grad u) in the unit square or cube with u = 0 at its walls, from the flows of heat one by
    one. Between two cells is the mean of their resistances 1/k, between a cell and a wall half of its own."""
    n, numbers = len(k), np.arange(k.size).reshape(k.shape)
    matrix = np.zeros((k.size, k.size))
    for cell in np.ndindex(k.shape):
        for axis, side in itertools.product(range(k.ndim), (-1, 1)):
            other = tuple(at + side * (i == axis) for i, at in enumerate(cell))
            if 0 <= other[axis] < n:
                flow = n**2 / ((1 / k[cell] + 1 / k[other]) / 2)
                matrix[numbers[cell], numbers[other]] -= flow
            else:
                flow = n**2 / (1 / k[cell] / 2)
            matrix[numbers[cell], numbers[cell]] += flow
    return matrix


@pytest.mark.parametrize(
    ("dimensions", "size", "ranks"), [(2, 11, RANKS), pytest.param(3, 7, (4,), marks=pytest.mark.nightly)]
)
def test_poisson(tmp_path, dimensions, size, ranks):
    """u is the solution of a dense system; the gradient with respect to f is that of the same system."""
    arguments = ("--dimensions", str(dimensions), "--size", str(size))
    below = {f"Gradient with respect to {x}: relative error ": 1e-6 for x in "fk"}
    _, states = run_on_each(tmp_path, "poisson_cg", ranks, *arguments, alike=1e-10, below=below)

    state, shape = states[0], (size,) * dimensions
    assert state["u"].shape == state["k"].shape == shape
    assert np.ptp(state["k"]) > 1
    places = np.meshgrid(*[(np.arange(size) + 0.5) / size] * dimensions, indexing="ij")
    f, wanted = 24 * (1 - places[0]), np.prod(np.sin(np.pi * np.asarray(places)), axis=0)
    matrix = conduction(state["k"])
    u = np.linalg.solve(matrix, f.ravel())
    by_f = np.linalg.solve(matrix, u - wanted.ravel()) / u.size
    np.testing.assert_allclose(state["u"].ravel(), u, rtol=1e-9)
    np.testing.assert_allclose(state["gradient_f"].ravel(), by_f, rtol=0, atol=1e-9 * np.abs(by_f).max())


@pytest.mark.nightly
def test_heat_inverse(tmp_path):
    arguments = ("--size", "13", "--iterations", "8")
    outs, states = run_on_each(tmp_path, "heat_inverse", RANKS, *arguments, alike=1e-9)
    for out in outs:
        before, after = map(float, re.search(r"Relative error of k: (\S+) before, (\S+) after", out).groups())
        assert after < before
    losses = states[0]["losses"]
    assert losses.shape == (8,)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("dimensions", "size", "ranks"), [(2, 13, RANKS), pytest.param(3, 7, (2, 3), marks=pytest.mark.nightly)]
)
def test_spectral(tmp_path, dimensions, size, ranks):
    """Against NumPy's transforms, which the example uses as a witness, and against another number of ranks."""
    arguments = ("--dimensions", str(dimensions), "--size", str(size), "--steps", "12")
    below = {"Transform.*: .* error ": 1e-13, "Final state.*: .* error ": 1e-12, "Gradient.*: relative error ": 1e-5}
    _, states = run_on_each(tmp_path, "spectral", ranks, *arguments, alike=1e-11, below=below)
    assert np.ptp(states[0]["end"]) > 0.2
    assert np.abs(states[0]["gradient"]).max() > 0


@pytest.mark.parametrize("dimensions", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_poisson_fft(tmp_path, dimensions):
    """Transforms and conjugate gradients give the same pressure, on any number of ranks; no divergence is left."""
    arguments = ("--dimensions", str(dimensions), "--size", "14")
    below = {".*relative difference ": 1e-9, ".*relative to that before: ": 1e-11}
    run_on_each(tmp_path, "poisson_fft", RANKS, *arguments, alike=1e-9, below=below)


@pytest.mark.nightly
@pytest.mark.parametrize("case", ["taylor-green", "turbulence"])
def test_turbulence(tmp_path, case):
    arguments = ("--case", case, "--size", "20", "--steps", "24")
    below = {".*viscosity: relative error ": 1e-5, ".*beside forward mode: ": 1e-10}
    below |= {".*formula: relative error ": 1e-9} if case == "taylor-green" else {}
    _, states = run_on_each(tmp_path, "turbulence", RANKS, *arguments, alike=1e-9, below=below)
    assert np.ptp(states[0]["w"]) > 0.5


@pytest.mark.nightly
def test_lattice_boltzmann(tmp_path):
    """The derivative is that of differences, and the fluid pushes the cylinder."""
    arguments = ("--radius", "2", "--reynolds", "20", "--steps", "400", "--check")
    below = {"Derivative by differences: relative error ": 1e-6}
    _, states = run_on_each(tmp_path, "lattice_boltzmann", RANKS, *arguments, alike=1e-9, below=below)
    assert states[0]["vorticity"].shape == (20, 60)
    assert np.ptp(states[0]["vorticity"]) > 0.5
    assert 1.5 < states[0]["drags"][-100:].mean() < 6
    assert states[0]["slopes"][-100:].mean() > 0


@pytest.mark.nightly
def test_transformer(tmp_path):
    """Loss and gradient are those of one process, and the training is the same on any number of ranks."""
    below = {"Relative difference from one process: loss ": 1e-5, "Relative difference .* gradient ": 1e-4}
    _, states = run_on_each(tmp_path, "transformer", RANKS, "--steps", "12", alike=1e-3, below=below)
    assert states[0]["losses"][-1] < 0.8 * states[0]["losses"][0]


def test_overlap(tmp_path):
    """With and without overlap, on any number of ranks; heat is neither made nor lost."""
    arguments = ("--size", "99", "103", "--steps", "5", "--turns", "3", "--save")
    outs, states = zip(*(run(tmp_path, "overlap", n, *arguments) for n in RANKS), strict=True)
    assert_same(states, 1e-12)
    for out in outs:
        assert re.search(r"^without overlap: +[0-9.]+ ms per step\nwith overlap: +[0-9.]+ ms per step\n", out), out
        assert "The numbers are identical.\n" in out
    u = states[0]["u"]
    assert u.shape == (99, 103)
    assert 0.1 < np.ptp(u) < 1
    y, x = np.mgrid[:99, :103] / np.reshape((99, 103), (2, 1, 1))
    disks = ((0.2, 0.3, 0.1), (0.5, 0.5, 0.2), (0.8, 0.1, 0.05), (0.7, 0.8, 0.1))
    heat = sum(((y - cy) ** 2 + (x - cx) ** 2 < radius**2).sum() for cy, cx, radius in disks)
    np.testing.assert_allclose(u.sum(dtype=np.float64), heat, rtol=1e-5)
