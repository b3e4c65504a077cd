"""The relay of a job's files between machines: what passes, what does not, and that it ends. See test_two_hosts.py."""

import os
import subprocess
import sys
import time

import pytest

from jaxmpi._launcher import lifeline, relay

pytestmark = pytest.mark.alone
PATH = (
    f"import sys; sys.path.insert(0, {os.path.dirname(relay.__file__)!r}); import lifeline, relay\n"  # not the package
)
LAUNCHER = f"""
{PATH}
from pathlib import Path
listening, secret, address = relay.listen()
print("127.0.0.1", *address.split()[-2:], flush=True)
relay.serve(Path(sys.argv[1]), 2, listening, secret)
"""
RANK = PATH + "print(relay.folder_here(*sys.argv[1:], lifeline.hold))"


@pytest.fixture
def launcher(tmp_path):
    """A process with the folder of a job of 2 ranks, and the address of its socket."""
    folder = tmp_path / "launcher" / "jaxmpi-job"
    folder.mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, folder], stdout=subprocess.PIPE, text=True) as process:
        yield process, folder, process.stdout.readline().strip()
        process.kill()


def begin(tmp_path, address):
    """The folder of a rank on a machine that does not see the launcher's."""
    (tmp_path / "machine").mkdir(exist_ok=True)
    command = [sys.executable, "-c", RANK, "/nowhere/jaxmpi-job", address]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "machine")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=30, check=True)
    return tmp_path / "machine" / "jaxmpi-job", done.stdout.strip()


def until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def test_files_pass(launcher, tmp_path):
    process, folder, address = launcher
    here, told = begin(tmp_path, address)
    assert told == str(here) == begin(tmp_path, address)[1]  # the second rank uses the folder of the first
    (here / "1.state").write_text("0.5\ncall\ncomm\nplace")
    assert until((folder / "1.state").exists)
    assert (folder / "1.state").read_text() == "0.5\ncall\ncomm\nplace"
    (here / "other.state").write_text("not a rank's")
    (here / "7.state").write_text("not a rank of this job")
    (folder / "ask").write_text("1")
    assert until((here / "ask").exists)
    (here / "0.ended").write_text("")
    assert until((folder / "0.ended").exists)
    assert {path.name for path in folder.iterdir()} == {"1.state", "0.ended", "ask"}
    process.kill()
    assert until(lambda: not here.exists())


@pytest.mark.parametrize("wrong", ["secret", "port", "host"])
def test_no_connection(wrong, launcher, tmp_path):
    """Nothing passes, and nothing is left."""
    _, folder, address = launcher
    host, port, secret = address.split()
    secret, port, host = {
        "secret": ("another", port, host),
        "port": (secret, 1, host),
        "host": (secret, port, "nowhere.invalid"),
    }[wrong]
    begin_at = time.monotonic()
    here, _ = begin(tmp_path, f"{host} {port} {secret}")
    assert time.monotonic() - begin_at < 10
    if here.exists():
        (here / "1.state").write_text("0.5\ncall\ncomm\nplace")
    assert until(lambda: not here.exists())
    assert not list(folder.iterdir())


def test_folder_of_another_user_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(relay.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / "jaxmpi-job").mkdir()
    assert relay.folder_here(str(tmp_path), "", lifeline.hold) == str(tmp_path)
    monkeypatch.setattr(relay.os, "geteuid", lambda: -1)
    assert relay.folder_here("/nowhere/jaxmpi-job", "", lifeline.hold) == "/nowhere/jaxmpi-job"
