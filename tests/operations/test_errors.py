"""Bad input gets an exception that names operation, argument and value, and nothing is sent: the ranks go on."""

import gc

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import jaxmpi
from jaxmpi import fft
from jaxmpi._mpi import tags
from jaxmpi._mpi.library import OPERATIONS
from jaxmpi._primitive.operation import eager_programs
from support import simulated
from support.rows import each, rows
from support.table import CASES, NEW_JAX, raised

pytestmark = pytest.mark.usefixtures("own_errors")

X = jnp.ones(3)


@pytest.fixture(autouse=True)
def _nothing_was_sent(size, rank):
    """After an error all ranks can still talk to each other."""
    yield
    right, left = (rank + 1) % size, (rank - 1) % size
    assert jaxmpi.sendrecv(jnp.float32(rank), jnp.float32(0), left, right) == left
    assert jaxmpi.allreduce(1, MPI.SUM) == size


VALUES = [
    (
        "alltoall",
        (jnp.ones((2, 2)),),
        r"the first axis of x must be the number of ranks, (\d+), .* got shape \(\d+, 2\)",
    ),
    ("alltoall", (1.0,), r".* got shape \(\)"),
    ("reduce_scatter", (jnp.ones((2, 2)), MPI.SUM), "the first axis of x must be the number of ranks"),
    ("reduce_scatter", (jnp.ones((2, 2)), MPI.SUM, [1]), r"x has \d+ rows, and the sum of counts is \d+"),
    ("allgatherv", (X, [3, 3]), r"counts must have a count of rows for each of the \d+ ranks, got \d+"),
    ("allgatherv", (X, [2]), "x has 3 rows, and counts say that this rank has 2"),
    ("allgatherv", (X, jnp.ones(1, int)), r"counts must be a scalar, the count of this rank; got shape \(\d+,\)"),
    ("allgatherv", (jnp.ones(()), [1]), "x is a scalar, and the first axis is what is divided"),
    ("allgatherv", ({"a": X, "b": jnp.ones(2)}, [3]), r"x\['b'\] has 2 rows and x\['a'\] 3"),
    ("alltoallv", (X, jnp.zeros(1, int)), "pass rows="),
    (
        "scatterv",
        (jnp.ones(7), [2], 0),
        r"x has \d+ rows, and (the sum of counts is|counts say that this rank gets) \d+",
    ),
    ("bcast", (X, 1), r"root must be a rank .* got \d+"),
    ("gather", (X, -5), "root .* got -5"),
    ("reduce", (X, MPI.SUM, MPI.PROC_NULL), "root"),
    ("send", (X, 1), r"dest .* or MPI.PROC_NULL; got \d+"),
    ("send", (X, MPI.ANY_SOURCE), "dest"),
    ("recv", (X, 1), r"source .* or MPI.PROC_NULL or MPI.ANY_SOURCE; got \d+"),
    ("sendrecv", (X, X, 0, 1), "dest"),
    ("scan", (X, MPI.OP_NULL), "op is MPI.OP_NULL"),
    ("recv", ((X, X),), "a pytree of 2 arrays .*ANY_SOURCE"),
    ("sendrecv", ((X, X), X, 0, 0), "sendbuf has 2 arrays and recvbuf 1"),
]
TYPES = [
    ("reduce_scatter", (jnp.ones((1, 2)), MPI.LAND), "op MPI.LAND is not defined"),
    ("exscan", (X, MPI.BOR), "op MPI.BOR is not defined"),
    ("gatherv", (X, [3.0], 0), "counts must be a sequence"),
    ("gatherv", (X, "3", 0), "counts must be a sequence"),
    ("gatherv", (X, 3.0, 0), "counts must be a Python or NumPy"),
    ("allgatherv", (X, jnp.float32(1)), "counts must be integers, got dtype float32"),
    ("allgatherv", (X, None), "counts must be a Python"),
    ("alltoallv", (X, jnp.zeros(1, int), [0]), "sendcounts and recvcounts must both be sequences"),
    ("scatter", (X, 0.0), "root .* got 0.0 of type float"),
    ("bcast", (X, None), "root .* got None"),
    ("allreduce", (X, "sum"), "op .* got 'sum'"),
    ("allreduce", (MPI.SUM, X), "op must be"),
    ("allreduce", (X, MPI.BAND), r"op MPI.BAND is not defined for dtype float\d+; possible: MPI.SUM"),
    ("reduce", (X + 1j, MPI.MAX, 0), r"op MPI.MAX is not defined for dtype complex\d+; possible: MPI.SUM, MPI.PROD"),
    ("scan", (X > 0, MPI.SUM), "op MPI.SUM .* bool.*To count"),
    ("bcast", (jnp.ones(3, jnp.int4), 0), "x has dtype int4, which cannot be communicated; use x.astype"),
    (
        "allreduce",
        (jax.random.key(0), MPI.SUM),
        "x has dtype key<fry>, of random keys, which are moved, not reduced.*jax.random.key_data",
    ),
    ("allgather", ("abc",), "x must hold JAX arrays, numbers.*got 'abc'"),
    ("send", (object(), 0), "x must hold JAX arrays, numbers"),
    ("allreduce", ({"a": X, "b": "no"}, MPI.SUM), r"x\['b'\] .* got 'no'"),
    ("iallreduce", (X > 0, MPI.SUM), "op MPI.SUM .* bool"),
    ("bcast", (X, MPI.IN_PLACE), r"root must .* got (MPI\.)?IN_PLACE"),
    ("send", (X, MPI.BOTTOM), r"dest must .* got (MPI\.)?BOTTOM"),
    ("recv", (X, MPI.IN_PLACE), r"source must .* got (MPI\.)?IN_PLACE"),
    ("allgatherv", (X, MPI.BOTTOM), r"counts must .* got (MPI\.)?BOTTOM"),
    ("allreduce", (X, MPI.IN_PLACE), r"op must .* got (MPI\.)?IN_PLACE"),
]
OTHER_VALUES = [
    (lambda: jaxmpi.allgatherv(X, [-1]), r"counts must not be negative"),
    (lambda: jaxmpi.allgatherv(X, [3], rows=9), r"allgatherv: rows= is for counts that are JAX arrays"),
    (lambda: jaxmpi.allgatherv(X, jnp.int32(3), rows=-1), r"allgatherv: rows must be between 0 and \d+; got -1"),
    (
        lambda: jaxmpi.alltoallv(X, jnp.zeros((1, 1), int), rows=3),
        r"alltoallv: sendcounts must be of shape \(\d+,\), a count for each rank; got shape \(\d+, 1\)",
    ),
    (lambda: jaxmpi.send(X, 0, tag=tags.KEPT[-1]), r"send: tag \d+ is a tag that jaxmpi keeps"),
    (lambda: jaxmpi.send(X, 0, tag=-7), r"send: tag must be between 0 and \d+; got -7"),
    (lambda: jaxmpi.recv(X, 0, tag=2**40), r"recv: tag .* or MPI.ANY_TAG; got"),
    (lambda: jaxmpi.barrier(comm=MPI.COMM_NULL), r"barrier: comm is MPI.COMM_NULL"),
]
OTHER_TYPES = [
    (
        lambda: jax.jit(lambda k: jaxmpi.allgatherv(X, [k]))(3),
        r"allgatherv: counts must be a sequence of integers.*Counts that are known at run time",
    ),
    (
        lambda: jax.jit(lambda rows: jaxmpi.allgatherv(X, jnp.int32(3), rows=rows))(3),
        r"allgatherv: rows must be known when the function is compiled",
    ),
    (
        lambda: jax.jit(lambda x, r: jaxmpi.bcast(x, r))(X, 0),
        r"bcast: root must be known when the function is compiled.*static_argnums",
    ),
    (
        lambda: jax.jit(lambda t: jaxmpi.send(X, 0, tag=t))(1.0),
        r"send: tag must be an integer, got a traced value of dtype float",
    ),
    (
        lambda: jax.jit(lambda d: jaxmpi.send(X, d))(jnp.arange(2)),
        r"send: dest must be an integer, got a traced value of dtype int\d+ and shape \(2,\)",
    ),
    (
        lambda: jaxmpi.allreduce(X, MPI.SUM, comm="world"),
        r"allreduce: comm must be an mpi4py communicator .* got 'world' of type str",
    ),
    (lambda: jax.jit(lambda c: jaxmpi.allgather(X, comm=c))(1), r"allgather: comm .* traced"),
    (lambda: jaxmpi.allreduce(X.astype(jnp.float8_e5m2), MPI.SUM), r"float8_e5m2; it can be moved, not reduced"),
    (lambda: jaxmpi.allreduce(X, MPI.MAXLOC), r"op MPI.MAXLOC is not defined"),
    (
        lambda: jaxmpi.allreduce([X, 3, MPI.DOUBLE], MPI.SUM),
        r"x\[2\] is .*Datatype .* is no array: in the place of mpi4py's \[x, count, datatype\] pass x alone",
    ),
    (lambda: jaxmpi.send(2**70, 0), r"Python int .* too large to convert"),
    (lambda: jaxmpi.send(np.arange(3, dtype=">f4"), 0), r"x must hold JAX arrays.*JAX says"),
    (lambda: jaxmpi.recv(X, 0, status=3), r"recv: status must be an MPI.Status"),
    (lambda: jaxmpi.bcast(X, 0, token=None), r"unexpected keyword argument .token."),
    (lambda: jaxmpi.isend(X, 0, tag=MPI.BOTTOM), r"tag must .* got (MPI\.)?BOTTOM"),
    (lambda: jaxmpi.allgatherv(X, jnp.int32(3), rows=MPI.IN_PLACE), r"rows must .* got (MPI\.)?IN_PLACE"),
    (lambda: jaxmpi.alltoallv(X, MPI.BOTTOM, rows=3), r"sendcounts must .* got (MPI\.)?BOTTOM"),
    (lambda: jaxmpi.Grid(MPI.IN_PLACE), r"processes must .* got (MPI\.)?IN_PLACE"),
    (lambda: jaxmpi.Grid((0,), MPI.BOTTOM), r"shape must .* got (MPI\.)?BOTTOM"),
    (lambda: jaxmpi.allreduce(X, MPI.SUM, comm=MPI.IN_PLACE), r"comm must .* got (MPI\.)?IN_PLACE"),
    (lambda: jaxmpi.recv(X, 0, status=MPI.BOTTOM), r"status must .* got (MPI\.)?BOTTOM"),
]
HOW = "jax.vmap maps an operand that says how to communicate"
MAPPED = [
    (lambda k: jaxmpi.allgatherv(X, k)[0], f"allgatherv: {HOW}"),
    (lambda d: jaxmpi.send(X, d), f"send: {HOW}"),
    (lambda s: jaxmpi.recv(X + s, s), f"recv: {HOW}"),
    (lambda t: jaxmpi.irecv(X, 0, tag=t), f"irecv: {HOW}"),
    (lambda p: jax.lax.cond(p > 0, lambda: jaxmpi.recv(X, p), lambda: X), r"recv: .*the predicate or index as well"),
]


def of_operation(rows):
    """Operations, their arguments on one rank, and what an error says behind the name of the operation."""
    return [(lambda name=name, of=of: getattr(jaxmpi, name)(*of), f"{name}: {words}") for name, of, words in rows]


BAD = [
    *((ValueError, *row) for row in (*of_operation(VALUES), *OTHER_VALUES)),
    *((TypeError, *row) for row in (*of_operation(TYPES), *OTHER_TYPES)),
    *((NotImplementedError, lambda call=call: jax.vmap(call)(jnp.arange(2)), words) for call, words in MAPPED),
]


def both_ways(call):
    """Without jit and while it traces."""
    return call, jax.jit(lambda: call())


@pytest.mark.alone
@rows("cases", BAD, ids=lambda row: row[2])
def test_bad_input(cases):
    def check(case):
        kind, call, message = case
        for way in both_ways(call):
            with pytest.raises(kind, match=message):
                way()

    each(cases, check, lambda case: case[2])


def test_scatter_on_root(rank, size):
    if rank == 0:
        with pytest.raises(ValueError, match=r"scatter: the first axis of x must be the number of ranks"):
            jaxmpi.scatter(jnp.ones((size + 1, 2)), 0)


def nothing_on_its_way(comm):
    """No message waits for this rank on `comm`, now that all ranks have sent what they send."""
    jax.effects_barrier()
    comm.Barrier()
    return not comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)


def test_bad_leaf_is_named(size):
    tree = {"a": X, "b": [jnp.ones((size, 2)), jnp.ones((size + 1, 2))]}
    with pytest.raises(ValueError, match=r"alltoall: the first axis of x\['b'\]\[1\] must be"):
        jaxmpi.alltoall({**tree, "a": jnp.ones(size)})
    with pytest.raises(TypeError, match=r"allreduce: op MPI.SUM is not defined for dtype bool of x\['b'\]\[0\];"):
        jaxmpi.allreduce({**tree, "b": [X > 0, X]}, MPI.SUM)


def test_bad_leaf_sends_nothing(comm, rank, size):
    """The first leaf is good: it must not be sent before the second is found to be bad."""
    part = comm.Dup()
    with pytest.raises(TypeError):
        jaxmpi.send((X, "no"), (rank + 1) % size, comm=part)
    assert nothing_on_its_way(part)
    part.Free()


@pytest.mark.skipif(not NEW_JAX, reason="this JAX has no derivatives of communication")
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_refused_derivative_sends_nothing(jitted, comm, rank, size):
    """What cannot be differentiated says so before it communicates."""
    part = comm.Dup()
    own = MPI.Op.Create(lambda a, b, t: None, commute=True)
    right = (rank + 1) % size

    def high_tag(x):
        jaxmpi.send(x, right, tag=MPI.COMM_WORLD.Get_attr(MPI.TAG_UB), comm=part)
        return jnp.sum(x)

    refused = {
        "ANY_TAG" if NEW_JAX else "JAX 0.7": lambda x: jnp.sum(jaxmpi.recv(x, right, comm=part)),
        "ANY_SOURCE": lambda x: jnp.sum(jaxmpi.sendrecv(x, x, MPI.ANY_SOURCE, right, comm=part)),
        "tag must be below" if NEW_JAX else "or sendrecv": high_tag,
        "user-defined": lambda x: jnp.sum(jaxmpi.allreduce(x, own, comm=part)),
    }
    for why, f in refused.items():
        gradient = jax.jit(jax.grad(f)) if jitted else jax.grad(f)
        with pytest.raises(NotImplementedError, match=f"cannot be differentiated: .*{why}"):
            gradient(X)
    assert nothing_on_its_way(part)
    part.Free()
    own.Free()


@pytest.mark.skipif(not NEW_JAX, reason="this JAX has no derivatives of communication")
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_what_has_no_derivative_of_what_is_stopped(jitted, comm, rank, size):
    """A reduction without derivative is a constant where nothing that is differentiated reaches it."""

    def larger(a, b, datatype):
        b = np.frombuffer(b, X.dtype)
        np.maximum(np.frombuffer(a, X.dtype), b, out=b)

    own = MPI.Op.Create(larger, commute=True)
    f = lambda x: jnp.sum(x * jaxmpi.allreduce(jax.lax.stop_gradient(x) + rank, own))  # noqa: E731
    gradient = (jax.jit if jitted else lambda f: f)(jax.grad(f))(X)
    assert (np.asarray(gradient) == np.asarray(X) + size - 1).all()
    own.Free()


def test_intercommunicator(comm, rank, size):
    if size < 2:
        pytest.skip("needs 2 ranks")
    half = comm.Split(rank % 2, rank)
    inter = half.Create_intercomm(0, comm, 1 - rank % 2)
    with pytest.raises(ValueError, match=r"allreduce: comm is an inter-communicator.*Merge"):
        jaxmpi.allreduce(X, MPI.SUM, comm=inter)
    inter.Free()
    half.Free()


@pytest.mark.parametrize("jit", [jax.jit, jaxmpi.jit], ids=["jax.jit", "jaxmpi.jit"])
def test_freed_communicator(jit, comm):
    """Freed before tracing: ValueError. Freed after compiling: an error at run time, and nothing is sent."""
    part = comm.Dup()
    compiled = jit(lambda x: jaxmpi.allreduce(x, MPI.SUM, comm=part))
    jax.block_until_ready(compiled(X))
    handle = part
    part.Free()
    with pytest.raises(ValueError, match=r"allreduce: comm is MPI.COMM_NULL"):
        jaxmpi.allreduce(X, MPI.SUM, comm=handle)
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"has been freed since this function was compiled"):
            jax.block_until_ready(compiled(X))
    again = comm.Dup()  # with the handle that has just become free
    np.testing.assert_array_equal(jaxmpi.allreduce(X, MPI.SUM, comm=again), comm.size * np.ones(3))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"has been freed since this function was compiled"):
        jax.block_until_ready(compiled(X))
    np.testing.assert_array_equal(jit(lambda x: jaxmpi.allreduce(x, MPI.SUM, comm=again))(X), comm.size * np.ones(3))
    jax.effects_barrier()
    again.Free()


def test_programs_of_freed_communicators_go(comm):
    """Each communicator has compiled programs of its own; nothing of them is left when the next one is used."""
    backend = jax.extend.backend.get_backend()

    def use():
        part = comm.Dup()
        np.testing.assert_array_equal(jaxmpi.allreduce(X, MPI.SUM, comm=part), comm.size * np.ones(3))
        jaxmpi.barrier(comm=part)
        part.Free()
        gc.collect()
        return eager_programs(), len(backend.live_executables())

    gc.freeze()  # what other tests have left
    try:
        use()
        before = use()
        assert use() == before
    finally:
        gc.unfreeze()


def combined(values):
    def combine(a, b, datatype):
        mine, result = (np.frombuffer(x, np.float64) for x in (a, b))
        result[:] = values(mine, result)

    return MPI.Op.Create(combine, commute=True)


@pytest.mark.parametrize("jit", [jax.jit, jaxmpi.jit], ids=["jax.jit", "jaxmpi.jit"])
def test_freed_reduction(jit, comm, size):
    """As for a communicator; and a new operation with its handle is not taken for it."""
    add = combined(lambda a, b: a + b)
    compiled = jit(lambda x: jaxmpi.allreduce(x, add, comm=comm))
    np.testing.assert_array_equal(compiled(X), size * np.ones(3))
    np.testing.assert_array_equal(jaxmpi.allreduce(X, add), size * np.ones(3))
    add.Free()
    with pytest.raises(ValueError, match=r"allreduce: op is MPI.OP_NULL"):
        jaxmpi.allreduce(X, add)
    largest = combined(np.maximum)
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"has been freed since this function was compiled"):
            jax.block_until_ready(compiled(X))
        np.testing.assert_array_equal(jaxmpi.allreduce(X, largest), np.ones(3))
        np.testing.assert_array_equal(jit(lambda x: jaxmpi.allreduce(x, largest))(X), np.ones(3))
    jax.effects_barrier()
    largest.Free()


def _with_neighbors(call):
    def with_communicator(x):
        ring = MPI.COMM_WORLD.Create_cart([MPI.COMM_WORLD.size])
        try:
            return call(x, comm=ring)
        finally:
            ring.Free()

    return with_communicator


NOTHING = {
    **{case.name: lambda x, case=case: case.call(x, MPI.COMM_WORLD, 0) for case in CASES if not case.messages},
    "irecv": lambda x: jaxmpi.irecv(x, 0),
    "isend": lambda x: jaxmpi.isend(x, 0),
    "neighbor_allgather": _with_neighbors(jaxmpi.neighbor_allgather),
    "neighbor_alltoall": _with_neighbors(jaxmpi.neighbor_alltoall),
    **{
        f"Grid.{name}": lambda x, name=name: getattr(jaxmpi.Grid((0,), (MPI.COMM_WORLD.size,)), name)(x)
        for name in ("exchange", "start", "pad", "scatter", "gather")
    },
    "recv": lambda x: jaxmpi.recv(x, 0),
    "send": lambda x: jaxmpi.send(x, 0),
    "sendbuf": lambda x: jaxmpi.sendrecv(x, X, 0, 0),
    "recvbuf": lambda x: jaxmpi.sendrecv(X, x, 0, 0),
    "replicate": jaxmpi.replicate,
    "invariant": jaxmpi.invariant,
}


NO_ARRAYS = {
    "None": (None, " is None, which has no array"),
    "IN_PLACE": (MPI.IN_PLACE, "is MPI.IN_PLACE, which is no array: pass the array itself"),
    "BOTTOM": ((MPI.BOTTOM, X), "is MPI.BOTTOM, which is no array: pass the array itself"),
    "a datatype": (MPI.DOUBLE, "Datatype .* is no array: .* pass x alone"),
    "a token": (jaxmpi.tokens.Token(), r"is Token\(\), which has no array"),
    "a derivative of integers": (np.zeros(2, jax.dtypes.float0), "has dtype float0, which cannot be communicated"),
}


@pytest.mark.alone
@rows("names", NOTHING)
def test_no_arrays(names):
    """What is surely a mistake, though `jnp.asarray` or a tree makes an array of it, or none. A function that forgot to
    return sends nothing, and another rank would wait for it."""

    def check(row):
        name, what = row
        given, message = NO_ARRAYS[what]
        for way in both_ways(lambda: NOTHING[name](given)):
            with pytest.raises(TypeError, match=message):
                way()

    each([(name, what) for name in names for what in NO_ARRAYS], check)


@pytest.mark.alone
@rows("names", NOTHING)
def test_a_request_is_no_array(names):
    """The wait is missing: what is in a request would be sent as numbers."""
    request = jaxmpi.iallreduce(X, MPI.SUM)

    def check(name):
        with pytest.raises(TypeError, match=r"Request\(iallreduce\), which is no array: wait for it first"):
            NOTHING[name](request)
        with pytest.raises(TypeError, match=r"Request\(iallreduce\), which is no array: wait for it first"):
            jax.jit(lambda request: NOTHING[name]({"a": request}))(request)

    each(names, check)
    jaxmpi.wait(request)


def test_leaves_may_be_none(size):
    result = jaxmpi.allreduce({"a": None, "b": X}, MPI.SUM)
    assert result["a"] is None
    np.testing.assert_array_equal(result["b"], size * np.ones(3))
    assert jaxmpi.allreduce({}, MPI.SUM) == {}


def test_leaves_may_be_functions(comm, rank, size):
    """They are returned as they are, beside arrays and numbers, by operations of every kind; alone they are errors."""
    made = {"activation": jax.nn.relu, "dtype": jnp.float32, "kind": np.dtype("int8")}
    tree = {**made, "weight": X + rank, "rate": 0.5, "none": None, "nested": [jnp.tanh, jnp.arange(3)]}
    rows = {**made, "a": jnp.full((size, 2), rank), "nested": (max, jnp.ones(size))}
    grid, points = jaxmpi.Grid(size, 3 * size), jaxmpi.IndexMap(np.arange(3) + 3 * rank, [])
    before, after = (rank - 1) % size, (rank + 1) % size

    def sent(x):
        received = jaxmpi.irecv(x, before, tag=4)
        return jaxmpi.waitall([jaxmpi.isend(x, after, tag=4), received])[1]

    calls = [
        (tree, lambda x: jaxmpi.allreduce(x, MPI.SUM), lambda x: np.sum(x, 0)),
        (tree, lambda x: jaxmpi.bcast(x, size - 1), lambda x: x[-1]),
        (tree, lambda x: jaxmpi.sendrecv(x, x, before, after), lambda x: x[before]),
        (tree, sent, lambda x: x[before]),
        (tree, jaxmpi.replicate, lambda x: x[rank]),
        (tree, lambda x: (jaxmpi.send(x, after, tag=5), jaxmpi.recv(x, before, tag=5))[1], lambda x: x[before]),
        (rows, jaxmpi.alltoall, lambda x: np.stack([its[rank] for its in x])),
        (rows, lambda x: jaxmpi.allgatherv(x, [size] * size), np.concatenate),
        ({**made, "nested": (max, X)}, lambda x: grid.gather(x, None), np.concatenate),
        ({**made, "nested": (max, X)}, lambda x: points.gather(x, None), np.concatenate),
        ({**made, "u": X}, lambda x: grid.exchange(x, 0, boundary={**dict.fromkeys(made), "u": "edge"}), None),
        ({**made, "u": X}, lambda x: jaxmpi.redistribute(x, grid, grid), lambda x: x[rank]),
    ]
    if size == 1:
        transform = fft.Transform(grid)
        calls.append(({**made, "u": X}, lambda x: transform.backward(transform.forward(x)), lambda x: x[0]))
    is_array = lambda x: isinstance(x, float | jax.Array)  # noqa: E731
    for i, (given, call, witness) in enumerate(calls):
        arrays = [x for x in jax.tree.leaves(given) if is_array(x)]
        others = jax.tree.map(lambda x: None if is_array(x) else x, given)
        result = call(given)
        assert jax.tree.map(lambda x: None if is_array(x) else x, result) == others, i
        results = [x for x in jax.tree.leaves(result) if is_array(x)]
        assert len(results) == len(arrays), i
        for x, result in zip(arrays, results, strict=True):
            if witness is not None:
                np.testing.assert_allclose(result, witness(comm.allgather(np.asarray(x))), err_msg=str(i))
    for alone in (jax.nn.relu, [jnp.tanh, max], [X, "text"]):
        with pytest.raises(TypeError, match=r"allreduce: x.* must hold JAX arrays"):
            jaxmpi.allreduce(alone, MPI.SUM)
    with pytest.raises(TypeError, match=r"bcast: x\[1\] must hold JAX arrays"):
        jaxmpi.bcast([X, MPI.SUM], 0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["now", "later"])
@pytest.mark.parametrize("count", [6, 200_000])
def test_truncation(count, asynchronous, rank):
    """A message longer than the template is an exception on the receiver, with both sizes. The next one arrives."""

    @jax.jit
    def receive(x):
        y = jaxmpi.recv(x, 0, tag=1)
        if asynchronous:  # enough to compute that the call returns before the message is looked at
            z = jax.lax.fori_loop(0, 30, lambda i, v: jnp.sin(v @ v) / 100, jnp.full((150, 150), x[0]))
            y = jaxmpi.recv(y + 0 * z[0, 0], 0, tag=2)
        return y

    half = count // 2
    if rank == 0:
        jaxmpi.send(jnp.arange(float(half if asynchronous else count)), 1, tag=1)
        if asynchronous:
            jaxmpi.send(jnp.arange(float(count)), 1, tag=2)
        jaxmpi.send(jnp.arange(3.0), 1, tag=3)
    elif rank == 1:
        with pytest.raises(Exception, match=rf"jaxmpi.recv on rank 1 of .*{count * 8} bytes.*{half * 8} bytes.*trunc"):
            jax.block_until_ready(receive(jnp.zeros(half)))
        y = jaxmpi.recv(jnp.zeros(3), 0, tag=3)
        np.testing.assert_array_equal(y, np.arange(3.0))


@pytest.mark.ranks(2)
def test_short_message(rank):
    if rank == 0:
        jaxmpi.send(jnp.ones(2), 1)
    elif rank == 1:
        with pytest.raises(Exception, match=r"16 bytes \(2 elements of float64\), the template 32 bytes.*status="):
            jax.block_until_ready(jaxmpi.recv(jnp.zeros(4), 0))


@pytest.mark.alone
def test_operations_are_named_as_users_know_them():
    """In errors, reports and timelines; what is no public function is named by several words."""
    functions = {name for name in jaxmpi.__all__ if callable(getattr(jaxmpi, name))}
    for made in (jaxmpi.Grid, jaxmpi.IndexMap):
        functions |= {f"{made.__name__}.{name}" for name in vars(made) if not name.startswith("_")}
    for name, operation in OPERATIONS.items():
        assert operation.shown in functions or " " in operation.shown, name


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="test_gpu.py says what is there")
def test_supports():
    assert jaxmpi.has_cuda_support() is bool(simulated.TRANSPORT)
    assert jaxmpi.has_rocm_support() is (bool(simulated.TRANSPORT) and not simulated.BY_NCCL)
    assert jaxmpi.has_sycl_support() is (simulated.TRANSPORT == "sycl")


@pytest.mark.ranks(2, 2)
def test_a_batch_on_one_rank_alone(comm, rank, size):
    """Where vmap maps on one rank what is a constant on the other, the error says so."""
    comm = comm.Dup()  # on which the first collectives are compared: NCCL sends without a comparison
    grid, columns = (jaxmpi.Grid(dims, (4, 4), periodic=True, comm=comm) for dims in ((size, 1), (1, size)))
    rows = jaxmpi.IndexMap(4 * rank + np.arange(4), [(4 * rank + 4) % (4 * size)], comm=comm)
    calls = {
        "exchange": lambda x: grid.exchange(grid.pad(x)),
        "start": lambda x: grid.finish(grid.start(grid.pad(x))),
        "redistribute": lambda x: jaxmpi.redistribute(x, grid, columns),
        "index map": lambda x: rows.exchange(rows.pad(jnp.resize(x, 4))),
        "sendrecv": lambda x: jaxmpi.sendrecv(x, x, (rank - 1) % size, (rank + 1) % size, comm=comm),
    }
    if simulated.BY_NCCL:
        del calls["start"]  # after this error the ranks no longer compare the same calls, and NCCL has no labels
    x = jnp.ones(grid.local_shape)
    for name, call in calls.items():
        mapped = jax.vmap(lambda s, call=call: call(x * s if rank else x))
        assert "jax.vmap" in raised(lambda mapped=mapped: mapped(jnp.arange(1.0, 6.0))), name
    comm.Free()
