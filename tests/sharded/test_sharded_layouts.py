"""Changes of the layout of arrays over processes, by JAX: `make test-sharded` some, `make test-layouts` all there are.

An array is laid out in another way, and each process compares its part with that of a NumPy array.
"""

import itertools
import math
import os
import random

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mpi4py import MPI

from jaxmpi_launch import before_jax

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
ALL = os.environ.get("JAXMPI_TEST_LAYOUTS") == "all"
pytestmark = [
    pytest.mark.skipif(before_jax.state.kind != "mpi", reason="needs --collectives mpi: make test-sharded"),
    pytest.mark.ranks(2),
    pytest.mark.seconds(3600 if ALL else 120),
]
SOURCES, CHANGES, EXCHANGES = (1000, 1000, 100) if ALL else (2, 4, 4)
"""At most so many layouts from which there are changes to all others, changes alone, and changes of the mesh."""


def meshes():
    """Shapes of 1 to 3 axes, and the processes in an order which is the same on all of them."""
    rng = random.Random(SIZE)
    found = []
    for axes in (1, 2, 3):
        shapes = [sizes for sizes in itertools.product(range(1, SIZE + 1), repeat=axes) if math.prod(sizes) == SIZE]
        balanced = min(shapes, key=lambda sizes: (max(sizes), sizes[1:]))
        shapes = (ALL and [sizes for sizes in shapes if 1 not in sizes]) or [balanced]
        for sizes in shapes:
            other = min((tuple(rng.sample(range(SIZE), SIZE)) for _ in range(4)), key=lambda order: order[0] == 0)
            orders = [tuple(range(SIZE)), other]
            found += [(sizes, order) for order in (orders if ALL or axes == 2 else orders[1:])]
    return found


MESHES = meshes()
NAMED = [f"{'x'.join(map(str, sizes))} of {','.join(map(str, order))}" for sizes, order in MESHES]


def mesh_of(sizes, order):
    devices = np.array([jax.devices()[i] for i in order]).reshape(sizes)
    return Mesh(devices, tuple("xyz"[: len(sizes)]))


def layouts(mesh, ndim):
    """All of arrays of so many axes: each axis of the mesh divides one of the array's, behind others, or none."""
    found = []
    for count in range(len(mesh.axis_names) + 1):
        for names in itertools.permutations(mesh.axis_names, count):
            for cuts in itertools.combinations_with_replacement(range(count + 1), ndim - 1):
                ends = (0, *cuts, count)
                spec = P(*(names[a:b] or None for a, b in itertools.pairwise(ends)))
                found.append(NamedSharding(mesh, spec))
    return found


def array(ndim):
    """No number twice, and all axes can be divided by any of the mesh's."""
    shape = [SIZE, 2 * SIZE, SIZE][:ndim]
    return np.arange(math.prod(shape), dtype=np.int32).reshape(shape)


def placed(whole, layout):
    return jax.make_array_from_callback(whole.shape, layout, lambda index: whole[index])


def check(found, whole, layout):
    index = layout.devices_indices_map(whole.shape)[jax.local_devices()[0]]
    assert found.sharding.is_equivalent_to(layout, whole.ndim)
    np.testing.assert_array_equal(np.asarray(found.addressable_data(0)), whole[index])


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize(("sizes", "order"), MESHES, ids=NAMED)
def test_from_a_layout_to_all_others(sizes, order, ndim):
    """In one program for each layout to begin with."""
    mesh, whole = mesh_of(sizes, order), array(ndim)
    known = layouts(mesh, ndim)
    for source in random.Random(ndim).sample(known, min(SOURCES, len(known))):
        change = jax.jit(lambda x: [x] * len(known), out_shardings=known)
        for found, layout in zip(change(placed(whole, source)), known, strict=True):
            check(found, whole, layout)


@pytest.mark.parametrize("ndim", [1, 2, 3] if ALL else [2])
@pytest.mark.parametrize(("sizes", "order"), MESHES, ids=NAMED)
def test_from_layout_to_layout(sizes, order, ndim):
    """In a program for each change: XLA chooses other collectives than for many at once."""
    mesh, whole = mesh_of(sizes, order), array(ndim)
    changes = list(itertools.permutations(layouts(mesh, ndim), 2))
    for source, layout in random.Random(ndim).sample(changes, min(CHANGES, len(changes))):
        check(jax.jit(lambda x: x, out_shardings=layout)(placed(whole, source)), whole, layout)


@pytest.mark.parametrize("seed", range(EXCHANGES))
def test_from_mesh_to_mesh(seed):
    """Of another shape, with the processes in another order."""
    rng = random.Random(seed)
    ndim = rng.randint(1, 3)
    whole = array(ndim)
    source, layout = (rng.choice(layouts(mesh_of(*rng.choice(MESHES)), ndim)) for _ in range(2))
    check(jax.device_put(placed(whole, source), layout), whole, layout)
