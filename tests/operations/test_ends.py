"""Ranks and tags of messages that are known at run time: against NumPy, against static ones, and what is none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from mpi4py import MPI

import jaxmpi
from jaxmpi._mpi import tags
from support.launch import launch
from support.rows import one_each_time
from support.table import NEW_JAX, raised

pytestmark = pytest.mark.usefixtures("own_errors")


def around(x, rank, size):
    """Each rank's array by all others, in a loop over partners."""

    def step(i, found):
        y = jaxmpi.sendrecv(x, x, (rank - i) % size, (rank + i) % size, sendtag=i, recvtag=i)
        return found.at[(rank - i) % size].set(y)

    return lax.fori_loop(0, size, step, jnp.zeros((size, *x.shape), x.dtype))


@pytest.mark.parametrize("jit", [jax.jit, jaxmpi.jit])
def test_loop_over_partners(jit, comm, rank, size):
    """One program for all ranks: the rank is an argument, too."""
    x = jnp.arange(4.0) + 10 * rank
    found = jit(around, static_argnums=2)(x, rank, size)
    np.testing.assert_array_equal(found, np.stack(comm.allgather(np.asarray(x))))
    text = [jit(around, static_argnums=2).lower(x, r, size).as_text() for r in (0, 1)]
    assert text[0] == text[1]


@pytest.mark.skipif(not NEW_JAX, reason="this JAX has no derivatives of communication")
def test_one_half_has_a_derivative(rank, size):
    """A rank sends numbers and gets integers, and the other way round."""
    right, left = (rank + 1) % size, (rank - 1) % size
    other = jnp.zeros(2, int) if left % 2 else jnp.zeros(2)

    @jax.jit
    def f(x, left, right):
        y = jaxmpi.sendrecv(x.astype(int) if rank % 2 else x, other, left, right, sendtag=left * 0 + 4, recvtag=4)
        return jnp.sum(y * (rank + 1.0))

    gradient = jax.grad(f)(jnp.ones(2), left, right)
    np.testing.assert_array_equal(gradient, [0.0] * 2 if rank % 2 else [right + 1.0] * 2)


def test_dtypes(rank, size):
    kinds = ["int8", "uint8", "int32", "uint32", "int64", "uint64"]
    ends = [np.asarray([(rank - 1) % size, (rank + 1) % size], dtype) for dtype in kinds]
    call = jax.jit(lambda x, ends: [jaxmpi.sendrecv(x, x, source, dest) for source, dest in ends])
    found = call(jnp.float32(rank), [tuple(pair) for pair in ends])
    assert dict(zip(kinds, map(float, found), strict=True)) == dict.fromkeys(kinds, float((rank - 1) % size))


def test_proc_null_any_source_and_status(rank, size):
    status = MPI.Status()
    f = jax.jit(lambda x, source, dest, tag: jaxmpi.sendrecv(x, x, source, dest, sendtag=3, recvtag=tag, status=status))
    right = (rank + 1) % size
    x = jnp.arange(2.0) + rank
    np.testing.assert_array_equal(f(x, MPI.PROC_NULL, MPI.PROC_NULL, MPI.ANY_TAG), [0, 0])
    y = jax.block_until_ready(f(x, MPI.ANY_SOURCE, right, MPI.ANY_TAG))
    assert (status.source, status.tag) == ((rank - 1) % size, 3)
    np.testing.assert_array_equal(y, x - rank + (rank - 1) % size)


@pytest.mark.parametrize(("jit", "dtype"), [(jax.jit, "int64"), (jaxmpi.jit, "int32")], ids=["jit", "jaxmpi"])
def test_what_is_no_rank(jit, dtype, comm, rank, size):
    x = jnp.ones(2)
    recv = jit(lambda s, t: jaxmpi.recv(x, s, tag=t))
    number = lambda value: jnp.asarray(value, dtype)  # noqa: E731
    wrong = {size: str(size), -7: "-7", 2**31 - 1: "2147483647", -(2**31): str(-(2**31))}  # which stands for another
    if dtype == "int64":
        wrong |= dict.fromkeys([2**31, 2**32, -(2**40), -(2**31) + 1, -(2**31)], "more than 32 bits hold")
    for value, given in wrong.items():
        told = f"is {given}, and must be a rank of the communicator, 0 to {size - 1}, or MPI.PROC_NULL"
        assert told in raised(lambda value=value: recv(number(value), 0)), value
    for value in (2**32 + 1, -(2**32) + 1, 2**31) if dtype == "int64" else ():
        assert "tag is more than 32 bits hold" in raised(lambda value=value: recv(number(0), number(value))), value
    assert "tag is more than 32 bits hold" in raised(lambda: recv(number(0), jnp.uint32(3_000_000_000)))
    assert "MPI.ANY_SOURCE; nothing was sent" in raised(lambda: recv(number(size), 0))
    assert "tag is -5, and must be between 0 and" in raised(lambda: recv(number(0), number(-5)))
    for kept in tags.KEPT:
        assert f"tag is {kept}, which is a tag that jaxmpi keeps" in raised(
            lambda kept=kept: recv(number(0), number(kept))
        )
    assert jaxmpi.sendrecv(rank, rank, (rank - 1) % size, (rank + 1) % size) == (rank - 1) % size


def test_send_to_what_is_no_rank(rank, size):
    """Raised by the call that waits; here the loop's result."""

    @jaxmpi.jit
    def f(x, dest):
        jaxmpi.send(x, dest, tag=x.astype(int))
        return x + 1

    assert f"dest is {size}, and must be a rank" in raised(lambda: f(jnp.float32(3), size))
    assert "tag is -2, and must be between 0 and" in raised(lambda: f(jnp.float32(-2), MPI.PROC_NULL))
    assert f(jnp.float32(3), MPI.PROC_NULL) == 4


def test_any_source_of_several_leaves(rank, size):
    f = jax.jit(lambda tree, source: jaxmpi.recv(tree, source))
    assert "the source must be a rank" in raised(lambda: f([jnp.ones(2), jnp.ones(3)], MPI.ANY_SOURCE))
    tree = jax.jit(lambda tree, s, d: jaxmpi.sendrecv(tree, tree, s, d))(
        [jnp.ones(2) * rank, jnp.ones(3)], (rank - 1) % size, (rank + 1) % size
    )
    np.testing.assert_array_equal(tree[0], np.ones(2) * ((rank - 1) % size))


@pytest.mark.skipif(not NEW_JAX, reason="this JAX has no derivatives of communication")
def test_tags_of_derivatives(rank, size):
    """The upper half of the tags is theirs: a traced one there is an error, and not another message."""
    limit = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    f = jax.jit(lambda x, tag: jaxmpi.sendrecv(x, x, rank, rank, sendtag=tag, recvtag=tag))
    assert f(jnp.float32(2), limit) == 2
    error = raised(lambda: jax.jvp(lambda x: f(x, limit), (jnp.float32(2),), (jnp.float32(1),)))
    assert "must be between 0 and" in error
    assert "in a derivative" in error


@pytest.mark.skipif(not NEW_JAX, reason="this JAX has no derivatives of communication")
def test_any_source_has_no_derivative(rank, size):
    """Its tangent could come from another rank."""
    right = (rank + 1) % size
    f = jax.jit(lambda x, source, tag: jaxmpi.sendrecv(x, x, source, right, sendtag=2, recvtag=tag))
    ways = [
        lambda *ends: jax.jvp(lambda x: f(x, *ends), (jnp.float32(2),), (jnp.float32(1),)),
        lambda *ends: jax.grad(lambda x: f(x, *ends))(jnp.float32(2)),
    ]
    for way in ways:
        assert "so that the way back of a derivative is known" in raised(lambda way=way: way(MPI.ANY_SOURCE, 2))
        assert raised(lambda way=way: way((rank - 1) % size, 2)) == ""
    assert f"sendtag is {MPI.ANY_TAG}" in raised(lambda: ways[1]((rank - 1) % size, MPI.ANY_TAG))


@pytest.mark.alone
@pytest.mark.parametrize("check", one_each_time(["0", "1"], "1"))
def test_reports(check, script, tmp_path):
    """Who waits for whom, and where, has the values of the run. The message is sent when the report is there."""
    program = script(f"""
    import os, time
    @jax.jit
    def f(x, source, tag):
        return jaxmpi.recv(x, source, tag=tag)  # the line
    reports = os.open({str(tmp_path / "reports")!r}, os.O_RDWR | os.O_CREAT)
    if rank == 0:
        os.dup2(reports, 2)
        f(jnp.ones(3), 1, 77).block_until_ready()
    else:
        while b"in recv of 3 float32, source 1, tag 77" not in os.pread(reports, 1 << 20, 0):
            time.sleep(0.02)
        jaxmpi.send(jnp.ones(3), 0, tag=77)
    """)
    launch(2, program, JAXMPI_TIMEOUT="0.2", JAXMPI_CHECK=check)
    line = program.read_text().splitlines().index("    return jaxmpi.recv(x, source, tag=tag)  # the line") + 1
    assert f"program.py:{line}" in (tmp_path / "reports").read_text()


@pytest.mark.alone
def test_tags_of_this_library():
    """Those of derivatives and of plans are tags of the MPI library in use, whichever that is."""
    highest = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    half = highest - highest // 2
    assert highest == tags.LIMIT
    assert list(tags.KEPT) == [half - 3, half - 2, half - 1]
    assert half - 1 == tags.OF_RULES
    assert tags.sent(0, True) == half
    assert tags.sent(highest // 2, True) == highest
