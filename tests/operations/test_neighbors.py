"""Neighbour collectives against a witness, which follows the edges of all ranks; and against MPI's own."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import jaxmpi
from jaxmpi import notoken
from support.table import draw, dtype_of

DTYPES = ["float32", "complex128", "int8", "bfloat16", "float8_e4m3fn", "bool"]


def random_graph(size, seed):
    """The destinations of each rank, some of them twice, some of them itself; and the sources."""
    generator = np.random.default_rng([size, seed])
    destinations = [list(map(int, generator.integers(0, size, generator.integers(0, 5)))) for _ in range(size)]
    sources = [
        [a for a in generator.permutation(size).tolist() for b in destinations[a] if b == r] for r in range(size)
    ]
    for of_rank in sources:  # the edges from one rank need not follow each other
        generator.shuffle(of_rank)
    return sources, destinations


def make_graph(comm, seed):
    sources, destinations = random_graph(comm.size, seed)
    made = comm.Create_dist_graph_adjacent(sources[comm.rank], destinations[comm.rank])
    return made, sources, destinations


def edge_of_source(sources, destinations, rank, at):
    """Where the block of a rank's source comes from: that rank and its number among its destinations."""
    source = sources[rank][at]
    number = sources[rank][:at].count(source)
    places = [i for i, other in enumerate(destinations[source]) if other == rank]
    return source, places[number]


def block(rank, at, shape, dtype, seed=0):
    return draw(shape, dtype_of(dtype), rank + 1000 * (at + 1), seed)


def data(rank, destinations, own_blocks, shape, dtype, seed=0):
    if not own_blocks:
        return block(rank, -1, shape, dtype, seed)
    blocks = [block(rank, at, shape, dtype, seed) for at in range(len(destinations[rank]))]
    return np.stack(blocks) if blocks else np.zeros((0, *shape), dtype_of(dtype))


def right(rank, sources, destinations, own_blocks, shape, dtype, seed=0):
    found = []
    for at in range(len(sources[rank])):
        source, place = edge_of_source(sources, destinations, rank, at)
        found.append(block(source, place if own_blocks else -1, shape, dtype, seed))
    return np.stack(found) if found else np.zeros((0, *shape), dtype_of(dtype))


FUNCTIONS = [(notoken.neighbor_allgather, False), (notoken.neighbor_alltoall, True)]
BOTH = pytest.mark.parametrize(("function", "own_blocks"), FUNCTIONS, ids=["allgather", "alltoall"])


@BOTH
@pytest.mark.parametrize("seed", range(6))
def test_random_graphs(function, own_blocks, seed, comm, rank):
    graph, sources, destinations = make_graph(comm, seed)
    dtypes = [DTYPES[(seed + i) % len(DTYPES)] for i in range(3)]
    shapes = [(), (2, 3), (0, 2)]
    tree = [data(rank, destinations, own_blocks, s, d) for s, d in zip(shapes, dtypes, strict=True)]
    for jit in (lambda f: f, jax.jit, jaxmpi.jit):
        results = jit(lambda x: function(x, comm=graph))([jnp.asarray(x) for x in tree])
        for shape, dtype, result in zip(shapes, dtypes, results, strict=True):
            expected = right(rank, sources, destinations, own_blocks, shape, dtype)
            assert result.dtype == expected.dtype
            np.testing.assert_array_equal(np.asarray(result), expected)
    graph.Free()


@BOTH
@pytest.mark.parametrize("seed", range(4))
def test_derivatives(function, own_blocks, seed, comm, rank):
    graph, sources, destinations = make_graph(comm, seed)
    x, v = (jnp.asarray(data(rank, destinations, own_blocks, (3,), "float64", s)) for s in range(2))
    f = lambda x: function(x, comm=graph)  # noqa: E731
    _, forward = jax.jvp(f, (x,), (v,))
    np.testing.assert_array_equal(forward, right(rank, sources, destinations, own_blocks, (3,), "float64", 1))
    ct = jnp.asarray(draw(forward.shape, np.float64, rank, 7))
    adjoint = lambda ct: jax.vjp(f, x)[1](ct)[0]  # noqa: E731
    dot = lambda a, b: comm.allreduce(float(jnp.sum(a * b)))  # noqa: E731
    assert dot(forward, ct) == dot(v, adjoint(ct))
    np.testing.assert_array_equal(jax.vjp(adjoint, ct)[1](v)[0], forward)
    graph.Free()


@BOTH
@pytest.mark.parametrize("where", [0, 1, 2])
def test_batches(function, own_blocks, where, comm, rank):
    graph, sources, destinations = make_graph(comm, 1)
    xs = [data(rank, destinations, own_blocks, (2, 3), "float32", seed) for seed in range(2)]
    fixed = jnp.asarray(data(rank, destinations, own_blocks, (4,), "int32"))
    mapped = jax.vmap(lambda x, y: function((x, y), comm=graph), (where, None), (0, None))
    ys, z = mapped(jnp.stack([jnp.asarray(x) for x in xs], axis=where), fixed)
    for seed in range(2):
        np.testing.assert_array_equal(ys[seed], right(rank, sources, destinations, own_blocks, (2, 3), "float32", seed))
    np.testing.assert_array_equal(z, right(rank, sources, destinations, own_blocks, (4,), "int32"))
    graph.Free()


def dims_of(size, dimensions):
    return MPI.Compute_dims(size, dimensions)


@pytest.mark.parametrize(("dimensions", "periods"), [
    (n, periods) for n in (1, 2, 3) for periods in itertools.product([False, True], repeat=n)
])  # fmt: skip
def test_cartesian(dimensions, periods, comm, rank):
    """The block sent one way along an axis arrives in the place of the neighbour on the other side."""
    cart = comm.Create_cart(dims_of(comm.size, dimensions), periods=periods)
    neighbors = [r for axis in range(dimensions) for r in cart.Shift(axis, 1)]
    x = jnp.asarray([[100 * rank + at, -1] for at in range(2 * dimensions)])
    result = notoken.neighbor_alltoall(x, comm=cart)
    gathered = notoken.neighbor_allgather(jnp.asarray(float(rank + 1)), comm=cart)
    for at, neighbor in enumerate(neighbors):
        sent_as = at ^ 1  # the neighbour's block for the opposite direction
        expected = [0, 0] if neighbor == MPI.PROC_NULL else [100 * neighbor + sent_as, -1]
        np.testing.assert_array_equal(result[at], expected)
        assert gathered[at] == (0 if neighbor == MPI.PROC_NULL else neighbor + 1)
    cart.Free()


def test_as_mpi_does(comm, rank):
    """Where neighbours differ, MPI's own collectives agree."""
    graph = comm.Create_dist_graph_adjacent([(rank - 1) % comm.size], [(rank + 1) % comm.size])
    x = draw((1, 4), np.float32, rank)
    theirs = np.empty_like(x)
    graph.Neighbor_alltoall(x, theirs)
    np.testing.assert_array_equal(notoken.neighbor_alltoall(jnp.asarray(x), comm=graph), theirs)
    graph.Neighbor_allgather(x[0], theirs)
    np.testing.assert_array_equal(notoken.neighbor_allgather(jnp.asarray(x[0]), comm=graph), theirs)
    graph.Free()


@pytest.mark.ranks(2)
def test_graph_of_the_old_kind(comm, rank):
    index, edges = np.cumsum([comm.size - 1] + (comm.size - 1) * [1]), [*range(1, comm.size), *(comm.size - 1) * [0]]
    star = comm.Create_graph(index.tolist(), edges)
    got = notoken.neighbor_allgather(jnp.asarray(rank), comm=star)
    assert got.tolist() == (list(range(1, comm.size)) if rank == 0 else [0])
    star.Free()


def test_tokens_and_errors(comm):
    cart = comm.Create_cart([comm.size], periods=[True])
    result, token = jaxmpi.neighbor_allgather(jnp.ones(2), comm=cart, token=None)
    assert result.shape == (2, 2)
    assert token == jaxmpi.Token()
    for bad in (None, comm):
        with pytest.raises(ValueError, match="comm has no neighbours"):
            notoken.neighbor_allgather(jnp.ones(2), comm=bad)
    for bad in (jnp.ones(3), jnp.ones(())):
        with pytest.raises(ValueError, match="a block for each of the 2 destinations"):
            notoken.neighbor_alltoall(bad, comm=cart)
    cart.Free()
