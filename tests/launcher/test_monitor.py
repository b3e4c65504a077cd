"""When the launcher asks the ranks what they do, what it prints, and when it ends mpiexec. The clock is the tests'."""

import signal
import subprocess
import sys

import pytest

from jaxmpi_launch import folder, monitor, parent
from support.launch import started

pytestmark = pytest.mark.alone


class Job:
    """A monitor of a job, whose clock moves by `after`."""

    def __init__(self, path, monkeypatch, ranks=4):
        self.now, self.printed, self.path = 0.0, [], path
        monkeypatch.setattr(monitor.time, "monotonic", lambda: self.now)
        self.folder = folder.Folder(str(path))
        monkeypatch.setattr(self.folder, "ring", lambda: None)
        monkeypatch.setattr(self.folder, "hush", lambda: None)
        self.monitor = monitor.Monitor(self.folder, ranks, False, self.printed.append)

    def leave(self, *names):
        for name in names:
            (self.path / name).touch()

    def after(self, seconds, signalled=False):
        self.now += seconds
        return self.monitor.step(signalled)


@pytest.fixture
def job(tmp_path, monkeypatch):
    return Job(tmp_path, monkeypatch)


def test_mpiexec_has_time_to_end_a_job(job):
    assert job.after(100) == ""
    job.leave("1.aborts")
    assert job.after(1) == job.after(19) == ""
    assert job.after(2) == "rank 1 failed 20 s ago"


def test_mpiexec_has_time_to_end_after_a_signal(job):
    assert job.after(100) == job.after(1, True) == job.after(58, True) == ""
    assert job.after(2, True) == "mpiexec was told to end 60 s ago"


@pytest.mark.parametrize("reports", [False, True])
def test_ranks_that_leave_no_file(reports, job):
    """They are on other machines, as far as the launcher knows: one line, and nobody waits for them."""
    job.leave("0.began", "0.ended", *(["0.report"] if reports else []))
    for _ in range(20):
        assert job.after(0.25) == ""
    others = "are on other machines, or have not begun: their own reports tell what they wait for"
    table = f"jaxmpi.run: what the ranks do:\n  rank 0: has ended\n  ranks 1 to 3: {others}\n"
    assert (job.path / "ask").exists() == reports
    assert job.printed == ([table] if reports else [])


def test_answers_are_awaited(job):
    """Of ranks that have begun here, for some seconds; the same table is printed once."""
    job.leave("0.began", "1.began", "0.ended")
    for _ in range(10):
        job.after(0.25)
    assert (job.path / "ask").exists()
    assert not job.printed
    (job.path / "1.state").write_text("7\nrecv of 3 float32\nhalo\nPython is at a.py:1")
    for _ in range(40):
        job.after(0.25)
    (table,) = job.printed
    assert "  rank 1: waits in recv of 3 float32, on halo; Python is at a.py:1, 7 s so far\n" in table


@pytest.mark.parametrize("stubborn", [False, True])
def test_mpiexec_is_ended(stubborn, monkeypatch, capfd):
    monkeypatch.setattr(parent, "_KILL_SECONDS", 0.5)
    ignores = "signal.signal(signal.SIGTERM, signal.SIG_IGN); " if stubborn else ""
    program = f"import signal, time; {ignores}print('ready', flush=True); time.sleep(1000)"
    with started([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        parent.end(process, "rank 1 failed 20 s ago")
        assert process.returncode == -(signal.SIGKILL if stubborn else signal.SIGTERM)
    assert capfd.readouterr().err == "jaxmpi.run: rank 1 failed 20 s ago; mpiexec is still there, and is ended\n"


def test_ranks_in_words():
    assert [monitor.in_words(ranks) for ranks in ([0], [0, 1])] == ["rank 0", "ranks 0, 1"]
    assert monitor.in_words([0, 1, 2, 3, 5, 7, 8]) == "ranks 0 to 3, 5, 7, 8"
