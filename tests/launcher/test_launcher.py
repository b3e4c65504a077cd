"""The launcher as the parent of mpiexec: its status, signals, what it passes on, and its own end."""

import contextlib
import os
import pty
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from programs import errors_page
from support import limits
from support.launch import end_what_is_left, is_openmpi, launch, outside_of_a_job, started, until, written
from support.rows import each, one_each_time

pytestmark = [pytest.mark.alone, pytest.mark.sampled, pytest.mark.seconds(120)]

COMMAND = [sys.executable, "-m", "jaxmpi.run"]


@pytest.fixture
def job():
    """The environment of a job, of which nothing may be left."""
    mark = f"JAXMPI_TEST_JOB={time.monotonic_ns()}-{os.getpid()}"
    yield outside_of_a_job() | {"JAX_PLATFORMS": "cpu"} | dict([mark.split("=")])
    assert not end_what_is_left(mark)


def processes(environment):
    return limits.processes(f"JAXMPI_TEST_JOB={environment['JAXMPI_TEST_JOB']}")


FAKE = """\
#!/usr/bin/env python3
import os, signal, subprocess, sys, time
if "--version" in sys.argv: sys.exit(print("fake"))
words = sys.argv[3:]
def rank(number, **more): return subprocess.Popen(words, env={**os.environ, "PMI_RANK": str(number)}, **more)
"""
BOTH = "for r in (0, 1): rank(r).wait()"


def words(tmp_path, text, ranks=1, program="pass"):
    """The command of the launcher with an mpiexec of our own, in which `rank(0)` starts a rank."""
    mpiexec = written(tmp_path, FAKE, text, name="mpiexec")
    mpiexec.chmod(0o755)
    return [*COMMAND, "-n", str(ranks), "--mpiexec", str(mpiexec), "-c", program]


def finished(command, **options):
    return subprocess.run(command, **{"timeout": 60, "check": False, "env": outside_of_a_job(), **options})


def fake(tmp_path, text, ranks=2, program="pass"):
    return finished(words(tmp_path, text, ranks, program), capture_output=True)


# --- the status ---------------------------------------------------------------------------------------------------


ENDED = "\njaxmpi.run: rank {} ended the job with code {}: "
STATUS = {
    "mpiexec succeeds": (BOTH, "pass", 0, ""),
    "mpiexec fails": (f"{BOTH}\nsys.exit(213)", "pass", 213, ""),
    "mpiexec is that of another MPI": (BOTH, "from mpi4py import MPI; assert MPI.COMM_WORLD.size == 1", 0, ""),
    "exit at once": (BOTH, "os._exit(0)", 0, ""),
    "a rank fails": (BOTH, "sys.exit(5 if rank == '1' else 0)", 5, ENDED.format(1, 5) + r"sys\.exit\(5\)\n"),
    "a rank is lost": (
        BOTH,
        "rank == '1' and os.kill(os.getpid(), 9)",
        1,
        "jaxmpi.run: mpiexec ended with status 0, but rank 1 began and did not report an end.*\n",
    ),
    # The first line of a reason says what it is.
    "a text": ("rank(0).wait(); sys.exit(1)", "sys.exit('1\\n2')", 1, f"(.*\n)*({ENDED.format(0, 1)})?1\n"),
    "an exception": (
        "rank(0).wait(); sys.exit(1)",
        "raise KeyError('1\\n2')",
        1,
        rf"(.*\n)*({ENDED.format(0, 1)})?KeyError: '1\\n2'\n",
    ),
    # Python brought them with 3.11, and the last line that it writes of one is a rule.
    "an exception group": (
        "rank(0).wait(); sys.exit(1)",
        "raise ExceptionGroup('several', [KeyError(1), ValueError('x' * 5000)])",
        1,
        rf"(.*\n)*{ENDED.format(0, 1)}(ExceptionGroup: several \(2 sub-exceptions\)|NameError: .*)\n",
    ),
}
"""What mpiexec does, what a rank does, the status, and what is told."""


def test_status(tmp_path):
    """Where mpiexec says nothing of ranks, the launcher does."""

    def check(case):
        text, program, status, told = STATUS[case]
        done = fake(tmp_path, text, 2, f"import os, sys; rank = os.environ['PMI_RANK']; {program}")
        assert done.returncode == status
        assert re.fullmatch(told, done.stderr.decode()), done.stderr

    each(STATUS, check)


def test_ranks_that_a_signal_ends_though_mpiexec_says_nothing(tmp_path):
    """As that of Open MPI, if what it has started on other machines gets the signal as well: a job of Slurm."""
    text = """
        ranks = [rank(r, stdout=subprocess.PIPE) for r in (0, 1)]
        for process in ranks: process.stdout.readline()
        def end(*_):
            for process in ranks:
                process.kill()
                process.wait()
            sys.exit(0)
        signal.signal(signal.SIGTERM, end)
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(1000)
    """
    done = fake(tmp_path, text, program="import time; print('begins', flush=True); time.sleep(1000)")
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stderr == b"jaxmpi.run: ended by SIGTERM\n"


@pytest.mark.parametrize("number", one_each_time([signal.SIGKILL, signal.SIGSEGV], signal.SIGKILL))
def test_mpiexec_ended_by_a_signal(number, tmp_path, job):
    """A rank that it leaves behind ends as well."""
    text = f"rank(0, stdout=subprocess.PIPE).stdout.readline(); os.kill(os.getpid(), {int(number)})"
    command = words(tmp_path, text, program="import time; print('begins', flush=True); time.sleep(1000)")
    begin = time.monotonic()
    done = finished(command, stderr=subprocess.PIPE, env=job, text=True)
    told = f"jaxmpi.run: mpiexec was ended by signal {int(number)}"
    errors_page.note(f"mpiexec is ended by {number.name}", told, time.monotonic() - begin)
    assert done.returncode == 128 + number
    assert done.stderr == f"{told} ({number.name})\n"


def test_sigchld_is_ignored_by_who_starts_it(tmp_path):
    ignored = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, "-c", ignored, *words(tmp_path, "sys.exit(7)")]
    assert finished(command).returncode == 7


def test_main_returns_the_status(tmp_path):
    """Also in a thread, and the program goes on, with its own signals."""
    program = f"""
        import os, signal, threading, time
        from jaxmpi_launch import command, mpiexec
        words = {words(tmp_path, "sys.exit(7)")[3:]!r}
        before = signal.getsignal(signal.SIGINT)
        found = [command.main(words)]
        thread = threading.Thread(target=lambda: found.append(command.main(words)))
        thread.start(); thread.join()
        files = sorted(os.listdir("/proc/self/fd"))
        command.main(["--mpiexec-args=", *words])
        while threading.active_count() > 1: time.sleep(0.01)
        print(found, signal.getsignal(signal.SIGINT) is before, files == sorted(os.listdir("/proc/self/fd")))
    """
    done = finished([sys.executable, written(tmp_path, program)], capture_output=True, text=True)
    assert done.stdout == "[7, 7] True True\n", done.stderr


def test_more_descriptors_than_select_takes(tmp_path):
    """The status, standard input, stderr, a signal, and what is told of ranks are what they are."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < 4000:
        pytest.skip("the system permits too few files")
    reads = "import os, sys; rank = os.environ['PMI_RANK']; print(rank, len(sys.stdin.read())); sys.stderr.write('err')"
    command = words(tmp_path, f"{BOTH}\nsys.exit(7)", 2, reads)
    program = f"""
        import os, resource, subprocess, sys
        resource.setrlimit(resource.RLIMIT_NOFILE, (4000, {hard}))
        files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
        for file in files: os.set_inheritable(file, True)
        sys.exit(subprocess.run({command!r}, close_fds=False).returncode)
    """
    done = finished([sys.executable, written(tmp_path, program)], input="abc", capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (7, "errerr")
    assert sorted(done.stdout.splitlines()) == ["0 3", "1 0"]


# --- signals ------------------------------------------------------------------------------------------------------

COUNTS = """
seen = []
for n in (1, 2, 10, 12, 15): signal.signal(n, lambda n, _: seen.append(n))
print("ready", flush=True)
while 15 not in seen: time.sleep(0.02)
time.sleep(0.5)  # in which a second one would come
print(sorted(seen), flush=True)
sys.exit(9)
"""


@pytest.mark.parametrize("to", one_each_time(["launcher", "group", "both"], "group", "both"))
def test_signals_come_once(to, tmp_path):
    """To mpiexec, whether they were for the launcher alone, as by `kill`, for its group, as Ctrl-C is, or for both, as
    those of `timeout` are."""
    command = ["env", "--default-signal", *words(tmp_path, COUNTS)]  # also if nohup or a background job ignores some
    with started(command, stdout=subprocess.PIPE, env=outside_of_a_job(), start_new_session=True, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
            if to in ("launcher", "both"):
                process.send_signal(number)
            if to in ("group", "both"):
                os.killpg(process.pid, number)
        assert process.stdout.read() == "[1, 2, 10, 12, 15]\n"
        assert process.wait(10) - 128 in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)


@pytest.mark.filterwarnings("ignore")  # of JAX about the fork
@pytest.mark.parametrize("what", ["Ctrl-C", "the terminal is closed", "SIGHUP"])
def test_job_in_a_terminal(what, tmp_path, job):
    """A real job ends in order."""
    program = written(tmp_path, "from mpi4py import MPI\nimport time\nprint('ready', flush=True)\ntime.sleep(100)")
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(COMMAND[0], [*COMMAND, "-n", "2", str(program)], job)
    seen = b""
    while seen.count(b"ready") < 2:
        seen += os.read(terminal, 1000)
    if what == "the terminal is closed":
        os.close(terminal)
    elif what == "Ctrl-C":
        os.write(terminal, b"\x03")
    else:
        os.kill(pid, signal.SIGHUP)
    with contextlib.suppress(OSError):
        while more := os.read(terminal, 1000):
            seen += more
    _, status = os.waitpid(pid, 0)
    assert status != 0
    assert b"within 5 seconds" not in seen  # of Open MPI's, for a second one
    assert b"force abort" not in seen.partition(b"Press Ctrl-C again to force abort")[2]
    assert b"mpiexec is still there" not in seen  # the launcher ends it 60 seconds after a signal that did not reach it


# --- what is passed on --------------------------------------------------------------------------------------------


def test_stderr_that_is_closed(tmp_path):
    """The job goes on, and ends as it does."""
    text = "sys.stderr.write('lost'); rank(0).wait(); print('done'); sys.exit(4)"
    shell = ["bash", "-c", f"{' '.join(words(tmp_path, text))} 2>&-"]
    done = finished(shell, stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (4, b"done\n")


def test_the_error_is_the_last_that_is_told(tmp_path):
    """Below what MPI writes of the abort."""
    program = """
        import time
        from mpi4py import MPI
        MPI.COMM_WORLD.Barrier()
        if MPI.COMM_WORLD.rank == 1: raise KeyError("this")
        time.sleep(100)
    """
    done = launch(2, written(tmp_path, program), check=False)
    assert done.returncode == 1
    last = done.stderr.replace("\0", "").rstrip().rpartition("\n")[2]  # Open MPI's last byte is a 0
    assert last == "jaxmpi.run: rank 1 ended the job with code 1: KeyError: 'this'", done.stderr


# --- the end of the launcher --------------------------------------------------------------------------------------

BUSY = {
    "Python": "ready()\nwhile True: pass",
    "XLA": "import jax, jax.numpy as jnp\nloop = lambda x: jax.lax.while_loop(lambda v: v[0] > -1, abs, x)\n"
    "for_ever = jax.jit(loop).lower(jnp.ones(3)).compile()\nready()\nfor_ever(jnp.ones(3))[0].block_until_ready()",
    "sleep": "ready()\ntime.sleep(1000)",
    "a call that holds the interpreter": "import ctypes\nready()\nctypes.PyDLL(None).sleep(1000)",
    "an operation": "import jax.numpy as jnp\nimport jaxmpi\nx = jnp.ones(3)\nready()\n"
    "jaxmpi.recv(x, rank).block_until_ready()",
}


@pytest.mark.parametrize("within", one_each_time(BUSY, "a call that holds the interpreter"))
@pytest.mark.parametrize("group", [False, True], ids=["launcher", "group"])
def test_launcher_is_killed(within, group, tmp_path, job):
    """No process of the job lives some seconds later, whatever it does."""
    begin = "import time\nfrom mpi4py import MPI\nrank = MPI.COMM_WORLD.rank\ndef ready(): print('ready', flush=True)\n"
    program = written(tmp_path, begin + BUSY[within])
    command = [*COMMAND, "-n", "2", program]
    with started(command, stdout=subprocess.PIPE, env=job, start_new_session=True, text=True) as process:
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        assert len(processes(job)) >= 4
        begin = time.monotonic()
        if group:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        ranks = lambda: [line for line in processes(job).values() if str(program) in line and "launch.child" in line]  # noqa: E731
        assert until(lambda: not ranks())
        if not group:
            errors_page.note(f"the launcher is killed, ranks are in {within}", "", time.monotonic() - begin)
        assert until(lambda: not processes(job)), processes(job)


def test_what_a_rank_leaves_behind_stays(tmp_path):
    """A process that it has started is no rank, and outlives the job if it wants to."""
    ended, stays = tmp_path / "ended", tmp_path / "stays"
    waits = f"while not pathlib.Path({str(ended)!r}).exists(): time.sleep(0.01)"
    child = f"import time, pathlib\n{waits}\npathlib.Path({str(stays)!r}).touch()"
    files = "start_new_session=True, stdin=-3, stdout=-3, stderr=-3"
    program = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}], {files})"
    assert finished([*COMMAND, "-n", "1", "-c", program]).returncode == 0
    ended.touch()
    assert not is_openmpi() or until(stays.exists)


# --- input, places, names -----------------------------------------------------------------------------------------

READS = "from mpi4py import MPI; import sys; print(MPI.COMM_WORLD.rank, len(sys.stdin.read()), flush=True)"


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="another user's input needs root")
@pytest.mark.parametrize("kind", one_each_time(["pipe", "file"], "file"))
def test_input_of_another_user(kind, tmp_path):
    """As under sudo: it cannot be opened again by a path, the descriptor is enough."""
    capabilities = "-dac_override,-dac_read_search"  # by which root may open what is another's
    command = ["setpriv", "--bounding-set", capabilities, *COMMAND, "-n", "2", "-c", READS]
    if kind == "file":
        (tmp_path / "input").write_text("x" * 30_000)
        given = os.open(tmp_path / "input", os.O_RDONLY)
    else:
        given, writes = os.pipe()
        os.write(writes, b"x" * 30_000)
        os.close(writes)
    os.fchown(given, 65534, 65534)
    os.fchmod(given, 0o600)
    check = [*command[:3], sys.executable, "-c", "open('/dev/fd/0')"]
    assert finished(check, stdin=given, capture_output=True).returncode != 0
    done = finished(command, stdin=given, capture_output=True)
    os.close(given)
    assert sorted(done.stdout.splitlines()) == [b"0 30000", b"1 0"], done.stderr
    errors_page.goes_on("standard input belongs to another user")


def test_input_that_is_a_socket(tmp_path):
    """As under inetd, and of programs that start others so; where the folder's path is longer than the address of a
    socket may be."""
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    of_openmpi = ("OMPI_MCA_orte_tmpdir_base", "PRTE_MCA_prte_tmpdir_base", "PMIX_MCA_ptl_base_tmpdir")
    environment = {**outside_of_a_job(), **dict.fromkeys(of_openmpi, "/tmp"), "TMPDIR": str(folder)}
    mine, theirs = socket.socketpair()
    command = [*COMMAND, "-n", "2", "-c", READS]
    with started(command, stdin=theirs, stdout=subprocess.PIPE, env=environment, text=True) as process:
        theirs.close()
        mine.sendall(b"x" * 1000)
        mine.close()
        assert sorted(process.communicate(timeout=240)[0].splitlines()) == ["0 1000", "1 0"]


def test_folder_that_goes(tmp_path):
    """The job goes on, and the launcher says what it no longer does."""
    text = "import shutil; shutil.rmtree(os.environ['JAXMPI_JOB_FOLDER']); time.sleep(1)"
    done = fake(tmp_path, text)
    assert done.returncode == 0
    assert done.stderr.startswith(b"jaxmpi.run: what ranks wait for is not told any more: FileNotFoundError")
