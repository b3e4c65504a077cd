"""Every operation against NumPy: eager, jitted, shapes, pytrees, tokens, communicators."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import jaxmpi
from support.rows import each, rows
from support.table import CASES, NEW_JAX, draw

WAYS = {
    "eager": (lambda f: f, [()]),
    "jit": (jax.jit, [(2, 3), (0, 3)]),
    "jaxmpi.jit": (jaxmpi.jit, [(1,), (5, 1, 2)]),
}


@pytest.mark.parametrize("way", WAYS)
@rows("cases", CASES)
def test_results(cases, way, comm, rank, size):
    """All operations, with each root, in one program: most of the time goes into compiling."""
    jit, shapes = WAYS[way]
    calls = [
        (case, shape, root) for case in cases for shape in shapes for root in list(case.roots(size))[way == "eager" :]
    ]
    inputs = [case.inputs(shape, np.float32, size, root) for case, shape, root in calls]

    def call(xs):
        return [case.call(x, comm, root) for (case, _, root), x in zip(calls, xs, strict=True)]

    def check(row):
        (case, _, root), xs, result = row
        expected = case.expected(xs, rank, root)
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_array_equal(result, expected)

    results = jit(call)([jnp.asarray(xs[rank]) for xs in inputs])
    each(list(zip(calls, inputs, results, strict=True)), check, lambda row: " ".join(map(str, row[0])))


def _families(comm, rank, size):
    """What is no operation of the table: functions of arrays of 4 numbers, and of which dtypes these may be."""
    grid, target = (jaxmpi.Grid(dims, (2 * size, 6), comm=comm) for dims in ((size, 1), (1, size)))
    points = jaxmpi.fft.Transform(grid, pad=1.5, real=True)
    spectrum = jaxmpi.fft.Transform(grid, norm="ortho", natural=True)
    empty = jaxmpi.fft.Transform(jaxmpi.Grid((size, 1), (max(size - 1, 1), 6), comm=comm), real=True)
    rows = jaxmpi.IndexMap(4 * rank + np.arange(4), (4 * rank + 4 + np.arange(3 * (size > 1))) % (4 * size), comm=comm)
    field = lambda x: jnp.resize(x, grid.local_shape)  # noqa: E731
    owners = (np.arange(4) + rank) % size
    left, right = (jnp.asarray((rank + step) % size, jnp.int16) for step in (-1, 1))  # known at run time
    transforms = {
        "padded": lambda x: points.backward(points.forward(jnp.resize(x, points.physical_grid.local_shape))),
        "transform": lambda x: jnp.abs(spectrum.forward(field(x))),
        "without cells": lambda x: empty.backward(empty.forward(jnp.resize(x, empty.grid.local_shape))),
    }
    others = {
        **{f"exchange, {b}": lambda x, b=b: grid.exchange(grid.pad(field(x)), boundary=b) for b in (1, "reflect")},
        "start": lambda x: grid.finish(grid.start(grid.pad(field(x)))),
        "redistribute": lambda x: jaxmpi.redistribute(field(x), grid, target),
        "messages": lambda x: jaxmpi.sendrecv([x, x], [x, x], left, right, sendtag=3, recvtag=3, comm=comm)[1],
        "index map": lambda x: rows.accumulate(rows.exchange(rows.pad(x))),
        "migrate": lambda x: jaxmpi.migrate(x, owners, rows=4 * size, comm=comm)[0],
        "migrate, counted": lambda x: jaxmpi.migrate(x, jnp.asarray(owners), rows=8, count=jnp.int8(2), comm=comm)[0],
        "invariant": lambda x: jaxmpi.invariant(jaxmpi.bcast(jaxmpi.replicate(x, comm=comm), 0, comm=comm), comm=comm),
        **{op: lambda x, op=op: jaxmpi.allreduce(x, getattr(MPI, op), comm=comm) for op in ("MAX", "PROD")},
        "prefixes": lambda x: jaxmpi.scan(x, MPI.MAX, comm=comm),
    }
    return {**dict.fromkeys(transforms.items(), ("float64",)), **dict.fromkeys(others.items(), ("float64", "bfloat16"))}


def test_strict_promotion(comm, rank, size):
    """The package converts no dtype that it was not told to, in results and derivatives: JAX refuses what it would
    convert by itself while it traces."""
    calls = {str(case): lambda x, case=case: case.call(x, comm, 0) for case in CASES}
    xs = {str(case): jnp.asarray(case.inputs((3,), np.float32, size, 0)[rank]) for case in CASES}
    for (name, call), dtypes in _families(comm, rank, size).items():
        calls |= {f"{name} of {dtype}": call for dtype in dtypes}
        xs |= {f"{name} of {dtype}": draw((4,), np.float64, rank, 0).astype(dtype) for dtype in dtypes}

    def derivatives(name):
        def of(x):
            _, tangent = jax.jvp(calls[name], (x,), (x,))
            return jax.vjp(calls[name], x)[1](tangent)

        jax.eval_shape(of if NEW_JAX else calls[name], xs[name])

    with jax.numpy_dtype_promotion("strict"):
        each(list(calls), derivatives)


def test_strict_promotion_of_files(comm, tmp_path):
    pytest.importorskip("zarr", minversion="3")
    path, state = comm.bcast(str(tmp_path / "state")), {d: jnp.arange(5).astype(d) for d in ("int8", "bfloat16")}
    with jax.numpy_dtype_promotion("strict"):
        jaxmpi.io.save(path, state, comm=comm)
        loaded = jaxmpi.io.load(path, like=state, comm=comm)
    for name, values in state.items():
        assert loaded[name].dtype == values.dtype
        np.testing.assert_array_equal(loaded[name], values)


@rows("cases", CASES)
def test_operands_are_kept(cases, comm, rank, size):
    """In place or not, the caller's array is the caller's, and an operand that is used before and after is not
    overwritten by a result in its place."""
    inputs = [case.inputs((6,), np.float32, size, 0) for case in cases]
    arrays = [jnp.asarray(xs[rank].copy()) for xs in inputs]

    def of(xs):
        return [case.call(x, comm, 0) for case, x in zip(cases, xs, strict=True)]

    def call(xs):
        ys = [x * 2 for x in xs]
        return of(ys), [y + 1 for y in ys], of(xs)

    def check(row):
        case, xs, array, result, used = row
        np.testing.assert_array_equal(array, xs[rank])
        np.testing.assert_array_equal(used, xs[rank] * 2 + 1)
        np.testing.assert_array_equal(result, case.expected([x * 2 for x in xs], rank, 0))

    jax.block_until_ready(of(arrays))
    results, used, _ = jax.block_until_ready(jax.jit(call)(arrays))
    each(list(zip(cases, inputs, arrays, results, used, strict=True)), check, lambda row: str(row[0]))


LEAVES = [(), (0,), (1,), (3,), (2, 2), (0, 3), (700,), (5000,), (40, 300)]  # the last is not small in any dtype
DTYPES = [np.float32, np.int32, np.float16, np.int8, np.complex64]
JOINED = [case for case in CASES if not case.messages]


def check_trees(cases, leaves, way, comm, seed=0):
    """Of each case a tree with so many leaves, whose shapes and dtypes `leaves` draws; None is no leaf."""
    rank, size = comm.rank, comm.size
    generator = np.random.default_rng(seed)
    roots = [int(generator.integers(size)) if case.rooted else 0 for case in cases]
    kinds = [leaves(generator) for _ in cases]
    inputs = [
        [case.inputs(*kind, size, root, i) for i, kind in enumerate(drawn)]
        for case, root, drawn in zip(cases, roots, kinds, strict=True)
    ]
    trees = [{"a": jnp.asarray(xs[0][rank]), "b": ([jnp.asarray(x[rank]) for x in xs[1:]], None)} for xs in inputs]

    def call(trees):
        return [case.call(tree, comm, root) for case, root, tree in zip(cases, roots, trees, strict=True)]

    def check(row):
        case, root, xs, tree, result = row
        assert jax.tree.structure(result) == jax.tree.structure(tree)
        for i, (x, kept, got) in enumerate(zip(xs, *map(jax.tree.leaves, (tree, result)), strict=True)):
            expected = case.expected(x, rank, root)
            assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
            np.testing.assert_array_equal(got, expected, err_msg=f"leaf {i}")
            np.testing.assert_array_equal(kept, x[rank])

    found = list(zip(cases, roots, inputs, trees, way(call)(trees), strict=True))
    each(found, check, lambda row: str(row[0]))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 5))])
@rows("cases", JOINED)
def test_random_pytrees(cases, seed, comm):
    """Leaves of several shapes and dtypes, some of which are communicated together, in any order."""

    def leaves(generator):
        return [(LEAVES[i], DTYPES[generator.integers(5)]) for i in generator.integers(len(LEAVES), size=5)]

    check_trees(cases, leaves, [jax.jit, jaxmpi.jit][seed % 2], comm, seed)


@rows("cases", [case for case in JOINED if case.name in ("allgatherv", "allreduce", "iallreduce", "scatter")])
def test_many_leaves(cases, comm):
    """Of one dtype, and more than one operation takes."""
    leaves = lambda generator: [(LEAVES[i], np.float32) for i in generator.integers(5, size=130)]  # noqa: E731
    check_trees(cases, leaves, lambda f: f, comm)


def test_small_leaves_are_one_operation(comm, size):
    def check(name):
        case = next(case for case in CASES if case.name == name)
        tree = [jnp.asarray(case.inputs((3,), np.float32, size, 0)[comm.rank])] * 100
        equations = jax.make_jaxpr(lambda tree: case.call(tree, comm, 0))(tree).eqns
        assert [equation.primitive.name for equation in equations].count(f"jaxmpi.{name}") == 1

    each(["allgather", "allreduce", "alltoall", "bcast", "gather", "reduce", "scan", "scatter"], check)


def test_pytree_of_which_some_leaves_are_mapped(comm, rank, size):
    """What is not mapped is communicated once."""
    tree = {"a": jnp.ones(3) * rank, "b": jnp.arange(6.0).reshape(2, 3), "c": jnp.float32(rank)}
    axes = {"a": None, "b": 0, "c": None}
    result = jax.vmap(lambda tree: jaxmpi.allreduce(tree, MPI.SUM), in_axes=(axes,), out_axes=axes)(tree)
    total = sum(range(size))
    np.testing.assert_array_equal(result["a"], np.full(3, total))
    np.testing.assert_array_equal(result["b"], size * np.arange(6.0).reshape(2, 3))
    assert result["c"] == total


def test_barrier(comm, rank, size, tmp_path):
    """Nobody leaves before the last one, which leaves a file, has come; it gives the others time to leave too early."""
    file = comm.bcast(tmp_path, root=size - 1) / "came"
    if rank == size - 1:
        time.sleep(0.1)
        file.touch()
    token = jaxmpi.tokens.barrier(comm=comm)
    jax.effects_barrier()
    assert file.exists()
    assert token == jaxmpi.tokens.Token()
    assert jax.tree.leaves(token) == []
    assert jax.jit(jaxmpi.tokens.barrier)() == jaxmpi.tokens.Token()


def test_tokens(size):
    """A token is returned beside the result, any token is accepted and handed back, and it crosses jit and loops."""
    x = jnp.ones(2)
    for token in (None, jaxmpi.tokens.Token(), jax.lax.create_token(), jnp.zeros(0), object()):
        y, returned = jaxmpi.tokens.allreduce(x, MPI.SUM, token=token)
        assert returned is token or (token is None and isinstance(returned, jaxmpi.tokens.Token))
        np.testing.assert_array_equal(y, size * np.ones(2))

    @jax.jit
    def f(x, token):
        def body(carry, _):
            x, token = carry
            x, token = jaxmpi.tokens.allreduce(x, MPI.SUM, token=token)
            token = jaxmpi.tokens.barrier(token=token)
            return (x, token), None

        return jax.lax.scan(body, (x, token), None, length=3)[0]

    for token in (jaxmpi.tokens.Token(), jnp.zeros(1)):
        y, returned = f(x, token)
        np.testing.assert_array_equal(y, size**3 * np.ones(2))
        assert returned == token


def test_no_operation_takes_a_token():
    for name in ("allgather", "allreduce", "sendrecv", "recv", "barrier"):
        with pytest.raises(TypeError, match="unexpected keyword argument 'token'"):
            getattr(jaxmpi, name)(token=None)
    assert jaxmpi.barrier() is None


def test_sub_communicators(comm, rank, size):
    """Split by parity: ranks, sizes and roots are those of the communicator."""
    part = comm.Split(rank % 2, rank)
    peers = [r for r in range(size) if r % 2 == rank % 2]
    calls = [(case, root) for case in CASES for root in case.roots(part.size)]
    inputs = [case.inputs((3,), np.float32, part.size, root) for case, root in calls]
    call = lambda xs: [case.call(x, part, root) for (case, root), x in zip(calls, xs, strict=True)]  # noqa: E731
    results = jax.jit(call)([jnp.asarray(xs[part.rank]) for xs in inputs])
    for (case, root), xs, result in zip(calls, inputs, results, strict=True):
        np.testing.assert_array_equal(result, case.expected(xs, part.rank, root), err_msg=f"{case} {root}")
    np.testing.assert_array_equal(jaxmpi.allgather(jnp.int32(rank), comm=part), peers)
    jax.effects_barrier()
    part.Free()


def test_communicators_in_turn(comm, size):
    """Handles that MPI recycles must not find the shapes of their predecessors."""
    for turn in range(6):
        colour = 0 if turn % 2 else comm.rank
        part = comm.Split(colour, comm.rank)
        assert jaxmpi.allgather(jnp.ones(2), comm=part).shape == (part.size, 2)
        assert part.size == (size if turn % 2 else 1)
        jax.effects_barrier()
        part.Free()


def test_default_is_a_clone(comm, rank, size):
    """Messages of the user's own on COMM_WORLD do not meet ours."""
    request = comm.irecv(source=(rank - 1) % size, tag=0)
    received = jaxmpi.sendrecv(jnp.full(1, rank), jnp.zeros(1, int), (rank - 1) % size, (rank + 1) % size)
    assert received[0] == (rank - 1) % size
    comm.send("mine", dest=(rank + 1) % size, tag=0)
    assert request.wait() == "mine"


def test_numpy_scalars_and_numbers(size, rank):
    assert jaxmpi.allreduce(3, MPI.SUM) == 3 * size
    assert jaxmpi.allreduce(2.5, MPI.SUM) == 2.5 * size
    assert jaxmpi.allreduce(True, MPI.LAND)
    np.testing.assert_array_equal(jaxmpi.allreduce(np.arange(3), MPI.SUM), size * np.arange(3))
    root = np.int16(size - 1)
    np.testing.assert_array_equal(jaxmpi.bcast(np.full(2, rank), root), np.full(2, size - 1))
    assert jaxmpi.allreduce([1, 2.0], MPI.SUM) == [size, 2.0 * size]


def test_templates_are_not_read(rank, size):
    """NaN in a template changes nothing, a ShapeDtypeStruct is enough."""
    data = jnp.arange(3.0)
    for template in (jnp.full(3, jnp.nan), jax.ShapeDtypeStruct((3,), data.dtype)):
        np.testing.assert_array_equal(jaxmpi.bcast(data if rank == 0 else template, 0), np.arange(3.0))
        stacked = jnp.tile(data, (size, 1))
        np.testing.assert_array_equal(jaxmpi.scatter(stacked if rank == 0 else template, 0), np.arange(3.0))
        received = jaxmpi.sendrecv(data + rank, template, (rank - 1) % size, (rank + 1) % size)
        np.testing.assert_array_equal(received, np.arange(3.0) + (rank - 1) % size)


def test_proc_null():
    x = jnp.ones(3)
    jaxmpi.send(x, MPI.PROC_NULL)
    np.testing.assert_array_equal(jaxmpi.recv(x, MPI.PROC_NULL), np.zeros(3))
    np.testing.assert_array_equal(jaxmpi.sendrecv(x, x, MPI.PROC_NULL, MPI.PROC_NULL), np.zeros(3))


@pytest.mark.ranks(2)
def test_status(rank):
    """Source, tag and count of what came; a message shorter than the template leaves zeros behind it."""
    if rank == 1:
        jaxmpi.send(jnp.arange(1.0, 3.0), 0, tag=17)
    if rank == 0:
        status = MPI.Status()
        y = jaxmpi.recv(jnp.full(4, 9.0), MPI.ANY_SOURCE, status=status)
        assert (status.source, status.tag) == (1, 17)
        assert status.Get_count(MPI.DOUBLE) == 2
        np.testing.assert_array_equal(y, [1, 2, 0, 0])


@pytest.mark.ranks(2)
def test_any_source(rank, size):
    if rank == 0:
        got = sorted(float(jaxmpi.recv(jnp.zeros(()))) for _ in range(size - 1))
        assert got == [float(r) for r in range(1, size)]
    else:
        jaxmpi.send(jnp.float64(rank), 0)


@pytest.mark.ranks(2)
def test_different_shapes(rank):
    if rank < 2:
        mine = jnp.arange(6.0).reshape(2, 3) if rank == 0 else jnp.arange(4, dtype=jnp.int32)
        other = jnp.zeros(4, jnp.int32) if rank == 0 else jnp.zeros((2, 3))
        got = jaxmpi.sendrecv(mine, other, 1 - rank, 1 - rank)
        expected = np.arange(4) if rank == 0 else np.arange(6.0).reshape(2, 3)
        np.testing.assert_array_equal(got, expected)


def test_donation(size, rank):
    """A donated operand gives its memory to the result, and the result is right."""
    f = jax.jit(lambda x: jaxmpi.allreduce(x, MPI.SUM), donate_argnums=0)
    x = jnp.arange(1000.0) + rank
    np.testing.assert_array_equal(f(x), size * np.arange(1000.0) + size * (size - 1) / 2)
    assert x.is_deleted()


def test_draw_differs():
    """The inputs of two ranks are different, or nothing here would prove anything."""
    assert not np.array_equal(draw((8,), np.float32, 0), draw((8,), np.float32, 1))
