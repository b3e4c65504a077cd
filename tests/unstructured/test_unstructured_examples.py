"""The examples of meshes and graphs: any number of ranks gives what one alone does, and what a witness finds."""

import re

import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg

from support import examples
from support.examples import run_on_each

RANKS = examples.ranks()
pytestmark = examples.MARKS


def elements(x, cells, k):
    """The matrix of each triangle: its linear functions are the rows of the inverse of (1, x, y) at its corners."""
    corners = np.concatenate([np.ones((*cells.shape, 1)), x[cells]], axis=2)
    gradients = np.linalg.inv(corners)[:, 1:]
    areas = np.abs(np.linalg.det(corners)) / 2
    return areas, np.einsum("t,txi,txj->tij", k * areas, gradients, gradients)


def test_mesh_poisson(tmp_path):
    """u is the solution of a sparse system, and the gradient with respect to k that of the same system."""
    below = {f"Derivative with respect to the {x}: relative error ": 1e-5 for x in ("conductivity", "pipe's place")}
    outs, states = run_on_each(tmp_path, "mesh_poisson", RANKS, "--size", "14", alike=1e-9, below=below)

    x, cells, k, u = (states[0][name] for name in ("x", "cells", "k", "u"))
    free = ~states[0]["on_pipe"]
    areas, matrices = elements(x, cells, k)
    assert np.isclose(areas.sum(), 1 - np.pi * 0.1**2, rtol=3e-3)
    edges = x[cells] - x[np.roll(cells, 1, axis=1)]
    assert (4 * 3**0.5 * areas / (edges**2).sum(axis=(1, 2))).min() > 0.3  # 1 where all edges are equal
    places = np.broadcast_to(cells[:, :, None], matrices.shape), np.broadcast_to(cells[:, None], matrices.shape)
    matrix = scipy.sparse.coo_array((matrices.ravel(), tuple(map(np.ravel, places)))).tocsr()[free][:, free].tocsc()
    shares = np.bincount(cells.ravel(), np.repeat(areas / 3, 3))
    heat = shares * np.exp(-((x - (0.75, 0.7)) ** 2).sum(axis=1) / (2 * 0.15**2))
    expected, adjoint = np.zeros_like(u), np.zeros_like(u)
    expected[free] = scipy.sparse.linalg.spsolve(matrix, heat[free])
    adjoint[free] = scipy.sparse.linalg.spsolve(matrix, shares[free] / shares.sum())
    by_k = -np.einsum("ti,tij,tj->t", adjoint[cells], matrices, expected[cells]) / k
    np.testing.assert_allclose(u, expected, rtol=0, atol=1e-9 * expected.max())
    np.testing.assert_allclose(states[0]["gradient_k"], by_k, rtol=0, atol=1e-9 * np.abs(by_k).max())
    assert re.search(rf"^Mean temperature {expected @ shares / shares.sum():.6f}", outs[0], re.M), outs[0]


@pytest.mark.nightly
def test_graph_network(tmp_path):
    """Loss and gradient are those of one process without MPI, and the training is the same on any number of ranks."""
    arguments = ("--vertices", "90", "--steps", "30")
    below = {"Relative difference from one process: loss ": 1e-11, "Relative difference .* gradient ": 1e-11}
    outs, states = run_on_each(tmp_path, "graph_network", RANKS, *arguments, alike=1e-7, below=below)
    assert all(", 90 vertices, " in out for out in outs)
    losses = states[0]["losses"]
    assert losses[-5:].mean() < 0.5 * losses[:5].mean()
    assert np.linalg.norm(states[0]["gradient"]) > 1e-3
