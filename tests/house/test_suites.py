"""Which suites run where: the plans of tests/suites.py, and how it runs their commands."""

import argparse
import sys
from pathlib import Path

import pytest

import suites

pytestmark = pytest.mark.alone
ROOT = Path(__file__).resolve().parents[2]


def commands(plan, brief=False, names="errors"):
    options = argparse.Namespace(suites=names, ranks=[1, 3], brief=brief, workers="2", mpi="mpich", fakes="/fakes")
    options.gpu, options.count = "rocm", 7
    return list(suites.PLANS[plan](options))


def test_names_of_suites_are_unique():
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))
    with pytest.raises(SystemExit, match="no suite nothing"):
        suites.path("nothing")


@pytest.mark.parametrize("brief", [False, True])
@pytest.mark.parametrize("plan", suites.PLANS)
def test_plan(plan, brief):
    for words, environment in commands(plan, brief):
        named = [word.removeprefix("--ignore=") for word in words if "tests/" in word]
        assert all((ROOT / name).is_file() for name in named)
        assert all(isinstance(value, str) for value in environment.values())
        assert "pytest" in words
        assert plan in ("each-time", "clients") or ("--brief" in words) == brief


def test_ranks():
    assert [words[words.index("-n") + 1] for words, _ in commands("ranks")] == ["1", "3"]
    assert [words[-1] for words, _ in commands("ranks", names="jit large")] == ["tests/mpi/test_large.py"] * 2


def test_limit():
    assert suites.run(suites.Command([sys.executable, "-c", "raise SystemExit(3)"], {}), 60) == 3
    assert suites.run(suites.Command([sys.executable, "-c", "import time; time.sleep(100)"], {}), 1) == 124
