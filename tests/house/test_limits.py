"""The limit of a test: what its fixtures have started ends with it, so that nobody waits for their output."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support import limits

TESTS = Path(__file__).resolve().parents[1]
HANGS = """
import subprocess, sys, pytest
CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"

@pytest.fixture
def child():
    with subprocess.Popen([sys.executable, "-c", CHILD]):  # has the output of pytest, and waits for the child
        yield

@pytest.mark.seconds(1)
def test_hangs(child):
    pass
"""
WAITS = """
import pytest
from support import limits
from support.launch import launch

@pytest.mark.seconds(20)
def test_waits(monkeypatch):
    monkeypatch.setattr(limits, "TO_TIDY_UP", 19)
    launch(0, "-c", "import time; time.sleep(600)")
"""


def run(tmp_path, text):
    (tmp_path / "test_it.py").write_text(text)
    options = ("-p", "conftest", "-p", "no:cacheprovider", "-c", TESTS.parent / "pyproject.toml")
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", tmp_path, tmp_path / "test_it.py"]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), limits.PATIENCE: "0.5"}
    environment.pop("JAXMPI_TEST_DURATIONS", None)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)


@pytest.mark.alone
@pytest.mark.nightly
def test_a_child_that_hangs(tmp_path):
    """No reader of the output waits for the child."""
    done = run(tmp_path, HANGS)
    assert done.returncode != 0
    assert "Timeout (0:00:01)!" in done.stderr


@pytest.mark.alone
@pytest.mark.nightly
def test_a_job_that_hangs(tmp_path):
    """Its error is told, before the test's own limit ends everything."""
    done = run(tmp_path, WAITS)
    assert "1 failed" in done.stdout, done.stdout + done.stderr
    assert "TimeoutExpired" in done.stdout
    assert "Timeout (" not in done.stderr


@pytest.mark.alone
def test_within(monkeypatch):
    monkeypatch.setattr(limits, "_deadline", None)
    assert limits.within(300) == 300
    monkeypatch.setattr(limits, "_deadline", time.monotonic() + 50)
    assert limits.within(20) == 20
    assert 35 < limits.within(300) <= 50 - limits.TO_TIDY_UP
    monkeypatch.setattr(limits, "_deadline", time.monotonic())
    assert limits.within(300) == 1
