"""The job's folder: whose it is, and that other users cannot lead a rank or the launcher elsewhere."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from jaxmpi_launch import lifeline, private
from programs import errors_page

pytestmark = pytest.mark.alone

as_root = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="another user needs root")
OTHER = ("setpriv", "--reuid", "1234", "--regid", "1234", "--clear-groups")

PLANT = """
what=$1 path=$2 victim=$3
case $what in
  "file") touch "$path" ;;
  "link to a folder") ln -s "$(dirname "$victim")" "$path" ;;
  "link to nowhere") ln -s "$victim.new" "$path" ;;
  *) mkdir "$path"; chmod 777 "$path" ;;
esac
if [ "$what" = "folder with links" ]; then
  for kind in began report state ended aborts; do
    for end in "" .draft; do ln -s "$victim" "$path/0.$kind$end"; done
  done
  for name in ask machine alive bell input; do ln -s "$victim" "$path/$name"; done
fi
"""
PLANTED = ["file", "link to a folder", "link to nowhere", "folder", "folder with links"]


@pytest.fixture
def shared():
    """A folder for the temporary files of all users, and a file of ours that no other may read."""
    with tempfile.TemporaryDirectory() as made:  # pytest's own are of no use to others
        os.chmod(made, 0o755)
        tmp, victim = Path(made, "tmp"), Path(made, "ours", "victim")
        tmp.mkdir()
        tmp.chmod(0o1777)
        victim.parent.mkdir(mode=0o700)
        victim.write_text("ours")
        victim.chmod(0o600)
        yield tmp, victim


def look(path):
    """What tells whether somebody has changed a file or a folder."""
    found = path.lstat()
    inside = sorted(os.listdir(path)) if path.is_dir() and not path.is_symlink() else []
    return found.st_ino, found.st_uid, found.st_mode, inside


def plant(what, path, victim):
    subprocess.run([*OTHER, "sh", "-ec", PLANT, "-", what, path, victim], check=True, timeout=30)
    return look(path)


def run_rank(folder, tmp, program):
    """child.py as the first rank of a machine."""
    child = os.path.join(os.path.dirname(private.__file__), "child.py")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "PMI_"))}
    environment |= {"PMI_RANK": "0", "TMPDIR": str(tmp), "JAXMPI_JOB_FOLDER": str(folder)}
    command = [sys.executable, child, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


SHOW = """
import os
print(folder := os.environ.get("JAXMPI_JOB_FOLDER"))
if folder: print(*sorted(os.listdir(folder)))
"""


@pytest.mark.parametrize("machine", ["another", None])
def test_rank_on_another_machine(machine, tmp_path):
    """It uses no folder, whether it sees the launcher's or not, and that is no fault: nothing is told."""
    folder = tmp_path / "jaxmpi-job"
    if machine is not None:
        folder.mkdir(mode=0o700)
        (folder / "machine").write_text(machine)
    done = run_rank(folder, tmp_path, SHOW)
    assert (done.returncode, done.stdout, done.stderr) == (0, "None\n", "")
    assert machine is None or os.listdir(folder) == ["machine"]


@as_root
@pytest.mark.parametrize("what", PLANTED)
def test_another_user_makes_the_folder(what, shared):
    """By whatever way it knows the name: the rank says so, and runs without."""
    tmp, victim = shared
    path = tmp / "jaxmpi-job"
    planted = plant(what, path, victim)
    done = run_rank(path, tmp, SHOW)
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr
    assert done.stderr.startswith(f"jaxmpi.run: {os.uname().nodename} has no folder for what its ranks tell")
    assert str(path) in done.stderr
    assert look(path) == planted
    assert victim.read_text() == "ours"
    assert os.listdir(victim.parent) == ["victim"]
    if what in (names := {"folder": "belongs to another user", "link to a folder": "is a symbolic link"}):
        errors_page.goes_on(f"the folder of the job {names[what]}")


@as_root
@pytest.mark.parametrize("what", ["folder with links", "link to a folder"])
def test_another_user_replaces_the_folder_while_the_rank_runs(what, shared):
    """In a folder for temporary files that is not sticky: nothing is written, and nothing removed."""
    tmp, victim = shared
    tmp.chmod(0o777)
    folder = tmp / "jaxmpi-job"
    folder.mkdir(mode=0o700)
    (folder / "machine").write_text(lifeline.machine())
    program = f"""
import os, subprocess
os.rename({str(folder)!r}, {str(tmp / "gone")!r})
subprocess.run({[*OTHER, "sh", "-ec", PLANT, "-", what, str(folder), str(victim)]!r}, check=True)
"""
    done = run_rank(folder, tmp, program)
    assert (done.returncode, done.stderr) == (0, "")
    assert victim.read_text() == "ours"
    assert os.listdir(victim.parent) == ["victim"]
    private.remove(str(folder))
    assert folder.lstat().st_uid == 1234
    assert os.listdir(victim.parent) == ["victim"]


@as_root
def test_links_in_a_folder_of_ours(shared):
    """None is followed, whoever made it."""
    _, victim = shared
    with private.make("jaxmpi-") as folder:
        for name in ("read", "written", "removed"):
            os.symlink(victim, name, dir_fd=folder.descriptor)
        with pytest.raises(OSError, match="symbolic links"):
            folder.read("read")
        with pytest.raises(FileExistsError):
            folder.create("written")
        folder.write("written", "new")
        folder.remove("removed")
        os.mkfifo("fifo", dir_fd=folder.descriptor)
        with pytest.raises(PermissionError, match="not what was expected"):
            folder.read("fifo")
        assert folder.read("written") == "new"
        os.chown("written", 1234, 1234, dir_fd=folder.descriptor)
        with pytest.raises(PermissionError, match="another user's"):
            folder.read("written")
    assert victim.read_text() == "ours"
    private.remove(folder.path)
    assert not os.path.exists(folder.path)
    errors_page.goes_on("files in the folder of the job are symbolic links")  # those of a rank: tests/c/test_job.c
