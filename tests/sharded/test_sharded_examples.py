"""The examples of JAX's own sharded arrays: any number of processes, by MPI and by gloo, gives what one alone does.

That one runs without a launcher, and so without a word of MPI."""

import importlib.util
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from support.launch import launch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
AS_USERS_DO = {"XLA_FLAGS": ""}  # without the suites' own, of tests/support/quick.py
JOBS = [(3, "mpi"), (2, "gloo")]
pytestmark = [pytest.mark.alone, pytest.mark.sampled, pytest.mark.nightly, pytest.mark.seconds(300)]


def outputs(name, arguments):
    """What the example prints alone, and then in each of the jobs; its arguments for so many processes are given."""
    jobs = [(0, ()), *((n, ("--collectives", kind)) for n, kind in JOBS)]
    program = EXAMPLES / f"{name}.py"
    return [launch(n, *options, program, *arguments(n or 1), **AS_USERS_DO).stdout for n, options in jobs]


def numbers(pattern, text, lines):
    """Those that the pattern finds, in so many lines: one process prints, not each of them."""
    found = re.findall(pattern, text, re.M)
    assert len(found) == lines, text
    return np.array(found, float)


def test_data_parallel():
    """Neither 50 images nor 1437 can be divided among all numbers of processes."""
    for package in ("optax", "sklearn"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    alone, *jobs = outputs("data_parallel", lambda n: ["--steps", "40", "--batch", "50"])
    pattern = r"^step +(\d+): loss ([\d.]+), test accuracy ([\d.]+)$"
    expected = numbers(pattern, alone, 8)
    assert expected[-1, 1] < 0.5 < expected[0, 1]
    assert expected[-1, 2] > 0.85
    for text, (processes, _) in zip(jobs, JOBS, strict=True):
        np.testing.assert_allclose(numbers(pattern, text, 8), expected, rtol=1e-3)
        assert f" per step, processes: {processes}\n" in text


@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="this JAX has no jax.shard_map")
def test_sharded_fft():
    """The size is rounded up to 60 on any number of processes, so that all have the same points."""
    alone, *jobs = outputs("sharded_fft", lambda n: ["--size", str(61 - n), "--repeats", "1"])
    for text, (processes, _) in zip((alone, *jobs), ((1, ""), *JOBS), strict=True):
        assert f"60 x 60 points, processes: {processes}\n" in text
        assert (numbers(r"max error (\S+), \S+ ms$", text, 2) < 1e-13).all()
        both = (numbers(r"^largest potential (\S+)$", output, 1) for output in (text, alone))
        np.testing.assert_allclose(*both, rtol=1e-10)
