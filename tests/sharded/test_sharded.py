"""JAX's own collectives over MPI, against NumPy: `make test-sharded`.

Every process knows the whole array, from a seed, and compares its part of the result with NumPy's.
"""

import functools
import itertools
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mpi4py import MPI

import jaxmpi
from jaxmpi._jax import internals
from jaxmpi._sharded import communicators
from jaxmpi_launch import before_jax
from support.rows import each

KIND = before_jax.state.kind
pytestmark = pytest.mark.skipif(KIND is None, reason="needs --collectives: make test-sharded")
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
DTYPES = ["bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))]
DTYPES += ["float32", "float64", "complex64", "complex128"]
BY_MPI = KIND == "mpi"


def values(shape, dtype, seed=0):
    """Small whole numbers, so that sums of all dtypes are exact."""
    rng = np.random.default_rng(seed)
    numbers = rng.integers(0, 5, shape)
    if np.issubdtype(dtype, np.complexfloating):
        return (numbers + 1j * rng.integers(0, 5, shape)).astype(dtype)
    return (numbers > 2) if dtype == "bool" else numbers.astype(dtype)


def place(array, mesh, spec):
    """A global array: each process passes its part."""
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def check(found, expected, exact=True):
    """This process's parts of a global array are those of NumPy's."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    for shard in found.addressable_shards:
        part = np.asarray(shard.data)
        if exact:
            np.testing.assert_array_equal(part, expected[shard.index])
        else:
            np.testing.assert_allclose(part, expected[shard.index], rtol=2e-5, atol=2e-5)


@functools.cache
def line(processes=None):
    """A mesh of one axis, p, over all processes or these."""
    devices = jax.devices() if processes is None else [jax.devices()[i] for i in processes]
    return Mesh(np.array(devices), ("p",))


PARTS = P("p")


def over(mesh, body, spec=PARTS, out=PARTS):
    unchecked = {
        "check_vma" if hasattr(jax, "shard_map") else "check_rep": False
    }  # JAX cannot tell some of the replicated
    return jax.jit(internals.shard_map(body, mesh=mesh, in_specs=spec, out_specs=out, **unchecked))


def test_every_process_is_a_rank():
    assert (jax.process_index(), jax.process_count()) == (RANK, SIZE)
    assert [device.process_index for device in jax.devices()] == list(range(SIZE))


# For each: the body, and by NumPy what each process gets of the blocks (process, *shape) of all.
PERMUTATIONS = {
    "around": lambda n: [(i, (i + 1) % n) for i in range(n)],
    "back": lambda n: [(i, (i - 1) % n) for i in range(n)],
    "partial": lambda n: [(i, i + 1) for i in range(n - 1)],
    "mirrored": lambda n: [(i, n - 1 - i) for i in range(n)],
    "none": lambda n: [],
}


def permuted(pairs, blocks):
    result = np.zeros_like(blocks)
    for source, target in pairs:
        result[target] = blocks[source]
    return result


def transposed(blocks):
    """Block j of process i goes to process j, as its block i."""
    n = len(blocks)
    return blocks.reshape(n, n, -1, *blocks.shape[2:]).swapaxes(0, 1).reshape(blocks.shape)


def of_all(function):
    return lambda blocks: np.stack([function(blocks)] * len(blocks))


OPERATIONS = {
    "psum": (lambda x: lax.psum(x, "p"), of_all(lambda b: b.sum(0, dtype=b.dtype))),
    "pmax": (lambda x: lax.pmax(x, "p"), of_all(lambda b: b.max(0))),
    "pmin": (lambda x: lax.pmin(x, "p"), of_all(lambda b: b.min(0))),
    "pmean": (lambda x: lax.pmean(x, "p"), of_all(lambda b: b.mean(0))),
    "all_gather": (lambda x: lax.all_gather(x, "p"), of_all(lambda b: b)),
    "all_gather_tiled": (lambda x: lax.all_gather(x, "p", tiled=True), of_all(lambda b: b.reshape(-1, *b.shape[2:]))),
    "all_to_all": (lambda x: lax.all_to_all(x, "p", 0, 0, tiled=True), transposed),
    "psum_scatter": (
        lambda x: lax.psum_scatter(x, "p", tiled=True),
        lambda b: b.sum(0, dtype=b.dtype).reshape(len(b), -1, *b.shape[2:]),
    ),
    **{
        f"ppermute_{name}": (
            lambda x, pairs=pairs: lax.ppermute(x, "p", pairs(SIZE)),
            lambda b, pairs=pairs: permuted(pairs(len(b)), b),
        )
        for name, pairs in PERMUTATIONS.items()
    },
}
ARITHMETIC = ("psum", "pmean", "psum_scatter")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_collectives_by_numpy(operation):
    """A program for each, of arrays of all dtypes."""
    dtypes = [dtype for dtype in DTYPES if dtype != "bool" or operation not in ARITHMETIC]
    if operation in ("pmax", "pmin"):  # complex numbers have no order
        dtypes = [dtype for dtype in dtypes if "complex" not in dtype]
    body, witness = OPERATIONS[operation]
    blocks = [values((SIZE, 2 * SIZE, 3), dtype, seed=len(operation)) for dtype in dtypes]
    xs = [place(its.reshape(-1, 3), line(), P("p")) for its in blocks]

    def verify(row):
        _, found, its = row
        results = witness(its)
        expected = results.reshape(-1, *results.shape[2:])
        check(found, expected.astype(found.dtype), exact=operation != "pmean")

    found = over(line(), lambda xs: [body(x) for x in xs])(xs)
    each([*zip(dtypes, found, blocks, strict=True)], verify, lambda row: row[0])


def test_odd_shapes():
    shapes = [(0,), (1,), (1, 0, 3), (100_003,), (3, 5, 7)]
    blocks = [values((SIZE, *shape), "float32", seed=7) for shape in shapes]
    whole = [its.reshape(SIZE * shape[0], *shape[1:]) for its, shape in zip(blocks, shapes, strict=True)]
    xs = [place(its, line(), P("p")) for its in whole]
    sums = over(line(), lambda xs: [lax.psum(x, "p") for x in xs], out=P())(xs)
    rotated = over(line(), lambda xs: [lax.ppermute(x, "p", PERMUTATIONS["around"](SIZE)) for x in xs])(xs)

    def verify(row):
        shape, its, total, turned = row
        check(total, its.sum(0))
        check(turned, np.roll(its, 1, axis=0).reshape(SIZE * shape[0], *shape[1:]))

    each([*zip(shapes, blocks, sums, rotated, strict=True)], verify, lambda row: str(row[0]))


def test_scalars_and_trees():
    x = place(np.arange(SIZE, dtype=np.float32), line(), P("p"))
    tree = over(line(), lambda x: lax.psum({"a": x[0], "b": (x, 2 * x)}, "p"), out=P())(x)
    total = SIZE * (SIZE - 1) / 2
    assert float(tree["a"]) == float(tree["b"][0][0]) == total
    assert float(tree["b"][1][0]) == 2 * total


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_nan(dtype):
    """As JAX has it in one process, NaN wins; and all processes have the same."""
    reduce = over(line(), lambda x: (lax.pmax(x, "p"), lax.pmin(x, "p"), lax.psum(x, "p")), out=P())

    def verify(row):
        of, count = row
        blocks = values((SIZE, count), dtype, 3) + 1
        blocks[of, 0] = np.nan
        found = reduce(place(blocks.reshape(-1), line(), P("p")))
        if BY_MPI:  # gloo loses it
            for result, witness in zip(found, (blocks.max(0), blocks.min(0), blocks.sum(0)), strict=True):
                np.testing.assert_array_equal(np.asarray(result.addressable_data(0)), witness)

    each([(of, count) for of in range(SIZE) for count in (1, 5)], verify)


SPECS = [P(), P("p"), P(None, "p")]


@pytest.mark.parametrize("out", SPECS, ids=str)
def test_products_of_sharded_matrices(out):
    n = 2 * SIZE
    a, b = values((n, 3 * SIZE), "float32", 1), values((3 * SIZE, n), "float32", 2)
    pairs = [*itertools.product(SPECS, SPECS)]
    products = jax.jit(lambda xs: [x @ y for x, y in xs], out_shardings=NamedSharding(line(), out))
    found = products([(place(a, line(), left), place(b, line(), right)) for left, right in pairs])
    each([*zip(pairs, found, strict=True)], lambda row: check(row[1], a @ b), lambda row: str(row[0]))


def test_gradients():
    blocks = np.random.default_rng(3).normal(size=(SIZE, 4)).astype(np.float32)
    weights = np.linspace(-1, 1, 4, dtype=np.float32)

    def loss(w, x):
        part = jnp.sin(x @ w[:, None])
        return lax.psum(jnp.sum(part**2), "p")

    def whole(w, x):
        return jnp.sum(jnp.sin(x @ w[:, None]) ** 2)

    mapped = internals.shard_map(loss, mesh=line(), in_specs=(P(), P("p")), out_specs=P())
    w, x = place(weights, line(), P()), place(blocks, line(), P("p"))
    with jax.default_device(jax.local_devices()[0]):
        expected = jax.grad(whole)(jnp.asarray(weights), jnp.asarray(blocks))
    check(jax.jit(jax.grad(mapped))(w, x), np.asarray(expected), exact=False)
    check(jax.jit(jax.grad(whole))(w, x), np.asarray(expected), exact=False)


def grids():
    return [(a, SIZE // a) for a in range(1, SIZE + 1) if SIZE % a == 0]


@pytest.mark.parametrize("grid", grids(), ids=str)
def test_two_axes(grid):
    """Of processes in an order that is drawn; and in the order of several axes."""
    order = random.Random(SIZE).sample(range(SIZE), SIZE)
    mesh = Mesh(np.array([jax.devices()[i] for i in order]).reshape(grid), ("a", "b"))
    blocks = values((*grid, 4 * SIZE), "int32", 5)
    x = place(blocks.reshape(grid[0], -1), mesh, P("a", "b"))

    def body(x):
        sums = [lax.psum(x, axes) for axes in ("a", "b", ("a", "b"))]
        rows = [lax.all_gather(x, axes) for axes in ("b", ("a", "b"), ("b", "a"))]
        around = lax.ppermute(x, ("a", "b"), PERMUTATIONS["around"](SIZE))
        parts = [lax.psum_scatter(x, axes, scatter_dimension=1, tiled=True) for axes in (("a", "b"), ("b", "a"))]
        return [jnp.stack([y.reshape(-1) for y in ys]) for ys in (sums, rows[:1], rows[1:], [around], parts)]

    found = over(mesh, body, P("a", "b"), P("a", "b"))(x)
    a, b = (int(i[0]) for i in np.nonzero(np.array(order).reshape(grid) == RANK))
    by_rows, by_columns = (its.reshape(SIZE, -1) for its in (blocks, blocks.swapaxes(0, 1)))
    total, place_of = blocks.sum((0, 1), dtype=np.int32), (a * grid[1] + b, b * grid[0] + a)
    expected = [
        [blocks.sum(0, dtype=np.int32)[b], blocks.sum(1, dtype=np.int32)[a], total],
        [blocks[a]],
        [by_rows, by_columns],
        [by_rows[place_of[0] - 1]],
        [total.reshape(SIZE, 4)[i] for i in place_of],
    ]
    for result, its in zip(found, expected, strict=True):
        np.testing.assert_array_equal(result.addressable_data(0), [y.reshape(-1) for y in its])


def orders():
    """Meshes of some of the processes, in any order; all processes have the same list."""
    rng = random.Random(11)
    chosen = {tuple(rng.sample(range(SIZE), rng.randint(1, SIZE))) for _ in range(8)}
    return sorted(chosen, key=lambda processes: (rng.random(), processes))


@pytest.mark.parametrize("processes", orders(), ids=str)
def test_meshes_of_some_processes(processes):
    """The others go on at once: nobody waits for them."""
    if RANK not in processes:
        return
    mesh = line(processes)
    n = len(processes)
    blocks = values((n, 3), "float64", n)
    x = place(blocks.reshape(-1), mesh, P("p"))
    check(over(mesh, lambda x: lax.psum(x, "p"), out=P())(x), blocks.sum(0))
    gathered = over(mesh, lambda x: lax.all_gather(x, "p", tiled=True), out=P())(x)
    check(gathered, blocks.reshape(-1))
    rotated = over(mesh, lambda x: lax.ppermute(x, "p", PERMUTATIONS["around"](n)))(x)
    check(rotated, np.roll(blocks, 1, axis=0).reshape(-1))


@pytest.mark.ranks(3)
@pytest.mark.ranks(1, 3)
def test_a_program_of_some_then_of_all_then_of_others():
    for processes in ([0, 1], [0, 1, 2], [1, 2], [2, 0], [1, 0], [0, 2, 1]):
        if RANK in processes:
            x = place(np.arange(len(processes), dtype=np.float32) + 1, line(tuple(processes)), P("p"))
            found = over(line(tuple(processes)), lambda x: lax.psum(x, "p"), out=P())(x)
            assert float(found.addressable_data(0)[0]) == sum(range(1, len(processes) + 1))


# --- what JAX's own utilities do ---


# JAX 0.7 calls there what it has deprecated itself.
@pytest.mark.filterwarnings("ignore:jax.interpreters.xla.canonicalize_dtype:DeprecationWarning")
def test_multihost_utils():
    x = np.arange(3) + RANK
    gathered = multihost_utils.process_allgather(x)
    np.testing.assert_array_equal(np.asarray(gathered).reshape(SIZE, 3), np.arange(3) + np.arange(SIZE)[:, None])
    np.testing.assert_array_equal(multihost_utils.broadcast_one_to_all(x), np.arange(3))
    multihost_utils.sync_global_devices("here")
    multihost_utils.assert_equal(np.ones(2), "differ")


SETTINGS = {
    "jax.set_mesh": lambda mesh: jax.set_mesh(mesh),
    "transfer_guard": lambda mesh: jax.transfer_guard("disallow"),
    "disable_jit": lambda mesh: jax.disable_jit(),
    "checking_leaks": lambda mesh: jax.checking_leaks(),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_the_program(setting):
    """A communicator is made whatever the program has set."""
    if setting == "jax.set_mesh" and not hasattr(jax, "set_mesh"):
        pytest.skip("this JAX has no jax.set_mesh")
    mesh = Mesh(np.array(jax.devices()).reshape(1, SIZE), ("a", "b"))
    whole = np.arange(2.0 * SIZE, dtype=np.float32).reshape(2, SIZE)
    x = place(whole, mesh, P(None, "b"))
    communicators._connected.clear()  # once more: XLA keeps those that it has
    with SETTINGS[setting](mesh):
        found = over(mesh, lambda x: lax.psum(x, "b"), P(None, "b"), P())(x)
    check(found, whole.sum(1, keepdims=True))


# --- both kinds in one program ---


def test_both_kinds():
    mesh = line()
    total = over(mesh, lambda x: lax.psum(x, "p"), out=P())

    @jaxmpi.jit
    def messages(x):
        return jaxmpi.allreduce(x, MPI.SUM), jaxmpi.allgather(x)

    for i in range(20):
        x = np.full(2, RANK + i, np.float32)
        whole = np.concatenate([np.full(2, r + i, np.float32) for r in range(SIZE)])
        first = total(place(whole, mesh, P("p")))
        second, third = messages(jnp.asarray(x))
        expected = sum(r + i for r in range(SIZE))
        again = total(place(np.repeat(np.asarray(second)[:1], SIZE), mesh, P("p")))
        assert float(first.addressable_data(0)[0]) == float(second[0]) == expected
        assert float(again.addressable_data(0)[0]) == expected * SIZE
        assert np.asarray(third)[:, 0].tolist() == [r + i for r in range(SIZE)]


# --- grids of this package, on the same data ---


@pytest.mark.parametrize(("dims", "shape"), [((SIZE, 1), (2 * SIZE, 3)), ((1, SIZE), (3, 2 * SIZE))])
def test_blocks_of_a_grid(dims, shape):
    """To sharded arrays and back in the same memory; what JAX computes of them is what NumPy does."""
    grid = jaxmpi.Grid(dims, shape)
    whole = np.arange(math.prod(shape) * 2.0).reshape(2, *shape)
    block = jnp.asarray(whole[(..., *grid.slices)])
    (array,) = grid.to_sharded([block], ("a", "b"))
    check(array, whole)
    assert array.sharding == grid.sharding(("a", "b"), 3)
    assert array.addressable_data(0).unsafe_buffer_pointer() == block.unsafe_buffer_pointer()
    doubled = jax.jit(lambda x: 2 * x + x.sum())(array)
    (back,) = grid.from_sharded([doubled])
    np.testing.assert_array_equal(back, (2 * whole + whole.sum())[(..., *grid.slices)])
    np.testing.assert_array_equal(jaxmpi.allreduce(back, MPI.SUM).sum(), (2 * whole + whole.sum()).sum())
    front = jnp.moveaxis(block, 0, -1)
    check(grid.to_sharded(front, ("a", "b"), axes=(0, 1)), np.moveaxis(whole, 0, -1))
    keys = jax.random.split(jax.random.key(SIZE), grid.local_shape)
    again = grid.from_sharded(grid.to_sharded(keys, ("a", "b")))
    np.testing.assert_array_equal(jax.random.key_data(again), jax.random.key_data(keys))


def test_blocks_that_are_no_parts():
    grid = jaxmpi.Grid((SIZE, 1), (2 * SIZE, 3))
    block = jnp.ones(grid.local_shape)
    with pytest.raises(ValueError, match="one for each of the grid's 2 axes"):
        grid.to_sharded(block, "ab")
    with pytest.raises(TypeError, match="is traced"):
        jax.jit(lambda x: grid.to_sharded(x, ("a", "b")))(block)
    with pytest.raises(TypeError, match="a sharded array of JAX is needed"):
        grid.from_sharded(np.ones(3))
    with pytest.raises(ValueError, match="where it needs"):
        grid.to_sharded(block[1:], ("a", "b"))
    with pytest.raises(ValueError, match="share points"):
        grid.to_sharded(jnp.ones((3, 3)), ("a", "b"))
    if SIZE > 1:
        uneven = jaxmpi.Grid((SIZE, 1), (2 * SIZE + 1, 3))
        with pytest.raises(ValueError, match="into equal parts"):
            uneven.to_sharded(jnp.ones(uneven.local_shape), ("a", "b"))
        replicated = place(np.ones(grid.global_shape), line(), P())
        with pytest.raises(ValueError, match="Divide the array as the grid"):
            grid.from_sharded(replicated)
