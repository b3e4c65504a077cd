"""Jobs that go on as ranks die: `python -m jaxmpi.run --survive`, `jaxmpi.recover`.

Five jobs run each time: recovery with checks, what is given up, agreed values, spares and Replica, wrong arguments.
"""

import itertools
import re
import shutil
import textwrap
from pathlib import Path

import numpy as np
import pytest

from jaxmpi import run
from support.launch import launch
from support.rows import one_each_time

pytestmark = [pytest.mark.alone, pytest.mark.sampled, pytest.mark.seconds(150)]
TESTS = Path(__file__).resolve().parents[1]
SECONDS = 90

nightly = pytest.mark.nightly
needs_openmpi = pytest.mark.skipif(
    run.flavour(run.find_mpiexec() or "") != "openmpi", reason="jobs of Open MPI alone go on without a rank"
)

BEGIN = textwrap.dedent("""
    import ctypes, os, signal, sys, time
    import jax, jax.numpy as jnp, numpy as np
    import jaxmpi
    from jaxmpi import notoken
    from mpi4py import MPI
    WORLD = MPI.COMM_WORLD
    rank, size = WORLD.rank, WORLD.size
    x = jnp.ones(3)
    def die(): os.kill(os.getpid(), signal.SIGKILL)
    def all_have_come(): WORLD.Agree(1)  # and no death that follows is an error of what was done before
    def told(*what): print(f"rank {rank}:", *what, flush=True)
""")


def survive(tmp_path, ranks, *parts, spare=0, **options):
    program = tmp_path / "program.py"
    program.write_text("\n".join([BEGIN, *map(textwrap.dedent, parts)]))
    return launch(ranks, "--survive", "--spare", spare, program, check=False, timeout=SECONDS, **options)


@pytest.mark.alone
@pytest.mark.parametrize("said", ["HYDRA build details:", "mpiexec (OpenRTE) 4.1.4", "mpiexec (Open MPI) 4.1.8"])
def test_refused_with_another_mpi(said, tmp_path):
    """By the launcher, before any rank starts."""
    other = tmp_path / "mpiexec"
    other.write_text(f"#!/bin/sh\necho '{said}'\n")
    other.chmod(0o755)
    done = launch(2, "--survive", "--mpiexec", other, "-c", "print('begins')", check=False)
    assert done.returncode == 1
    assert "begins" not in done.stdout
    assert "--survive: only jobs of Open MPI 5 or later go on without a rank" in done.stderr
    assert said in done.stderr


@pytest.mark.alone
def test_refused_with_sharded_programs():
    done = launch(2, "--survive", "--collectives", "mpi", "-c", "print('begins')", check=False)
    assert done.returncode == 2
    assert "JAX's own sharded programs (--collectives) cannot go on without a rank" in done.stderr


@pytest.mark.alone
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--spare", "1"), "--spare: ranks step in for others in jobs that go on without a rank: add --survive"),
        (("--survive", "--spare", "-1"), "--spare must be 0 or more, not -1"),
    ],
)
def test_refused_spares(options, text):
    done = launch(2, *options, "-c", "print('begins')", check=False)
    assert done.returncode == 2
    assert text in done.stderr
    assert "begins" not in done.stdout


def test_spares_without_survive():
    """As the environment of a plain mpiexec may say it."""
    done = launch(0, "-c", "import jaxmpi", check=False, JAXMPI_SPARES="1")
    assert "RuntimeError: jaxmpi: JAXMPI_SPARES=1: only a job that goes on after a death has spare" in done.stderr


@needs_openmpi
@nightly
@pytest.mark.parametrize(
    ("spares", "text"),
    [
        ("2", "ValueError: jaxmpi: JAXMPI_SPARES=2: of 2 ranks fewer must be spare"),
        ("-1", "ValueError: jaxmpi: JAXMPI_SPARES=-1: it is a whole number, 0 or more"),
    ],
)
def test_refused_number_of_spares(spares, text):
    program = f"import os; os.environ['JAXMPI_SPARES'] = '{spares}'; import jaxmpi; print('begins')"
    done = launch(2, "--survive", "-c", program, check=False, timeout=SECONDS)
    assert done.returncode == 1
    assert text in done.stderr
    assert "begins" not in done.stdout


OPERATIONS = {
    "eager": "call = lambda x: notoken.allreduce(x, MPI.SUM)",
    "jaxmpi.jit": "call = jaxmpi.jit(lambda x: notoken.allreduce(x, MPI.SUM))",
    "jax.jit": "call = jax.jit(lambda x: notoken.allreduce(x, MPI.SUM))",
    "wait": "call = lambda x: notoken.wait(notoken.iallreduce(x, MPI.SUM))",
    "exchange": """
        call = lambda x: size * jaxmpi.Grid((size,), (3 * size,), periodic=True).exchange(jnp.pad(x, 1))[0]
    """,
}


@needs_openmpi
@nightly
@pytest.mark.parametrize("operation", OPERATIONS)
def test_error_and_recovery(operation, tmp_path):
    """What was called raises ProcessFailed, which says who has died and where; it is right again afterwards."""
    done = survive(
        tmp_path,
        3,
        OPERATIONS[operation],
        """
        assert float(np.asarray(call(x)).ravel()[0]) == 3
        all_have_come()
        if rank == 1: die()
        try:
            with jaxmpi.survive():
                for _ in range(1000): call(x)
            told("nothing raised")
        except jaxmpi.ProcessFailed as error:
            assert isinstance(error, jax.errors.JaxRuntimeError)
            assert set(error.ranks) <= {1} and error.comm.size == 3
            told("failed in", error.operation)
            comm = jaxmpi.recover()
            assert jaxmpi.lost(error.comm, comm) == (1,)
            size = comm.size
            told("sum", np.asarray(call(x)).ravel()[0])
        """,
    )
    names = {"wait": "iallreduce", "exchange": "Grid.exchange"}
    assert done.stdout.count(f"failed in {names.get(operation, 'allreduce')}\n") == 2, done.stdout + done.stderr
    assert done.stdout.count("sum 2.0") == 2
    assert done.stderr.count("rank 1 has died") == 1
    assert "rank 1 of 3 was lost, and the others ended without an error. The status is 77" in done.stderr
    assert done.returncode == 77


ENDS = {
    "raise KeyError('this')": "rank 0 is lost, and the job goes on: KeyError: 'this'",
    "sys.exit(3)": "rank 0 is lost, and the job goes on: sys.exit(3)",
    "os._exit(4)": "rank 0 is lost, and the job goes on: rank 0 calls os._exit(4)",
    "os.kill(os.getpid(), signal.SIGSEGV)": "rank 0 has died",
    "ctypes.CDLL(None).exit(3)": "rank 0 has died",
}


@needs_openmpi
@pytest.mark.parametrize("how", ENDS)
@nightly
def test_each_end_of_a_rank(how, tmp_path):
    """However a rank ends, the others hear of it, and it is told once. Rank 0 is none that the job needs."""
    loop = f"""
        comm = jaxmpi.recover  # not called yet
        try:
            for i in range(1000):
                if i == 10 and rank == 0: {how}
                notoken.allreduce(x, MPI.SUM).block_until_ready()
        except jaxmpi.ProcessFailed as error:
            told("left", jaxmpi.recover().size)
    """
    done = survive(tmp_path, 3, loop)
    assert done.stdout.count("left 2") == 2, done.stdout + done.stderr
    assert done.stderr.count(ENDS[how]) == 1, done.stderr
    assert len(re.findall(r"jaxmpi\.run: rank 0 (?:is lost|has died)", done.stderr)) == 1
    assert done.returncode == 77


@needs_openmpi
def test_nothing_of_the_old_one_is_left(tmp_path):
    """Requests in flight are given up, a wait for one says so, and so does what was made on the old communicator."""
    done = survive(
        tmp_path,
        3,
        """
        old = WORLD.Dup()
        grid = jaxmpi.Grid((3,), (9,), periodic=True, comm=old)
        grid.exchange(jnp.ones(5)).block_until_ready()
        inner = jax.jit(lambda x: notoken.allreduce(x, MPI.SUM))  # traced once, within others too
        outer = jaxmpi.jit(lambda x: inner(x) + jax.lax.fori_loop(0, 2, lambda _, y: inner(x), x))
        assert float(outer(x)[0]) == 6
        request = notoken.irecv(x, (rank + 1) % 3, tag=9, comm=old)
        sum_of_all = notoken.iallreduce(x, MPI.SUM, comm=old)
        all_have_come()
        if rank == 2: die()
        def fails(call):
            try: jax.block_until_ready(call())
            except RuntimeError as error: return str(error)
            except ValueError as error: return str(error)
            return "nothing"
        fails(lambda: [notoken.barrier(comm=old) for _ in range(1000)])
        fails(lambda: [notoken.allreduce(x, MPI.SUM).block_until_ready() for _ in range(1000)])
        comm, new = jaxmpi.recover(old, None)
        assert comm.size == new.size == 2
        for text, call in {
            "given up by jaxmpi.recover": lambda: notoken.wait(request),
            "comm has been given up": lambda: notoken.allreduce(x, MPI.SUM, comm=old),
            "Make the grid again": lambda: grid.exchange(jnp.ones(5)),
        }.items():
            assert text in fails(call), fails(call)
        assert float(outer(x)[0]) == 4
        jaxmpi.set_default(comm)
        assert float(outer(x)[0]) == 4
        again = jaxmpi.Grid((2,), (6,), periodic=True, comm=comm)
        halos = np.asarray(again.exchange(jnp.full(5, float(comm.rank))))
        assert halos[0] == halos[-1] == 1 - comm.rank
        index = jaxmpi.IndexMap(np.arange(2) + 2 * comm.rank, np.array([2 - 2 * comm.rank]), comm=comm)
        rows = np.asarray(index.exchange(jnp.asarray([10.0 * comm.rank, 1, 0])))
        assert rows[2] == 10 * (1 - comm.rank), rows
        told("right")
        """,
    )
    assert done.stdout.count(": right") == 2, done.stdout + done.stderr
    assert "never waited" not in done.stderr
    assert done.returncode == 77


@needs_openmpi
@nightly
def test_uniform(tmp_path):
    """A rank that has got its result raises at the end of the block all the same, if another has not."""
    done = survive(
        tmp_path,
        3,
        """
        comm = jaxmpi.recover()  # of all: nobody has died
        assert comm.size == 3
        with jaxmpi.survive(uniform=True):
            notoken.allreduce(x, MPI.SUM)
        try:
            with jaxmpi.survive(uniform=True):
                if rank == 0: notoken.send(x, 1)
                if rank == 1: notoken.recv(x, 0)
                if rank == 2: die()
        except jaxmpi.ProcessFailed as error:
            told("raised", error.operation or "at the end")
            told("left", jaxmpi.recover().size)
        try:
            with jaxmpi.survive(uniform=True):
                if rank == 1: raise KeyError("mine")
                notoken.barrier()
        except (jaxmpi.ProcessFailed, KeyError) as error:
            told("then", type(error).__name__)
            told("again", jaxmpi.recover().size)
        """,
    )
    assert done.stdout.count("raised at the end") == 2, done.stdout + done.stderr
    assert done.stdout.count("left 2") == 2
    assert "rank 0: then ProcessFailed" in done.stdout
    assert "rank 1: then KeyError" in done.stdout
    assert done.stdout.count("again 2") == 2
    assert done.returncode == 77


@needs_openmpi
@pytest.mark.parametrize("spare", one_each_time([0, 1], 0))
def test_agreed_or_recovered(spare, tmp_path):
    """A rank is in `recover` while another one still agrees at the end of a block: that one raises, too."""
    done = survive(
        tmp_path,
        4,
        """
        jaxmpi.get_default()
        agreed = jaxmpi.survive(uniform=True)(lambda x: notoken.allreduce(x, MPI.SUM))
        if rank < 4: assert float(agreed(x)[0]) == 4  # not a spare one, which has stepped in
        if rank == 3: die()
        time.sleep(0.3 * rank)
        try:
            if rank == 0:
                for _ in range(1000): notoken.allreduce(x, MPI.SUM).block_until_ready()
            if rank == 1:
                with jaxmpi.survive(uniform=True): pass
            if rank == 2:
                agreed(x)
        except jaxmpi.ProcessFailed:
            told("left", jaxmpi.recover().size)
        told("sum", float(agreed(x)[0]))
        """,
        spare=spare,
    )
    assert done.stdout.count(f"left {3 + spare}") == 3, done.stdout + done.stderr
    assert done.stdout.count(f"sum {3 + spare}.0") == 3 + spare
    assert done.returncode == 77


@needs_openmpi
@nightly
def test_no_half_result(tmp_path):
    """MPI_Allgatherv of Open MPI drops the error of its own broadcast: at most deaths it returns on some rank without
    an error and without its result."""
    done = survive(
        tmp_path,
        4,
        """
        import threading
        def later(): time.sleep(2.0 - 0.5 * rank); die()
        gather = jaxmpi.jit(lambda x: notoken.allgatherv(x, [3] * size))
        gather(x)
        if rank in (2, 3): threading.Thread(target=later, daemon=True).start()
        while size > 2:
            try:
                for i in range(100000):
                    got = np.asarray(gather(np.full(3, 10 * i + rank, np.float32)))
                    if not np.array_equal(got, np.repeat(10.0 * i + np.arange(size), 3)): told("WRONG", i, got)
            except jaxmpi.ProcessFailed:
                comm = jaxmpi.recover()
                rank, size = comm.rank, comm.size
        told("left", i)
        """,
    )
    assert "WRONG" not in done.stdout, done.stdout
    assert done.stdout.count(": left") == 2, done.stdout + done.stderr


@needs_openmpi
@nightly
def test_a_collective_that_drops_an_error(tmp_path):
    """What the ranks of files, maps and replicas tell each other raises, where MPI knows of a death and returns what it
    has not written; also where that cannot be unpickled."""
    done = survive(
        tmp_path,
        2,
        """
        from jaxmpi._mpi import agreement, failures
        class Dropping(MPI.Intracomm):
            def gather(self, value, root=0): return None
            def bcast(self, value, root=0): return ["of the call before"] * 2
            def Allreduce(self, value, result, op): result[:] = 0
        class Unreadable(Dropping):
            def bcast(self, value, root=0): raise ValueError("unpickling")
        comm = MPI.COMM_WORLD.Dup()
        all_have_come()
        if rank == 1: die()
        while not failures.dead(comm): MPI.COMM_SELF.Iprobe()
        for its in (Dropping(comm), Unreadable(comm)):
            for call in (
                lambda: agreement.told(its, 1),
                lambda: agreement.of_rank(its, 1),
                lambda: agreement.alike(its, "this", lambda: (1, []), None),
                lambda: agreement.on_root(its, "this", lambda: 1),
                lambda: agreement.sums(its, "this", None, 1),
            ):
                try: told("WRONG", call())
                except MPI.Exception as error: told("failed", jaxmpi.process_failure(error) is not None)
        """,
    )
    assert "WRONG" not in done.stdout
    assert done.stdout.count("failed True") == 10, done.stdout + done.stderr


@needs_openmpi
@nightly
def test_what_ranks_tell_each_other(tmp_path):
    """It is right, or they raise as a rank dies: by mpi4py's allgather they have a value of the call before, or one
    that cannot be unpickled, at many deaths."""
    done = survive(
        tmp_path,
        6,
        """
        import threading
        from jaxmpi._mpi import agreement, clones
        def later(): time.sleep(3.2 - 0.5 * rank); die()
        if rank > 0: threading.Thread(target=later, daemon=True).start()
        comm = jaxmpi.get_default()
        while comm.size > 1:
            clone = clones.clone_of(comm)
            try:
                for i in range(1000000):
                    got = agreement.told(clone, (i, comm.rank))
                    if got != [(i, r) for r in range(comm.size)]: told("WRONG", i, got)
            except Exception as error:
                if jaxmpi.process_failure(error) is None: told("WRONG", repr(error))
                comm = jaxmpi.recover()
        told("left")
        """,
    )
    assert "WRONG" not in done.stdout, done.stdout
    assert done.stdout.count(": left") == 1, done.stdout + done.stderr


DEATHS = {
    "one": (3, 1, [[1]], [0, 3, 2]),
    "of rank 0": (3, 1, [[0]], [3, 1, 2]),
    "one after the other": (3, 2, [[1], [0]], [4, 3, 2]),
    "two at once": (3, 2, [[0, 2]], [3, 1, 4]),
    "all but one": (3, 3, [[0, 1]], [3, 4, 2]),
    "more than there are spares": (4, 1, [[1, 2]], [0, 4, 3]),
    "again when there are none left": (3, 1, [[1], [0]], [3, 2]),
    "of one that has stepped in": (3, 2, [[1], [3]], [0, 4, 2]),
    "of a spare": (3, 2, [[3], [1]], [0, 4, 2]),
    "of the last spare, and of a rank at the same time": (3, 1, [[3, 1]], [0, 2]),
}


@needs_openmpi
@nightly
@pytest.mark.parametrize("deaths", DEATHS)
def test_spares(deaths, tmp_path):
    """Spare ranks get the numbers of those that have died, and the others keep theirs."""
    ranks, spare, rounds, expected = DEATHS[deaths]
    done = survive(
        tmp_path,
        ranks,
        f"rounds, size = {rounds}, {ranks}",
        """
        import threading
        def later(): time.sleep(2); die()
        if rank >= size and rank in rounds[0]: threading.Thread(target=later, daemon=True).start()
        comm, at = jaxmpi.get_default(), 0
        members = None
        while members is None or at < len(rounds):
            try:
                with jaxmpi.survive(uniform=True):
                    at = int(notoken.allreduce(jnp.int32(at), MPI.MAX))
                    members = np.asarray(notoken.allgather(jnp.int32(rank))).tolist()
                    assert members[comm.rank] == rank
                if at < len(rounds):
                    waiting = [r for r in rounds[at] if r not in members]  # they die meanwhile
                    if rank in rounds[at]:
                        time.sleep(2 if waiting else 0.2)
                        die()
                    at += 1
                    if waiting == rounds[at - 1]: time.sleep(3)
                    else:
                        for _ in range(100000): notoken.allreduce(x, MPI.SUM).block_until_ready()
            except jaxmpi.ProcessFailed:
                comm, members = jaxmpi.recover(), None
        told("of", members, "of", np.asarray(notoken.allgather(jnp.int32(rank))).tolist())
        """,
        spare=spare,
    )
    assert done.stdout.count(f"of {expected} of {expected}") == len(expected), done.stdout + done.stderr
    dead = sum(map(len, rounds))
    stepped_in = {rank for rank in [*expected, *itertools.chain(*rounds[1:])] if rank >= ranks}
    assert len(re.findall(r"which was spare, is rank \d+ of the default", done.stderr)) == len(stepped_in)
    assert f"of {ranks + spare} ({spare} began as spare) {'were' if dead > 1 else 'was'} lost" in done.stderr
    assert done.returncode == 77


@needs_openmpi
@nightly
def test_spares_that_nobody_needs(tmp_path):
    """They take no core, and end with the others."""
    done = survive(
        tmp_path,
        2,
        """
        import atexit
        begin = time.process_time()
        try:
            comm = jaxmpi.get_default()
        except SystemExit:
            atexit.register(told, "released")
            if time.process_time() - begin > 1: told("took", time.process_time() - begin)
            raise
        assert (comm.rank, comm.size) == (rank, 2)
        told("sum", float(notoken.allreduce(x, MPI.SUM)[0]))
        time.sleep(4)
        """,
        spare=2,
    )
    assert done.stdout.count("sum 2.0") == 2, done.stdout + done.stderr
    assert done.stdout.count("released") == 2
    assert "took" not in done.stdout
    assert (done.returncode, done.stderr) == (0, "")


@needs_openmpi
@nightly
def test_spares_in_reports(tmp_path):
    """The table of what ranks do says who is spare."""
    done = survive(
        tmp_path,
        2,
        """
        jaxmpi.get_default()
        if rank == 0: notoken.recv(x, 1).block_until_ready()
        else: time.sleep(8); notoken.send(x, 0)
        """,
        spare=2,
        JAXMPI_TIMEOUT="2",
    )
    assert "  ranks 2, 3: are spare\n" in done.stderr, done.stderr
    assert done.returncode == 0


@needs_openmpi
@nightly
def test_spare_that_ends(tmp_path):
    """Before it has waited: nobody waits for it, and it does not step in."""
    done = survive(
        tmp_path,
        3,
        """
        if rank == 3: sys.exit()
        jaxmpi.get_default()
        if rank == 1: die()
        try:
            while rank < 3: notoken.allreduce(x, MPI.SUM).block_until_ready()
        except jaxmpi.ProcessFailed:
            jaxmpi.recover()
        told("left", jaxmpi.get_default().rank, float(notoken.allreduce(x, MPI.SUM)[0]))
        """,
        spare=2,
    )
    assert sorted(re.findall(r"rank .: left .*", done.stdout)) == [
        "rank 0: left 0 3.0",
        "rank 2: left 2 3.0",
        "rank 4: left 1 3.0",
    ], done.stdout + done.stderr
    assert "rank 1 of 5 (2 began as spare) was lost" in done.stderr
    assert done.returncode == 77


@needs_openmpi
@pytest.mark.parametrize("how", ["die()", "raise ValueError('late')"])
@nightly
def test_death_after_the_last_operation(how, tmp_path):
    """The spares end with the others."""
    done = survive(tmp_path, 2, f"jaxmpi.get_default()\nif rank == 1: {how}\ntold('left')", spare=1)
    assert done.stdout.split("\n") == ["rank 0: left", ""], done.stdout + done.stderr
    assert "rank 1 of 3 (1 began as spare) was lost, and the others ended without an error" in done.stderr
    assert done.returncode == 77


@needs_openmpi
@pytest.mark.parametrize("how", ["sys.exit(5)", "die()"])
@nightly
def test_only_spares_are_left(how, tmp_path):
    """Nobody calls them: the job ends."""
    done = survive(tmp_path, 2, f"jaxmpi.get_default()\n{how}", spare=1)
    assert f"all ranks are lost. The status is {5 if how.startswith('sys') else 1}" in done.stderr
    assert done.returncode == (5 if how.startswith("sys") else 1)


@needs_openmpi
def test_first_save_is_interrupted(tmp_path):
    """A rank dies before it sends its blocks of the first save. The next one is another for all ranks, also for those
    that have stepped in since, which have had none, and have the numbers of those that have died."""
    done = survive(
        tmp_path,
        3,
        """
        comm = jaxmpi.get_default()
        grid = jaxmpi.Grid((0,), (6,))
        replica = jaxmpi.Replica(x[:2], grid=grid, save=False)
        if rank == 1: replica._begin = lambda *arguments: die()
        while True:
            try:
                with jaxmpi.survive(uniform=True):
                    restored = replica.restore(grid)
                members = np.asarray(notoken.allgather(jnp.int32(rank))).tolist()
                told("restored", restored if restored is None else np.asarray(restored).tolist(), "by", members)
                if restored is not None: break
                with jaxmpi.survive(uniform=True):
                    value = comm.bcast(rank, 1)
                    for _ in range(2): replica.save(value * x[:2])
                if rank == 2: die()
                for _ in range(100000): notoken.allreduce(x, MPI.SUM).block_until_ready()
            except jaxmpi.ProcessFailed:
                comm = jaxmpi.recover()
                grid = jaxmpi.Grid((0,), (6,))
        """,
        spare=2,
    )
    told = re.findall(r"rank (\d): restored (.*)", done.stdout)
    for turn, (members, restored) in enumerate((([0, 1, 2], None), ([0, 3, 2], None), ([0, 3, 4], [3.0, 3.0]))):
        expected = [(str(rank), f"{restored} by {members}") for rank in sorted(members)]
        assert sorted(told[3 * turn :][:3]) == expected, done.stdout + done.stderr
    assert len(told) == 9
    assert len(re.findall(r"which was spare, is rank [12] of the default", done.stderr)) == 2
    assert "ranks 1, 2 of 5 (2 began as spare) were lost" in done.stderr


@needs_openmpi
@nightly
def test_spare_that_saves(tmp_path):
    """Ranks that save while others restore raise an error, all of them, and do not hang."""
    done = survive(
        tmp_path,
        3,
        """
        try:
            grid = jaxmpi.Grid((0,), (6,))
            replica = jaxmpi.Replica(x[:2], grid=grid)
            while True:
                try:
                    if rank == 1: die()
                    for _ in range(1000): replica.save(x[:2])
                    break
                except jaxmpi.ProcessFailed:
                    jaxmpi.recover()
                    replica.restore(jaxmpi.Grid((0,), (6,)))
        except RuntimeError as error: told(error)
        """,
        spare=1,
    )
    assert done.stdout.count("Replica: some ranks save, while others restore") == 3, done.stdout + done.stderr


@needs_openmpi
@nightly
def test_death_before_mpi(tmp_path):
    """The others wait for it in MPI_Init, and cannot go on: the job ends, and says why."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, time\n"
        "if os.environ['OMPI_COMM_WORLD_RANK'] == '1': os.kill(os.getpid(), 9)\n"
        "import jaxmpi\nprint('begins')\n"
    )
    done = launch(3, "--survive", program, check=False, timeout=SECONDS)
    assert "begins" not in done.stdout
    assert "rank 1 died before MPI was initialized, for which the others wait" in done.stderr
    assert done.returncode != 0


@needs_openmpi
@nightly
def test_death_before_the_import(tmp_path):
    """The others cannot agree on what holds for all ranks."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os\nfrom mpi4py import MPI\nif MPI.COMM_WORLD.rank == 1: os.kill(os.getpid(), 9)\nimport jaxmpi\n"
    )
    done = launch(3, "--survive", program, check=False, timeout=SECONDS)
    assert done.stderr.count("RuntimeError: jaxmpi: a rank has died before all had imported jaxmpi") >= 2
    assert "all ranks are lost. The status is 1" in done.stderr
    assert done.returncode == 1


@needs_openmpi
@pytest.mark.parametrize("dead", [0, 1])
@nightly
def test_death_in_an_exit_handler(dead, tmp_path):
    """When the program has ended: no other rank hears of it, but the launcher."""
    done = survive(tmp_path, 2, f"import atexit\nif rank < {dead}: atexit.register(die)\nnotoken.barrier()")
    told = "rank 0 of 2 was lost, and the others ended without an error. The status is 77"
    assert (told in done.stderr) == bool(dead), done.stderr
    assert done.returncode == 77 * dead


@needs_openmpi
@pytest.mark.parametrize(("seed", "spare"), [(2, 0), (3, 2)])
@nightly
def test_replica_and_random_deaths(seed, spare, tmp_path):
    """What is restored is, to the last bit, the newest state that was complete; as many die as there are copies."""
    ranks = seed % 3 + 3
    deaths = seed % (ranks - 1) + 1
    options = ("--seed", str(seed), "--deaths", str(deaths), "--seconds", "2")
    program = TESTS / "programs" / "replicas.py"
    done = _launch_random(deaths, ranks, "--survive", "--spare", spare, program, *options)
    _check_random(done, r"^OK ", ranks + spare, deaths)


def _launch_random(deaths, *arguments):
    """Open MPI's mpiexec ended 2 of 100 jobs of 5 ranks, on busy cores, with status 0 as the third rank died."""
    done = launch(*arguments, check=False, timeout=SECONDS)
    if deaths > 2 and "all ranks are lost. The status is 1" in done.stderr and "Traceback" not in done.stderr:
        assert "WRONG" not in done.stdout
        pytest.xfail("mpiexec has ended the job: docs/survive.md")
    return done


def _check_random(done, line, ranks, deaths):
    """All that live have come to their end. A spare rank that was to die within a recovery may have had none."""
    dead = re.search(r"^jaxmpi.run: ranks? ([\d, to]+) of .* lost, and the others", done.stderr, re.MULTILINE)
    assert dead is not None, done.stdout + done.stderr
    lost = 0
    for part in dead[1].split(", "):
        first, _, last = part.partition(" to ")
        lost += int(last or first) - int(first) + 1
    assert lost <= deaths
    assert len(re.findall(line, done.stdout, re.MULTILINE)) == ranks - lost, done.stdout + done.stderr
    assert "WRONG" not in done.stdout
    assert done.returncode == 77


@needs_openmpi
@nightly
def test_replica_is_lost(tmp_path):
    """A rank and the one that keeps its copy die at the same time: all that live raise alike, and say what helps."""
    done = survive(
        tmp_path,
        4,
        """
        grid = jaxmpi.Grid((0,), (8,))
        replica = jaxmpi.Replica({"x": x[:2] + rank}, grid=grid)
        all_have_come()
        if rank in (1, 2): die()
        try:
            for _ in range(100): replica.save({"x": x[:2] + rank})
        except jaxmpi.ProcessFailed as failure: told(type(failure).__name__)
        jaxmpi.recover()
        try: replica.restore(jaxmpi.Grid((0,), (8,)))
        except RuntimeError as error: told(error)
        """,
    )
    assert done.stdout.count(": ProcessFailed\n") == 2, done.stdout + done.stderr
    text = "the saved state is lost. All ranks that had the blocks of rank 1 of 4 have died. Keep more copies"
    assert done.stdout.count(text) == 2
    assert done.returncode == 77


@needs_openmpi
@pytest.mark.parametrize(("seed", "spare"), [(1, 0), (17, 0), (11, 2)])
@nightly
def test_random_deaths(seed, spare):
    """In random operations, at random times: no wrong result, nothing in flight, and an end within seconds."""
    ranks, deaths = seed % 3 + 2, seed % (seed % 3 + 1) + 1
    program = TESTS / "programs" / "deaths.py"
    options = ("--seed", str(seed), "--deaths", str(deaths), "--programs", "6")
    done = _launch_random(deaths, ranks, "--survive", "--spare", spare, program, *options)
    _check_random(done, r"^OK .* 0 in flight$", ranks + spare, deaths)


@pytest.mark.skipif(shutil.which("mpiexec") is None and run.find_mpiexec() is None, reason="no mpiexec")
@needs_openmpi
@pytest.mark.alone
def test_command():
    """Both that of the launcher's own placement and the user's."""
    for more in ((), ("--mpiexec-args=--map-by node",)):
        done = launch(2, "--survive", "--dry-run", *more, "-c", "pass")
        assert "--with-ft ulfm" in done.stdout
        assert "child.py --survive" in done.stdout
    done = launch(2, "--survive", "--spare", "3", "--dry-run", "-c", "pass")
    assert "JAXMPI_SPARES=3" in done.stdout
    assert "OMPI_MCA_opal_signal= " in done.stdout  # a rank that crashes dies
    assert "-n 5" in done.stdout


@needs_openmpi
@pytest.mark.seconds(300)
@pytest.mark.parametrize(("kept", "spare"), [("memory", 0), ("memory", 1), ("files", 0), ("files", 2)])
@nightly
def test_example(kept, spare, tmp_path):
    """The model ends with the field of a run in which nobody dies."""
    pytest.importorskip("matplotlib")
    states = []
    for kill in ([], ["--kill", "1@50", "--kill", "0@110"]):
        if kept == "files":
            pytest.importorskip("zarr")
            kill += ["--files", tmp_path / f"of {len(kill)}"]
        file = tmp_path / f"{len(kill)}.npz"
        options = ["--size", "96", "48", "--days", "0.05", "--every", "20", "--output-dir", tmp_path]
        options += ["--save-state", file, *kill]
        program = TESTS.parent / "examples" / "survivor.py"
        done = launch(3, "--survive", "--spare", spare, program, *options, check=False)
        assert done.returncode == (77 if "--kill" in kill else 0), done.stderr
        assert f"{1 + spare if '--kill' in kill else 3} of {3 + spare} processes left" in done.stdout
        with np.load(file) as data:
            states.append({name: data[name] for name in data})
    assert "step 40: 1 of 3 processes lost" in done.stdout
    assert (tmp_path / "survivor.png").stat().st_size > 10_000
    for name, tolerance in (("h", 1e-3), ("u", 1e-4), ("v", 1e-4)):
        np.testing.assert_allclose(states[1][name], states[0][name], atol=tolerance, rtol=0)


@needs_openmpi
@pytest.mark.parametrize("spare", one_each_time([0, 1], 0))
def test_checks_do_not_keep_ranks(spare, tmp_path):
    """With JAXMPI_CHECK=1 ranks wait without end for the comparison of their calls: not for one that is at its end."""
    done = survive(
        tmp_path,
        3,
        """
        jaxmpi.get_default()
        if rank < 3:
            notoken.allreduce(x, MPI.SUM).block_until_ready()
            jaxmpi.get_default().Agree(1)
        if rank == 2: raise KeyError("this")
        try:
            while rank < 3: notoken.allreduce(x, MPI.SUM).block_until_ready()
        except jaxmpi.ProcessFailed as error:
            comm = jaxmpi.recover()
            told("failed in", error.operation, set(error.ranks) <= {2}, jaxmpi.lost(error.comm, comm))
        for _ in range(5): told("sum", float(notoken.allreduce(x, MPI.SUM)[0]))
        """,
        spare=spare,
        JAXMPI_CHECK="1",
    )
    left = 2 + spare
    assert done.stdout.count(f"sum {left}.0") == 5 * left, done.stdout + done.stderr
    assert done.stdout.count("failed in allreduce True (2,)") == 2
    assert "was lost, and the others ended without an error. The status is 77" in done.stderr
    assert done.stderr.count("rank 2 is lost, and the job goes on: KeyError: 'this'") == 1
    assert done.returncode == 77


@needs_openmpi
def test_wrong_arguments(tmp_path):
    """Errors that say what to do, and the job goes on: nothing of the package itself is taken away from it. What has
    spare ranks is not recovered: they wait, and would never call it."""
    done = survive(
        tmp_path,
        2,
        """
        comm = jaxmpi.get_default()
        gone = comm.Dup()
        gone.Free()
        def generator(): yield
        async def coroutine(): pass
        between = comm.Split(rank, 0).Create_intercomm(0, comm, 1 - rank, 5)
        wrong = [
            (jaxmpi.recover, (MPI.COMM_SELF,), ValueError, "recover: comm is MPI.COMM_SELF, which cannot lose a rank"),
            (jaxmpi.recover, (None, MPI.COMM_SELF), ValueError, "recover: comm is MPI.COMM_SELF"),
            (jaxmpi.recover, (WORLD,), ValueError, "comm has spare ranks, which wait and do not call recover"),
            (jaxmpi.recover, (None, WORLD), ValueError, "recover: comm has spare ranks"),
            (jaxmpi.lost, (3, comm), TypeError, "lost: old must be an intra-communicator of mpi4py, got 3"),
            (jaxmpi.lost, (comm, None), TypeError, "lost: new must be an intra-communicator of mpi4py, got None"),
            (jaxmpi.lost, (gone, comm), ValueError, "lost: old is MPI.COMM_NULL"),
            (jaxmpi.lost, (between, comm), TypeError, "lost: old must be an intra-communicator"),
            (jaxmpi.survive, (5,), TypeError, "survive: comm must be an intra-communicator of mpi4py, got 5"),
            (jaxmpi.survive, (gone,), ValueError, "survive: comm is MPI.COMM_NULL"),
            (jaxmpi.survive, (told,), TypeError, "survive: call it before it decorates a function: @jaxmpi.survive()"),
            (jaxmpi.survive(), (3,), TypeError, "survive: it decorates functions, got 3"),
            (lambda uniform: jaxmpi.survive(uniform=uniform), ("yes",), TypeError, "survive: uniform must be True or"),
            (jaxmpi.survive(), (generator,), TypeError, "is a generator or asynchronous"),
            (jaxmpi.survive(), (coroutine,), TypeError, "is a generator or asynchronous"),
            (jaxmpi.survive(), (dict,), TypeError, "survive: it decorates functions, got <class 'dict'>"),
            (jaxmpi.set_default, (None,), TypeError, "set_default: comm must be an intra-communicator"),
        ]
        for function, arguments, kind, text in wrong:
            try:
                function(*arguments)
                told("nothing raised:", text)
            except kind as error:
                assert text in str(error), error
        told("sum", notoken.allreduce(x, MPI.SUM)[0])
        told("sum", notoken.allreduce(x, MPI.SUM, comm=MPI.COMM_SELF)[0])
        """,
        spare=1,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.count("sum 2.0") == 2
    assert done.stdout.count("sum 1.0") == 2
    assert "nothing raised" not in done.stdout


TOGETHER = {
    "IndexMap": ("jaxmpi.IndexMap(3 * rank + np.arange(3), [], comm=comm)", "IndexMap"),
    "IndexMap.from_csr": ("jaxmpi.IndexMap.from_csr([0, 1], [rank], comm=comm)", "IndexMap.from_csr"),
    "save": ("io.save(folder + '/one', {'n': 1}, comm=comm)", "io.save"),
    "load": ("io.load(folder + '/00000000', comm=comm)", "io.load"),
    "checkpoint": ("io.checkpoint(folder, {'n': 1}, comm=comm)", "io.checkpoint"),
    "latest": ("io.latest(folder, comm=comm)", "io.latest"),
    "Writer.append": ("out.append(1.0, {'n': 1})", "io.Writer.append"),
    "Writer.close": ("out.close()", "io.Writer.close"),
}


@needs_openmpi
@nightly
@pytest.mark.parametrize("call", TOGETHER)
def test_error_of_what_ranks_do_together(call, tmp_path):
    """What is done by mpi4py inside the package raises ProcessFailed, too, and the others hear of it: here one of them
    waits in an operation with a rank that lives."""
    if "IndexMap" not in call:
        pytest.importorskip("zarr")
    text, operation = TOGETHER[call]
    done = survive(
        tmp_path,
        3,
        f"folder = {str(tmp_path / 'states')!r}",
        f"operation, call = {operation!r}, lambda: {text}",
        """
        from jaxmpi import io
        comm = jaxmpi.get_default()
        if operation.startswith("io."):
            io.checkpoint(folder, {"n": 0})
            out = io.Writer(folder + "/series.zarr", None)
            out.append(0.0, {"n": 0})
        else:
            call()
        all_have_come()
        if rank == 1: die()
        try:
            if rank == 0: call()
            else: notoken.recv(x, 0, comm=comm)
            told("nothing raised")
        except jaxmpi.ProcessFailed as error:
            told("failed in", error.operation, set(error.ranks) <= {1}, error.comm == comm)
        comm = jaxmpi.recover()
        told("sum", notoken.allreduce(x, MPI.SUM)[0])
        """,
    )
    assert f"rank 0: failed in {operation} True True" in done.stdout, done.stdout + done.stderr
    assert "rank 2: failed in recv True True" in done.stdout
    assert done.stdout.count("sum 2.0") == 2
    assert done.returncode == 77


@needs_openmpi
@nightly
def test_what_is_not_made_again(tmp_path):
    """A grid, map or Replica of the old communicator says so by another error than a death, which a loop that recovers
    would take for the next one, for ever."""
    done = survive(
        tmp_path,
        3,
        """
        grid = jaxmpi.Grid((0,), (12,))
        block = jnp.ones(grid.local_shape)
        points = jaxmpi.IndexMap(4 * rank + np.arange(4), [])
        replica = jaxmpi.Replica({"u": block}, grid=grid)
        all_have_come()
        if rank == 1: die()
        try:
            for _ in range(1000): notoken.allreduce(x, MPI.SUM)
        except jaxmpi.ProcessFailed:
            jaxmpi.recover()
        again = jaxmpi.Grid((0,), (12,))
        calls = {
            "save": lambda: replica.save({"u": block}),
            "restore": lambda: replica.restore(grid),
            "gather": lambda: grid.gather(block),
            "scatter": lambda: grid.scatter(jnp.ones(12)),
            "redistribute": lambda: jaxmpi.redistribute(block, grid, again),
            "exchange": lambda: points.exchange(points.pad(block)),
        }
        for name, call in calls.items():
            try: jax.block_until_ready(call())
            except jaxmpi.ProcessFailed as error: told(name, "another death", error)
            except (ValueError, jax.errors.JaxRuntimeError) as error:
                assert "given up by jaxmpi.recover" in str(error), error
                told(name, "says so")
        told(float(grid.global_shape[0] == again.gather(replica.restore(again)["u"], root=None).sum()))
        """,
    )
    for name in ("save", "restore", "gather", "scatter", "redistribute", "exchange"):
        assert done.stdout.count(f"{name} says so") == 2, done.stdout + done.stderr
    assert done.stdout.count(": 1.0") == 2


SLOW = """
def slow(x):
    y = jax.lax.fori_loop(0, 8, lambda _, a: jnp.tanh(a @ a), jnp.eye(400) + x[0] * 0)
    return notoken.allreduce(x + y[0, 0] * 0, MPI.SUM)
step = jax.jit(slow)  # returns before it is done
step(x).block_until_ready()
"""


@needs_openmpi
@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("then", ["notoken.allreduce(z, MPI.SUM)", "jaxmpi.jit(lambda z: z + 1)(z)", "step(z)"])
@nightly
def test_errors_that_a_later_call_only_warns_of(then, uniform, tmp_path):
    """The end of the block raises them all the same."""
    done = survive(
        tmp_path,
        3,
        SLOW,
        f"""
        all_have_come()
        if rank == 2: die()
        try:
            with jaxmpi.survive(uniform={uniform}):
                z = step(x)
                y = {then}
            told("left without an error")
        except jaxmpi.ProcessFailed as error:
            told("raised", error.ranks)
        comm = jaxmpi.recover()
        told("sum", step(x)[0])
        """,
    )
    assert "left without an error" not in done.stdout
    assert done.stdout.count(": raised (") == 2, done.stdout + done.stderr
    assert done.stdout.count("sum 2.0") == 2
    assert done.returncode == 77


@needs_openmpi
@nightly
@pytest.mark.parametrize("uniform", [False, True])
def test_arrays_that_are_lost(uniform, tmp_path):
    """The result of a computation that failed before recover is an error that is no ProcessFailed, or a program would
    recover for ever; and no other rank waits for one that has used it."""
    done = survive(
        tmp_path,
        3,
        SLOW,
        f"""
        all_have_come()
        if rank == 2: die()
        kept = x
        for turn in range(5):
            try:
                with jaxmpi.survive(uniform={uniform}):
                    x = step(x)
                told("sum", x[0])
                break
            except jaxmpi.ProcessFailed as error:
                jaxmpi.recover()
                if rank == 1: x = kept  # and the other goes on with what it has
            except RuntimeError as error:
                assert "an array whose computation failed before jaxmpi.recover" in str(error), error
                told("lost in turn", turn)
                jaxmpi.recover()
                x = kept
        """,
    )
    assert done.stdout.count("lost in turn 1") == 1, done.stdout + done.stderr
    assert done.stdout.count("sum 2.0") == 2
    assert done.returncode == 77


@needs_openmpi
@nightly
def test_recover_is_reported(tmp_path):
    """It waits for a rank that has ended, or does not come, and the table says of each rank what it does."""
    done = survive(
        tmp_path,
        4,
        """
        notoken.barrier()
        all_have_come()
        if rank == 1: sys.exit(0)
        if rank == 2: die()
        try: notoken.barrier()
        except jaxmpi.ProcessFailed: pass
        if rank == 3: time.sleep(12); sys.exit(5)
        jaxmpi.recover()
        """,
        JAXMPI_TIMEOUT="3",
        JAXMPI_TIMEOUT_ACTION="abort",
    )
    assert re.search(r"rank 0 has been waiting for 3\S* s in recover", done.stderr), done.stderr
    assert "rank 0: waits in recover, on" in done.stderr
    assert "rank 1: has ended" in done.stderr
    assert "rank 2: has died" in done.stderr


@needs_openmpi
@nightly
def test_reason_is_the_error(tmp_path):
    """And not the note that JAX puts below it."""
    done = survive(tmp_path, 2, "if rank == 1: jax.jit(lambda x: x.bogus)(1.0)")
    assert "rank 1 is lost, and the job goes on: AttributeError: " in done.stderr
