"""Runs the examples that any number of ranks may run, and compares what they save."""

import importlib.util
import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from support import drawing
from support.launch import launch
from support.table import NEW_JAX

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MARKS = [
    pytest.mark.alone,
    pytest.mark.sampled,
    pytest.mark.seconds(400),
    pytest.mark.skipif(not NEW_JAX, reason="this JAX has no derivatives of communication"),
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("matplotlib", "optax", "tqdm"))), reason="examples need more packages"
    ),
]
"""Of tests that run examples with derivatives."""


def ranks():
    """On which numbers of ranks an example is run."""
    return (1, 3) if drawing.brief else (1, 2, 3, 4)


def run(folder, name, ranks, *arguments):
    """What the example prints and saves; its picture is where it says."""
    file = folder / "state.npz"
    program = EXAMPLES / f"{name}.py"
    arguments = (*arguments, "--output-dir", folder, "--save-state", file)
    out = launch(ranks, program, *arguments, timeout=200).stdout
    picture = Path(re.search(r"^Picture: (.*)$", out, re.M)[1])
    assert picture.parent == folder
    assert picture.stat().st_size > 10_000
    picture.unlink()
    with np.load(file) as data:
        return out, dict(data)


def assert_same(states, tolerance):
    """The fields of all states, but for rounding relative to the largest value of each."""
    reference, *others = states
    for state, name in itertools.product(others, reference):
        size = np.abs(reference[name]).max()
        np.testing.assert_allclose(state[name], reference[name], rtol=0, atol=tolerance * size, err_msg=name)


def run_on_each(folder, name, ranks, *arguments, alike, below=()):
    """What an example prints on each of the numbers of ranks, which it says, and the states that it saves, which are
    `alike` to this tolerance. The number behind each text of `below`, a regular expression, is below that limit."""
    outs, states = zip(*(run(folder, name, n, *arguments) for n in ranks), strict=True)
    for n, out in zip(ranks, outs, strict=True):
        assert f"{n} processes" in out
        for text, limit in dict(below).items():
            assert float(re.search(rf"^{text}([^\s,]+)", out, re.M)[1]) < limit, f"{text} on {n} ranks: {out}"
    assert_same(states, alike)
    return outs, states
