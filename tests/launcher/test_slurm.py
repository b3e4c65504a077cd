"""Jobs of Slurm on two hosts (support/slurm.py): the scripts of docs/slurm.md, and what users see of jobs that end."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import jaxmpi
from support.launch import is_openmpi
from support.slurm import slurm

pytestmark = [pytest.mark.alone, pytest.mark.sampled, pytest.mark.nightly, pytest.mark.seconds(300)]

ROOT = Path(__file__).resolve().parents[2]
PMI = "pmix" if is_openmpi() else "pmi2"
TWO = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--time=3")
"""Options of sbatch, which count more than those in a script: two ranks, on two hosts."""


def files_of(page):
    """The files that a page shows: code below a paragraph that begins with the file's name."""
    shown = re.findall(r"^`([\w-]+\.\w+)`(?:[^\n]+\n)*?[^\n]*:\n\n```\w+\n(.*?)^```$", page.read_text(), re.M | re.S)
    assert len(shown) == len(dict(shown))
    return dict(shown)


def program_of(page):
    """The first program on a page."""
    return re.search(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)[1]


def for_this_mpi(script):
    """A script as its comments tell users of MPICH to write it."""
    return script if PMI == "pmix" else re.sub(r"^.*# MPICH: ", "", script, flags=re.MULTILINE)


BUSY = """
import ctypes, os, socket, sys, time
import jax.numpy as jnp
from mpi4py import MPI
import jaxmpi
rank, fault = MPI.COMM_WORLD.rank, sys.argv[1:]
for i in range(100000):
    if i == 10: print("rank", rank, "on", socket.gethostname(), flush=True)
    if i == 20 and rank == 1 and fault:
        if fault == ["exception"]: raise KeyError("this")
        if fault == ["exit"]: sys.exit(3)
        ctypes.string_at(0)
    jaxmpi.allreduce(jnp.ones(10), MPI.SUM).block_until_ready()
    time.sleep(0.02)
"""

WITH = {
    "srun": f"srun --mpi={PMI} --kill-on-bad-exit python -m mpi4py",
    "launcher": "python -m jaxmpi.run -n $SLURM_NTASKS --mpiexec-args=",
}
both = pytest.mark.parametrize("starter", WITH)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    try:
        with slurm(tmp_path_factory.mktemp("slurm")) as made:
            (made.home / "jaxmpi").symlink_to(sys.prefix)
            (made.work / "mean.py").write_text(program_of(ROOT / "README.md"))
            (made.work / "busy.py").write_text(BUSY)
            for name, text in files_of(ROOT / "docs" / "slurm.md").items():
                (made.work / name).write_text(for_this_mpi(text))
            offered = made.call("srun", "--mpi=list")
            if PMI not in (offered.stdout + offered.stderr).split():
                pytest.skip(f"this Slurm has no {PMI}")
            yield made
    except (PermissionError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no Slurm: {error}")


@pytest.fixture
def batch(cluster):
    """Submits a batch script of this text, and returns the number of its job."""

    def submit(text, *options):
        script = cluster.work / "job.sh"
        script.write_text(f"#!/bin/bash\nsource ~/jaxmpi/bin/activate\n{text}\n")
        return cluster.submit(*(options or TWO), script)

    return submit


def mean(ranks):
    """What the README's program prints on each rank, by NumPy."""
    return str(np.mean([np.arange(3.0) + rank for rank in range(ranks)], axis=0, dtype=np.float32))


def begun(cluster, number, ranks=2):
    """Waits until ranks of `busy.py` have."""
    cluster.until(f"begun in job {number}", lambda: cluster.output(number).count(" on ") >= ranks, 60)


def test_docs_have_the_scripts():
    """Each is used by a test here."""
    names = set(files_of(ROOT / "docs" / "slurm.md"))
    assert names == {"by-srun.sh", "by-launcher.sh", "steps.py", "steps.sh", "steps-by-launcher.sh", "array.sh"}


def test_srun(cluster):
    """As a user types it, on two hosts, and twice two ranks."""
    python = cluster.home / "jaxmpi" / "bin" / "python"
    for nodes, ranks in ((2, 2), (2, 4), (1, 2)):
        done = cluster.call(
            "srun", "--quiet", f"--mpi={PMI}", f"--nodes={nodes}", f"--ntasks={ranks}", python, "mean.py"
        )
        assert done.stdout.splitlines() == [mean(ranks)] * ranks
        assert done.stderr == ""


@pytest.mark.parametrize("script", ["by-srun.sh", "by-launcher.sh"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_batch(cluster, script, ranks):
    """With so many ranks on each host."""
    done = cluster.wait(cluster.submit(*TWO, f"--ntasks-per-node={ranks}", script))
    assert (done.state, done.code) == ("COMPLETED", 0), done.output
    lines = done.output.splitlines()
    assert lines.count(mean(2 * ranks)) == 2 * ranks, done.output
    if script == "by-srun.sh":
        told = re.findall(r"^rank +(\d) of (\d) on (\w+)$", done.output, re.MULTILINE)
        hosts = ["one"] * ranks + ["two"] * ranks
        assert sorted(told) == [(str(rank), str(2 * ranks), host) for rank, host in enumerate(hosts)]
        assert done.output.count("problems         none found") == 2 * ranks, done.output
        assert re.findall(r"^cores +(\d+)", done.output, re.MULTILINE) == ["1"] * 2 * ranks


SHARDED = {
    "srun, mpi": "import jaxmpi.sharded\njaxmpi.sharded.install()\n",
    "srun, gloo": "import jaxmpi.sharded\njaxmpi.sharded.install('gloo')\n",
    "srun, initialize": "import jax, jaxmpi\njax.distributed.initialize()\n",
    "launcher, mpi": "",
    "launcher, gloo": "",
    "launcher, mpi, initialize": "import jax\njax.distributed.initialize()\n",
    "launcher, mpi, one host": "",
}
"""How JAX is started, and what the program begins with."""
NUMBERS = "print('process', jax.process_index(), 'of', jax.process_count(), 'is rank', MPI.COMM_WORLD.rank)\n"


def printed(output):
    """The lines of the program. Gloo writes its own in pieces, between which those of another rank may come."""
    if "[Gloo]" not in output:
        return sorted(output.splitlines())
    return sorted(re.findall(r"36\.0|process \d of \d is rank \d", output))


@pytest.mark.parametrize("how", SHARDED)
def test_sharded(cluster, batch, how):
    """JAX's processes are the ranks, whoever starts them, and though JAX knows Slurm's variables."""
    starter, *more = how.split(", ")
    command = WITH[starter] + (f" --collectives {more[0]}" if starter == "launcher" else "")
    program = cluster.work / "sharded.py"
    program.write_text(f"{SHARDED[how]}{program_of(ROOT / 'docs' / 'sharded.md')}from mpi4py import MPI\n{NUMBERS}")
    options = ("--nodes=1", "--ntasks=2", "--time=3") if "one host" in more else TWO
    done = cluster.wait(batch(f"{command} sharded.py", *options))
    assert (done.state, done.code) == ("COMPLETED", 0), done.output
    by_mpi = "mpi" in more
    assert ("[Gloo]" in done.output) != by_mpi, done.output
    assert printed(done.output) == ["36.0", "36.0", *(f"process {rank} of 2 is rank {rank}" for rank in range(2))]


def after(steps):
    """The field of steps.py by NumPy."""
    u = np.arange(96.0)
    for _ in range(steps):
        u = 0.999 * np.roll(u, 1) + 0.001 * u
    return u


def state(folder):
    """The last state that was written, read by one process."""
    return jaxmpi.io.load(jaxmpi.io.latest(folder), grid=jaxmpi.Grid((0,), shape=(96,), periodic=True))


def check(found, steps):
    assert found["step"] == steps
    np.testing.assert_allclose(found["u"], after(steps), rtol=1e-3)


def test_array(cluster):
    done = cluster.wait(cluster.submit("array.sh"))
    assert (done.state, done.code) == ("COMPLETED", 0), done.output
    for task in range(3):
        assert f"done after step {task + 5}\n" in done.output
        check(state(cluster.work / f"case-{task}" / "states"), task + 5)


@both
def test_time_limit(cluster, starter):
    """The first job stops in time, with a state, and the second, which has waited for it, goes on from there."""
    folder = cluster.work / f"limit-{starter}"
    folder.mkdir()
    names = {"srun": "steps.sh", "launcher": "steps-by-launcher.sh"}
    for name in (names[starter], "steps.py"):
        (folder / name).write_text((cluster.work / name).read_text())
    to = "B:" if starter == "launcher" else ""
    options = (*TWO, "--time=2", f"--signal={to}TERM@60", f"--chdir={folder}")

    def submit(steps):
        return cluster.submit(*options, folder / names[starter], STEPS=str(steps))

    first = submit(100000)
    cluster.until("the first job's begin", lambda: "begins after step 0\n" in cluster.output(first), 60)
    second = submit(100000)
    assert cluster.told(second, "Reason") == ["Dependency"]
    cluster.call("scancel", second)
    done = cluster.wait(first, 150)
    assert (done.state, done.code) == ("COMPLETED", 0), done.output
    stopped = int(re.search(r"^stopped after step (\d+)$", done.output, re.MULTILINE)[1])
    assert stopped > 10
    check(state(folder / "states"), stopped)
    done = cluster.wait(submit(stopped + 20))
    assert (done.state, done.code) == ("COMPLETED", 0), done.output
    assert done.output == f"begins after step {stopped}\ndone after step {stopped + 20}\n"
    check(state(folder / "states"), stopped + 20)


SEEN = {
    ("exception", "srun"): ["KeyError: 'this'"],
    ("exception", "launcher"): ["uncaught exception on rank 1", "KeyError: 'this'"],
    ("exit", "srun"): ["task 1: Exited with exit code 3" if PMI == "pmix" else "MPI_Abort(MPI_COMM_WORLD, 3)"],
    ("exit", "launcher"): ["jaxmpi.run: rank 1 ended the job with code 3: sys.exit(3)"],
    ("segmentation fault", "srun"): ["two: task 1: Segmentation fault"],
    ("segmentation fault", "launcher"): ["Segmentation fault" if PMI == "pmix" else "EXIT CODE: 11"],
}


@both
@pytest.mark.parametrize("fault", ["exception", "exit", "segmentation fault"])
def test_rank_fails(cluster, batch, starter, fault):
    """The job ends, is FAILED, and its output says why."""
    done = cluster.wait(batch(f"{WITH[starter]} busy.py {fault.replace(' ', '-')}"))
    assert done.state == "FAILED", done.output
    assert done.code > 0
    for words in SEEN[fault, starter]:
        assert words in done.output


@both
def test_cancelled(cluster, batch, starter):
    """The ranks end by SIGTERM, before SIGKILL comes."""
    number = batch(f"{WITH[starter]} busy.py")
    begun(cluster, number)
    cluster.call("scancel", number)
    done = cluster.wait(number)
    assert done.state == "CANCELLED"
    assert f"JOB {number} ON one CANCELLED" in done.output
    last = "ended by SIGTERM" if starter == "launcher" else "task 1: Terminated"
    assert last in done.output


def test_cancelled_with_a_state(cluster):
    """Ranks that srun has started get the signal themselves, and time to write."""
    folder = cluster.work / "cancelled"
    folder.mkdir()
    (folder / "steps.py").write_text((cluster.work / "steps.py").read_text())
    number = cluster.submit(*TWO, f"--chdir={folder}", "--signal=TERM@1", "steps.sh", STEPS="100000")
    cluster.until(f"begun in job {number}", lambda: "begins after step 0" in cluster.output(number), 60)
    cluster.call("scancel", number)
    done = cluster.wait(number)
    assert done.state == "CANCELLED"
    check(state(folder / "states"), int(re.search(r"^stopped after step (\d+)$", done.output, re.MULTILINE)[1]))


def test_failure_beside_a_script_that_waits_for_a_signal(cluster):
    """Its exit status is the script's."""
    folder = cluster.work / "failure"
    folder.mkdir()
    (folder / "steps.py").write_text("import jaxmpi\nraise KeyError('this')\n")
    done = cluster.wait(cluster.submit(*TWO, f"--chdir={folder}", "--signal=B:TERM@1", "steps-by-launcher.sh"))
    assert (done.state, done.code) == ("FAILED", 1), done.output
