"""Jobs that go on as ranks die: `python -m jaxmpi.run --survive`, `jaxmpi.survive.recover`.

Seven tests run each time, five of them jobs: recovery with checks, what is given up, agreed values, spares and Replica,
wrong arguments. The others are of what docs/survive.md says.
"""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from support.launch import is_openmpi, launch, written
from support.rows import one_each_time

pytestmark = [pytest.mark.alone, pytest.mark.sampled, pytest.mark.seconds(300)]
TESTS = Path(__file__).resolve().parents[1]
SECONDS = 240

needs_openmpi = pytest.mark.skipif(not is_openmpi(), reason="jobs of Open MPI alone go on without a rank")


def at_night(test):
    return pytest.mark.nightly(needs_openmpi(test))


BEGIN = """
    import ctypes, os, signal, sys, time
    import jax, jax.numpy as jnp, numpy as np
    import jaxmpi
    from jaxmpi import survive
    from mpi4py import MPI
    WORLD = MPI.COMM_WORLD
    rank, size = WORLD.rank, WORLD.size
    x = jnp.ones(3)
    def die(): os.kill(os.getpid(), signal.SIGKILL)
    def all_have_come(): WORLD.Agree(1)  # and no death that follows is an error of what was done before
    def told(*what): print(f"rank {rank}:", *what, flush=True)
"""


def survive(tmp_path, ranks, *parts, spare=0, **options):
    program = written(tmp_path, BEGIN, *parts)
    return launch(ranks, "--survive", "--spare", spare, program, check=False, timeout=SECONDS, **options)


def test_spares_without_survive():
    """As the environment of a plain mpiexec may say it."""
    done = launch(0, "-c", "import jaxmpi", check=False, JAXMPI_SPARES="1")
    assert "RuntimeError: jaxmpi: JAXMPI_SPARES=1: only a job that goes on after a death has spare" in done.stderr


FAILING = {
    "eager": ("jaxmpi.allreduce(x, MPI.SUM)", "allreduce"),
    "jaxmpi.jit": ("jaxmpi.jit(add)(x)", "allreduce"),
    "jax.jit": ("jaxmpi.survive.deaths()(jax.jit(add))(x)", "allreduce"),
    "wait": ("jaxmpi.wait(jaxmpi.iallreduce(x, MPI.SUM))", "iallreduce"),
    "exchange": ("grid.exchange(jnp.ones(5))", "Grid.exchange"),
    "IndexMap": ("jaxmpi.IndexMap(3 * rank + np.arange(3), [], comm=comm)", "IndexMap"),
    "IndexMap.from_csr": ("jaxmpi.IndexMap.from_csr([0, 1], [rank], comm=comm)", "IndexMap.from_csr"),
    "save": ("io.save(folder + '/one', {'n': 1}, comm=comm)", "io.save"),
    "load": ("io.load(folder + '/00000000', comm=comm)", "io.load"),
    "checkpoint": ("io.checkpoint(folder, {'n': 1}, comm=comm)", "io.checkpoint"),
    "latest": ("io.latest(folder, comm=comm)", "io.latest"),
    "Writer.append": ("out.append(1.0, {'n': 1})", "io.Writer.append"),
    "Writer.close": ("out.close()", "io.Writer.close"),
}


@at_night
@pytest.mark.parametrize("call", FAILING)
def test_error_and_recovery(call, tmp_path):
    """What was called raises ProcessFailed, which says who has died and where, and the others hear of it: here one of
    them waits in an operation with a rank that lives."""
    text, operation = FAILING[call]
    if operation.startswith("io."):
        pytest.importorskip("zarr")
    program = """
        from jaxmpi import io
        def add(x): return jaxmpi.allreduce(x, MPI.SUM)
        comm, grid = jaxmpi.get_default(), jaxmpi.Grid((size,), (3 * size,), periodic=True)
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
            else: jaxmpi.recv(x, 0, comm=comm)
            told("nothing raised")
        except jaxmpi.survive.ProcessFailed as error:
            assert isinstance(error, jax.errors.JaxRuntimeError)
            told("failed in", error.operation, set(error.ranks) <= {1}, error.comm == comm)
            old = error.comm
        comm = jaxmpi.survive.recover()
        told("sum", jaxmpi.allreduce(x, MPI.SUM)[0], jaxmpi.survive.lost(old, comm))
    """
    setting = f"folder, operation, call = {str(tmp_path / 'states')!r}, {operation!r}, lambda: {text}"
    done = survive(tmp_path, 3, setting, program)
    assert f"rank 0: failed in {operation} True True" in done.stdout, done.stdout + done.stderr
    assert "rank 2: failed in recv True True" in done.stdout
    assert done.stdout.count("sum 2.0 (1,)") == 2
    assert done.stderr.count("rank 1 has died") == 1
    assert "rank 1 of 3 was lost, and the others ended without an error. The status is 77" in done.stderr
    assert done.returncode == 77


ENDS = {
    "raise KeyError('this')": "rank 0 is lost, and the job goes on: KeyError: 'this'",
    "jax.jit(lambda x: x.bogus)(1.0)": "rank 0 is lost, and the job goes on: AttributeError: ",  # not a note of JAX
    "sys.exit(3)": "rank 0 is lost, and the job goes on: sys.exit(3)",
    "os._exit(4)": "rank 0 is lost, and the job goes on: rank 0 calls os._exit(4)",
    "os.kill(os.getpid(), signal.SIGSEGV)": "rank 0 has died",
    "ctypes.CDLL(None).exit(3)": "rank 0 has died",
}


@at_night
@pytest.mark.parametrize("how", ENDS)
def test_each_end_of_a_rank(how, tmp_path):
    """However a rank ends, the others hear of it, and it is told once. Rank 0 is none that the job needs."""
    loop = f"""
        try:
            for i in range(1000):
                if i == 10 and rank == 0: {how}
                jaxmpi.allreduce(x, MPI.SUM).block_until_ready()
        except jaxmpi.survive.ProcessFailed as error:
            told("left", jaxmpi.survive.recover().size)
    """
    done = survive(tmp_path, 3, loop)
    assert done.stdout.count("left 2") == 2, done.stdout + done.stderr
    assert done.stderr.count(ENDS[how]) == 1, done.stderr
    assert len(re.findall(r"jaxmpi\.run: rank 0 (?:is lost|has died)", done.stderr)) == 1
    assert done.returncode == 77


@needs_openmpi
def test_nothing_of_the_old_one_is_left(tmp_path):
    """Requests in flight are given up, a wait for one says so, and so does what was made on the old communicator."""
    program = """
        old = WORLD.Dup()
        grid = jaxmpi.Grid((3,), (9,), periodic=True, comm=old)
        grid.exchange(jnp.ones(5)).block_until_ready()
        replica = jaxmpi.survive.Replica({"u": x}, grid=grid)
        points = jaxmpi.IndexMap(3 * rank + np.arange(3), [], comm=old)
        inner = jax.jit(lambda x: jaxmpi.allreduce(x, MPI.SUM))  # traced once, within others too
        outer = jaxmpi.jit(lambda x: inner(x) + jax.lax.fori_loop(0, 2, lambda _, y: inner(x), x))
        assert float(outer(x)[0]) == 6
        request = jaxmpi.irecv(x, (rank + 1) % 3, tag=9, comm=old)
        sum_of_all = jaxmpi.iallreduce(x, MPI.SUM, comm=old)
        all_have_come()
        if rank == 2: die()
        def fails(call):
            try: jax.block_until_ready(call())
            except survive.ProcessFailed as error: return f"another death, for which a loop would recover: {error}"
            except (RuntimeError, ValueError) as error: return str(error)
            return "nothing"
        fails(lambda: [jaxmpi.barrier(comm=old) for _ in range(1000)])
        fails(lambda: [jaxmpi.allreduce(x, MPI.SUM).block_until_ready() for _ in range(1000)])
        comm, new = jaxmpi.survive.recover(old, None)
        assert comm.size == new.size == 2
        again, nine = (jaxmpi.Grid((2,), (n,), periodic=True, comm=comm) for n in (6, 9))
        for text, call in [
            ("given up by jaxmpi.survive.recover", lambda: jaxmpi.wait(request)),
            ("comm has been given up", lambda: jaxmpi.allreduce(x, MPI.SUM, comm=old)),
            ("Make the grid again", lambda: grid.exchange(jnp.ones(5))),
            ("given up by jaxmpi.survive.recover", lambda: replica.save({"u": x})),
            ("given up by jaxmpi.survive.recover", lambda: replica.restore(grid)),
            ("given up by jaxmpi.survive.recover", lambda: grid.gather(x)),
            ("given up by jaxmpi.survive.recover", lambda: grid.scatter(jnp.ones(9))),
            ("given up by jaxmpi.survive.recover", lambda: jaxmpi.redistribute(x, grid, nine)),
            ("given up by jaxmpi.survive.recover", lambda: points.exchange(x)),
        ]:
            assert text in fails(call), fails(call)
        assert np.array_equal(replica.restore(nine)["u"], np.ones(nine.local_shape))
        assert float(outer(x)[0]) == 4
        jaxmpi.set_default(comm)
        assert float(outer(x)[0]) == 4
        halos = np.asarray(again.exchange(jnp.full(5, float(comm.rank))))
        assert halos[0] == halos[-1] == 1 - comm.rank
        index = jaxmpi.IndexMap(np.arange(2) + 2 * comm.rank, np.array([2 - 2 * comm.rank]), comm=comm)
        rows = np.asarray(index.exchange(jnp.asarray([10.0 * comm.rank, 1, 0])))
        assert rows[2] == 10 * (1 - comm.rank), rows
        told("right")
    """
    done = survive(tmp_path, 3, program)
    assert done.stdout.count(": right") == 2, done.stdout + done.stderr
    assert "never waited" not in done.stderr
    assert done.returncode == 77


@needs_openmpi
@pytest.mark.parametrize("spare", one_each_time([0, 1], 0))
def test_agreed_or_recovered(spare, tmp_path):
    """A rank is in `recover` while another one still agrees at the end of a block: that one raises, too. If a rank
    leaves a block by an exception of its own, no other waits for it."""
    program = """
        jaxmpi.get_default()
        agreed = jaxmpi.survive.deaths(uniform=True)(lambda x: jaxmpi.allreduce(x, MPI.SUM))
        if rank < 4: assert float(agreed(x)[0]) == 4  # not a spare one, which has stepped in
        if rank == 3: die()
        time.sleep(0.3 * rank)
        try:
            if rank == 0:
                for _ in range(1000): jaxmpi.allreduce(x, MPI.SUM).block_until_ready()
            if rank == 1:
                with jaxmpi.survive.deaths(uniform=True): pass
            if rank == 2:
                agreed(x)
        except jaxmpi.survive.ProcessFailed:
            told("left", jaxmpi.survive.recover().size)
        told("sum", float(agreed(x)[0]))
        try:
            with jaxmpi.survive.deaths(uniform=True):
                if rank == 1: raise KeyError("mine")
                jaxmpi.barrier()
        except (jaxmpi.survive.ProcessFailed, KeyError) as error:
            told("then", type(error).__name__, jaxmpi.survive.recover().size)
    """
    done = survive(tmp_path, 4, program, spare=spare)
    left = 3 + spare
    assert done.stdout.count(f"left {left}") == 3, done.stdout + done.stderr
    assert done.stdout.count(f"sum {left}.0") == left
    assert f"rank 1: then KeyError {left}\n" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count(f"then ProcessFailed {left}\n") == left - 1
    assert done.returncode == 77


DEATHS = {
    "one": (3, 1, [[1]], [0, 3, 2]),
    "one after the other": (3, 2, [[1], [0]], [4, 3, 2]),
    "two at once": (3, 2, [[0, 2]], [3, 1, 4]),
    "more than there are spares": (4, 1, [[1, 2]], [0, 4, 3]),
    "of one that has stepped in": (3, 2, [[1], [3]], [0, 4, 2]),
    "of a spare": (3, 2, [[3], [1]], [0, 4, 2]),
    "of the last spare, and of a rank at the same time": (3, 1, [[3, 1]], [0, 2]),
    "after the program of a spare has ended": (3, 2, [[1]], [0, 4, 2], 3),
}
"""Ranks, spares, who dies one after the other, who has the numbers then, and the spare whose program ends at once."""


@at_night
@pytest.mark.parametrize("deaths", DEATHS)
def test_spares(deaths, tmp_path):
    """Spare ranks get the numbers of those that have died, and the others keep theirs."""
    ranks, spare, rounds, expected, *ends = DEATHS[deaths]
    program = """
        import threading
        def later(): time.sleep(2); die()
        if rank >= size and rank in rounds[0]: threading.Thread(target=later, daemon=True).start()
        comm, at = jaxmpi.get_default(), 0
        members = None
        while members is None or at < len(rounds):
            try:
                with jaxmpi.survive.deaths(uniform=True):
                    at = int(jaxmpi.allreduce(jnp.int32(at), MPI.MAX))
                    members = np.asarray(jaxmpi.allgather(jnp.int32(rank))).tolist()
                    assert members[comm.rank] == rank
                if at < len(rounds):
                    waiting = [r for r in rounds[at] if r not in members]  # they die meanwhile
                    if rank in rounds[at]:
                        time.sleep(2 if waiting else 0.2)
                        die()
                    at += 1
                    if waiting == rounds[at - 1]: time.sleep(3)
                    else:
                        for _ in range(100000): jaxmpi.allreduce(x, MPI.SUM).block_until_ready()
            except jaxmpi.survive.ProcessFailed:
                comm, members = jaxmpi.survive.recover(), None
        told("of", members, "of", np.asarray(jaxmpi.allgather(jnp.int32(rank))).tolist())
    """
    setting = f"rounds, size = {rounds}, {ranks}\nif rank in {ends}: sys.exit()"
    done = survive(tmp_path, ranks, setting, program, spare=spare)
    assert done.stdout.count(f"of {expected} of {expected}") == len(expected), done.stdout + done.stderr
    dead = sum(map(len, rounds))
    stepped_in = {rank for rank in [*expected, *itertools.chain(*rounds[1:])] if rank >= ranks}
    assert len(re.findall(r"which was spare, is rank \d+ of the default", done.stderr)) == len(stepped_in)
    assert f"of {ranks + spare} ({spare} began as spare) {'were' if dead > 1 else 'was'} lost" in done.stderr
    assert done.returncode == 77


@needs_openmpi
def test_first_save_is_interrupted(tmp_path):
    """A rank dies before it sends its blocks of the first save. The next one is another for all ranks, also for those
    that have stepped in since, which have had none, and have the numbers of those that have died."""
    program = """
        comm = jaxmpi.get_default()
        grid = jaxmpi.Grid((0,), (6,))
        replica = jaxmpi.survive.Replica(x[:2], grid=grid, save=False)
        if rank == 1: replica._begin = lambda *arguments: die()
        while True:
            try:
                with jaxmpi.survive.deaths(uniform=True):
                    restored = replica.restore(grid)
                members = np.asarray(jaxmpi.allgather(jnp.int32(rank))).tolist()
                told("restored", restored if restored is None else np.asarray(restored).tolist(), "by", members)
                if restored is not None: break
                with jaxmpi.survive.deaths(uniform=True):
                    value = comm.bcast(rank, 1)
                    for _ in range(2): replica.save(value * x[:2])
                if rank == 2: die()
                for _ in range(100000): jaxmpi.allreduce(x, MPI.SUM).block_until_ready()
            except jaxmpi.survive.ProcessFailed:
                comm = jaxmpi.survive.recover()
                grid = jaxmpi.Grid((0,), (6,))
    """
    done = survive(tmp_path, 3, program, spare=2)
    told = re.findall(r"rank (\d): restored (.*)", done.stdout)
    for turn, (members, restored) in enumerate((([0, 1, 2], None), ([0, 3, 2], None), ([0, 3, 4], [3.0, 3.0]))):
        expected = [(str(rank), f"{restored} by {members}") for rank in sorted(members)]
        assert sorted(told[3 * turn :][:3]) == expected, done.stdout + done.stderr
    assert len(told) == 9
    assert len(re.findall(r"which was spare, is rank [12] of the default", done.stderr)) == 2
    assert "ranks 1, 2 of 5 (2 began as spare) were lost" in done.stderr


EARLY = {
    "os.environ['OMPI_COMM_WORLD_RANK']": "rank 1 died before MPI was initialized, for which the others wait",
    "str(__import__('mpi4py.MPI').MPI.COMM_WORLD.rank)": "jaxmpi: a rank has died before all had imported jaxmpi",
}
"""The number of the rank, before MPI is initialized and after, and why the others cannot go on without it."""


@at_night
@pytest.mark.parametrize("number", EARLY)
def test_death_before_the_import(number):
    program = f"import os\nif {number} == '1': os.kill(os.getpid(), 9)\nimport jaxmpi\nprint('begins')"
    done = launch(3, "--survive", "-c", program, check=False, timeout=SECONDS)
    assert "begins" not in done.stdout
    assert EARLY[number] in done.stderr
    assert done.returncode not in (0, 77)


@at_night
@pytest.mark.parametrize(
    ("program", "ranks", "deaths", "seed", "spare"),
    [("deaths", 4, 3, 17, 0), ("deaths", 4, 2, 11, 2), ("replicas", 3, 2, 3, 2)],
)
def test_random_deaths(program, ranks, deaths, seed, spare):
    """At random times, in random operations or while a Replica saves and restores: no wrong result, and an end within
    seconds for all that live. A spare rank that was to die within a recovery may have had none."""
    options = ("--seed", str(seed), "--deaths", str(deaths))
    more, line = {"deaths": (("--programs", "6"), r"^OK .* 0 in flight$"), "replicas": (("--seconds", "2"), "^OK ")}[
        program
    ]
    file = TESTS / "programs" / f"{program}.py"
    done = launch(ranks, "--survive", "--spare", spare, file, *options, *more, check=False, timeout=SECONDS)
    assert "WRONG" not in done.stdout
    if deaths > 2 and "all ranks are lost. The status is 1" in done.stderr and "Traceback" not in done.stderr:
        pytest.xfail("mpiexec has ended the job: docs/survive.md")  # 2 of 100 jobs of 5 ranks on busy cores
    dead = re.search(r"^jaxmpi.run: ranks? ([\d, to]+) of .* lost, and the others", done.stderr, re.MULTILINE)
    assert dead is not None, done.stdout + done.stderr
    lost = 0
    for part in dead[1].split(", "):
        first, _, last = part.partition(" to ")
        lost += int(last or first) - int(first) + 1
    assert lost <= deaths
    assert len(re.findall(line, done.stdout, re.MULTILINE)) == ranks + spare - lost, done.stdout + done.stderr
    assert done.returncode == 77


JOBS = {
    # The program has ended: no other rank hears of it, but the launcher.
    "a death in an exit handler": (
        (2, 0, 77),
        "import atexit\nif rank == 0: atexit.register(die)\njaxmpi.barrier()",
        {"rank 0 of 2 was lost, and the others ended without an error. The status is 77": 1},
    ),
    "a death after the last operation": (
        (2, 1, 77),
        "jaxmpi.get_default()\nif rank == 1: die()\ntold('left')",
        {"rank 1 of 3 (1 began as spare) was lost, and the others ended without an error": 1, "rank 0: left": 1},
    ),
    "nobody is left to call a spare": ((2, 1, 1), "jaxmpi.get_default()\ndie()", {"all ranks are lost.": 1}),
    "nobody is left, by exit": ((2, 1, 5), "jaxmpi.get_default()\nsys.exit(5)", {"all ranks are lost.": 1}),
    "ranks that save while others restore": (
        (3, 1, 77),
        """
        try:
            grid = jaxmpi.Grid((0,), (6,))
            replica = jaxmpi.survive.Replica(x[:2], grid=grid)
            while True:
                try:
                    if rank == 1: die()
                    for _ in range(1000): replica.save(x[:2])
                    break
                except jaxmpi.survive.ProcessFailed:
                    jaxmpi.survive.recover()
                    replica.restore(jaxmpi.Grid((0,), (6,)))
        except RuntimeError as error: told(error)
        """,
        {"Replica: some ranks save, others restore": 3},
    ),
    "a rank dies together with the one that keeps its copy": (
        (4, 0, 77),
        """
        grid = jaxmpi.Grid((0,), (8,))
        replica = jaxmpi.survive.Replica({"x": x[:2] + rank}, grid=grid)
        all_have_come()
        if rank in (1, 2): die()
        try:
            for _ in range(100): replica.save({"x": x[:2] + rank})
        except jaxmpi.survive.ProcessFailed as failure: told(type(failure).__name__)
        jaxmpi.survive.recover()
        try: replica.restore(jaxmpi.Grid((0,), (8,)))
        except RuntimeError as error: told(error)
        """,
        {
            ": ProcessFailed\n": 2,
            "the saved state is lost. All ranks that had the blocks of rank 1 of 4 have died. Keep more copies, by copies=": 2,  # noqa: E501
        },
    ),
    # What ranks of files, maps and replicas tell each other, where MPI knows of a death and returns what it has not
    # written, or what cannot be unpickled.
    "a collective that drops an error": (
        (2, 0, 77),
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
                lambda: agreement.gather_objects(its, 1),
                lambda: agreement.of_rank(its, 1),
                lambda: agreement.check_equal(its, "this", lambda: (1, []), None),
                lambda: agreement.on_root(its, "this", lambda: 1),
                lambda: agreement.sums(its, "this", None, 1),
            ):
                try: told("WRONG", call())
                except MPI.Exception as error: told("failed", jaxmpi.survive.process_failure(error) is not None)
        """,
        {"WRONG": 0, "failed True": 10},
    ),
}
"""Ranks, spares and the status; the program; and what is told how often."""


@at_night
@pytest.mark.parametrize("job", JOBS)
def test_what_is_told(job, tmp_path):
    (ranks, spare, status), program, told = JOBS[job]
    done = survive(tmp_path, ranks, program, spare=spare)
    said = done.stdout + done.stderr
    assert {text: said.count(text) for text in told} == told, said
    assert done.returncode == status


@needs_openmpi
def test_command():
    """Both that of the launcher's own placement and the user's."""
    for more in ((), ("--mpiexec-args=--map-by node",)):
        done = launch(2, "--survive", "--dry-run", *more, "-c", "pass")
        assert "--with-ft ulfm" in done.stdout
        assert "jaxmpi_launch.child --survive" in done.stdout
    done = launch(2, "--survive", "--spare", "3", "--dry-run", "-c", "pass")
    assert "JAXMPI_SPARES=3" in done.stdout
    assert "OMPI_MCA_opal_signal= " in done.stdout  # a rank that crashes dies
    assert "-n 5" in done.stdout


@at_night
@pytest.mark.seconds(300)
@pytest.mark.parametrize(("kept", "spare"), [("memory", 1), ("files", 0)])
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
    program = """
        jaxmpi.get_default()
        if rank < 3:
            jaxmpi.allreduce(x, MPI.SUM).block_until_ready()
            jaxmpi.get_default().Agree(1)
        if rank == 2: raise KeyError("this")
        try:
            while rank < 3: jaxmpi.allreduce(x, MPI.SUM).block_until_ready()
        except jaxmpi.survive.ProcessFailed as error:
            comm = jaxmpi.survive.recover()
            told("failed in", error.operation, set(error.ranks) <= {2}, jaxmpi.survive.lost(error.comm, comm))
        for _ in range(5): told("sum", float(jaxmpi.allreduce(x, MPI.SUM)[0]))
    """
    done = survive(tmp_path, 3, program, spare=spare, JAXMPI_CHECK="1")
    left = 2 + spare
    assert done.stdout.count(f"sum {left}.0") == 5 * left, done.stdout + done.stderr
    assert done.stdout.count("failed in allreduce True (2,)") == 2
    assert "was lost, and the others ended without an error. The status is 77" in done.stderr
    assert done.stderr.count("rank 2 is lost, and the job goes on: KeyError: 'this'") == 1
    assert done.returncode == 77


@needs_openmpi
def test_wrong_arguments(tmp_path):
    """Errors that say what to do, and the job goes on: nothing of the package itself is taken away from it. What has
    spare ranks is not recovered: they wait, would never call it, take no core, and end with the others."""
    program = """
        import atexit
        spare = WORLD.allgather(os.getpid())[2]
        def sleeps():
            return int(open(f"/proc/{spare}/status").read().split("\\nvoluntary_ctxt_switches:")[1].split()[0])
        try:
            comm = jaxmpi.get_default()
        except SystemExit:
            atexit.register(told, "released")
            raise
        assert (comm.rank, comm.size) == (rank, 2)
        gone = comm.Dup()
        gone.Free()
        def generator(): yield
        async def coroutine(): pass
        between = comm.Split(rank, 0).Create_intercomm(0, comm, 1 - rank, 5)
        wrong = [
            (survive.recover, (MPI.COMM_SELF,), ValueError, "recover: comm is MPI.COMM_SELF, which cannot lose a rank"),
            (jaxmpi.survive.recover, (None, MPI.COMM_SELF), ValueError, "recover: comm is MPI.COMM_SELF"),
            (jaxmpi.survive.recover, (WORLD,), ValueError, "comm has spare ranks, which wait and do not call recover"),
            (jaxmpi.survive.recover, (None, WORLD), ValueError, "recover: comm has spare ranks"),
            (jaxmpi.survive.lost, (3, comm), TypeError, "lost: old must be an intra-communicator of mpi4py, got 3"),
            (survive.lost, (comm, None), TypeError, "lost: new must be an intra-communicator of mpi4py, got None"),
            (jaxmpi.survive.lost, (gone, comm), ValueError, "lost: old is MPI.COMM_NULL"),
            (jaxmpi.survive.lost, (between, comm), TypeError, "lost: old must be an intra-communicator"),
            (survive.deaths, (5,), TypeError, "survive.deaths: comm must be an intra-communicator of mpi4py, got 5"),
            (jaxmpi.survive.deaths, (gone,), ValueError, "survive.deaths: comm is MPI.COMM_NULL"),
            (survive.deaths, (told,), TypeError, "call it before it decorates a function: @jaxmpi.survive.deaths()"),
            (jaxmpi.survive.deaths(), (3,), TypeError, "survive.deaths: it decorates functions, got 3"),
            (lambda x: survive.deaths(uniform=x), ("yes",), TypeError, "survive.deaths: uniform must be True"),
            (jaxmpi.survive.deaths(), (generator,), TypeError, "is a generator or asynchronous"),
            (jaxmpi.survive.deaths(), (coroutine,), TypeError, "is a generator or asynchronous"),
            (jaxmpi.survive.deaths(), (dict,), TypeError, "survive.deaths: it decorates functions, got <class 'dict'>"),
            (jaxmpi.set_default, (None,), TypeError, "set_default: comm must be an intra-communicator"),
        ]
        for function, arguments, kind, text in wrong:
            try:
                function(*arguments)
                told("nothing raised:", text)
            except kind as error:
                assert text in str(error), error
        told("sum", jaxmpi.allreduce(x, MPI.SUM)[0])
        told("sum", jaxmpi.allreduce(x, MPI.SUM, comm=MPI.COMM_SELF)[0])
        before = sleeps()
        while sleeps() < before + 20: time.sleep(0.01)  # a spare that polls without a pause never sleeps
    """
    done = survive(tmp_path, 2, program, spare=1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not re.search("Traceback|lost|died", done.stderr), done.stderr
    assert done.stdout.count("rank 2: released") == 1
    assert done.stdout.count("sum 2.0") == 2
    assert done.stdout.count("sum 1.0") == 2
    assert "nothing raised" not in done.stdout


@at_night
@pytest.mark.parametrize(("then", "uniform"), [("jaxmpi.allreduce(x, MPI.SUM)", False), ("step(x)", True)])
def test_arrays_that_are_lost(then, uniform, tmp_path):
    """A computation fails after its call has returned, and a later call only warns of it: the end of the block raises.
    Its result is then an error that is no ProcessFailed, or a program would recover for ever; and no other rank waits
    for one that has used it."""
    program = f"""
        def slow(x):
            y = jax.lax.fori_loop(0, 8, lambda _, a: jnp.tanh(a @ a), jnp.eye(400) + x[0] * 0)
            return jaxmpi.allreduce(x + y[0, 0] * 0, MPI.SUM)
        step = jax.jit(slow)  # returns before it is done
        step(x).block_until_ready()
        all_have_come()
        if rank == 2: die()
        kept = x
        for turn in range(5):
            try:
                with jaxmpi.survive.deaths(uniform={uniform}):
                    x = step(x)
                    y = {then}
                told("sum", x[0], y[0])
                break
            except jaxmpi.survive.ProcessFailed as error:
                told("raised in turn", turn)
                jaxmpi.survive.recover()
                if rank == 1: x = kept  # and the other goes on with what it has
            except RuntimeError as error:
                assert "an array whose computation failed before jaxmpi.survive.recover" in str(error), error
                told("lost in turn", turn)
                jaxmpi.survive.recover()
                x = kept
    """
    done = survive(tmp_path, 3, program)
    assert done.stdout.count("raised in turn 0") == 2, done.stdout + done.stderr
    assert done.stdout.count("lost in turn 1") == 1
    assert done.stdout.count("sum 2.0 4.0") == 2
    assert done.returncode == 77


@at_night
def test_recover_is_reported(tmp_path):
    """It waits for a rank that has ended, or does not come, and the table says of each rank what it does."""
    program = """
        jaxmpi.barrier()
        all_have_come()
        if rank == 1: sys.exit(0)
        if rank == 2: die()
        try: jaxmpi.barrier()
        except jaxmpi.survive.ProcessFailed: pass
        if rank == 3: time.sleep(12); sys.exit(5)
        jaxmpi.survive.recover()
    """
    done = survive(tmp_path, 4, program, JAXMPI_TIMEOUT="3", JAXMPI_TIMEOUT_ACTION="abort")
    assert re.search(r"rank 0 has been waiting for 3\S* s in recover", done.stderr), done.stderr
    assert "rank 0: waits in recover, on" in done.stderr
    assert "rank 1: has ended" in done.stderr
    assert "rank 2: has died" in done.stderr
