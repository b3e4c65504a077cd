"""`jaxmpi.static`: communicators and reductions as arguments of compiled functions, in pytrees, and their lifetimes."""

import copy
import functools
import pickle
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import jaxmpi

pytestmark = pytest.mark.ranks(1, 2)

X = jnp.ones(3)
BOTH = pytest.mark.parametrize("jit", [jax.jit, jaxmpi.jit], ids=["jax.jit", "jaxmpi.jit"])


@BOTH
def test_static_argument(jit, comm, rank, size):
    """A function is compiled once for each communicator, however often that is made static."""
    traced = []

    @functools.partial(jit, static_argnames=("comm", "op"))
    def total(x, comm, op):
        traced.append(comm.size)
        return jaxmpi.allreduce(x, op, comm=comm)

    half = comm.Split(rank % 2)
    highest = max(range(rank % 2, size, 2))
    for _ in range(2):
        whole, part = jaxmpi.static(comm), jaxmpi.static(half)
        plus, most = jaxmpi.static(MPI.SUM), jaxmpi.static(MPI.MAX)
        np.testing.assert_array_equal(total(X, comm=whole, op=plus), size * X)
        np.testing.assert_array_equal(total(X, comm=part, op=plus), half.size * X)
        np.testing.assert_array_equal(total(rank * X, comm=part, op=most), highest * X)
    assert traced == [size, half.size, half.size]
    jax.effects_barrier()
    half.Free()


def test_any_other_argument(comm, size):
    """Without leaves it may be in an argument, a result and the carry of a loop."""
    given = jaxmpi.static(comm)

    @jaxmpi.jit
    def total(x, state):
        def step(carry, _):
            comm, x = carry
            return (comm, jaxmpi.allreduce(x, state["op"], comm=comm)), None

        return jax.lax.scan(step, (state["comm"], x), length=2)[0]

    returned, result = total(X, {"comm": given, "op": jaxmpi.static(MPI.SUM)})
    assert returned is given
    np.testing.assert_array_equal(result, size**2 * X)
    assert jax.tree.leaves(given) == []
    batch = jax.vmap(total)(jnp.ones((2, 3)), {"comm": given, "op": jaxmpi.static(MPI.SUM)})[1]
    np.testing.assert_array_equal(batch, np.full((2, 3), size**2))


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=["comm", "op"])
@dataclass
class Model:
    weight: jax.Array
    comm: MPI.Comm
    op: MPI.Op

    def __call__(self, x):
        return jaxmpi.allreduce(self.weight * x, self.op, comm=self.comm)


@BOTH
def test_static_data_of_a_pytree(jit, comm, size):
    def model():
        return Model(jnp.float32(2), jaxmpi.static(comm), jaxmpi.static(MPI.SUM))

    call = jit(lambda model, x: model(x))
    np.testing.assert_array_equal(call(model(), X), 2 * size * X)
    assert jax.tree.structure(model()) == jax.tree.structure(copy.deepcopy(model()))
    if hasattr(call, "_cache_size"):
        call(copy.deepcopy(model()), X)
        assert call._cache_size() == 1
    moved = jax.tree.map(lambda weight: weight + 1, model())
    np.testing.assert_array_equal(call(moved, X), 3 * size * X)


def same_handle_again(comm, part, freed):
    """Frees a communicator, and makes others until one has its handle on a rank, if the library gives it once more."""
    handle = MPI._handleof(part)
    freed.Free()
    made = []
    while len(made) < 20:
        made.append(comm.Dup())
        if comm.allreduce(MPI._handleof(made[-1]) == handle, MPI.LOR):
            break
    for other in made[:-1]:
        other.Free()
    return made[-1]


@pytest.mark.parametrize(
    ("jit", "by"), [(jax.jit, "the original"), (jaxmpi.jit, "the static one")], ids=["jax", "jaxmpi"]
)
def test_freed_communicator(jit, by, comm, size):
    """Its successor with the same handle is another one; the freed one raises, wherever it is used."""
    total = functools.partial(jit, static_argnames="comm")(lambda x, comm: jaxmpi.allreduce(x, MPI.SUM, comm=comm))
    part = comm.Dup()
    first = jaxmpi.static(part)
    hashed = hash(first)
    np.testing.assert_array_equal(total(X, comm=first), size * X)
    jax.effects_barrier()
    again = same_handle_again(comm, part, part if by == "the original" else first)
    assert part == MPI.COMM_NULL
    second = jaxmpi.static(again)
    assert first != second
    assert first != again
    assert second == again
    assert hash(first) == hashed
    np.testing.assert_array_equal(total(X, comm=second), size * X)
    for call in (
        lambda: jaxmpi.allreduce(X, MPI.SUM, comm=first),
        lambda: jit(lambda x: jaxmpi.allreduce(x, MPI.SUM, comm=first))(X),
        lambda: jaxmpi.static(first),
        lambda: jaxmpi.Grid((0,), comm=first),
        lambda: jaxmpi.neighbor_allgather(X, comm=first),
    ):
        with pytest.raises(ValueError, match=r"comm is jaxmpi.static\(.*, which has been freed"):
            call()
    with pytest.raises(jax.errors.JaxRuntimeError, match="has been freed since this function was compiled"):
        jax.block_until_ready(total(X, comm=first))
    jax.effects_barrier()
    again.Free()


@pytest.mark.parametrize("by", ["the original", "the static one"])
def test_freed_reduction(by, size):
    def combine(a, b, datatype):
        np.frombuffer(b, np.float64)[:] += np.frombuffer(a, np.float64)

    total = functools.partial(jax.jit, static_argnames="op")(lambda x, op: jaxmpi.allreduce(x, op))
    x = jnp.ones(3, jnp.float64)
    own = MPI.Op.Create(combine, commute=True)
    first = jaxmpi.static(own)
    assert first == jaxmpi.static(own) == own
    np.testing.assert_array_equal(total(x, op=first), size * x)
    jax.effects_barrier()
    (own if by == "the original" else first).Free()
    again = MPI.Op.Create(combine, commute=True)
    second = jaxmpi.static(again)
    assert first not in (second, again)
    np.testing.assert_array_equal(total(x, op=second), size * x)
    with pytest.raises(ValueError, match=r"allreduce: op is jaxmpi.static\(.*, which has been freed"):
        jaxmpi.allreduce(x, first)
    with pytest.raises(jax.errors.JaxRuntimeError, match="has been freed since this function was compiled"):
        jax.block_until_ready(total(x, op=first))
    jax.effects_barrier()
    again.Free()


def test_it_is_one_of_mpi4py(comm, rank, size):
    given = jaxmpi.static(comm)
    assert given == comm
    assert comm == given
    assert (given != comm) is False
    assert given not in (MPI.COMM_SELF, MPI.COMM_NULL, None, 3)
    assert isinstance(given, MPI.Intracomm)
    assert (given.rank, given.size, given.allreduce(1)) == (rank, size, size)
    assert jaxmpi.static(given) is given
    assert copy.copy(given) is copy.deepcopy(given) is given
    assert jaxmpi.static(MPI.SUM)(1, 2) == 3
    assert {jaxmpi.static(MPI.SUM): "sum", jaxmpi.static(MPI.MAX): "max"}[jaxmpi.static(MPI.MAX)] == "max"
    assert repr(given) == f"jaxmpi.static(Communicator(rank {rank} of {size}))"
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(given)


def test_topologies(comm, rank, size):
    """With the class of a Cartesian communicator or a graph."""
    ring = comm.Create_cart([size], periods=[True])
    graph = comm.Create_dist_graph_adjacent([(rank - 1) % size], [(rank + 1) % size])
    total = functools.partial(jax.jit, static_argnames="comm")(lambda x, comm: jaxmpi.neighbor_allgather(x, comm=comm))
    left, right = (rank - 1) % size, (rank + 1) % size
    np.testing.assert_array_equal(total(jnp.int32(rank), comm=jaxmpi.static(ring)), [left, right])
    np.testing.assert_array_equal(total(jnp.int32(rank), comm=jaxmpi.static(graph)), [left])
    assert jaxmpi.static(ring).Get_coords(rank) == [rank]
    assert jaxmpi.Grid(shape=(2 * size,), comm=jaxmpi.static(ring)).periodic == (True,)
    jax.effects_barrier()
    ring.Free()
    graph.Free()


def test_refused(comm, rank, size):
    for bad in (3, None, "world", MPI.FLOAT):
        with pytest.raises(TypeError, match="static: a communicator or an operation of mpi4py is needed"):
            jaxmpi.static(bad)
    for null in (MPI.COMM_NULL, MPI.OP_NULL):
        with pytest.raises(ValueError, match=r"static: .* it has been freed"):
            jaxmpi.static(null)
    with pytest.raises(TypeError, match=r"bcast: x is jaxmpi.static\(.*, which is no array: pass it as comm="):
        jaxmpi.bcast(jaxmpi.static(comm), 0)
