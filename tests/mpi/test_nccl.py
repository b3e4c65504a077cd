"""NCCL beside MPI: how the ranks agree on it, and how jobs fail.

On the simulated device, with a fake NCCL that connects the ranks: `make test-device`. The other suites there, and
tests/device/test_nccl.c, test the calls that NCCL carries.
"""

from pathlib import Path

import pytest

from support import simulated
from support.launch import launch, written

pytestmark = [
    pytest.mark.skipif(not simulated.BY_NCCL, reason="needs the simulated device with NCCL: make test-device"),
    pytest.mark.alone,
    pytest.mark.seconds(200),
]


def run(ranks, *words, **variables):
    """Run a job whose ranks may use devices."""
    return launch(ranks, *words, **{"JAX_PLATFORMS": "", **variables})


def program(tmp_path, text, *, of_rank_1="", device=True):
    """Write a program on the simulated device. `of_rank_1`: variables of the environment that rank 1 alone has."""
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
        def said(f, *args):
            try:
                f(*args).block_until_ready()
            except RuntimeError as error:
                return str(error)
            return ""
    """
    return written(tmp_path, head, text)


REFUSED = [
    ("FAKE_NCCL_VERSION='23001'", "the ranks have different versions of the library"),
    ("FAKE_NCCL_VERSION='21703'", "a rank cannot load the library"),
    ("FAKE_NCCL_FAIL='GetVersion'", "a rank cannot load the library"),
    ("JAXMPI_DEVICE_TRANSPORT='callback'", "not all ranks have set JAXMPI_DEVICE_TRANSPORT=nccl"),
    ("JAXMPI_DEVICE_MPI='on'", "MPI reads the memory of devices itself"),
    ("JAX_PLATFORMS='cpu'", "a rank has no driver"),
]
"""The variables of rank 1, and the reason why NCCL then carries nothing on any rank."""


@pytest.mark.sampled
@pytest.mark.parametrize(("variables", "why"), REFUSED)
def test_refused_by_one_rank(variables, why, tmp_path):
    """The job has one warning, with the reason, and MPI carries all calls."""
    text = f"""
        assert {why!r} in communicators.nccl_refusal(), communicators.nccl_refusal()
        texts = [str(w.message) for w in warned if "NCCL carries nothing" in str(w.message)]
        assert len(texts) == (rank == 0) and all({why!r} in text for text in texts), texts
        assert (jaxmpi.allreduce(x, MPI.SUM) == total).all()
        assert (jaxmpi.allreduce(x, MPI.SUM, comm=MPI.COMM_WORLD) == total).all()
        print("right;", flush=True)
    """
    script = program(tmp_path, text, of_rank_1=variables, device=False)
    assert run(2, script).stdout.count("right;") == 2


def test_no_communicator(tmp_path):
    """NCCL fails on one rank. All ranks get an error that names the rank, and may try again."""
    text = """
        text = said(jaxmpi.allreduce, x, MPI.SUM)
        assert "ncclCommInitRankConfig failed" in text, text
        assert rank == 1 or "failed on rank 1: unhandled system error (code 2). Nothing was sent" in text, text
        os.environ.pop("FAKE_NCCL_FAIL", None)
        assert (jaxmpi.allreduce(x, MPI.SUM) == total).all()
        print("right;", flush=True)
    """
    script = program(tmp_path, text, of_rank_1="FAKE_NCCL_FAIL='CommInitRankConfig'")
    assert run(2, script).stdout.count("right;") == 2


def test_communicators(tmp_path):
    """Each communicator of several ranks has one of NCCL, until it is freed. On one rank MPI carries all calls."""
    text = """
        for i in range(20):
            comm = MPI.COMM_WORLD.Dup() if i % 2 else MPI.COMM_WORLD.Split(rank % 2, -rank)
            right = total if i % 2 else sum(jnp.arange(6.0) + r for r in range(rank % 2, size, 2))
            f = jaxmpi.jit(lambda v: jaxmpi.allreduce(v, MPI.SUM, comm=comm))
            assert (f(x) == right).all() and (f(x) == right).all()
            comm.Free()
        print("right;", flush=True)
    """
    assert run(4, program(tmp_path, text)).stdout.count("right;") == 4
    assert run(1, program(tmp_path, text)).stdout.count("right;") == 1


def test_a_late_rank_is_reported(tmp_path):
    """The host does not wait, so the report comes from the thread that follows the enqueued calls."""
    text = """
        f = jaxmpi.jit(lambda v: jaxmpi.allreduce(v, MPI.SUM))
        f(x).block_until_ready()
        if rank == 1:
            time.sleep(5)
        assert (f(x) == total).all()
        print("right;", flush=True)
    """
    done = run(2, program(tmp_path, text), JAXMPI_TIMEOUT="1", JAXMPI_CHECK="0")
    assert done.stdout.count("right;") == 2
    assert "allreduce of 6 float" in done.stderr, done.stderr


def test_different_calls(tmp_path):
    """The ranks compare calls by MPI before NCCL gets them."""
    text = """
        text = said(jaxmpi.allreduce, x, MPI.SUM) if rank == 0 else said(jaxmpi.bcast, x, 0)
        assert "the ranks differ" in text and "allreduce SUM of 6 float" in text, text
        print("said;", flush=True)
    """
    assert run(2, program(tmp_path, text), JAXMPI_CHECK="1").stdout.count("said;") == 2


def test_a_start_and_a_call_at_once(tmp_path):
    """A start and a call do not match, because MPI carries the start: the ranks compare them, too."""
    text = """
        grid = jaxmpi.Grid(2, 16)
        field = grid.pad(jnp.zeros(grid.local_shape), 1)
        if rank == 1:
            time.sleep(1)  # until rank 0 waits for messages
        (grid.exchange(field) if rank == 1 else grid.finish(grid.start(field))).block_until_ready()
    """
    done = run(2, program(tmp_path, text), check=False)
    assert done.returncode != 0
    assert "the ranks differ" in done.stderr
    assert "Grid.exchange" in done.stderr


def test_the_log(tmp_path):
    text = """
        for i in range(3):
            assert (jaxmpi.allreduce(x, MPI.SUM) == total).all()
    """
    done = run(2, program(tmp_path, text), JAXMPI_DEBUG="1", JAXMPI_CHECK="0")
    assert done.stderr.count("NCCL in the stream's order, allreduce, with token") == 6
    assert done.stderr.count("NCCL done after") == 6


def test_another_thread(tmp_path):
    """Python refuses another thread, because XLA chooses the thread of a call of arrays in CPU memory."""
    text = """
        import threading
        comm, texts = MPI.COMM_WORLD.Dup(), []
        thread = threading.Thread(target=lambda: texts.append(said(lambda: jaxmpi.allreduce(x, MPI.SUM, comm=comm))))
        thread.start()
        thread.join()
        assert "only the thread that imported jaxmpi may communicate" in texts[0], texts
        print("said;", flush=True)
    """
    assert run(2, program(tmp_path, text)).stdout.count("said;") == 2


def test_an_error_of_the_network(tmp_path):
    """NCCL reports the error, and the kernel of the call spins: the follower ends the job."""
    text = """
        f = jaxmpi.jit(lambda v: jaxmpi.allreduce(v, MPI.SUM))
        f(x).block_until_ready()
        if rank == 0:
            os.environ["FAKE_NCCL_ASYNC"] = "6"
            f(x).block_until_ready()
        time.sleep(60)
    """
    done = run(2, program(tmp_path, text), check=False, JAXMPI_CHECK="0")
    assert done.returncode != 0
    assert "NCCL reports an error on rank 0 while a call is under way: an error of the fake (code 6)" in done.stderr


def test_messages_progress_while_ranks_meet(tmp_path):
    """Rank 0 has started a message and waits in NCCL for rank 1, which waits for the message."""
    text = """
        y = jnp.arange(4000.0) + rank
        jaxmpi.allreduce(x, MPI.SUM).block_until_ready()
        if rank == 0:
            request = jaxmpi.isend(y, 1)
            z = jaxmpi.alltoall(jnp.arange(2.0))
            jaxmpi.wait(request)
        else:
            time.sleep(1)
            assert (jaxmpi.recv(y, 0) == jnp.arange(4000.0)).all()
            z = jaxmpi.alltoall(jnp.arange(2.0))
        z.block_until_ready()
        print("right;", flush=True)
    """
    assert run(2, program(tmp_path, text), JAXMPI_CHECK="0").stdout.count("right;") == 2


def test_a_rank_dies(tmp_path):
    text = """
        f = jaxmpi.jit(lambda v: jaxmpi.allreduce(v, MPI.SUM))
        f(x).block_until_ready()
        if rank == 1:
            os._exit(7)
        f(x).block_until_ready()
    """
    done = run(2, program(tmp_path, text), check=False, JAXMPI_CHECK="0")
    assert done.returncode == 7
    assert "rank 1 ended the job" in done.stderr


def test_report():
    assert "NCCL             2.28.9 carries collectives" in run(2, "-m", "jaxmpi.info").stdout
