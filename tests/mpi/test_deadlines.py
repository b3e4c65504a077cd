"""`JAXMPI_TIMEOUT_ACTION=raise`: a message that does not come is an error, by which nothing is lost."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from support.launch import launch

LATE_MESSAGES = Path(__file__).parents[1] / "programs" / "late_messages.py"

pytestmark = [pytest.mark.launches, pytest.mark.seconds(120)]

BEGIN = """
import time
import numpy as np
from jax.errors import JaxRuntimeError

x = jnp.arange(3.0)
many = jnp.arange(float(1 << 19))  # 2 MiB: it is not sent before it is received

def late(call, *words):
    begin = time.monotonic()
    try:
        jax.block_until_ready(call())
    except JaxRuntimeError as error:
        told = str(error)
        assert "DEADLINE_EXCEEDED: jaxmpi." in told and f" on rank {rank} of {size}: " in told, told
        assert " within 0.5 s (JAXMPI_TIMEOUT), called at " in told and "program.py:" in told, told
        for word in words:
            assert word in told, (word, told)
        assert 0.4 < time.monotonic() - begin < 20
        return
    raise AssertionError(f"{words} has not been late")

def same(result, expected):
    np.testing.assert_array_equal(np.asarray(result), np.asarray(expected))

def are_in_step():
    MPI.COMM_WORLD.Barrier()  # what waits in MPI's own functions is not reported
    same(jaxmpi.jit(lambda x: notoken.allreduce(x, MPI.SUM))(x), size * x)
"""


def run(script, ranks, text, check=True, **environment):
    given = {"JAXMPI_TIMEOUT": "0.5", "JAXMPI_TIMEOUT_ACTION": "raise"} | environment
    done = launch(ranks, script(BEGIN + text), timeout=100, check=check, **given)
    assert done.stdout.count("all is well") == ranks
    return done.stderr


def test_messages_that_come_later_are_received(script):
    """By all ways to receive; eager, in jit, of a batch, of a pytree; with what is sent meanwhile."""
    told = run(
        script,
        2,
        """
jitted = jaxmpi.jit(lambda x: notoken.recv(x, 1, tag=2))
batch = jax.vmap(lambda x: notoken.recv(x, 1, tag=3))
tree = lambda: notoken.recv({"a": x, "b": jnp.zeros(5)}, 1, tag=4)
together = jaxmpi.jit(lambda x: notoken.wait(notoken.irecv(x, 1, tag=6)))
swap = lambda x, tag: notoken.sendrecv(x, jnp.zeros_like(x), 1 - rank, 1 - rank, sendtag=tag, recvtag=tag)
if rank == 0:
    status = MPI.Status()
    late(lambda: notoken.recv(x, 1, tag=1, status=status), "jaxmpi.recv", "no message from rank 1 with tag 1 has come")
    late(lambda: notoken.recv(x), "no message from any rank with any tag has come")
    late(lambda: jitted(x), "with tag 2")
    late(lambda: batch(jnp.zeros((4, 3))), "with tag 3")
    late(tree, "with tag 4")
    request, beside = notoken.irecv(x, 1, tag=5), notoken.irecv(x, 1, tag=15)
    late(lambda: notoken.wait(request), "jaxmpi.irecv", "with tag 5", "wait for it again")
    late(lambda: notoken.waitall([beside, request]), "with tag 15", "wait for it again")
    late(lambda: together(x), "with tag 6", "A message that comes later can be received")
    late(lambda: swap(x, 7), "jaxmpi.sendrecv", "What it sends to rank 1 with tag 7 is under way", "send nothing again")
    y = many + 1
    late(lambda: swap(y, 8), "with tag 8 is under way")
    del y
    junk = [many * k for k in range(20)]  # in the place of what is still to be sent
    sums = notoken.iallreduce(x, MPI.SUM)
    late(lambda: notoken.wait(sums), "jaxmpi.iallreduce", "it is not done", "wait for it again")
    away = notoken.isend(many, 1, tag=9)
    late(lambda: notoken.wait(away), "jaxmpi.isend", "it is not done", "wait for it again")
    grid = jaxmpi.Grid((1,), (4,), periodic=True, comm=MPI.COMM_SELF)
    same(grid.finish(grid.start(grid.pad(jnp.arange(4.0))))[:1], [3.0])
MPI.COMM_WORLD.Barrier()
if rank == 1:  # before the other rank waits again: none is late because it compiles
    for tag in (1, 2, 5, 15, 6, 7):
        notoken.send(x + tag, 0, tag=tag)
    notoken.send(jnp.arange(12.0).reshape(4, 3), 0, tag=3)
    notoken.send({"a": x + 4, "b": jnp.arange(5.0)}, 0, tag=4)
    sums = notoken.iallreduce(x, MPI.SUM)
    there = notoken.irecv(many, 0, tag=9)
    back = notoken.irecv(many, 0, tag=8)
    away = notoken.isend(many + 8, 0, tag=8)
MPI.COMM_WORLD.Barrier()
if rank == 1:
    same(notoken.recv(x, 0, tag=7), x)
    same(notoken.wait(back), many + 1)
    same(notoken.wait(there), many)
else:
    same(notoken.recv(x, 1, tag=1, status=status), x + 1)
    assert status.source == 1 and status.tag == 1
    same(jitted(x), x + 2)
    same(batch(jnp.zeros((4, 3))), np.arange(12.0).reshape(4, 3))
    got = tree()
    same(got["a"], x + 4)
    same(got["b"], np.arange(5.0))
    first, second = notoken.waitall([request, beside])
    same(first, x + 5)
    same(second, x + 15)
    same(together(x), x + 6)
    same(notoken.recv(x, 1, tag=7), x + 7)
    same(notoken.recv(many, 1, tag=8), many + 8)
MPI.COMM_WORLD.Barrier()
same(notoken.wait(sums), 2 * x)
notoken.wait(away)
are_in_step()
print("all is well", flush=True)
""",
    )
    assert "never waited for" not in told
    assert "rank 0 has been waiting for" not in told


# Why the first rank does not raise; what it does, and the second one later, which also begins: its first part.
TURNS = {
    "collective": (
        "MPI cannot take back what all ranks take part in: some may be done with it",
        """
        call = second = lambda: same(notoken.allreduce(x, MPI.SUM), 2 * x)
        """,
    ),
    "send": (
        "MPI cannot take back a message that it has begun to send",
        """
        call = lambda: notoken.send(many, 1)
        second = lambda: same(notoken.recv(many, 0), many)
        """,
    ),
    "pytree": (
        "other arrays of its pytree have been received already",
        """
        pair = {"a": x, "b": jnp.arange(5.0)}
        begin = lambda: notoken.send(x, 0, tag=3)
        call = lambda: same(notoken.recv(pair, 1, tag=3)["b"], pair["b"])
        second = lambda: notoken.send(pair["b"], 0, tag=3)
        """,
    ),
    "exchanged pytree": (
        "the other arrays of its pytree would not be sent any more",
        """
        pair = {"a": x, "b": jnp.arange(5.0)}
        call = second = lambda: same(notoken.sendrecv(pair, pair, other, other)["b"], pair["b"])
        """,
    ),
    "started collective": (
        "it was started in the same compiled function",
        """
        sums = jaxmpi.jit(lambda x: notoken.wait(notoken.iallreduce(x, MPI.SUM)))
        call = second = lambda: same(sums(x), 2 * x)
        """,
    ),
    "second message": (
        "the same compiled function has received other messages, which would be lost",
        """
        both = jaxmpi.jit(lambda x: notoken.waitall([notoken.irecv(x, 1, tag=4), notoken.irecv(x, 1, tag=4)]))
        begin = lambda: notoken.send(x, 0, tag=4)
        call = lambda: same(both(x), [x, x + 1])
        second = lambda: notoken.send(x + 1, 0, tag=4)
        """,
    ),
    "loop": (
        "the same compiled function has received other messages, which would be lost",
        """
        step = lambda c, _: (c + notoken.recv(x, 1, tag=4), None)
        loop = jaxmpi.jit(lambda x: jax.lax.scan(step, x, None, length=2)[0])
        begin = lambda: notoken.send(x, 0, tag=4)
        call = lambda: same(loop(x), 3 * x + 1)
        second = lambda: notoken.send(x + 1, 0, tag=4)
        """,
    ),
    "waits one after the other": (
        "the same compiled function has received other messages, which would be lost",
        """
        requests = [notoken.irecv(x, 1, tag=4), notoken.irecv(x, 1, tag=5)] if rank == 0 else []
        both = jaxmpi.jit(lambda one, other: [notoken.wait(one), notoken.wait(other)])
        begin = lambda: notoken.send(x, 0, tag=4)
        call = lambda: same(both(*requests), [x, x + 1])
        second = lambda: notoken.send(x + 1, 0, tag=5)
        """,
    ),
    "exchange": (
        "what it has sent to other ranks cannot be taken back",
        """
        grid = jaxmpi.Grid((2,), (8,), periodic=True)
        u = grid.pad(jnp.arange(4.0) + 4 * rank)
        call = second = lambda: same(grid.exchange(u)[0], 3 if rank else 7)
        """,
    ),
    "tangent": (
        "it belongs to a derivative",
        """
        from jaxmpi._mpi import tags
        begin = lambda: notoken.send(x, 0, tag=4)
        call = lambda: same(jax.jvp(lambda x: notoken.recv(x, 1, tag=4), (x,), (x,))[1], 2 * x)
        second = lambda: notoken.send(2 * x, 0, tag=tags.sent(4, True))
        """,
    ),
    "gradient": (
        "it belongs to a derivative",
        """
        MPI.COMM_WORLD.Barrier()
        y, back = jax.vjp(lambda x: notoken.sendrecv(jnp.sin(x), x, other, other), x)
        same(y, jnp.sin(x))
        call = second = lambda: np.testing.assert_allclose(back(x + 1)[0], jnp.cos(x) * (x + 1), rtol=1e-6)
        """,
    ),
}


@pytest.mark.parametrize("turn", TURNS)
def test_what_cannot_be_taken_back_goes_on(turn, script):
    """It is reported with the reason, and its numbers are right."""
    why, text = TURNS[turn]
    told = run(
        script,
        2,
        f"""
other, begin = 1 - rank, lambda: None
{textwrap.dedent(text)}
if rank == 1:
    begin()
MPI.COMM_WORLD.Barrier()
if rank == 1:
    time.sleep(5.5)
jax.block_until_ready((second if rank else call)())
are_in_step()
print("all is well", flush=True)
""",
        JAXMPI_TIMEOUT="3",  # ranks that compile are not late
    )
    reports = [line for line in told.splitlines() if "jaxmpi: rank 0 has been waiting for" in line]
    assert f"It goes on, though JAXMPI_TIMEOUT_ACTION is raise: {why}" in reports[0], told
    assert "called at" in reports[0], told
    assert "program.py:" in reports[0], told
    assert len(reports) == 1, told


@pytest.mark.parametrize("ranks", [3])
def test_others_go_on(ranks, script):
    """A rank that has got an error communicates with others; of one function the rest is left in the channel."""
    run(
        script,
        ranks,
        """
@jaxmpi.jit
def of_both(x):
    requests = [notoken.irecv(x, source, tag=3) for source in (1, 2)]
    notoken.isend(x, 2, tag=9)
    return notoken.waitall(requests)

if rank == 0:
    for _ in range(2):
        late(lambda: of_both(x), "with tag 3", "This function has communicated before, and would do that again")
    notoken.send(x, 2, tag=4)
MPI.COMM_WORLD.Barrier()
if rank == 2:
    same(notoken.recv(x, 0, tag=4), x)
    same(notoken.recv([x, x], 0, tag=9)[1], x)
if rank != 0:
    notoken.send(x + rank, 0, tag=3)
if rank == 0:
    got = of_both(x)
    same(got[0], x + 1)
    same(got[1], x + 2)
if rank == 2:
    same(notoken.recv(x, 0, tag=9), x)
are_in_step()
print("all is well", flush=True)
""",
    )


def test_collectives_that_differ_are_told(script):
    """Where an error of the deadline cannot be raised, the wait would last for ever."""
    program = script(
        BEGIN
        + """
if rank == 0:
    try:
        jaxmpi.jit(lambda x: notoken.wait(notoken.iallreduce(x, MPI.SUM)))(x).block_until_ready()
    except JaxRuntimeError as error:
        print(error, flush=True)
    MPI.COMM_WORLD.Abort(3)
notoken.allgather(many)
MPI.COMM_WORLD.Barrier()
"""
    )
    done = launch(2, program, check=False, timeout=60, JAXMPI_TIMEOUT="1", JAXMPI_TIMEOUT_ACTION="raise")
    assert "jaxmpi.iallreduce on rank 0 of 2: the ranks differ" in done.stdout, (done.stdout, done.stderr)


WAYS = {
    "usual": {},
    "compared": {"JAXMPI_CHECK": "1"},
    "not compared": {"JAXMPI_CHECK": "0"},
    "with a timeline": {"JAXMPI_TRACE": "folder"},
}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_random_programs(way, ranks, tmp_path):
    """Each message is received once, with its own data, and nothing is left."""
    run_random(tmp_path, ranks, way, "--seed", str(10 * ranks))


@pytest.mark.parametrize("ranks", [2])
def test_random_programs_of_two_threads(ranks, tmp_path):
    run_random(tmp_path, ranks, "usual", "--seed", "5", "--threads", "2", "--messages", "40")


def run_random(folder, ranks, way, *arguments):
    variables = {name: value.replace("folder", str(folder)) for name, value in WAYS[way].items()}
    done = launch(
        ranks,
        LATE_MESSAGES,
        *arguments,
        timeout=100,
        JAXMPI_TIMEOUT="0.05",
        JAXMPI_TIMEOUT_ACTION="raise",
        **variables,
    )
    assert done.stdout.count("all is well") == ranks
    assert "never waited for" not in done.stderr
    if ranks > 1:
        assert "errors: {'" in done.stdout
    if "JAXMPI_TRACE" in variables:
        subprocess.run([sys.executable, "-m", "jaxmpi.trace", folder], check=True, timeout=60, capture_output=True)


def test_uncaught_it_ends_the_job(script):
    program = script(
        "if rank == 0: jax.block_until_ready(notoken.recv(jnp.ones(3), 1, tag=5))\nMPI.COMM_WORLD.Barrier()"
    )
    done = launch(2, program, check=False, timeout=60, JAXMPI_TIMEOUT="0.5", JAXMPI_TIMEOUT_ACTION="raise")
    assert done.returncode != 0
    assert "jaxmpi.recv on rank 0 of 2: no message from rank 1 with tag 5 has come within 0.5 s" in done.stderr
