"""`Replica` without deaths: what is restored is what was saved. With deaths: tests/launcher/test_survive.py."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import jaxmpi
from jaxmpi.survive import Replica
from replicas import divisions, plain, state
from support.rows import each

SIZE = MPI.COMM_WORLD.size
SHAPE = (7, 9)


def check(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert type(x) is type(y)
        assert plain(x).dtype == plain(y).dtype
        np.testing.assert_array_equal(plain(x), plain(y))


@pytest.mark.parametrize("copies", [1, 2, SIZE + 3])
def test_what_was_saved_last(copies):
    """On the same grid and on others, as often as one likes."""
    grid, rows = jaxmpi.Grid((0, 0), SHAPE), jaxmpi.Grid((SIZE, 1), SHAPE)
    uneven = jaxmpi.Grid((1, SIZE), (7, [9 - (SIZE - 1)] + [1] * (SIZE - 1)), periodic=(False, True))
    replica = Replica(state(grid, 0), grid=divisions(grid), width={"fields": 1}, copies=copies)
    check(replica.restore(grid), state(grid, 0))
    for step in (1, 2, 3):
        replica.save(state(grid, step))
    for other in (rows, uneven, grid, grid):
        check(replica.restore(other), state(other, 3))
    replica.save(state(grid, 4))
    check(replica.restore(rows), state(rows, 4))


def test_axes_and_one_grid():
    """Of the axes that `axes` names; what has fewer axes than the grid is the same on all ranks."""
    grid = jaxmpi.Grid((0,), (3 * SIZE,))
    rank = MPI.COMM_WORLD.rank
    tree = (jnp.arange(6.0).reshape(3, 2) + rank, jnp.float32(4), 2.5)
    replica = Replica(tree, grid=grid, axes=[-2])
    check(replica.restore(grid), tree)


def test_a_saved_tree_may_be_changed():
    grid = jaxmpi.Grid((0,), (2 * SIZE,))
    x, weights = np.ones(2), np.ones(())
    replica = Replica({"x": x, "weights": weights}, grid=grid)
    x[:], weights[...] = 2, 2
    check(replica.restore(grid), {"x": np.ones(2), "weights": np.ones(())})
    donating = jax.jit(lambda x: 2 * x, donate_argnums=0)
    y = jnp.ones(2)
    replica = Replica({"x": y, "weights": 1}, grid=grid)
    donating(y)
    check(replica.restore(grid), {"x": jnp.ones(2), "weights": 1})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("cells", [2, 1000, 300_000])
def test_dropped_while_its_messages_travel(cells, comm):
    """MPI writes the blocks of other ranks into memory that nothing else has."""
    grid = jaxmpi.Grid((0,), (cells * SIZE,))
    for _ in range(3):
        Replica(np.full(cells, 1.0), grid=grid)  # dropped at once
        later = [np.zeros(cells) for _ in range(20)]
        comm.Barrier()
        assert not any(x.any() for x in later)
    replica = Replica(np.full(cells, 1.0 + comm.rank), grid=grid)
    check(replica.restore(grid), np.full(cells, 1.0 + comm.rank))


REFUSED = {
    "a field that does not fit": lambda grid, other: Replica(jnp.ones(5), grid=grid),
    "no grid": lambda grid, other: Replica(jnp.ones(2), grid=None),
    "shapes": lambda grid, other: Replica(jax.ShapeDtypeStruct((2,), jnp.float32), grid=grid),
    "two grids": lambda grid, other: Replica([jnp.ones(2)] * 2, grid=[grid, other]),
    "no copies": lambda grid, other: Replica(jnp.ones(2), grid=grid, copies=0),
    "another structure": lambda grid, other: Replica([jnp.ones(2)], grid=grid).save([jnp.ones(2), 1]),
    "another dtype": lambda grid, other: Replica(jnp.ones(2), grid=grid).save(jnp.ones(2, jnp.int32)),
    "another global shape": lambda grid, other: Replica(jnp.ones(2), grid=grid).restore(other),
    "what is no grid": lambda grid, other: Replica(jnp.ones(2), grid=grid).restore((SIZE,)),
    "random keys for each cell": lambda grid, other: Replica(jax.random.split(jax.random.key(1), 2), grid=grid),
    "pickled": lambda grid, other: pickle.dumps(Replica(jnp.ones(2), grid=grid)),
}


def test_refused():
    grid, other = jaxmpi.Grid((0,), (2 * SIZE,)), jaxmpi.Grid((0,), (4 * SIZE,))

    def check(what):
        with pytest.raises((ValueError, TypeError), match=r"Replica|field|pickled"):
            REFUSED[what](grid, other)

    each(REFUSED, check)


def test_nothing_saved_yet():
    """With `save=False` making one saves nothing, and a tree that has not been saved is not restored."""
    grid = jaxmpi.Grid((0, 0), SHAPE)
    replica = Replica(state(grid, 0), grid=divisions(grid), width={"fields": 1}, save=False)
    assert replica.restore(grid) is None
    replica.save(state(grid, 1))
    check(replica.restore(grid), state(grid, 1))
    tree = {"x": jnp.ones(grid.local_shape), "step": 3}
    replica = Replica(jax.eval_shape(lambda: tree), grid={"x": grid, "step": None}, save=False)
    replica.save(tree)
    check(replica.restore(grid), tree)


def test_within_a_trace():
    """An error that says what to do, and not one of NumPy's."""
    grid = jaxmpi.Grid((0,), (2 * SIZE,))
    replica = Replica(jnp.ones(2), grid=grid)
    for call in (replica.save, lambda x: Replica(x, grid=grid)):
        with pytest.raises(TypeError, match="it is called in a function that JAX is tracing"):
            jax.jit(call)(jnp.ones(2))
    check(replica.restore(grid), jnp.ones(2))
