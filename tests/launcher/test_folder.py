"""The job's folder: what a rank leaves there, and what it does without."""

import os
import subprocess
import sys
import threading

import pytest

from jaxmpi_launch import folder as folders

pytestmark = pytest.mark.alone

SHOW = f"""
import os
import threading
print(folder := os.environ.get("{folders.VARIABLE}"))
if folder: print(*sorted(os.listdir(folder)))
"""


def run_rank(path, program=SHOW):
    """Run child.py as the first rank of a machine."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "PMI_"))}
    environment |= {"PMI_RANK": "0", folders.VARIABLE: str(path)}
    command = [sys.executable, "-m", "jaxmpi_launch.child", "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


def test_rank_on_this_machine():
    folder = folders.Folder.make()
    try:
        done = run_rank(folder.path)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == f"{folder.path}\n0.began alive bell machine\n"
        assert os.stat(folder.path).st_mode & 0o777 == 0o700
        assert (folder.kinds()["ended"], folder.texts("began")) == ({0: "0.ended"}, {0: ""})
    finally:
        folder.remove()
    assert not os.path.exists(folder.path)


@pytest.mark.parametrize("machine", ["another", None])
def test_rank_on_another_machine(machine, tmp_path):
    """It uses no folder, whether it sees the launcher's or not, and says nothing: this is no fault."""
    path = tmp_path / "jaxmpi-job"
    if machine is not None:
        path.mkdir(mode=0o700)
        (path / "machine").write_text(machine)
    done = run_rank(path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "None\n", "")
    assert machine is None or os.listdir(path) == ["machine"]


def test_links_are_not_followed(tmp_path):
    """Whoever has made them: a folder of this name may be another user's once the launcher has removed its own."""
    victim = tmp_path / "victim"
    victim.write_text("ours")
    folder = folders.Folder(str(tmp_path))
    os.symlink(victim, f"{folder.path}/0.ended.{os.getpid()}.{threading.get_ident()}.draft")
    with pytest.raises(FileExistsError):
        folder.write("0.ended", "")
    os.symlink(victim, tmp_path / "1.ended")
    folder.write("1.ended", "new")
    assert (folder.read("1.ended"), victim.read_text()) == ("new", "ours")
