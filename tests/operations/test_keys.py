"""Typed random keys through every operation that moves data, against NumPy on the words that they are made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import jaxmpi
from support.rows import each, rows
from support.table import CASES, NEW_JAX, draw

MOVING = [case for case in CASES if case.moves]


def keys_of(words, kind):
    return jax.random.wrap_key_data(jnp.asarray(words), impl=kind)


def words_of(shape, kind, rank, seed=0):
    """Different on each rank and in each entry."""
    length = jax.random.key_data(jax.random.key(0, impl=kind)).shape[-1]
    words = draw((*shape, length), "uint32", rank, seed)
    return words + np.arange(words.size, dtype=np.uint32).reshape(words.shape) * 10 + np.uint32(10_000 * rank)


def inputs(case, shape, kind, size):
    return [words_of(case.shape(shape, r, size, 0), kind, r) for r in range(size)]


def check(case, result, words, kind, rank):
    assert result.dtype == jax.random.key(0, impl=kind).dtype, case
    expected = case.expected(words, rank, 0)
    np.testing.assert_array_equal(jax.random.key_data(result), expected, err_msg=str(case))


@rows("cases", MOVING)
def test_moves(cases, comm, rank, size):
    kinds = {
        jax.jit: [("threefry2x32", ()), ("rbg", (2, 3)), ("unsafe_rbg", (0,))],
        jaxmpi.jit: [("threefry2x32", (3,))],
    }
    for way, chosen in kinds.items():
        calls = [(case, kind, inputs(case, shape, kind, size)) for case in cases for kind, shape in chosen]
        call = way(lambda xs, calls=calls: [case.call(x, comm, 0) for (case, *_), x in zip(calls, xs, strict=True)])
        results = call([keys_of(words[rank], kind) for _, kind, words in calls])
        checked = lambda row: check(row[0][0], row[1], row[0][2], row[0][1], rank)  # noqa: E731
        each(list(zip(calls, results, strict=True)), checked, lambda row: f"{row[0][0]} {row[0][1]}")


@rows("cases", [case for case in MOVING if not case.variant])
def test_under_vmap_scan_and_grad(cases, comm, rank, size):
    """A batch of keys, in a loop, in a function that is differentiated."""
    kind, batches = "threefry2x32", []
    for case in cases:
        batch = [np.stack(words) for words in zip(*([inputs(case, (2,), kind, size)] * 3), strict=True)]
        batches.append([words + np.arange(3, dtype=np.uint32).reshape(3, *[1] * (words.ndim - 1)) for words in batch])
    own = [keys_of(batch[rank], kind) for batch in batches]

    def step(total, keys):
        moved = [jax.vmap(lambda x, c=case: c.call(x, comm, 0))(x) for case, x in zip(cases, keys, strict=True)]
        return total + 1.0, moved

    def loss(x):
        total, moved = jax.lax.scan(step, x, [jnp.stack([keys, keys]) for keys in own])
        return total**2, moved

    if NEW_JAX:
        gradient, moved = jax.jit(jax.grad(loss, has_aux=True))(1.0)
        assert gradient == 6.0
    else:
        _, moved = jax.jit(loss)(1.0)

    def checked(row):
        case, batch, steps = row
        for result in steps:
            for entry in range(3):
                check(case, result[entry], [words[entry] for words in batch], kind, rank)

    each(list(zip(cases, batches, moved, strict=True)), checked, lambda row: str(row[0]))


def test_cotangents_of_keys(comm, size):
    """Keys have none; what is drawn from keys that were sent is differentiated as ever."""
    keys = jax.random.split(jax.random.key(3), size)

    def loss(keys, x):
        own = jaxmpi.scatter(keys if comm.rank == 0 else keys[0], 0, comm=comm)
        return jnp.sum(x * jax.random.uniform(own, (4,)))

    gradient, pullback = jax.vjp(loss, keys, jnp.ones(4))
    of_keys, of_x = pullback(jnp.ones_like(gradient))
    assert of_keys.dtype == jax.dtypes.float0
    np.testing.assert_array_equal(of_x, jax.random.uniform(keys[comm.rank], (4,)))


def test_trees_and_templates(comm, rank, size):
    """Leaves of any dtypes beside keys, some of them of another kind; templates without values."""
    tree = {"key": jax.random.key(rank), "x": jnp.arange(3.0) + rank, "more": jax.random.key(rank + 5, impl="rbg")}
    template = jax.eval_shape(lambda: tree)
    for way in (lambda f: f, jax.jit):
        sent = way(lambda x: jaxmpi.bcast(x, size - 1, comm=comm))(tree)
        bare = jaxmpi.bcast(tree if rank == 0 else template, 0, comm=comm)
        left = jaxmpi.sendrecv(tree, template, (rank - 1) % size, (rank + 1) % size, comm=comm)
        for of, result in ((size - 1, sent), (0, bare), ((rank - 1) % size, left)):
            assert jax.tree.map(lambda x: x.dtype, result) == jax.tree.map(lambda x: x.dtype, tree)
            np.testing.assert_array_equal(jax.random.key_data(result["key"]), [0, of])
            np.testing.assert_array_equal(
                jax.random.key_data(result["more"]), jax.random.key_data(jax.random.key(of + 5, impl="rbg"))
            )
            np.testing.assert_array_equal(result["x"], np.arange(3.0) + of)


def test_words_and_keys(comm, rank, size):
    """A template decides what the words that are received become."""
    key, words = jax.random.key(7 + rank), jax.ShapeDtypeStruct((2,), jnp.uint32)
    left, right = (rank - 1) % size, (rank + 1) % size
    np.testing.assert_array_equal(jaxmpi.sendrecv(key, words, left, right, comm=comm), [0, 7 + left])
    received = jaxmpi.sendrecv(jax.random.key_data(key), key, left, right, comm=comm)
    assert received == jax.random.key(7 + left)


def test_the_same_on_all_ranks(comm):
    key = jax.random.key(1)
    both = lambda tree: [f(tree, comm=comm) for f in (jaxmpi.replicate, jaxmpi.invariant)]  # noqa: E731
    for result in jax.jit(lambda key: both({"key": key, "x": 1.0}))(key):
        assert result["key"] == key


def test_requests_of_keys_in_control_flow(comm, rank):
    """A request knows that it is of a key, through a loop and a branch."""

    @jax.jit
    def call(key):
        def step(carry, _):
            key, request = carry
            sent = jaxmpi.wait(request)
            key = jax.random.fold_in(sent, 1)
            return (key, jaxmpi.ibcast(key, 0, comm=comm)), sent

        begun = jax.lax.cond(
            jax.random.uniform(key) < 2,
            lambda key: jaxmpi.ibcast(key, 0, comm=comm),
            lambda key: jaxmpi.ibcast(key, 0, comm=comm),
            key,
        )
        (_, last), sent = jax.lax.scan(step, (key, begun), length=3)
        return sent, jaxmpi.wait(last)

    sent, last = call(jax.random.key(5 + rank))
    key = jax.random.key(5)
    for found in (*sent, last):
        assert found == key
        key = jax.random.fold_in(key, 1)


# --- grids and neighbours -------------------------------------------------------------------------------------------


def test_grid(comm, rank, size):
    """A key for each cell: its words are exchanged as those of an array with one axis more, that is not the grid's."""
    kind = "rbg"
    grid = jaxmpi.Grid((size, 1), (3 * size, 4), periodic=(True, False), comm=comm)
    words = words_of((3 * size, 4), kind, 9)
    whole = keys_of(words, kind)
    blocks = grid.scatter(whole if rank == 0 else jax.ShapeDtypeStruct(whole.shape, whole.dtype), width=1)
    exchanged = grid.exchange(grid.pad(whole[grid.slices], 1), 1)
    request = grid.start({"keys": grid.pad(whole[grid.slices], 1), "x": jnp.zeros((5, 6))}, 1)
    rows = [row % (3 * size) for row in range(3 * rank - 1, 3 * rank + 4)]
    expected = np.pad(words[rows], ((0, 0), (1, 1), (0, 0)))
    for found in (blocks, exchanged, grid.finish(request)["keys"]):
        np.testing.assert_array_equal(jax.random.key_data(found), expected)
    for root in (0, None):
        gathered = grid.gather(blocks, root, width=1)
        if root is None or rank == root:
            np.testing.assert_array_equal(jax.random.key_data(gathered), words)


def test_grid_boundaries(comm, rank, size):
    grid = jaxmpi.Grid((size,), (2 * size,), comm=comm)
    keys = keys_of(words_of((2 * size,), "threefry2x32", 9), "threefry2x32")
    field = grid.pad(keys[grid.slices], 1)
    first, *_, last = grid.exchange(field, 1, boundary="edge")
    assert first == keys[max(2 * rank - 1, 0)]
    assert last == keys[min(2 * rank + 2, 2 * size - 1)]
    with pytest.raises(ValueError, match=r"exchange: boundary is 0, which fields of key<fry> cannot hold"):
        grid.exchange(field, 1, boundary=0)


def test_neighbors(comm, rank, size):
    ring = comm.Create_cart([size], periods=[True])
    keys = jnp.stack([jax.random.key(2 * rank), jax.random.key(2 * rank + 1)])
    left, right = (rank - 1) % size, (rank + 1) % size
    gathered = jaxmpi.neighbor_allgather(keys, comm=ring)
    swapped = jaxmpi.neighbor_alltoall(keys, comm=ring)
    np.testing.assert_array_equal(
        jax.random.key_data(gathered)[..., 1], [[2 * left, 2 * left + 1], [2 * right, 2 * right + 1]]
    )
    np.testing.assert_array_equal(jax.random.key_data(swapped)[:, 1], [2 * left + 1, 2 * right])
    ring.Free()


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.alone
def test_reductions_are_refused():
    key, names = {"k": jax.random.key(0)}, ("allreduce", "iallreduce", "scan", "exscan", "reduce_scatter")
    calls = [(name, (MPI.SUM,)) for name in names]
    calls += [("iallreduce", (MPI.BXOR,)), ("reduce", (MPI.SUM, 0)), ("reduce_scatter", (MPI.SUM, [1]))]

    def refused(row):
        name, arguments = row
        for way in (lambda f: f, jax.jit):
            with pytest.raises(
                TypeError, match=rf"{name}: x\['k'\] has dtype key<fry>, .*moved, not reduced.*key_data"
            ):
                way(lambda key: getattr(jaxmpi, name)(key, *arguments))(key)

    each(calls, refused, lambda row: row[0])


def test_a_scalar_has_no_first_axis(comm, size):
    """The words of a key are no axis, not even if there are as many as ranks."""
    key = jax.random.key(0)
    for call in (
        lambda: jaxmpi.alltoall(key, comm=comm),
        lambda: jaxmpi.scatter(key, comm.rank, comm=comm),
        lambda: jaxmpi.allgatherv(key, [2] * size, comm=comm),
    ):
        with pytest.raises(ValueError, match="first axis"):
            call()
    with pytest.raises(ValueError, match="first axis"):
        jaxmpi.neighbor_alltoall(key, comm=comm.Create_cart([size]))
