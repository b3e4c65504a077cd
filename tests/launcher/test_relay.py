"""The relay of a job's files between machines: what passes, what does not, and that it ends. See test_two_hosts.py."""

import contextlib
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from jaxmpi._launcher import lifeline, private, relay
from programs import errors_page
from support.launch import started

pytestmark = pytest.mark.one_rank
PATH = (
    f"import sys; sys.path.insert(0, {os.path.dirname(relay.__file__)!r})\n"  # not the package
    "import private, lifeline\n"
    "sys.modules.update({'jaxmpi._launcher.private': private, 'jaxmpi._launcher.lifeline': lifeline})\n"
    "import relay\n"
)
LAUNCHER = f"""
{PATH}
from pathlib import Path
listening, secret, address = relay.listen()
print("127.0.0.1", *address.split()[-2:], flush=True)
relay.serve(Path(sys.argv[1]), 2, listening, secret, lambda text: print(text, end="", flush=True))
"""
RANK = PATH + "print(relay.folder_here(*sys.argv[1:]))"


@pytest.fixture
def launcher(tmp_path):
    """A process with the folder of a job of 2 ranks, and the address of its socket."""
    folder = tmp_path / "launcher" / "jaxmpi-job"
    folder.mkdir(parents=True)
    folder.chmod(0o700)
    with started([sys.executable, "-c", LAUNCHER, folder], stdout=subprocess.PIPE, text=True) as process:
        yield process, folder, process.stdout.readline().strip()
        process.kill()


def begin(tmp_path, address):
    """The folder of a rank on a machine that does not see the launcher's."""
    (tmp_path / "machine").mkdir(exist_ok=True)
    command = [sys.executable, "-c", RANK, "/nowhere/jaxmpi-job", address]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "machine")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=30, check=True)
    return Path(done.stdout.strip()), done.stdout.strip()


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


def test_end_of_a_process(launcher, tmp_path):
    """The launcher is told that a rank has ended, after all that this has said, and not its number of a process, which
    is another one's where the launcher is."""
    _, folder, address = launcher
    here, _ = begin(tmp_path, address)
    with started([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        (here / "1.pid").write_text(str(process.pid))
        (here / "1.began").write_text("")
        assert until((folder / "1.began").exists)
        time.sleep(0.5)
        assert not (folder / "1.gone").exists()
        (here / "1.lost").write_text("why")
        process.kill()
        process.wait()
    assert until((folder / "1.gone").exists)
    assert {path.name for path in folder.iterdir()} == {"1.began", "1.lost", "1.gone"}


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


def test_path_that_is_no_folder_of_ours(tmp_path, monkeypatch):
    """Of the launcher's name: there is another one, under a name that follows from the secret."""
    monkeypatch.setattr(relay.tempfile, "gettempdir", lambda: str(tmp_path / "none"))
    (tmp_path / "ours").mkdir(mode=0o700)
    (tmp_path / "ours" / "machine").write_text(lifeline.machine())
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o770)
    (tmp_path / "link").symlink_to(tmp_path / "ours")
    (tmp_path / "file").touch()
    assert relay.folder_here(str(tmp_path / "ours"), "") == str(tmp_path / "ours")
    for name in ("open", "link", "file", "nothing"):
        with pytest.raises(FileNotFoundError, match="none"):  # where the other one would be
            relay.folder_here(str(tmp_path / name), "")


@pytest.mark.parametrize("refused", ["too long a line", "not lines of ours", "a reader that never reads"])
def test_connections_that_are_no_use(refused, launcher, tmp_path):
    """They are closed, and others served."""
    _, folder, address = launcher
    host, port, _ = address.split()
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        with contextlib.suppress(OSError):
            connection.sendall({"t": b"x" * 100_000, "n": b"one\ntwo\n", "a": b""}[refused[0]])
        here, _ = begin(tmp_path, address)
        (here / "0.state").write_text("0.5\ncall\ncomm\nplace")
        assert until((folder / "0.state").exists)
        if refused != "a reader that never reads":  # it may be slow, and has ten seconds
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(1000):
                    pass


def test_more_descriptors_than_select_takes(launcher, tmp_path):
    process, folder, address = launcher
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit[1] < 4000:
        pytest.skip("the system permits too few files")
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (4000, limit[1]))
    resource.setrlimit(resource.RLIMIT_NOFILE, (4000, limit[1]))
    host, port, _ = address.split()
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(1100):
                stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
            here, _ = begin(tmp_path, address)
            (here / "0.state").write_text("0.5\ncall\ncomm\nplace")
            assert until((folder / "0.state").exists)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


@pytest.mark.parametrize("hard", [False, True], ids=["the soft limit", "the hard limit"])
def test_more_machines_than_files_may_be_open(hard, launcher, tmp_path):
    """A small limit is lifted as far as the system permits; then those who are connected are served, and it is said."""
    process, folder, _ = launcher
    process.kill()
    if hard:
        limits = "resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))"
    else:
        limits = (
            "resource.setrlimit(resource.RLIMIT_NOFILE, (60, 4000)); "
            "from jaxmpi._launcher.parent import _Limit; _Limit.lift()"
        )
    program = f"import resource\n{limits}\n{LAUNCHER}"
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(
            started([sys.executable, "-c", program, folder], stdout=subprocess.PIPE, text=True)
        )
        stack.callback(process.kill)
        host, port, secret = process.stdout.readline().split()
        here, _ = begin(tmp_path, f"{host} {port} {secret}")
        assert until((here / "machine").exists)
        time.sleep(1)  # until it is connected
        for _ in range(100):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
        (here / "0.state").write_text("0.5\ncall\ncomm\nplace")
        assert until((folder / "0.state").exists)
        if hard:
            told = process.stdout.readline()
            assert re.fullmatch(r"jaxmpi.run: \d+ machines are connected, and no more can be, .* 60 files.*\n", told)
            assert told.endswith("Raise the limit: ulimit -n\n")
        else:
            assert len(os.listdir(f"/proc/{process.pid}/fd")) > 100


def test_limit_of_open_files_is_put_back():
    """As the last of several jobs ends; what is started before, and after, inherits that of the program."""
    from jaxmpi._launcher.parent import _Limit

    _, hard = before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (500, hard))
        _Limit.lift()
        _Limit.lift()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        _Limit.restore()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        _Limit.restore()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (500, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_machines_that_see_one_folder(tmp_path, monkeypatch):
    """Another machine's is not used, though it can be: nothing tells its ranks there that they are asked, and none of
    them ends with the launcher. They have one in the memory of their own."""
    folder, memory = tmp_path / "jaxmpi-job", tmp_path / "memory"
    memory.mkdir()
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(relay, "_MEMORY", str(memory))
    monkeypatch.setattr(relay, "_make", lambda here, address: os.mkdir(here, 0o700))
    (folder / "machine").write_text(lifeline.machine())
    assert relay.folder_here(str(folder), "") == str(folder)
    (folder / "machine").write_text("another")
    here = relay.folder_here(str(folder), "")
    assert os.path.dirname(here) == str(memory)
    monkeypatch.setattr(lifeline, "machine", lambda: "a third")
    assert relay.folder_here(str(folder), "") not in (here, str(folder))


# --- another user -------------------------------------------------------------------------------------------------

as_root = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="another user needs root")
OTHER = ("setpriv", "--reuid", "1234", "--regid", "1234", "--clear-groups")
SECRET = "a" * 32

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
  for name in ask machine relayed alive bell input; do ln -s "$victim" "$path/$name"; done
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


def plant(what, path, victim):
    subprocess.run([*OTHER, "sh", "-ec", PLANT, "-", what, path, victim], check=True, timeout=30)
    return path.lstat(), sorted(os.listdir(path)) if path.is_dir() and not path.is_symlink() else []


def untouched(path, victim, planted):
    now = path.lstat(), sorted(os.listdir(path)) if path.is_dir() and not path.is_symlink() else []
    assert (now[0].st_ino, now[0].st_uid, now[0].st_mode, now[1]) == (
        planted[0].st_ino,
        planted[0].st_uid,
        planted[0].st_mode,
        planted[1],
    )
    assert victim.read_text() == "ours"
    assert os.listdir(victim.parent) == ["victim"]


def name_here():
    return f"jaxmpi-{relay._proof(SECRET, 'folder', f'jaxmpi-job {lifeline.machine()}')[:16]}"


def run_rank(folder, address, tmp, program="pass"):
    """child.py as the first rank of a machine."""
    child = os.path.join(os.path.dirname(relay.__file__), "child.py")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "PMI_"))}
    environment |= {"PMI_RANK": "0", "TMPDIR": str(tmp), "JAXMPI_JOB_FOLDER": str(folder)}
    environment |= {"JAXMPI_JOB_ADDRESS": address} if address else {}
    command = [sys.executable, child, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


SHOW = """
import os
print(folder := os.environ.get("JAXMPI_JOB_FOLDER"))
if folder: print(*sorted(os.listdir(folder)))
"""


@as_root
@pytest.mark.parametrize("what", PLANTED)
def test_another_user_makes_the_launchers_name_on_a_second_machine(what, shared):
    """The rank uses another one, as if there were nothing."""
    tmp, victim = shared
    path = tmp / "jaxmpi-job"
    planted = plant(what, path, victim)
    done = run_rank(path, f"127.0.0.1 1 {SECRET}", tmp, SHOW)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [str(tmp / name_here()), "0.began alive bell machine relayed"]
    untouched(path, victim, planted)
    assert until(lambda: not (tmp / name_here()).exists())
    untouched(path, victim, planted)
    errors_page.goes_on("the name of the folder is taken on a second machine")


@as_root
@pytest.mark.parametrize("address", [f"127.0.0.1 1 {SECRET}", ""], ids=["second machine", "first machine"])
@pytest.mark.parametrize("what", PLANTED)
def test_another_user_makes_the_folder(what, address, shared):
    """By whatever way it knows the name: the rank says so, and runs without."""
    tmp, victim = shared
    path = tmp / (name_here() if address else "jaxmpi-job")
    planted = plant(what, path, victim)
    done = run_rank(tmp / "jaxmpi-job", address, tmp, SHOW)
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr
    assert done.stderr.startswith(f"jaxmpi.run: {os.uname().nodename} has no folder for what its ranks tell")
    assert str(path) in done.stderr
    untouched(path, victim, planted)
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
    program = f"""
import os, subprocess
os.rename({str(folder)!r}, {str(tmp / "gone")!r})
subprocess.run({[*OTHER, "sh", "-ec", PLANT, "-", what, str(folder), str(victim)]!r}, check=True)
"""
    done = run_rank(folder, "", tmp, program)
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
