"""What ranks that compare their calls say of mistakes, and right programs that notice nothing: by functions.py.

Of JAXMPI_CHECK: BY_DEFAULT on three ranks, ALWAYS with 1 and NEVER with 0 on two; WITH_MPI4PY on three takes long.
"""

import concurrent.futures
import functools
import random
import re
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import jaxmpi

WAYS = {"jax.jit": jax.jit, "jaxmpi.jit": jaxmpi.jit, "eager": lambda f: f}


def _said(call):
    """The text of a call's error, in one line."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a computation that has failed before
        try:
            jax.block_until_ready(call())
            jax.effects_barrier()
        except Exception as error:
            return str(error).replace("\n", " ")
    return "nothing"


def _line(mark):
    """The last line of this file that ends so, as it is told."""
    with open(__file__) as file:
        number = [i for i, line in enumerate(file, 1) if line.rstrip().endswith(f"# {mark}")][-1]
    return f"{__file__}:{number}"


class _Bound:
    """The operations of jaxmpi on a communicator."""

    def __init__(self, comm):
        self.comm = comm

    def __getattr__(self, name):
        return functools.partial(getattr(jaxmpi, name), comm=self.comm)


# --- by default -------------------------------------------------------------------------------------------------------

_MISTAKES = {
    "the whole array on every rank": lambda on, rank, x, whole: on.scatter(whole, 0),
    "another size": lambda on, rank, x, whole: on.allreduce(jnp.ones(3 + (rank == 1)), MPI.SUM),
    "another dtype": lambda on, rank, x, whole: on.bcast(jnp.ones(2, jnp.int32 if rank else jnp.float32), 0),
    "another operation": lambda on, rank, x, whole: on.allgather(x) if rank else on.alltoall(whole),
    "another reduction": lambda on, rank, x, whole: on.allreduce(x, MPI.MAX if rank else MPI.SUM),
    "another root": lambda on, rank, x, whole: on.bcast(x, rank),
    "another number of arrays": lambda on, rank, x, whole: on.allreduce([x, x] if rank else x, MPI.SUM),
    "a start": lambda on, rank, x, whole: jaxmpi.wait(on.iallreduce(jnp.ones(3 + (rank == 1)), MPI.MAX)),
}


def mistakes(world):
    """They raise on all ranks, on communicators of each kind; then the ranks go on together."""
    rank, size, x = world.rank, world.size, jnp.arange(2.0)
    whole = jnp.arange(2.0 * size).reshape(size, 2)
    bound = [_Bound(comm) for comm in (None, world, world.Split(0, -rank))]
    for number, (name, call) in enumerate(_MISTAKES.items()):
        on, way = bound[number % 3], list(WAYS)[number // 3]
        said = _said(lambda call=call, way=way, on=on: WAYS[way](lambda: call(on, rank, x, whole))())
        assert "the ranks differ" in said, (name, way, said)
        assert ("Root alone passes the whole array" in said) == (name == "the whole array on every rank")
        assert on.allreduce(x, MPI.SUM)[1] == size


def value_and_tangent(world):
    """One operation, which a rank reaches as a value and another one as a tangent."""

    @jax.custom_jvp
    def f(x):
        return x

    @f.defjvp
    def rule(primals, tangents):
        return primals[0], jaxmpi.allreduce(tangents[0], MPI.SUM, comm=world)

    x = jnp.ones(3)
    y = jax.jvp(f, (x,), (x,))[1] if world.rank else jaxmpi.allreduce(x, MPI.SUM, comm=world)
    assert (y == world.size).all()


def start_before_what_another_waits_for(world):
    x, rank = jnp.ones(3), world.rank
    if rank == 1:
        jaxmpi.recv(x, 0, comm=world)
    request = jaxmpi.iallreduce(x, MPI.SUM, comm=world)
    if rank == 0:
        jaxmpi.send(x, 1, comm=world)
    assert (jaxmpi.wait(request) == world.size).all()


def threads_in_any_order(world):
    """Each with a communicator of its own; the threads of ranks begin in opposite orders."""
    rank, size, comms, begun = world.rank, world.size, [world.Dup() for _ in range(2)], threading.Event()

    def work(i):
        if i == rank % 2:
            begun.wait()
        begun.set()
        for k in range(20):
            y = jaxmpi.allgather(jnp.full(2 + i, rank + k), comm=comms[i])
            assert (y[:, 0] == jnp.arange(size) + k).all()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))


def freed_communicators(world):
    for _ in range(8):
        comm = world.Split(world.rank % 2, world.rank)
        assert jaxmpi.allreduce(jnp.float32(1), MPI.SUM, comm=comm) == comm.size
        comm.Free()


def more_calls_than_are_compared(world):
    def step(i, total):
        return total + jaxmpi.allreduce(jnp.float32(1), MPI.SUM, comm=world)

    assert jaxmpi.jit(lambda: jax.lax.fori_loop(0, 1100, step, jnp.float32(0)))() == 1100 * world.size


def start_and_call(world):
    """Exchanges by plans, and their derivatives: a rank that starts one meets those that block in it. If the plans
    differ, the ranks that compare say so."""
    rank, size = world.rank, world.size
    grid = jaxmpi.Grid(size, 2 * size, periodic=True, comm=world)
    rows = jaxmpi.Grid((size, 1), (2 * size, size), comm=world)
    columns = jaxmpi.Grid((1, size), (2 * size, size), comm=world)
    mesh = jaxmpi.IndexMap([2 * rank, 2 * rank + 1], [(2 * rank + 2) % (2 * size)], comm=world)
    x, row = jnp.arange(4.0) + rank, jnp.ones(size)
    for name, (blocks, starts) in {
        "grid": (grid.exchange, lambda x: grid.finish(grid.start(x))),
        "map": (lambda x: mesh.exchange(x[:3]), lambda x: jaxmpi.wait(mesh.start(x[:3]))),
        "redistribute": (
            lambda x: jaxmpi.redistribute(x[:2, None] * row, rows, columns),
            lambda x: jaxmpi.wait(jaxmpi.iredistribute(x[:2, None] * row, rows, columns)),
        ),
    }.items():
        value, pull = jax.vjp(blocks, x)
        mixed, pull_mixed = jax.vjp(starts if rank == 1 else blocks, x)
        assert (mixed == value).all(), name
        assert (pull_mixed(value)[0] == pull(value)[0]).all(), name
    said = _said(lambda: grid.finish(grid.start([x, x])) if rank == 1 else grid.exchange(x))
    assert "differ" in said, said


BY_DEFAULT = [
    mistakes, value_and_tangent, start_before_what_another_waits_for, threads_in_any_order, freed_communicators,
    more_calls_than_are_compared,
]  # fmt: skip


# --- all calls: JAXMPI_CHECK=1 ----------------------------------------------------------------------------------------

_DIFFERING = {  # each number of a record is tested in tests/c/test_compare.c
    "operations": (
        lambda on, rank, x: on.bcast(x, 0) if rank else on.allreduce(x, MPI.SUM),
        ("allreduce SUM of 3 float32 (a value)", "bcast from root 0 of 3 float32 (a value)"),
    ),
    "tangents": (
        lambda on, rank, x: (jax.jvp(_sum(on), (x,), (x,)), _sum(on)(x)) if rank == 0 else (_sum(on)(x), _sum(on)(x)),
        ("allreduce SUM of 3 float32 (a tangent)", "allreduce SUM of 3 float32 (a value)"),
    ),
    "cotangents": (
        lambda on, rank, x: (
            jax.grad(lambda v: jnp.sum(on.allgather(v)))(x)
            if rank
            else [on.allgather(x), on.alltoall(jnp.stack([x, x]))]
        ),
        ("alltoall of 6 float32 (a value)", "reduce_scatter SUM of 3 float32 (a cotangent)"),
    ),
    "leaves": (
        lambda on, rank, x: on.allreduce([x, x[:2]] if rank else [x[:2], x], MPI.SUM),
        ("allreduce SUM of 5 float32 in 2 arrays (a value)",) * 2,
    ),
    "barrier": (
        lambda on, rank, x: on.barrier() if rank else on.allgather(x),
        ("allgather of 3 float32 (a value)", "barrier"),
    ),
}


def _sum(on):
    return lambda v: on.allreduce(v, MPI.SUM)


def differing(world):
    """Ranks that do not do the same raise on all of them, with both; then they go on together."""
    on, rank, x = _Bound(world), world.rank, jnp.ones(3)
    for number, (name, (call, texts)) in enumerate(_DIFFERING.items()):
        way = list(WAYS)[number % len(WAYS)]
        said = _said(lambda call=call, way=way: WAYS[way](lambda: call(on, rank, x))())
        said = re.sub("call [0-9]+ on this communicator: ", "", said)
        assert f" on rank {rank} of 2: the ranks differ: this is {texts[rank]}" in said, (name, way, said)
        assert f"; rank {1 - rank} calls {texts[1 - rank]}" in said, (name, way, said)
        assert "Nothing of it was sent" in said, (name, way, said)
        assert _sum(on)(x)[0] == 2


def lines_of_calls(world):
    """Of calls in compiled functions and of eager ones, on both ranks."""
    rank, x = world.rank, jnp.ones(3)

    @jaxmpi.jit
    def total(x):
        return jaxmpi.allreduce(x, MPI.SUM, comm=world)  # total

    @jaxmpi.jit
    def step(x):
        return jaxmpi.bcast(x, 0, comm=world)  # step

    def most(x):
        return jaxmpi.scan(x, MPI.MAX, comm=world)  # most

    def everyone(x):
        return jaxmpi.allgather(x, comm=world)  # everyone

    for functions, within, texts in (
        ((total, step), "lines_of_calls.<locals>.", ("allreduce SUM of 3 float32", "bcast from root 0 of 3 float32")),
        ((most, everyone), "", ("scan MAX of 3 float32", "allgather of 3 float32")),
    ):
        said = _said(lambda functions=functions: functions[rank](x))
        names = [function.__name__ for function in functions]
        calls = [
            f"{text} (a value) called at {_line(name)} ({within}{name})"
            for text, name in zip(texts, names, strict=True)
        ]
        assert f"{calls[rank]}; rank {1 - rank} calls {calls[1 - rank]}. Nothing" in said, said


def messages(world):
    """A message of another dtype than the template's raises on the rank that receives, with the line of the one that
    sent. Messages that fit arrive, and those from and to mpi4py, also in derivatives."""
    rank, other, x, status = world.rank, 1 - world.rank, jnp.arange(4.0) + world.rank, MPI.Status()
    on = _Bound(world)
    if rank == 0:
        on.send(x, 1, tag=3)  # sent
        on.send(x, 1, tag=4)
        on.send(x[:2], 1, tag=5)
        world.Send(np.arange(4, dtype=np.float32), 1, tag=6)
    else:
        said = _said(lambda: on.recv(jnp.zeros(4, jnp.int32), 0, tag=3))
        begin = f"jaxmpi.recv on rank 1 of 2: the message from rank 0 with tag 3 called at {_line('sent')} (messages) "
        assert f"{begin}is of 4 float32, the template of 4 int32, so it was dropped" in said, said
        said = _said(lambda: on.recv(jnp.zeros(2), 0, tag=4))
        assert "with tag 4 called at" in said
        assert "has 16 bytes (4 elements of float32), the template 8 bytes" in said
        np.testing.assert_array_equal(on.recv(jnp.zeros(4), 0, tag=5, status=status), [0, 1, 0, 0])
        assert status.Get_count(MPI.FLOAT) == 2
        np.testing.assert_array_equal(on.recv(x, 0, tag=6), np.arange(4.0))
    said = _said(lambda: on.sendrecv(x, jnp.zeros(4, jnp.int32), other, other))
    assert f"jaxmpi.sendrecv on rank {rank} of 2: the message from rank {other} with tag 0 " in said, said

    def swap(x):
        return on.sendrecv(x, x, other, other)

    value, back = jaxmpi.jit(lambda x: (swap(x), jax.grad(lambda x: swap(x**2) @ jnp.arange(4.0))(x)))(x)
    assert (value == jnp.arange(4.0) + other).all()
    assert (back == 2 * x * jnp.arange(4.0)).all()


def cotangents(world):
    """Ranks whose cotangents of one allreduce differ say so, with its line; equal ones do not."""
    rank = world.rank

    def loss(x, wrong):
        total = jaxmpi.allreduce(jnp.sin(x), MPI.SUM, comm=world)  # summed
        return jnp.sum(total * (1.0 + rank if wrong else 2.0))

    gradient = jaxmpi.jit(jax.grad(loss), static_argnums=1)
    assert jnp.allclose(gradient(jnp.ones(3), False), 2 * jnp.cos(1.0))
    said = _said(lambda: gradient(jnp.ones(3), True))
    told = "differs from that of rank 0" in said and f"{_line('summed')} (loss)" in said
    assert told if rank else said == "nothing", said
    world.Barrier()
    pull = jax.vjp(lambda x: jaxmpi.allreduce(x, MPI.SUM, comm=world), jnp.ones(2))[1]
    for first in (jnp.inf, jnp.nan):
        for second, differs in ((1 + rank * 1e-7, False), (1.0 + rank, rank > 0)):
            said = _said(lambda first=first, second=second: pull(jnp.asarray([first, second])))
            assert (said != "nothing") == differs, (first, second, said)
            world.Barrier()


def invariant(world):
    """Ranks whose values of one `invariant` differ say so, with its line; equal ones do not."""
    rank = world.rank

    def loss(x, wrong=0.0):
        everyone = jaxmpi.allgather(x, comm=world) * (1.0 + rank * wrong)
        return jnp.sum(jaxmpi.invariant(everyone, comm=world) ** 2)  # invariant

    x = jnp.ones(3) + rank
    assert jnp.allclose(jaxmpi.jit(jax.grad(loss))(x), 2 * x)
    said = _said(lambda: jaxmpi.jit(loss)(x, 1.0))
    told = "invariant" in said and f"{_line('invariant')} (loss)" in said
    assert told if rank else said == "nothing", said


def equal_collectives(world):
    """Nothing is said of ranks that do the same, in loops and derivatives, and on a communicator beside."""
    rank, half = world.rank, world.Split(0, -world.rank)
    on, beside = _Bound(world), _Bound(half)
    x = jnp.arange(3.0) + rank + 1

    def step(carry, _):
        y = jaxmpi.replicate(on.allreduce(jnp.sin(carry), MPI.SUM), comm=world)
        y = y + beside.scan(y, MPI.SUM) + jnp.sum(on.allgather(y), axis=0)
        y = y + on.bcast(y * (rank + 1), 1) + on.reduce(y, MPI.SUM, 0)
        y = y + on.sendrecv(y, y, 1 - rank, 1 - rank)
        return y / 20, on.alltoall(jnp.stack([y, y]))

    def loss(v):
        v, ys = jax.lax.scan(step, v, None, length=4)
        return jnp.sum(v) + jnp.sum(ys)

    value, gradient = jaxmpi.jit(jax.value_and_grad(loss))(x)
    assert jnp.isfinite(value)
    assert jnp.isfinite(gradient).all()
    jax.block_until_ready(on.allreduce(x, MPI.Op.Create(lambda a, b, datatype: None, commute=True)))
    on.barrier()


def leaves_of_other_dtypes(world):
    """Of several errors of one message the first is raised, and the next message is intact."""
    rank, other, on = world.rank, 1 - world.rank, _Bound(world)
    xs = (jnp.ones(3, jnp.float32), jnp.ones(2, jnp.int32), jnp.full(4, 5, jnp.int32))
    template = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs)
    wrong = (template[0], jax.ShapeDtypeStruct((2,), jnp.float32), jax.ShapeDtypeStruct((5,), jnp.int32))

    def swap(tag):
        return on.sendrecv(xs, wrong if rank else template, other, other, sendtag=tag, recvtag=tag)

    for f in (swap, jaxmpi.jit(swap)):
        said = _said(lambda f=f: f(3))
        assert "is of 2 int32, the template of 2 float32" in said if rank else said == "nothing", said
        y = on.sendrecv(jnp.full(2, 9 + rank), jnp.zeros(2, int), other, other, sendtag=3, recvtag=3)
        assert (y == 10 - rank).all(), y


def starts(world):
    """Starts that wait to be compared let messages pass. A message of another dtype is refused, and the next one is
    intact."""
    on, x = _Bound(world), jnp.ones(4000)
    if world.rank == 0:
        on.send(x, 1)
        total = on.iallreduce(x, MPI.SUM)
    else:
        received = on.irecv(x, 0)
        total = on.iallreduce(x, MPI.SUM)
        jax.block_until_ready(jaxmpi.wait(received))
    assert jaxmpi.wait(total)[0] == 2
    if world.rank == 0:
        on.send(jnp.arange(4, dtype=jnp.int32), 1, tag=1)
        on.send(jnp.arange(4, dtype=jnp.float32), 1, tag=1)
    else:
        request = on.irecv(jnp.zeros(4), 0, tag=1)
        said = _said(lambda: jaxmpi.wait(request))
        assert "irecv" in said, said
        assert "int32" in said, said
        np.testing.assert_array_equal(on.recv(jnp.zeros(4), 0, tag=1), np.arange(4.0))


ALWAYS = [
    differing, lines_of_calls, messages, cotangents, invariant, equal_collectives, start_and_call,
    leaves_of_other_dtypes, starts,
]  # fmt: skip


# --- none: JAXMPI_CHECK=0 ---------------------------------------------------------------------------------------------


def memory_that_nobody_wrote(world):
    """MPI lets a rank expect more of a scatter than it gets, and says nothing."""
    whole = jnp.arange(4.0 * world.size).reshape(world.size, 4)
    if world.rank == 0:
        np.testing.assert_array_equal(jaxmpi.scatter(whole, 0, comm=world), whole[0])
    else:
        said = _said(lambda: jaxmpi.scatter(whole, 0, comm=world))
        assert "jaxmpi.scatter on rank 1 of 2: rank 0 has passed fewer than the 8 float32" in said, said


def serialized(world):
    """At MPI_THREAD_SERIALIZED everything works, one operation at a time."""
    assert MPI.Query_thread() == MPI.THREAD_SERIALIZED
    step = jaxmpi.jit(lambda x: jaxmpi.sendrecv(x, x, 1 - world.rank, 1 - world.rank, comm=world))
    assert (step(jaxmpi.allreduce(jnp.ones(2), MPI.SUM, comm=world)) == 2).all()


NEVER = [memory_that_nobody_wrote, serialized]


# --- beside mpi4py ----------------------------------------------------------------------------------------------------


def ranks_that_use_mpi4py_in_turns(world):
    """Each makes its part of each call by jaxmpi or by mpi4py: calls are not numbered alike, and no error. It costs the
    others some seconds, once for a communicator."""
    rank, size, draw = world.rank, world.size, random.Random(0)
    for _ in range(12):
        kind = draw.choice(["allreduce", "allgather", "alltoall"])
        by_mpi4py = [draw.random() < 0.4 for _ in range(size)][rank]
        x = np.full((size, 2), rank + 1, np.float32)
        y = np.zeros_like(x)
        expected = np.repeat(np.arange(1, size + 1, dtype=np.float32)[:, None], 2, 1)
        if kind == "allreduce":
            y = world.Allreduce(x, y) or y if by_mpi4py else jaxmpi.allreduce(x, MPI.SUM, comm=world)
            expected = np.full_like(x, size * (size + 1) // 2)
        elif by_mpi4py:
            world.Allgather(x[0], y) if kind == "allgather" else world.Alltoall(x, y)
        else:
            y = jaxmpi.allgather(x[0], comm=world) if kind == "allgather" else jaxmpi.alltoall(x, comm=world)
        assert (np.asarray(y) == expected).all(), kind


WITH_MPI4PY = [ranks_that_use_mpi4py_in_turns]
