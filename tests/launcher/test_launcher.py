"""The launcher as the parent of mpiexec: its status, signals, what it passes on and leaves out, and its own end."""

import contextlib
import os
import pty
import re
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from jaxmpi_launch import command, mpiexec
from jaxmpi_launch import output, segments
from programs import errors_page
from support import limits
from support.launch import end_what_is_left, launch, outside_of_a_job, started
from support.rows import one_each_time

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


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def written(tmp_path, text, name="program.py"):
    program = tmp_path / name
    program.write_text(textwrap.dedent(text))
    return program


FAKE = """\
#!/usr/bin/env python3
import os, signal, subprocess, sys, time
if "--version" in sys.argv: sys.exit(print("fake"))
words = sys.argv[3:]
def rank(number, **more): return subprocess.Popen(words, env={**os.environ, "PMI_RANK": str(number)}, **more)
"""


def fake(tmp_path, text, ranks=2, program="pass", **options):
    """The launcher with an mpiexec of our own, in which `rank(0)` starts a rank."""
    mpiexec = written(tmp_path, FAKE + textwrap.dedent(text), "mpiexec")
    mpiexec.chmod(0o755)
    command = [*COMMAND, "-n", str(ranks), "--mpiexec", mpiexec, "-c", program]
    return subprocess.run(command, capture_output=True, timeout=60, check=False, env=outside_of_a_job(), **options)


def test_no_test_waits_for_ever():
    """Who reads what a process writes, or waits for it, does so until its limit."""
    with started(["sleep", "1000"], 1, stdout=subprocess.PIPE) as process:
        assert process.stdout.read() == b""
        assert process.wait() == -signal.SIGKILL


# --- the status ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 213])
def test_status_of_mpiexec(code, tmp_path):
    done = fake(tmp_path, f"for r in (0, 1): rank(r).wait()\nsys.exit({code})")
    assert (done.returncode, done.stderr) == (code, b"")


def test_ranks_of_which_each_is_alone(tmp_path):
    """The MPI library is not that of mpiexec. None is lost."""
    done = fake(tmp_path, "for r in (0, 1): rank(r).wait()", 2, "from mpi4py import MPI; print(MPI.COMM_WORLD.rank)")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"0\n0\n", b"")


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("sys.exit('one\\ntwo')", "one"),
        ("raise KeyError('one\\ntwo')", r"KeyError: 'one\ntwo'"),
    ],
)
def test_reason_of_several_lines(end, reason, tmp_path):
    """The first says what it is."""
    done = fake(tmp_path, "rank(0).wait(); sys.exit(1)", 1, f"import sys; {end}")
    last = done.stderr.decode().splitlines()[-1]
    assert last in (reason, f"jaxmpi.run: rank 0 ended the job with code 1: {reason}"), done.stderr


def test_no_thread_can_be_started(tmp_path, monkeypatch):
    """As by ulimit -u 1. mpiexec is ended."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, threading\n"
        'def start(self): raise RuntimeError("can\'t start new thread")\n'
        "if 'jaxmpi.run' in sys.orig_argv: threading.Thread.start = start\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = fake(tmp_path, "time.sleep(100)")
    assert done.returncode == 126
    assert done.stderr.startswith(b"jaxmpi.run: no thread can be started, and so no job: can't start new thread")
    assert done.stderr.count(b"\n") == 1


def test_ranks_that_are_lost(tmp_path):
    """With a machine, of which mpiexec says nothing."""
    done = fake(
        tmp_path,
        "for r in range(4):\n    rank(r).wait()",
        4,
        "import os\nif os.environ['PMI_RANK'] in '13': os.kill(os.getpid(), 9)",
    )
    assert done.returncode == 1
    assert done.stderr.startswith(b"jaxmpi.run: mpiexec ended with status 0, but ranks 1, 3 began and never told of an")
    assert done.stderr.count(b"\n") == 1


def test_ranks_that_a_signal_ends_though_mpiexec_says_nothing(tmp_path):
    """As that of Open MPI, if what it has started on other machines gets the signal as well: a job of Slurm."""
    done = fake(
        tmp_path,
        """
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
        """,
        program="import time; print('begins', flush=True); time.sleep(1000)",
    )
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stderr == b"jaxmpi.run: ended by SIGTERM\n"


@pytest.mark.parametrize(
    "end",
    ["import os; os._exit(0)", "import os; os.execvp('true', ['true'])", "import os; os.setuid(os.geteuid() or 65534)"],
)
def test_ranks_that_end_without_mpi(end, tmp_path):
    done = fake(tmp_path, "for r in (0, 1): rank(r).wait()", 2, f"import os; {end}")
    assert (done.returncode, done.stderr) == (0, b"")


def test_rank_that_fails_though_mpiexec_says_nothing(tmp_path):
    done = fake(
        tmp_path, "for r in (0, 1): rank(r).wait()", 2, "import os, sys; sys.exit(int(os.environ['PMI_RANK']) * 5)"
    )
    assert done.returncode == 5
    assert done.stderr == b"jaxmpi.run: rank 1 ended the job with code 5: sys.exit(5)\n"


@pytest.mark.parametrize("number", one_each_time([signal.SIGKILL, signal.SIGSEGV], signal.SIGKILL))
def test_mpiexec_ended_by_a_signal(number, tmp_path, job):
    """A rank that it leaves behind ends as well."""
    mpiexec = written(
        tmp_path,
        FAKE + f"rank(0, stdout=subprocess.PIPE).stdout.readline(); os.kill(os.getpid(), {int(number)})",
        "mpiexec",
    )
    mpiexec.chmod(0o755)
    command = [
        *COMMAND,
        "-n",
        "1",
        "--mpiexec",
        mpiexec,
        "-c",
        "import time; print('begins', flush=True); time.sleep(1000)",
    ]
    begin = time.monotonic()
    done = subprocess.run(command, stderr=subprocess.PIPE, env=job, timeout=60, check=False, text=True)
    told = f"jaxmpi.run: mpiexec was ended by signal {int(number)}"
    errors_page.note(f"mpiexec is ended by {number.name}", told, time.monotonic() - begin)
    assert done.returncode == 128 + number
    assert done.stderr == f"jaxmpi.run: mpiexec was ended by signal {int(number)} ({number.name})\n"


def test_sigchld_is_ignored_by_who_starts_it(tmp_path):
    ignored = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    mpiexec = written(tmp_path, FAKE + "sys.exit(7)", "mpiexec")
    mpiexec.chmod(0o755)
    command = [sys.executable, "-c", ignored, *COMMAND, "-n", "1", "--mpiexec", mpiexec, "-c", "pass"]
    assert subprocess.run(command, env=outside_of_a_job(), timeout=60, check=False).returncode == 7


def test_main_returns_the_status(tmp_path):
    """Also in a thread, and the program goes on, with its own signals."""
    mpiexec = written(tmp_path, FAKE + "sys.exit(7)", "mpiexec")
    mpiexec.chmod(0o755)
    program = f"""
        import os, signal, threading, time
        from jaxmpi_launch import command, mpiexec
        words = ["-n", "1", "--mpiexec", {str(mpiexec)!r}, "-c", "pass"]
        before = signal.getsignal(signal.SIGINT)
        found = [command.main(words)]
        thread = threading.Thread(target=lambda: found.append(command.main(words)))
        thread.start(); thread.join()
        files = sorted(os.listdir("/proc/self/fd"))
        command.main(["--mpiexec-args=", *words])
        while threading.active_count() > 1: time.sleep(0.01)
        print(found, signal.getsignal(signal.SIGINT) is before, files == sorted(os.listdir("/proc/self/fd")))
    """
    done = subprocess.run(
        [sys.executable, written(tmp_path, program)],
        capture_output=True,
        text=True,
        env=outside_of_a_job(),
        timeout=60,
        check=False,
    )
    assert done.stdout == "[7, 7] True True\n", done.stderr


MANY = 1100
"""Descriptors that are open already: more than `select` takes."""


def room_for(files):
    """As a program that raises its limit; the tests' own is put back."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < files:
        pytest.skip("the system permits too few files")
    return before


@pytest.mark.parametrize(
    "way", one_each_time(["its caller has many files", "it inherits many files"], "it inherits many files")
)
def test_more_descriptors_than_select_takes(way, tmp_path):
    """The status, standard input, stderr, a signal, and what is told of ranks are what they are."""
    hard = room_for(4000)[1]
    mpiexec = written(tmp_path, FAKE + "for r in (0, 1): rank(r).wait()\nsys.exit(7)", "mpiexec")
    mpiexec.chmod(0o755)
    reads = "import os, sys; rank = os.environ['PMI_RANK']; print(rank, len(sys.stdin.read())); sys.stderr.write('err')"
    words = ["-n", "2", "--mpiexec", str(mpiexec), "-c", reads]
    program = f"""
        import os, resource, signal, subprocess, sys
        resource.setrlimit(resource.RLIMIT_NOFILE, (4000, {hard}))
        files = [os.open("/dev/null", os.O_RDONLY) for _ in range({MANY})]
        if {way.startswith("it")}:
            for file in files: os.set_inheritable(file, True)
            sys.exit(subprocess.run([{", ".join(map(repr, COMMAND))}, *{words!r}], close_fds=False).returncode)
        from jaxmpi_launch import command, mpiexec
        sys.exit(command.main({words!r}))
    """
    command = [sys.executable, written(tmp_path, program)]
    done = subprocess.run(
        command, input="abc", capture_output=True, text=True, timeout=60, check=False, env=outside_of_a_job()
    )
    assert (done.returncode, done.stderr) == (7, "errerr")
    assert sorted(done.stdout.splitlines()) == ["0 3", "1 0"]


# --- signals ------------------------------------------------------------------------------------------------------

COUNTS = """
seen = []
for n in (1, 2, 10, 12, 15, 18, 28): signal.signal(n, lambda n, _: seen.append(n))
signal.signal(20, signal.SIG_DFL)
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
    mpiexec = written(tmp_path, FAKE + COUNTS, "mpiexec")
    mpiexec.chmod(0o755)
    command = [*COMMAND, "-n", "1", "--mpiexec", mpiexec, "-c", "pass"]
    with started(command, stdout=subprocess.PIPE, env=outside_of_a_job(), start_new_session=True, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGTERM):
            if to in ("launcher", "both"):
                process.send_signal(number)
            if to in ("group", "both"):
                os.killpg(process.pid, number)
        assert process.stdout.read() == "[1, 2, 10, 12, 15, 28]\n"
        assert process.wait(10) - 128 in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)


def stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize("to", one_each_time(["launcher", "group", "mpiexec first"], "mpiexec first"))
def test_suspended_and_resumed(to, tmp_path):
    """As by Ctrl-Z and `fg`: the launcher stops with mpiexec, so that the shell knows, whichever of the two the signal
    reaches first."""
    mpiexec = written(tmp_path, FAKE + COUNTS, "mpiexec")
    mpiexec.chmod(0o755)
    command = [*COMMAND, "-n", "1", "--mpiexec", mpiexec, "-c", "pass"]
    # In a session of its own, but not as its first process, whose group has no parent in it, and is not stopped.
    session = ["setsid", "--wait", sys.executable, "-c"]
    outer = (
        "import os, subprocess, sys; p = subprocess.Popen(sys.argv[1:], preexec_fn=os.setpgrp); "
        "print(p.pid, flush=True); sys.exit(p.wait())"
    )
    with started([*session, outer, *command], stdout=subprocess.PIPE, env=outside_of_a_job(), text=True) as process:
        launcher = int(process.stdout.readline())
        assert process.stdout.readline() == "ready\n"
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        (child,) = (int(its) for its in children if "jaxmpi.run" not in Path(f"/proc/{its}/cmdline").read_text())
        send = os.killpg if to == "group" else os.kill
        if to == "mpiexec first":
            os.kill(child, signal.SIGTSTP)
            assert until(lambda: stopped(child))
        send(launcher, signal.SIGTSTP)
        assert until(lambda: stopped(launcher) and stopped(child))
        send(launcher, signal.SIGCONT)
        assert until(lambda: not stopped(launcher) and not stopped(child))
        send(launcher, signal.SIGTERM)
        assert process.stdout.read() == "[15, 18]\n"
        assert process.wait(10) == 128 + signal.SIGTERM


@pytest.mark.filterwarnings("ignore")  # of JAX about the fork
def test_ctrl_c_of_a_terminal(tmp_path, job):
    """It ends a real job, in order."""
    program = written(tmp_path, "from mpi4py import MPI\nimport time\nprint('ready', flush=True)\ntime.sleep(100)")
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(COMMAND[0], [*COMMAND, "-n", "2", str(program)], job)
    seen = b""
    while seen.count(b"ready") < 2:
        seen += os.read(terminal, 1000)
    os.write(terminal, b"\x03")
    with contextlib.suppress(OSError):
        while more := os.read(terminal, 1000):
            seen += more
    _, status = os.waitpid(pid, 0)
    assert status != 0
    assert b"within 5 seconds" not in seen  # of Open MPI's, for a second one
    assert b"force abort" not in seen.partition(b"Press Ctrl-C again to force abort")[2]


# --- what is passed on --------------------------------------------------------------------------------------------


def block(rank, code, host="node"):
    rule = "-" * 74 + "\n"
    return (
        f"{rule}MPI_ABORT was invoked on rank {rank} in communicator MPI_COMM_WORLD\n  Proc: [[12345,1],{rank}]\n"
        f"  Errorcode: {code}\n\nNOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.\n"
        "You may or may not see output from other processes, depending on\nexactly when Open MPI kills them.\n"
        f"{rule}{rule}prterun has exited due to process rank {rank} with PID 0 on node {host} calling\n"
        '"abort". This may have caused other processes in the application to be\n'
        f"terminated by signals sent by prterun (as reported here).\n{rule}"
    ).encode()


@pytest.mark.parametrize("size", [1, 7, 100, 100_000])
def test_filter_leaves_out_each_text_once(size):
    """However they are cut, with what ranks write in between, and no other byte."""

    def passed(data, *aborting):
        found = output.Filter()
        for rank, code in aborting:
            found.expect(rank, code)
        parts = [found.take(data[i : i + size]) for i in range(0, len(data), size)]
        return b"".join(parts) + found.end()

    noise = bytes(range(256)) * 5 + b"-" * 200 + b"\n" + b"-" * 74 + b"\nMPI_ABORT was invoked\n---"
    ours = block(1, 3)
    first = len(ours) // 2 + 40
    assert passed(noise + ours + noise) == noise + ours + noise
    assert passed(noise + ours + noise, (1, 3)) == noise + noise
    assert passed(noise + ours + noise, (1, 4)) == noise + ours[: ours.index(b"-\nprterun") - 73] + noise
    assert passed(noise + ours + noise, (2, 3)) == noise + ours + noise
    assert passed(ours + b"x" + ours, (1, 3)) == b"x" + ours
    assert passed(ours + b"\0", (1, 3)) == b""
    assert passed(b"\0\0x\0" + ours + b"\0\0x\0\0", (1, 3)) == b"\0\0x\0\0\0x\0"
    assert passed(b"\0") == b"\0"
    assert passed(ours[:first], (1, 3)) == ours[ours.index(b"-\nprterun") - 73 : first]


DATA = "bytes(range(256)) * 40960"
"""10 MB, of all bytes."""


def test_all_bytes_pass(tmp_path):
    done = fake(tmp_path, f"sys.stderr.buffer.write({DATA} + b'no end of a line')", 1)
    assert done.stderr == eval(DATA) + b"no end of a line"


def test_nothing_waits_in_the_launcher(tmp_path):
    """A part of a line comes at once."""
    read = tmp_path / "read"
    waits = f"while not os.path.exists({str(read)!r}): time.sleep(0.01)"
    mpiexec = written(tmp_path, FAKE + f"os.write(2, b'part')\n{waits}\nos.write(2, b' of a line\\n')", "mpiexec")
    mpiexec.chmod(0o755)
    command = [*COMMAND, "-n", "1", "--mpiexec", mpiexec, "-c", "pass"]
    with started(command, stderr=subprocess.PIPE, env=outside_of_a_job()) as process:
        assert os.read(process.stderr.fileno(), 100) == b"part"
        read.touch()
        assert process.stderr.read() == b" of a line\n"


@pytest.mark.parametrize("where", ["closed", "a reader that goes"])
def test_stderr_that_takes_nothing(where, tmp_path):
    """The job goes on, and ends as it does."""
    mpiexec = written(
        tmp_path, FAKE + f"sys.stderr.buffer.write({DATA}); rank(0).wait(); print('done'); sys.exit(4)", "mpiexec"
    )
    mpiexec.chmod(0o755)
    words = f"{sys.executable} -m jaxmpi.run -n 1 --mpiexec {mpiexec} -c pass"
    shell = {
        "closed": f"{words} 2>&-",
        "a reader that goes": f"{words} 2> >(head -c 10 >/dev/null)",
    }[where]
    done = subprocess.run(
        ["bash", "-c", shell], stdout=subprocess.PIPE, env=outside_of_a_job(), timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (4, b"done\n")


def test_what_holds_stderr_open_is_not_waited_for(tmp_path):
    """As ssh may, of which a process stays."""
    holds = "process = subprocess.Popen(['sleep', '1000'], stdout=subprocess.DEVNULL); print(process.pid)"
    mpiexec = written(tmp_path, FAKE + holds, "mpiexec")
    mpiexec.chmod(0o755)
    command = [*COMMAND, "-n", "1", "--mpiexec", mpiexec, "-c", "pass"]
    with open(tmp_path / "errors", "w") as errors:
        pipes = {"stdout": subprocess.PIPE, "stderr": errors}
        done = subprocess.run(command, env=outside_of_a_job(), timeout=60, check=False, **pipes)
    assert done.returncode == 0
    os.kill(int(done.stdout), signal.SIGKILL)  # it is still there


FAILS = """
import os, sys, time
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
MPI.COMM_WORLD.Barrier()
if rank == 1:
    {}
time.sleep(100)
"""


def is_openmpi():
    return mpiexec.flavour(mpiexec.find_mpiexec()) == "openmpi"


@pytest.mark.parametrize("verbose", one_each_time(["", "variable", "option"], "", "option"))
def test_the_error_is_the_last_that_is_told(verbose, tmp_path):
    program = written(tmp_path, FAILS.format("raise KeyError('this')"))
    environment = {"JAXMPI_VERBOSE": "1"} if verbose == "variable" else {}
    options = ["--verbose"] if verbose == "option" else []
    done = launch(2, *options, program, check=False, **environment)
    assert done.returncode == 1
    last = done.stderr.replace("\0", "").rstrip().rpartition("\n")[2]  # Open MPI's last byte is a 0
    assert verbose or "\0" not in done.stderr
    if not is_openmpi():  # its line comes from the rank itself, and may be lost with it
        told = "jaxmpi.run: rank 1 ended the job with code 1: KeyError: 'this'"
        assert last == (told if "Abort(1)" in done.stderr else "KeyError: 'this'")
    elif verbose:
        assert "MPI_ABORT was invoked on rank 1" in done.stderr
        assert "prterun has exited due to process rank 1" in done.stderr
        assert last == "jaxmpi.run: rank 1 ended the job with code 1: KeyError: 'this'"
    else:
        assert last == "KeyError: 'this'"
        assert "MPI_ABORT" not in done.stderr
        assert "prterun" not in done.stderr


def test_group_of_exceptions(tmp_path):
    """The last line that Python writes of it is a rule."""
    if sys.version_info < (3, 11):
        pytest.skip("Python 3.11 brought them")
    program = written(tmp_path, FAILS.format("raise ExceptionGroup('several', [KeyError(1), ValueError('x' * 5000)])"))
    done = launch(2, program, check=False)
    assert done.stderr.rstrip().rpartition("\n")[2].endswith("code 1: ExceptionGroup: several (2 sub-exceptions)")


@pytest.mark.parametrize("number", one_each_time([signal.SIGINT, signal.SIGTERM], signal.SIGTERM))
def test_a_signal_is_told(number, tmp_path):
    """Open MPI's mpiexec says nothing, and ends with 1."""
    program = written(tmp_path, "from mpi4py import MPI\nprint('ready', flush=True)\nimport time\ntime.sleep(1000)")
    done = launch(2, program, check=False, interrupt_at="ready", said=2, by=number)
    assert done.returncode == 128 + number or "KeyboardInterrupt" in done.stderr
    assert f"jaxmpi.run: ended by {number.name}" in done.stderr or "KeyboardInterrupt" in done.stderr


def test_status_without_a_word(tmp_path):
    """A rank that says nothing itself: the launcher tells who it was."""
    done = launch(2, written(tmp_path, FAILS.format("sys.exit(3)")), check=False)
    assert done.returncode == 3
    assert done.stderr.endswith("jaxmpi.run: rank 1 ended the job with code 3: sys.exit(3)\n")
    assert "MPI_ABORT was" not in done.stderr


@pytest.mark.nightly
def test_own_text_of_a_rank_stays(tmp_path):
    """The same that Open MPI says, part of a line, all bytes, and much of it: if that takes long, the rank tells that
    it ends before its second text has come, which is then left out in the place of Open MPI's."""
    (tmp_path / "text").write_bytes(block(1, 1, os.uname().nodename))
    writes = (
        f"text = open({str(tmp_path / 'text')!r}, 'rb').read(); os.write(2, text + {DATA} + b'end\\n' + text + b'part')"
    )
    program = written(tmp_path, FAILS.format(f"{writes}; raise KeyError('this')"))
    command = [*COMMAND, "-n", "2", program]
    done = subprocess.run(command, capture_output=True, env=outside_of_a_job(), timeout=100, check=False)
    assert done.returncode == 1
    assert done.stderr.count(b"MPI_ABORT was invoked on rank 1") == 2
    assert done.stderr.count(b"prterun has exited due to process rank 1") == 2
    assert eval(DATA) + b"end\n" in done.stderr
    rest = done.stderr.rpartition(eval(DATA) + b"end\n")[2]  # the traceback quotes the line that has "part", too
    assert rest.removeprefix((tmp_path / "text").read_bytes()).startswith(b"part")


def test_abort_of_the_program_itself_is_told_by_mpi(tmp_path):
    """The launcher knows nothing of it, and leaves nothing out."""
    done = launch(2, written(tmp_path, FAILS.format("MPI.COMM_WORLD.Abort(6)")), check=False)
    assert done.returncode == 6
    assert "MPI_ABORT was invoked on rank 1" in done.stderr if is_openmpi() else "Abort(6)" in done.stderr


@pytest.mark.nightly
def test_all_ranks_fail(tmp_path):
    program = written(tmp_path, FAILS.format("pass\nraise KeyError('this')"))
    done = launch(3, program, check=False)
    assert done.returncode == 1
    assert "KeyError: 'this'" in done.stderr
    assert "MPI_ABORT was" not in done.stderr


# --- the end of the launcher --------------------------------------------------------------------------------------

BUSY = {
    "Python": "ready()\nwhile True: pass",
    "XLA": "import jax, jax.numpy as jnp\nloop = lambda x: jax.lax.while_loop(lambda v: v[0] > -1, abs, x)\n"
    "for_ever = jax.jit(loop).lower(jnp.ones(3)).compile()\nready()\nfor_ever(jnp.ones(3))[0].block_until_ready()",
    "sleep": "ready()\ntime.sleep(1000)",
    "a call that holds the interpreter": "import ctypes\nready()\nctypes.PyDLL(None).sleep(1000)",
    "an operation": "import jax.numpy as jnp\nfrom jaxmpi import notoken\nx = jnp.ones(3)\nready()\n"
    "notoken.recv(x, rank).block_until_ready()",
}


@pytest.mark.parametrize("within", one_each_time(BUSY, "a call that holds the interpreter"))
@pytest.mark.parametrize("group", [False, True], ids=["launcher", "group"])
def test_launcher_is_killed(within, group, tmp_path, job):
    """No process of the job lives some seconds later, whatever it does, and no file is left."""
    begin = "import time\nfrom mpi4py import MPI\nrank = MPI.COMM_WORLD.rank\ndef ready(): print('ready', flush=True)\n"
    program = written(tmp_path, begin + BUSY[within])
    folder = tmp_path / "folder"
    folder.mkdir()
    command = [*COMMAND, "-n", "2", program]
    with started(
        command, stdout=subprocess.PIPE, env={**job, "TMPDIR": str(folder)}, start_new_session=True, text=True
    ) as process:
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        assert len(processes(job)) >= 4
        begin = time.monotonic()
        if group:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        assert until(lambda: not any(str(program) in line and "child.py" in line for line in processes(job).values()))
        if not group:
            errors_page.note(f"the launcher is killed, ranks are in {within}", "", time.monotonic() - begin)
        assert until(lambda: not processes(job)), processes(job)
    if not group:  # else the process that removes it is killed as well
        assert until(lambda: not list(folder.glob("jaxmpi-*")))


def test_segments_of_mpich(tmp_path, monkeypatch):
    """Only what nobody else can need is removed."""
    monkeypatch.setattr(segments, "_FOLDER", str(tmp_path))
    names = ["mpich_shm_1_0", "mpich_shm_0abc_7", "mpich_shm_g_0", "mpich_shm_1", "sm_segment.1", "mpich_shm_2_0"]
    for name in [*names, "mpich_shm_3_0", "mpich_shm_4_0"]:
        (tmp_path / name).write_bytes(bytes(4096))
    (tmp_path / "mpich_shm_5_0").symlink_to(tmp_path / "mpich_shm_g_0")
    since = time.time() - 100
    os.utime(tmp_path / "mpich_shm_2_0", (since - 1, since - 1))
    if os.geteuid() == 0:
        os.chown(tmp_path / "mpich_shm_3_0", 1234, 1234)
    maps = "import mmap, os, sys; m = mmap.mmap(os.open(sys.argv[1], 2), 4096); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", maps, tmp_path / "mpich_shm_4_0"]
    with started(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        segments.remove(since)
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {*names[2:], *(["mpich_shm_3_0"] if os.geteuid() == 0 else []), "mpich_shm_4_0", "mpich_shm_5_0"}
        process.stdin.close()
    segments.remove(since)
    assert not (tmp_path / "mpich_shm_4_0").exists()


@pytest.mark.parametrize("ends", ["raise KeyError('this')", "os.kill(os.getpid(), 9)", "launcher"])
def test_nothing_is_left_in_shared_memory(ends, tmp_path, job):
    """MPICH leaves files there if it does not come to MPI_Finalize."""
    if mpiexec.flavour(mpiexec.find_mpiexec()) != "hydra" or os.readlink("/proc/self/ns/pid") != segments._ALL_PROCESSES:
        pytest.skip("Open MPI's mpiexec removes them, and in a container nobody can")
    program = """
        import os, time
        from mpi4py import MPI
        MPI.COMM_WORLD.Barrier()
        print(*(line.split("/")[-1].strip() for line in open("/proc/self/maps") if "/mpich_shm" in line), flush=True)
        MPI.COMM_WORLD.Barrier()
    """
    does = "pass" if ends == "launcher" else f"if MPI.COMM_WORLD.rank: {ends}"
    program = written(tmp_path, f"{textwrap.dedent(program)}\n{does}\ntime.sleep(1000)")
    with started(
        [*COMMAND, "-n", "2", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=job, text=True
    ) as process:
        found = {name for _ in range(2) for name in process.stdout.readline().split()}
        if ends == "launcher":
            process.kill()
        process.wait(60)
    assert found
    seconds = 60 if ends == "launcher" else 0
    assert until(lambda: not any(Path("/dev/shm", name).exists() for name in found), seconds)


def test_limit_of_subprocess_run(tmp_path, job):
    program = written(tmp_path, "from mpi4py import MPI\nimport time\ntime.sleep(1000)")
    with pytest.raises(subprocess.TimeoutExpired):  # no rank holds what is read
        subprocess.run([*COMMAND, "-n", "2", program], env=job, capture_output=True, timeout=3, check=False)
    assert until(lambda: not processes(job))


@pytest.mark.nightly
def test_launcher_is_killed_at_once(tmp_path, job):
    """Before a rank has begun."""
    for wait in (0.1, 0.4):
        with started([*COMMAND, "-n", "2", "-c", "import time; time.sleep(1000)"], env=job) as process:
            time.sleep(wait)
            process.kill()
        assert until(lambda: not processes(job)), wait


def test_what_a_rank_leaves_behind_stays(tmp_path):
    """A process that it has started is no rank, and outlives the job if it wants to."""
    ended, stays = tmp_path / "ended", tmp_path / "stays"
    waits = f"while not pathlib.Path({str(ended)!r}).exists(): time.sleep(0.01)"
    child = f"import time, pathlib\n{waits}\npathlib.Path({str(stays)!r}).touch()"
    files = "start_new_session=True, stdin=-3, stdout=-3, stderr=-3"
    program = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}], {files})"
    subprocess.run([*COMMAND, "-n", "1", "-c", program], env=outside_of_a_job(), timeout=60, check=True)
    ended.touch()
    assert not is_openmpi() or until(stays.exists)


# --- input, places, names -----------------------------------------------------------------------------------------

READS = "from mpi4py import MPI; import sys; print(MPI.COMM_WORLD.rank, len(sys.stdin.read()), flush=True)"


@pytest.mark.nightly
@pytest.mark.parametrize("length", [520, 3000])
def test_long_tmpdir(length, tmp_path):
    """No path is cut: what waits is told, and a file whose path is the first 511 characters of one of ours stays."""
    folder = tmp_path
    while len(str(folder)) < length - 202:
        folder = folder / ("x" * 150)
    folder = folder / ("x" * (length - len(str(folder)) - 1))
    folder.mkdir(parents=True)
    program = written(
        tmp_path,
        """
        import os, time
        folder = os.environ["JAXMPI_JOB_FOLDER"]
        import jax.numpy as jnp
        from mpi4py import MPI
        from jaxmpi import notoken
        cut = f"{folder}/{MPI.COMM_WORLD.rank}.report.draft"[:511]
        if MPI.COMM_WORLD.rank == 0:
            if not os.path.isdir(cut): open(cut, "w").write("ours")
            notoken.allreduce(jnp.ones(3), MPI.SUM).block_until_ready()
        time.sleep(100)
        """,
    )
    short = {
        "OMPI_MCA_orte_tmpdir_base": "/tmp",
        "PRTE_MCA_prte_tmpdir_base": "/tmp",
        "PMIX_MCA_ptl_base_tmpdir": "/tmp",
    }
    limits = {"JAXMPI_TIMEOUT": "2", "JAXMPI_TIMEOUT_ACTION": "abort"}
    done = launch(2, program, check=False, timeout=60, TMPDIR=str(folder), **short, **limits)
    assert re.search(r"  rank 0: waits in allreduce of 3 float32, op SUM, .*so far\n", done.stderr), done.stderr
    assert "rank 1: is in no operation" in done.stderr
    assert not list(folder.glob("jaxmpi-*"))
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path != program]
    assert all(path.read_text() == "ours" for path in left)


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
    assert subprocess.run(check, stdin=given, capture_output=True, timeout=60, check=False).returncode != 0
    done = subprocess.run(command, stdin=given, env=outside_of_a_job(), capture_output=True, timeout=60, check=False)
    os.close(given)
    assert sorted(done.stdout.splitlines()) == [b"0 30000", b"1 0"], done.stderr
    errors_page.goes_on("standard input belongs to another user")


def test_input_that_is_a_socket(tmp_path):
    """As under inetd, and of programs that start others so."""
    import socket

    mine, theirs = socket.socketpair()
    command = [*COMMAND, "-n", "2", "-c", READS]
    with started(command, stdin=theirs, stdout=subprocess.PIPE, env=outside_of_a_job(), text=True) as process:
        theirs.close()
        mine.sendall(b"x" * 1000)
        mine.close()
        assert sorted(process.communicate(timeout=60)[0].splitlines()) == ["0 1000", "1 0"]


def test_long_path_of_the_folder(tmp_path):
    """Longer than the address of a socket may be."""
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    short = {
        "OMPI_MCA_orte_tmpdir_base": "/tmp",
        "PRTE_MCA_prte_tmpdir_base": "/tmp",
        "PMIX_MCA_ptl_base_tmpdir": "/tmp",
    }
    environment = {**outside_of_a_job(), **short, "TMPDIR": str(folder)}
    command = [*COMMAND, "-n", "2", "-c", READS]
    done = subprocess.run(
        command, input="abc", env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert sorted(done.stdout.splitlines()) == ["0 3", "1 0"], done.stderr


def test_no_home():
    environment = outside_of_a_job()
    environment.pop("HOME", None)
    command = [*COMMAND, "-n", "1", "-c", "from mpi4py import MPI; print(MPI.COMM_WORLD.size)"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_no_place_for_files():
    """It is said before Open MPI says it by pages; MPICH needs none."""
    environment = {**outside_of_a_job(), "TMPDIR": "/proc"}
    command = [*COMMAND, "-n", "1", "-c", "from mpi4py import MPI; print(MPI.COMM_WORLD.size)"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    if is_openmpi():
        assert done.returncode != 0
        assert done.stderr.startswith("jaxmpi.run: TMPDIR=/proc: ")
        assert "Set TMPDIR to a folder with room" in done.stderr.splitlines()[0]
    else:
        assert (done.returncode, done.stdout) == (0, "1\n")


def test_no_process_for_the_guard(tmp_path, monkeypatch):
    """The job runs without."""
    from jaxmpi_launch import guard

    def fails():
        raise BlockingIOError

    monkeypatch.setattr(guard.os, "fork", fails)
    assert guard.start(0, None, str(tmp_path), time.time(), -1, [signal.SIGUSR1]) is None


@pytest.mark.nightly
def test_name_of_a_communicator_in_lines(tmp_path):
    """The table has it in one."""
    program = written(
        tmp_path,
        """
        import time, jax.numpy as jnp
        from mpi4py import MPI
        from jaxmpi import notoken
        comm = MPI.COMM_WORLD.Dup()
        comm.Set_name("two\\nlines")
        if comm.rank == 0: notoken.allreduce(jnp.ones(3), MPI.SUM, comm=comm).block_until_ready()
        time.sleep(100)
        """,
    )
    limits = {"JAXMPI_TIMEOUT": "2", "JAXMPI_TIMEOUT_ACTION": "abort"}
    done = launch(2, program, check=False, timeout=60, **limits)
    assert re.search(r"  rank 0: waits in allreduce of 3 float32, op SUM, on two lines; .*so far\n", done.stderr)


def test_watch_that_fails_says_so(tmp_path):
    from jaxmpi_launch import monitor

    said = []
    with started(["sleep", "100"]) as process:
        file = os.pidfd_open(process.pid)
        thread = threading.Thread(target=monitor.watch, args=(tmp_path / "no", 2, file, process.pid, [], said.append))
        thread.start()
        thread.join()
        process.kill()
        os.close(file)
    assert said[0].startswith("jaxmpi.run: what ranks wait for is not told any more: FileNotFoundError")


LOOKS = """
import ctypes, os, struct, time
folder = os.environ["JAXMPI_JOB_FOLDER"].encode()
import jax.numpy as jnp
from mpi4py import MPI
from jaxmpi import notoken
rank, libc = MPI.COMM_WORLD.rank, ctypes.CDLL(None)
notoken.barrier()
notoken.allreduce(jnp.ones(3), MPI.SUM).block_until_ready()
time.sleep(1.5)
if rank == 0:
    IN_OPEN = 0x20
    watch = libc.inotify_init1(os.O_NONBLOCK)
    assert libc.inotify_add_watch(watch, folder, IN_OPEN) > 0
    time.sleep(2.5)
    count = at = 0
    try:
        events = os.read(watch, 1 << 20)
    except BlockingIOError:  # there are none
        events = b""
    while at < len(events):
        at += 16 + struct.unpack_from("iIII", events, at)[3]
        count += 1
    print("opened", count, "times", flush=True)
MPI.COMM_WORLD.Barrier()
"""


@pytest.mark.nightly
def test_nothing_is_opened_while_nobody_is_asked(tmp_path):
    """A disk that many machines share is left alone by the ranks, which look each second whether they are asked."""
    done = launch(2, written(tmp_path, LOOKS), JAXMPI_TIMEOUT="8")
    assert done.stdout == "opened 0 times\n"
