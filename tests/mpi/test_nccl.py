"""NCCL beside MPI: what the ranks agree on, and how jobs fail. On the simulated device, with a fake NCCL that connects
the ranks: `make test-device`. What NCCL carries is tested by the other suites there, and by tests/device/test_nccl.c.
"""

from pathlib import Path

import pytest

from support import simulated
from support.launch import launch, written
from support.rows import each

pytestmark = [
    pytest.mark.skipif(not simulated.BY_NCCL, reason="needs the simulated device with NCCL: make test-device"),
    pytest.mark.alone,
    pytest.mark.seconds(200),
]


def program(tmp_path, text, *, of_rank_1="", device=True):
    """A program on the simulated device. `of_rank_1`: variables of the environment that rank 1 alone has."""
    head = f"""
        import os, sys, time, warnings
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        from support import simulated
        simulated.begin()
        if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
            os.environ.update(dict({of_rank_1}))
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            import jaxmpi
        import jax, jax.numpy as jnp
        from jaxmpi._mpi import communicators
        from mpi4py import MPI
        rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
        if {device}:
            device = simulated.Device()
        x = jnp.arange(6.0) + rank
        total = sum(jnp.arange(6.0) + r for r in range(size))
    """
    return written(tmp_path, head, text)


REFUSED = [
    ("FAKE_NCCL_VERSION='23001'", "the ranks have versions 22809 to 23001 of the library"),
    ("FAKE_NCCL_VERSION='21703'", "a rank cannot load the library"),
    ("FAKE_NCCL_FAIL='GetVersion'", "a rank cannot load the library"),
    ("JAXMPI_DEVICE_TRANSPORT='callback'", "not all ranks have set JAXMPI_DEVICE_TRANSPORT=nccl"),
    ("JAXMPI_DEVICE_MPI='on'", "MPI reads the memory of devices itself"),
    ("JAX_PLATFORMS='cpu'", "a rank has no driver"),
]
"""What differs on rank 1, and why NCCL carries nothing on any rank."""


def test_refused_by_one_rank(tmp_path):
    """One warning in the job, with the reason, and MPI carries all."""

    def check(row):
        variables, why = row
        text = f"""
            assert {why!r} in communicators.nccl_refusal(), communicators.nccl_refusal()
            texts = [str(w.message) for w in warned if "NCCL carries nothing" in str(w.message)]
            assert len(texts) == (rank == 0) and all({why!r} in text for text in texts), texts
            assert (jaxmpi.allreduce(x, MPI.SUM) == total).all()
            assert (jaxmpi.allreduce(x, MPI.SUM, comm=MPI.COMM_WORLD) == total).all()
            print("right;", flush=True)
        """
        made = program(tmp_path, text, of_rank_1=variables, device=False)
        assert launch(2, made).stdout.count("right;") == 2

    each(REFUSED, check)


def test_no_communicator(tmp_path):
    """NCCL fails on one rank: all ranks get an error that names the rank, and may try again."""
    text = """
        said = ""
        try:
            jaxmpi.allreduce(x, MPI.SUM).block_until_ready()
        except RuntimeError as error:
            said = str(error)
        assert "ncclCommInitRankConfig failed" in said, said
        assert rank == 1 or "failed on rank 1: unhandled system error (code 2). Nothing was sent" in said, said
        os.environ.pop("FAKE_NCCL_FAIL", None)
        assert (jaxmpi.allreduce(x, MPI.SUM) == total).all()
        print("right;", flush=True)
    """
    made = program(tmp_path, text, of_rank_1="FAKE_NCCL_FAIL='CommInitRankConfig'")
    assert launch(2, made).stdout.count("right;") == 2


def test_communicators(tmp_path):
    """Each communicator has one of NCCL, which goes with it; on a communicator of one rank MPI carries all."""
    text = """
        for i in range(20):
            comm = MPI.COMM_WORLD.Dup() if i % 2 else MPI.COMM_WORLD.Split(rank % 2, -rank)
            right = total if i % 2 else sum(jnp.arange(6.0) + r for r in range(rank % 2, size, 2))
            f = jaxmpi.jit(lambda v: jaxmpi.allreduce(v, MPI.SUM, comm=comm))
            assert (f(x) == right).all() and (f(x) == right).all()
            comm.Free()
        print("right;", flush=True)
    """
    assert launch(4, program(tmp_path, text)).stdout.count("right;") == 4
    assert launch(1, program(tmp_path, text)).stdout.count("right;") == 1


def test_a_late_rank_is_reported(tmp_path):
    """The host does not wait, so the report is that of the thread that follows what has been enqueued."""
    text = """
        f = jaxmpi.jit(lambda v: jaxmpi.allreduce(v, MPI.SUM))
        f(x).block_until_ready()
        if rank == 1:
            time.sleep(5)
        assert (f(x) == total).all()
        print("right;", flush=True)
    """
    done = launch(2, program(tmp_path, text), JAXMPI_TIMEOUT="1", JAXMPI_CHECK="0")
    assert done.stdout.count("right;") == 2
    assert "allreduce of 6 float64" in done.stderr, done.stderr


def test_different_calls(tmp_path):
    """The ranks compare calls by MPI before NCCL gets them."""
    text = """
        said = ""
        try:
            (jaxmpi.allreduce(x, MPI.SUM) if rank == 0 else jaxmpi.bcast(x, 0)).block_until_ready()
        except RuntimeError as error:
            said = str(error)
        assert "the ranks differ" in said and "allreduce SUM of 6 float64" in said, said
        print("said;", flush=True)
    """
    assert launch(2, program(tmp_path, text), JAXMPI_CHECK="1").stdout.count("said;") == 2


def test_a_start_and_a_call_at_once(tmp_path):
    """They do not match, because MPI carries a start: the ranks compare them, too."""
    text = """
        grid, said = jaxmpi.Grid(2, 16), ""
        field = jnp.zeros(grid.local_shape)
        try:
            (grid.exchange(field) if rank == 0 else grid.finish(grid.start(field))).block_until_ready()
        except RuntimeError as error:
            said = str(error)
        assert "the ranks differ" in said and "Grid.start" in said and "Grid.exchange" in said, said
        print("said;", flush=True)
    """
    assert launch(2, program(tmp_path, text)).stdout.count("said;") == 2


def test_a_rank_dies(tmp_path):
    text = """
        f = jaxmpi.jit(lambda v: jaxmpi.allreduce(v, MPI.SUM))
        f(x).block_until_ready()
        if rank == 1:
            os._exit(7)
        f(x).block_until_ready()
    """
    done = launch(2, program(tmp_path, text), check=False, JAXMPI_CHECK="0")
    assert done.returncode == 7
    assert "rank 1 ended the job" in done.stderr


def test_report():
    assert "NCCL             2.28.9 carries collectives" in launch(2, "-m", "jaxmpi.info").stdout
