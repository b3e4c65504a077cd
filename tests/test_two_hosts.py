"""A job on two hosts, started as docs/running.md says, by an agent that enters them: see two_hosts.py."""

import subprocess
import textwrap

import pytest

from jaxmpi import run
from launch import launch
from two_hosts import NAMES, two_hosts

pytestmark = [pytest.mark.launches, pytest.mark.seconds(120)]

BEGIN = """
import os, socket, sys, time
import jax.numpy as jnp
from mpi4py import MPI
from jaxmpi import notoken
rank, x = MPI.COMM_WORLD.rank, jnp.ones(50000)
print("rank", rank, "on", socket.gethostname(), "sum", float(notoken.allreduce(x, MPI.SUM)[-1]), flush=True)
MPI.COMM_WORLD.Barrier()
"""


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
    if run.flavour(run.find_mpiexec()) == "openmpi":
        hosts.file.write_text("".join(f"{name} slots=2\n" for name in NAMES))
        options = f"--hostfile {hosts.file} --mca plm_rsh_agent {hosts.agent}"
    else:
        hosts.file.write_text("".join(f"{name}:2\n" for name in NAMES))
        options = f"-f {hosts.file} -launcher ssh -launcher-exec {hosts.agent}"

    def run_program(rest, *more, begin=BEGIN, **environment):
        program = tmp_path / "program.py"
        program.write_text(begin + textwrap.dedent(rest))
        words = ("--ranks-per-node", "2", *more, f"--mpiexec-args={options}", program)
        environment = {"TMPDIR": str(hosts.tmp), **environment}
        return launch(4, *words, timeout=60, check=False, through=hosts.enter(NAMES[0]), **environment)

    return run_program


@pytest.mark.seldom
def test_variables_and_folder(job, tmp_path, monkeypatch):
    """They are the same on both hosts, though the agent passes neither."""
    monkeypatch.chdir(tmp_path)
    done = job(
        """
        names = ("JAXMPI_TIMEOUT", "JAXMPI_CHECK", "XLA_FLAGS", "PJRT_NPROC", "OMP_NUM_THREADS")
        print(rank, os.getcwd(), *(os.environ.get(name) for name in names), flush=True)
        """,
        JAXMPI_TIMEOUT="17",
        JAXMPI_CHECK="1",
        XLA_FLAGS="--xla_cpu_enable_fast_math=false",
        PJRT_NPROC="3",
    )
    assert done.returncode == 0, done.stderr
    for rank in range(4):
        assert f"rank {rank} on {NAMES[rank // 2]} sum 4.0\n" in done.stdout
        assert f"{rank} {tmp_path} 17 1 --xla_cpu_enable_fast_math=false 3 1\n" in done.stdout


@pytest.mark.parametrize("collectives", ["mpi", pytest.param("gloo", marks=pytest.mark.seldom)])
def test_sharded_program(job, collectives):
    """JAX's coordinator is found from the other host, whose names none can resolve."""
    done = job(
        """
        import jax, socket
        from jax.sharding import NamedSharding, PartitionSpec as P
        rows = NamedSharding(jax.make_mesh((4,), ("p",)), P("p"))
        x = jax.make_array_from_callback((4,), rows, lambda i: jax.numpy.arange(4.0)[i])
        print(jax.process_index(), "on", socket.gethostname(), "sum", float(jax.jit(jax.numpy.sum)(x)), flush=True)
        """,
        "--collectives",
        collectives,
        begin="",
    )
    assert done.returncode == 0, done.stderr
    for rank in range(4):
        assert f"{rank} on {NAMES[rank // 2]} sum 6.0\n" in done.stdout


@pytest.mark.parametrize("fails", [0, pytest.param(3, marks=pytest.mark.seldom)])
def test_exception_ends_the_job_on_both(job, fails):
    done = job(f"if rank == {fails}: raise KeyError('this')\nnotoken.allreduce(x, MPI.SUM)\nprint('not reached')")
    assert done.returncode != 0
    assert f"uncaught exception on rank {fails}" in done.stderr
    assert "KeyError: 'this'" in done.stderr
    assert "not reached" not in done.stdout


@pytest.mark.seldom
@pytest.mark.parametrize("late", [1, 2])
def test_what_waits_is_reported(job, late):
    done = job(f"if rank == {late}: time.sleep(1000)\nnotoken.allreduce(x, MPI.SUM).block_until_ready()",
               JAXMPI_TIMEOUT="2", JAXMPI_TIMEOUT_ACTION="abort")  # fmt: skip
    assert done.returncode != 0
    assert "s in allreduce of 50000 float32, op SUM, as rank" in done.stderr
    table = done.stderr.partition("jaxmpi.run: what the ranks do:")[2]
    others = ", ".join(str(rank) for rank in range(4) if rank != late)
    assert f"ranks {others}: wait in allreduce of 50000 float32, op SUM, on the default communicator;" in table
    assert f"rank {late}: is in no operation; Python is at" in table
