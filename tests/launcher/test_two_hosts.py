"""A job on two hosts, started as docs/running.md says, by an agent that enters them: see two_hosts.py."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from programs import errors_page
from support.launch import begin, is_openmpi, launch, outside_of_a_job, until, written
from support.rows import one_each_time
from support.two_hosts import NAMES, two_hosts

pytestmark = [pytest.mark.alone, pytest.mark.sampled, pytest.mark.seconds(120)]

survives = pytest.mark.skipif(not is_openmpi(), reason="jobs of Open MPI alone go on without a rank")

IMPORTS = """
import os, socket, sys, time
import jax.numpy as jnp
from mpi4py import MPI
import jaxmpi
rank, x = MPI.COMM_WORLD.rank, jnp.ones(50000)
"""
BEGIN = f"""{IMPORTS}
print("rank", rank, "on", socket.gethostname(), "sum", float(jaxmpi.allreduce(x, MPI.SUM)[-1]), flush=True)
MPI.COMM_WORLD.Barrier()
"""
OF_OTHERS = "are on other machines, or have not begun: their own reports tell what they wait for"
"""What the launcher's table says of ranks of the second host."""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    try:
        with two_hosts(tmp_path_factory.mktemp("hosts")) as made:
            yield made
    except (PermissionError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no namespaces: {error}")


@pytest.fixture
def job(hosts, tmp_path):
    """Runs a program on 4 ranks, ranks 0 and 1 on the first host, 2 and 3 on the second."""

    def run_program(rest, *more, begin=BEGIN, start=launch, options=True, ranks=4, **environment):
        """Without `options` variables name the hosts, as those of a scheduler do."""
        if is_openmpi():
            hosts.file.write_text("".join(f"{name} slots=2\n" for name in NAMES))
            told = f"--hostfile {hosts.file} --mca plm_rsh_agent {hosts.agent}"
            variables = {"PRTE_MCA_prte_default_hostfile": hosts.file, "PRTE_MCA_plm_ssh_agent": hosts.agent}
        else:
            hosts.file.write_text("".join(f"{name}:2\n" for name in NAMES))
            told = f"-f {hosts.file} -launcher ssh -launcher-exec {hosts.agent}"
            variables = {"HYDRA_HOST_FILE": hosts.file, "HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": hosts.agent}
        program = written(tmp_path, begin, rest)
        words = ("--ranks-per-node", "2", *more, *([f"--mpiexec-args={told}"] if options else []), program)
        environment = {"TMPDIR": hosts.tmp, **({} if options else variables), **environment}
        environment = {name: str(value) for name, value in environment.items()}
        return start(ranks, *words, timeout=60, check=False, through=hosts.enter(NAMES[0]), **environment)

    return run_program


@pytest.mark.nightly
def test_variables_and_folder(job, tmp_path, monkeypatch):
    """They are the same on both hosts, though the agent passes neither."""
    monkeypatch.chdir(tmp_path)
    program = """
        names = ("JAXMPI_TIMEOUT", "JAXMPI_CHECK", "XLA_FLAGS", "PJRT_NPROC", "OMP_NUM_THREADS")
        print(rank, os.getcwd(), *(os.environ.get(name) for name in names), flush=True)
    """
    done = job(
        program, JAXMPI_TIMEOUT="17", JAXMPI_CHECK="1", XLA_FLAGS="--xla_cpu_enable_fast_math=false", PJRT_NPROC="3"
    )
    assert done.returncode == 0, done.stderr
    for rank in range(4):
        assert f"rank {rank} on {NAMES[rank // 2]} sum 4.0\n" in done.stdout
        assert f"{rank} {tmp_path} 17 1 --xla_cpu_enable_fast_math=false 3 1\n" in done.stdout


@pytest.mark.parametrize("collectives", ["mpi", pytest.param("gloo", marks=pytest.mark.nightly)])
def test_sharded_program(job, collectives):
    """JAX's coordinator is found from the other host, whose names none can resolve."""
    program = """
        import jax, socket
        from jax.sharding import NamedSharding, PartitionSpec as P
        rows = NamedSharding(jax.make_mesh((4,), ("p",)), P("p"))
        x = jax.make_array_from_callback((4,), rows, lambda i: jax.numpy.arange(4.0)[i])
        print(jax.process_index(), "on", socket.gethostname(), "sum", float(jax.jit(jax.numpy.sum)(x)), flush=True)
    """
    done = job(program, "--collectives", collectives, begin="")
    assert done.returncode == 0, done.stderr
    for rank in range(4):
        assert f"{rank} on {NAMES[rank // 2]} sum 6.0\n" in done.stdout


@pytest.mark.parametrize("fails", [0, pytest.param(3, marks=pytest.mark.nightly)])
def test_exception_ends_the_job_on_both(job, fails):
    done = job(f"if rank == {fails}: raise KeyError('this')\njaxmpi.allreduce(x, MPI.SUM)\nprint('not reached')")
    assert done.returncode != 0
    assert f"uncaught exception on rank {fails}" in done.stderr
    assert "KeyError: 'this'" in done.stderr
    assert fails != 3 or "jaxmpi.run: rank 3 ended the job with code 1: KeyError: 'this'\n" in done.stderr
    assert "not reached" not in done.stdout


DEATHS = {
    "of one there": ("rank == 3", "os.kill(os.getpid(), 9)", "jaxmpi.run: rank 3 has died, and the job goes on\n", 77),
    "of one here": ("rank == 0", "raise KeyError('this')", "jaxmpi.run: rank 0 is lost, and the job goes on", 77),
    # The launcher knows of no rank that has ended, so its status is an error.
    "of all here": ("rank < 2", "os.kill(os.getpid(), 9)", "jaxmpi: ranks 0, 1 have died, and the job goes on\n", 1),
}
"""Who dies, how, what is told, and the status."""


@survives
@pytest.mark.parametrize("deaths", one_each_time(DEATHS, "of one there"))
def test_others_survive(deaths, job):
    """Ranks of either host die, and those of both recover. Each death is told once, by the launcher or by them."""
    who, how, told, status = DEATHS[deaths]
    left = 2 if "all" in deaths else 3
    program = f"""
        import jaxmpi
        if {who}: {how}
        total = None
        while total != {left}:
            try:
                total = float(jaxmpi.allreduce(x, MPI.SUM)[-1])
            except jaxmpi.survive.ProcessFailed:
                jaxmpi.survive.recover()
        print("rank", rank, "then", total, flush=True)
    """
    done = job(program, "--survive")
    assert done.stdout.count(f"then {left}.0") == left, done.stdout + done.stderr
    assert done.stderr.count(told) == 1, done.stderr
    assert status == 77 or "all ranks of this machine are lost. The status is 1" in done.stderr
    assert done.returncode == status


@survives
def test_spare_of_the_other_host(job):
    """It gets the number of a rank of the first host, and tells it itself."""
    program = """
        import jaxmpi
        comm = jaxmpi.get_default()
        if rank == 0: os.kill(os.getpid(), 9)
        try:
            while rank < 3: jaxmpi.allreduce(x, MPI.SUM).block_until_ready()
        except jaxmpi.survive.ProcessFailed:
            comm = jaxmpi.survive.recover()
        print("rank", rank, "is", comm.rank, "of", float(jaxmpi.allreduce(x, MPI.SUM)[-1]), flush=True)
    """
    done = job(program, "--survive", "--spare", "1", ranks=3, begin=IMPORTS)
    for line in ("rank 1 is 1 of 3.0", "rank 2 is 2 of 3.0", "rank 3 is 0 of 3.0"):
        assert line in done.stdout, done.stdout + done.stderr
    assert done.stderr.count("rank 3, which was spare, is rank 0 of the default communicator") == 1
    assert done.returncode == 77


@pytest.mark.parametrize(
    ("late", "options"), [(1, False), *(pytest.param(late, True, marks=pytest.mark.nightly) for late in (1, 2))]
)
def test_what_waits_is_reported(job, late, options):
    """In the launcher's table or by the ranks of the second host; whether options of mpiexec name it, or variables."""
    done = job(f"if rank == {late}: time.sleep(1000)\njaxmpi.allreduce(x, MPI.SUM).block_until_ready()",
               options=options, JAXMPI_TIMEOUT="2", JAXMPI_TIMEOUT_ACTION="abort")  # fmt: skip
    assert done.returncode != 0
    assert "s in allreduce of 50000 float32, op SUM, as rank" in done.stderr
    table = done.stderr.partition("jaxmpi.run: what the ranks do:")[2]
    wait = "wait in allreduce of 50000 float32, op SUM, on the default communicator;"
    if late == 1:
        assert f"rank 0: {wait.replace('wait', 'waits', 1)}" in table
        assert "rank 1: is in no operation; Python is at" in table
    else:
        assert f"ranks 0, 1: {wait}" in table
    assert f"ranks 2, 3: {OF_OTHERS}" in table
    for rank in {0, 1, 2, 3} - {late}:
        assert f"jaxmpi: rank {rank} has been waiting for " in done.stderr


def test_hosts_that_see_one_folder(job, hosts, tmp_path):
    """As of a cluster with one disk: the ranks of the second host leave it alone, and the table says where they are."""
    if not is_openmpi():
        pytest.skip("UCX, by which MPICH communicates, finds no way between hosts that seem to have two kernels")
    shared = hosts.folder / "shared"
    shared.mkdir(exist_ok=True)
    # The hosts have one, by which machines are told apart.
    (tmp_path / "boot_id").write_text("01234567-89ab-cdef-0123-456789abcdef\n")
    known = "/proc/sys/kernel/random/boot_id"
    subprocess.run([*hosts.enter(NAMES[1]), "mount", "--bind", tmp_path / "boot_id", known], check=True)
    try:
        done = job("print(rank, 'in', folder, flush=True)\n"
                   "if rank == 1: time.sleep(1000)\njaxmpi.allreduce(x, MPI.SUM).block_until_ready()",
                   begin=f"import os\nfolder = os.environ.get('JAXMPI_JOB_FOLDER')\n{BEGIN}",
                   TMPDIR=str(shared), JAXMPI_TIMEOUT="2", JAXMPI_TIMEOUT_ACTION="abort")  # fmt: skip
    finally:
        subprocess.run([*hosts.enter(NAMES[1]), "umount", known], check=True)
    folders = dict(re.findall("^([0-3]) in (.*)$", done.stdout, re.MULTILINE))
    assert folders["0"] == folders["1"], done.stderr
    assert folders["0"].startswith(str(shared))
    assert (folders["2"], folders["3"]) == ("None", "None")
    table = done.stderr.partition("jaxmpi.run: what the ranks do:")[2]
    assert "rank 0: waits in allreduce of 50000 float32" in table, done.stderr
    assert f"ranks 2, 3: {OF_OTHERS}" in table
    assert not list(shared.glob("jaxmpi-*"))


def begin_job(ranks, *words, through, timeout, check, **environment):
    """Starts a job that says it is ready, in a session of its own."""
    environment = {**outside_of_a_job(), "JAX_PLATFORMS": "cpu", **environment}
    command = [*through, sys.executable, "-m", "jaxmpi.run", "-n", str(ranks), *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = begin(command, timeout, env=environment, start_new_session=True, **pipes)
    seen = 0
    while seen < ranks and (line := process.stdout.readline()):
        seen += line.startswith("ready")
    return process


BUSY = """
print("ready", flush=True)
while True: pass
"""


def test_launcher_is_killed(job, hosts):
    """No rank lives some seconds later, on either host, and no process of ours or of mpiexec's."""
    process = job(BUSY, start=begin_job)
    assert len(list(hosts.running(NAMES[1]))) >= 4
    process.kill()
    try:
        assert until(lambda: not any(list(hosts.running(name)) for name in NAMES), 10)
    finally:
        for name in NAMES:
            for left in hosts.running(name):
                os.kill(left, signal.SIGKILL)
        process.communicate(timeout=20)


@pytest.mark.parametrize("options", [(), pytest.param(("--survive",), marks=survives)])
def test_machine_is_lost(options, job, hosts):
    """All of its processes end at once; whatever mpiexec's status is, the launcher's is an error, and says so. Open MPI
    ends a job that loses a machine, also one that goes on without a rank."""
    process = job(BUSY, *options, start=begin_job)
    since = time.monotonic()
    for lost in list(hosts.running(NAMES[1])):
        with contextlib.suppress(ProcessLookupError):
            os.kill(lost, signal.SIGKILL)
    try:
        _, errors = process.communicate(timeout=60)
        assert process.returncode not in (0, 77)
        if options:
            assert "all ranks of this machine are lost. The status is 1" in errors
        else:
            shown = "mpiexec ended with status 0, but ranks" if "ended with status 0" in errors else ""
            errors_page.note("a machine of two is lost", shown, time.monotonic() - since)
            if is_openmpi():  # MPICH's mpiexec says it by its own status
                told = "^\0?jaxmpi.run: mpiexec ended with status 0, but ranks 0, 1 began and did not report an end"
                assert re.search(told, errors, re.MULTILINE), errors
        assert until(lambda: not any(list(hosts.running(name)) for name in NAMES), 10)
    finally:
        process.kill()
        process.communicate()
