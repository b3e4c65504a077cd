"""The example of particles: any number of ranks gives what one alone does; momentum and energy are conserved."""

import re

import numpy as np
import pytest

from support import examples
from support.examples import EXAMPLES, run_on_each
from support.launch import launch

RANKS = examples.ranks()
pytestmark = examples.MARKS


def potential_energy(place, side):
    """Of all pairs, one by one."""
    total = 0.0
    for i in range(1, len(place)):
        between = place[i] - place[:i]
        r = np.linalg.norm(between - side * np.round(between / side), axis=1)
        r = r[r < 2.5]
        u = lambda r: 4 * (r**-12 - r**-6)  # noqa: E731
        slope = 4 * (-12 * 2.5**-13 + 6 * 2.5**-7)
        total += np.sum(u(r) - u(2.5) - slope * (r - 2.5))
    return total


def test_particles(tmp_path):
    arguments = ("--size", "14", "--steps", "160", "--temperature", "0.7")
    below = {
        "Momentum, at most: ": 1e-11,
        "Energy, drift relative to the first kinetic one: ": 2e-3,
        "Beside one process, after 100 steps: ": 1e-10,
        r"d energy / d temperature, over 20 steps: (?:relative error )?": 1e-5,
    }
    outs, states = run_on_each(tmp_path, "particles", RANKS, *arguments, alike=4e-11, below=below)
    for n, out in zip(RANKS, outs, strict=True):
        assert ", 196 particles, " in out
        moved = float(re.search(r"^Particles that another process has at the end: (\S+)", out, re.M)[1])
        assert (moved > 1) == (n > 1)
    place, velocity, energies = (states[0][name] for name in ("place", "velocity", "energies"))
    expected = potential_energy(place, 14 / 0.35**0.5) + np.sum(velocity**2) / 2
    np.testing.assert_allclose(energies[-1], expected, rtol=1e-10)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_too_little_room(ranks, tmp_path):
    """Particles that have no room end the job, with what to do."""
    arguments = ("--size", "14", "--steps", "100", "--temperature", "3", "--room", str(196 // ranks + 4))
    done = launch(ranks, EXAMPLES / "particles.py", *arguments, "--output-dir", tmp_path, check=False)
    assert done.returncode != 0
    assert re.search(r"its result has room for \d+|use a larger --room", done.stderr), done.stderr
    assert not list(tmp_path.glob("*.png"))
