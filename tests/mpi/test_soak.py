"""A short form of `make soak`."""

from pathlib import Path

import pytest

from fuzzing.steps import OPERATIONS
from support.launch import launch

SOAK = Path(__file__).parents[1] / "programs" / "soak.py"
pytestmark = [pytest.mark.alone, pytest.mark.sampled, pytest.mark.seconds(300)]
SHORT = ("--operations", "1200", "--programs", str(len(OPERATIONS)), "--duplicate", "50")


def test_short():
    done = launch(2, SOAK, *SHORT, timeout=240)
    assert "all results are right, and nothing has grown" in done.stdout
    assert "operations of each rank: " in done.stdout
    assert all(f" {name} " in done.stdout for name in OPERATIONS)
    assert "WRONG" not in done.stderr
