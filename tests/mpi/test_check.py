"""JAXMPI_CHECK=auto, the default: mistakes in the first collectives raise on all ranks, and no right program notices.

The comparison with JAXMPI_CHECK=1 is in test_programs.py, each number of a record in tests/c/test_compare.c."""

import re

import pytest

from support.launch import launch

pytestmark = pytest.mark.launches

_MISTAKES = {
    "the whole array on every rank": "notoken.scatter(whole, 0)",
    "another size": "notoken.allreduce(jnp.ones(3 + (rank == 1)), MPI.SUM)",
    "another dtype": "notoken.bcast(jnp.ones(2, jnp.int32 if rank else jnp.float32), 0)",
    "another operation": "notoken.allgather(x) if rank else notoken.alltoall(whole)",
    "another reduction": "notoken.allreduce(x, MPI.MAX if rank else MPI.SUM)",
    "another root": "notoken.bcast(x, rank)",
    "another number of arrays": "notoken.allreduce([x, x] if rank else x, MPI.SUM)",
    "a start": "jaxmpi.wait(jaxmpi.iallreduce(jnp.ones(3 + (rank == 1)), MPI.MAX)[0])",
}


@pytest.mark.parametrize("mpi_comm", ["None", "MPI.COMM_WORLD", "MPI.COMM_WORLD.Split(0, -rank)"])
def test_mistakes_raise_on_all_ranks(mpi_comm, script):
    """Whatever the communicator; then the ranks go on together."""
    program = script(f"""
        import functools, warnings
        warnings.simplefilter("ignore")  # of what has failed before
        comm, x = {mpi_comm}, jnp.arange(2.0)
        whole = jnp.arange(2.0 * size).reshape(size, 2)
        class Bound:
            def __init__(self, module): self.module = module
            def __getattr__(self, name): return functools.partial(getattr(self.module, name), comm=comm)
        notoken, waits, starts = Bound(notoken), jaxmpi.wait, Bound(jaxmpi)
        mistakes = {_MISTAKES}
        for name, call in mistakes.items():
            call = call.replace("jaxmpi.iallreduce", "starts.iallreduce")
            for jit in (jax.jit, jaxmpi.jit, lambda f: f):
                try:
                    jax.block_until_ready(jit(lambda: eval(call))())
                    said = "nothing"
                except Exception as error:
                    said = str(error).replace(chr(10), " ")
                print(f"{{name}} on {{rank}}: {{said}}", flush=True)
                assert notoken.allreduce(x, MPI.SUM)[1] == size
    """)
    done = launch(3, program, timeout=200)
    for name in _MISTAKES:
        for rank in range(3):
            said = re.findall(rf"^{name} on {rank}: (.*)$", done.stdout, re.M)
            assert len(said) == 3, (name, done.stdout, done.stderr)
            assert all("the ranks differ" in line for line in said), (name, said)
    assert done.stdout.count("Root alone passes the whole array") == 9


def test_right_programs_go_on(script):
    """Ranks that reach one operation as a value and as a tangent; one that starts before what another waits for;
    threads with communicators of their own in any order; freed communicators; and more calls than are compared."""
    program = script("""
        import concurrent.futures, time
        @jax.custom_jvp
        def f(x): return x
        @f.defjvp
        def rule(primals, tangents):
            return primals[0], notoken.allreduce(tangents[0], MPI.SUM)
        x = jnp.ones(3)
        if rank:
            y = jax.jvp(f, (x,), (x,))[1]
        else:
            y = notoken.allreduce(x, MPI.SUM)
        assert (y == size).all()
        if rank == 0:
            request, _ = jaxmpi.iallreduce(x, MPI.SUM)
            notoken.send(x, 1)
        elif rank == 1:
            notoken.recv(x, 0)
            request, _ = jaxmpi.iallreduce(x, MPI.SUM)
        else:
            request, _ = jaxmpi.iallreduce(x, MPI.SUM)
        begin = time.monotonic()
        assert (jaxmpi.wait(request)[0] == size).all()
        comms = [MPI.COMM_WORLD.Dup() for _ in range(2)]
        def work(i):
            time.sleep(0.2 * (i == rank % 2))
            for k in range(20):
                y = notoken.allgather(jnp.full(2 + i, rank + k), comm=comms[i])
                assert (y[:, 0] == jnp.arange(size) + k).all()
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            list(pool.map(work, range(2)))
        for _ in range(30):
            comm = MPI.COMM_WORLD.Split(rank % 2, rank)
            assert notoken.allreduce(jnp.float32(1), MPI.SUM, comm=comm) == comm.size
            comm.Free()
        for i in range(60):
            assert notoken.allreduce(jnp.float32(i), MPI.SUM) == i * size
        print("right after", time.monotonic() - begin, flush=True)
    """)
    slowest = {}
    for check in ("0", "auto", "50"):
        done = launch(3, program, JAXMPI_CHECK=check, timeout=100)
        seconds = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("right after")]
        assert len(seconds) == 3, done.stderr
        slowest[check] = max(seconds)
        assert slowest[check] < 8 + 3 * slowest["0"], f"something has waited in vain: {slowest}"


@pytest.mark.parametrize("check", ["auto", "1"])
def test_what_starts_meets_what_blocks(check, script):
    """Of exchanges by plans, their derivatives too; and if the plans differ, the ranks that compare say so."""
    program = script("""
        grid = jaxmpi.Grid(size, 2 * size, periodic=True)
        rows, columns = jaxmpi.Grid((size, 1), (2 * size, size)), jaxmpi.Grid((1, size), (2 * size, size))
        mesh = jaxmpi.IndexMap([2 * rank, 2 * rank + 1], [(2 * rank + 2) % (2 * size)])
        x = jnp.arange(4.0) + rank
        ways = {
            "grid": (grid.exchange, lambda x: grid.finish(grid.start(x))),
            "map": (lambda x: mesh.exchange(x[:3]), lambda x: notoken.wait(mesh.start(x[:3]))),
            "redistribute": (
                lambda x: jaxmpi.redistribute(x[:2, None] * jnp.ones(size), rows, columns),
                lambda x: notoken.wait(jaxmpi.iredistribute(x[:2, None] * jnp.ones(size), rows, columns)),
            ),
        }
        for name, (blocks, starts) in ways.items():
            for way in (blocks, starts):
                value, pull = jax.vjp(way, x)
                assert (pull(value)[0] == jax.vjp(blocks, x)[1](value)[0]).all()
            mixed = starts if rank == 1 else blocks
            value, pull = jax.vjp(blocks, x)
            assert (mixed(x) == value).all(), name
            assert (jax.vjp(mixed, x)[1](value)[0] == pull(value)[0]).all(), name
        try:
            jax.block_until_ready(grid.finish(grid.start([x, x])) if rank == 1 else grid.exchange(x))
        except jax.errors.JaxRuntimeError as error:
            print("differs:", error, flush=True)
        print("right", flush=True)
    """)
    done = launch(3, program, timeout=100, JAXMPI_CHECK=check)
    assert done.stdout.count("right") == 3, done.stdout + done.stderr
    assert done.stdout.count("differs:") == 3, done.stdout


@pytest.mark.slow
def test_collectives_of_mpi4py(script):
    """A rank that takes part by mpi4py costs the others some seconds, once for a communicator, and nothing else."""
    program = script("""
        import numpy as np, time
        for comm in (MPI.COMM_WORLD, MPI.COMM_WORLD.Dup()):
            begin = time.monotonic()
            for i in range(6):
                total = np.zeros(3, np.float32)
                if rank == 0:
                    comm.Bcast(np.arange(3, dtype=np.float32) + i, 0)
                    comm.Allreduce(np.ones(3, np.float32), total)
                else:
                    assert (notoken.bcast(jnp.zeros(3), 0, comm=comm) == jnp.arange(3.0) + i).all()
                    total = notoken.allreduce(jnp.ones(3), MPI.SUM, comm=comm)
                assert (np.asarray(total) == size).all()
            assert time.monotonic() - begin < 20
        print("right", flush=True)
    """)
    done = launch(3, program, timeout=100)
    assert done.stdout.count("right") == 3, done.stderr
    assert "Error" not in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))])
def test_collectives_of_mpi4py_in_turns(seed, script):
    """Each rank makes its part of each call by jaxmpi or by mpi4py: calls are not numbered alike, and no error."""
    program = script(f"""
        import numpy as np, random
        draw = random.Random({seed})
        comm = MPI.COMM_WORLD.Dup()
        for _ in range(12):
            kind = draw.choice(["allreduce", "allgather", "alltoall"])
            by_mpi4py = [draw.random() < 0.4 for _ in range(size)][rank]
            x = np.full((size, 2), rank + 1, np.float32)
            if kind == "allreduce":
                y = np.zeros_like(x)
                comm.Allreduce(x, y) if by_mpi4py else None
                y = y if by_mpi4py else notoken.allreduce(x, MPI.SUM, comm=comm)
                expected = np.full_like(x, size * (size + 1) // 2)
            else:
                call, mine = (notoken.allgather, x[0]) if kind == "allgather" else (notoken.alltoall, x)
                y = np.zeros_like(x)
                if by_mpi4py:
                    comm.Allgather(mine, y) if kind == "allgather" else comm.Alltoall(mine, y)
                else:
                    y = call(mine, comm=comm)
                expected = np.repeat(np.arange(1, size + 1, dtype=np.float32)[:, None], 2, 1)
            assert (np.asarray(y) == expected).all(), kind
        print("right", flush=True)
    """)
    done = launch(3, program, timeout=150)
    assert done.stdout.count("right") == 3, done.stderr
    assert "Error" not in done.stderr, done.stderr


def test_memory_that_nobody_wrote_is_an_error(script):
    """Without the comparison: MPI lets a rank expect more of a scatter than it gets, and says nothing."""
    program = script("""
        whole = jnp.arange(4.0 * size).reshape(size, 4)
        try:
            print(notoken.scatter(whole, 0), flush=True)
        except Exception as error:
            print(str(error).replace(chr(10), " "), flush=True)
    """)
    done = launch(2, program, JAXMPI_CHECK="0")
    assert "[0. 1. 2. 3.]" in done.stdout
    assert "jaxmpi.scatter on rank 1 of 2: rank 0 has passed fewer than the 8 float32" in done.stdout


def test_a_setting_that_is_none(script):
    done = launch(2, script(""), JAXMPI_CHECK="sometimes", check=False)
    assert "JAXMPI_CHECK=sometimes: it is auto, 1 (all calls are compared), 0 (none), or a number" in done.stderr
