"""A short form of `make soak`, and faults that it must notice."""

from pathlib import Path

import pytest

from fuzzing.steps import OPERATIONS
from support.launch import launch

SOAK = Path(__file__).parents[1] / "programs" / "soak.py"
pytestmark = [pytest.mark.alone, pytest.mark.sampled, pytest.mark.seconds(300)]
SHORT = ("--operations", "1200", "--programs", str(len(OPERATIONS)), "--duplicate", "50")


def soak(*options, **more):
    return launch(2, SOAK, *SHORT, *options, timeout=240, **more)


def test_short():
    done = soak()
    assert "all results are right, and nothing has grown" in done.stdout
    assert "operations of each rank: " in done.stdout
    assert all(f" {name} " in done.stdout for name in OPERATIONS)
    assert "WRONG" not in done.stderr


FAULTS = {
    "a wrong result": (("--wrong-at", "40"), "rank 1: array 0["),
    "lost memory": (("--leak", "4000000", "--growth", "40"), "memory has grown by"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("fault", FAULTS)
def test_fault(fault):
    options, told = FAULTS[fault]
    done = soak("--threads", "1", *options, check=False)
    assert done.returncode != 0
    assert told in done.stdout, done.stdout + done.stderr
    assert "FAILED" in done.stdout
