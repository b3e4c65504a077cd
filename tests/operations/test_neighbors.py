"""Neighbour collectives against a witness, which follows the edges of all ranks; and against MPI's own."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import jaxmpi
from support.rows import each, rows
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


FUNCTIONS = {"allgather": (jaxmpi.neighbor_allgather, False), "alltoall": (jaxmpi.neighbor_alltoall, True)}
BOTH = rows("names", FUNCTIONS)
SEEDS = range(4)


@pytest.fixture
def graphs(comm):
    edges = [random_graph(comm.size, seed) for seed in SEEDS]
    made = [(comm.Create_dist_graph_adjacent(*(ends[comm.rank] for ends in its)), *its) for its in edges]
    yield made
    for graph, _, _ in made:
        graph.Free()


@BOTH
def test_random_graphs(names, graphs, rank):
    """Trees of arrays of several dtypes and shapes."""
    calls, inputs, wanted = [], [], []
    for name in names:
        function, own_blocks = FUNCTIONS[name]
        for seed, (graph, sources, destinations) in zip(SEEDS, graphs, strict=True):
            leaves = list(
                zip([(), (2, 3), (0, 2)], [DTYPES[(2 * seed + i) % len(DTYPES)] for i in range(3)], strict=True)
            )
            calls.append((f"{name} {seed}", lambda x, f=function, graph=graph: f(x, comm=graph)))
            inputs.append([jnp.asarray(data(rank, destinations, own_blocks, *leaf)) for leaf in leaves])
            wanted.append([right(rank, sources, destinations, own_blocks, *leaf) for leaf in leaves])

    def same(row):
        _, expected, results = row
        for want, got in zip(expected, results, strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(np.asarray(got), want)

    for jit in (lambda f: f, jax.jit, jaxmpi.jit):
        results = jit(lambda xs: [call(x) for (_, call), x in zip(calls, xs, strict=True)])(inputs)
        each(list(zip(calls, wanted, results, strict=True)), same, lambda row: row[0][0])


@BOTH
def test_derivatives(names, graphs, comm, rank):
    calls = [(*FUNCTIONS[name], *graph) for name in names for graph in graphs]
    given = [[data(rank, ends, own, (3,), "float64", s) for s in range(2)] for _, own, _, _, ends in calls]
    wanted = [right(rank, sources, ends, own, (3,), "float64", 1) for _, own, _, sources, ends in calls]
    cts = [draw(y.shape, np.float64, rank, 7) for y in wanted]

    def derivatives(call, x, v, ct):
        f = lambda x: call[0](x, comm=call[2])  # noqa: E731
        adjoint = lambda ct: jax.vjp(f, x)[1](ct)[0]  # noqa: E731
        return jax.jvp(f, (x,), (v,))[1], adjoint(ct), jax.vjp(adjoint, ct)[1](v)[0]

    every = jax.jit(lambda given, cts: [derivatives(c, *xs, ct) for c, xs, ct in zip(calls, given, cts, strict=True)])
    for (_, v), expected, ct, (forward, back, again) in zip(given, wanted, cts, every(given, cts), strict=True):
        np.testing.assert_array_equal(forward, expected)
        np.testing.assert_array_equal(again, forward)
        assert comm.allreduce(float(np.sum(forward * ct) - np.sum(v * back))) == 0


@BOTH
def test_batches(names, graphs, comm, rank):
    graph, sources, destinations = graphs[1]
    for name in names:
        function, own_blocks = FUNCTIONS[name]
        xs = [data(rank, destinations, own_blocks, (2, 3), "float32", seed) for seed in range(2)]
        fixed = jnp.asarray(data(rank, destinations, own_blocks, (4,), "int32"))
        call = lambda x, y, f=function: f((x, y), comm=graph)  # noqa: E731
        mapped = jax.jit(lambda xs, y, c=call: [jax.vmap(c, (i, None), (0, None))(x, y) for i, x in enumerate(xs)])
        for ys, z in mapped([jnp.stack([jnp.asarray(x) for x in xs], axis=where) for where in range(3)], fixed):
            for seed in range(2):
                expected = right(rank, sources, destinations, own_blocks, (2, 3), "float32", seed)
                np.testing.assert_array_equal(ys[seed], expected)
            np.testing.assert_array_equal(z, right(rank, sources, destinations, own_blocks, (4,), "int32"))


def test_cartesian(comm, rank):
    """The block sent one way along an axis arrives in the place of the neighbour on the other side."""
    shapes = [(n, periods) for n in (1, 2, 3) for periods in itertools.product([False, True], repeat=n)]
    carts = [comm.Create_cart(MPI.Compute_dims(comm.size, n), periods=periods) for n, periods in shapes]

    @jax.jit
    def call():
        xs = [jnp.asarray([[100 * rank + at, -1] for at in range(2 * n)]) for n, _ in shapes]
        swapped = [jaxmpi.neighbor_alltoall(x, comm=cart) for x, cart in zip(xs, carts, strict=True)]
        return swapped, [jaxmpi.neighbor_allgather(jnp.asarray(float(rank + 1)), comm=cart) for cart in carts]

    def check(row):
        (dimensions, _), cart, swapped, gathered = row
        for at, neighbor in enumerate(r for axis in range(dimensions) for r in cart.Shift(axis, 1)):
            sent_as = at ^ 1  # the neighbour's block for the opposite direction
            expected = [0, 0] if neighbor == MPI.PROC_NULL else [100 * neighbor + sent_as, -1]
            np.testing.assert_array_equal(swapped[at], expected)
            assert gathered[at] == (0 if neighbor == MPI.PROC_NULL else neighbor + 1)

    each(list(zip(shapes, carts, *call(), strict=True)), check, lambda row: str(row[0]))
    jax.effects_barrier()
    for cart in carts:
        cart.Free()


@pytest.mark.ranks(2)
def test_graph_of_the_old_kind(comm, rank):
    index, edges = np.cumsum([comm.size - 1] + (comm.size - 1) * [1]), [*range(1, comm.size), *(comm.size - 1) * [0]]
    star = comm.Create_graph(index.tolist(), edges)
    got = jaxmpi.neighbor_allgather(jnp.asarray(rank), comm=star)
    assert got.tolist() == (list(range(1, comm.size)) if rank == 0 else [0])
    star.Free()


def test_tokens_and_errors(comm):
    cart = comm.Create_cart([comm.size], periods=[True])
    result, token = jaxmpi.tokens.neighbor_allgather(jnp.ones(2), comm=cart, token=None)
    assert result.shape == (2, 2)
    assert token == jaxmpi.tokens.Token()
    for bad in (None, comm):
        with pytest.raises(ValueError, match="comm has no neighbours"):
            jaxmpi.neighbor_allgather(jnp.ones(2), comm=bad)
    for bad in (jnp.ones(3), jnp.ones(())):
        with pytest.raises(ValueError, match="a block for each of the 2 destinations"):
            jaxmpi.neighbor_alltoall(bad, comm=cart)
    cart.Free()
