"""What XLA makes of operations for a GPU, without one: `make test-compiled`.

XLA compiles for a description of a device: of NVIDIA's or, with the value `oneapi`, of Intel's. jaxmpi finds the driver
of tests/device, or JAX's plugin for Intel's devices. Nothing is executed. A compiler
that cannot stand an operation beside what surrounds it ends the process, which fails the job.
"""

import os
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from mpi4py import MPI

import jaxmpi
from primitive.test_slices import LENGTH, ROWS, WAYS
from primitive.test_slices import OPERATIONS as SLICED
from support.table import CASES

PLATFORM = os.environ.get("JAXMPI_TEST_COMPILED", "")
pytestmark = pytest.mark.skipif(not PLATFORM, reason="make test-compiled")

DEVICES = {
    "cuda": """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
""",
    "oneapi": """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 131072 shared_memory_per_core: 131072
  threads_per_core_limit: 1024 core_count: 448 fpus_per_core: 32
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 1600000000000 l2_cache_size: 204800000 clock_rate_ghz: 1.6 device_memory_size: 68719476736
  shared_memory_per_block_optin: 131072 oneapi_compute_capability { architecture: "pvc" }
}
platform_name: "SYCL"
device_description_str: "Intel Data Center GPU Max 1550"
""",
}
"""Of the GPUs that XLA compiles for, in the text form of XLA's GpuTargetConfigProto."""


@pytest.fixture(scope="module")
def sharding():
    from jax.experimental import topologies

    target = topologies.get_topology_desc("1x1x1", platform=PLATFORM, target_config=DEVICES[PLATFORM], topology="1x1x1")
    return jax.sharding.SingleDeviceSharding(target.devices[0])


CALL = re.compile(r'custom_call_target\s*=\s*"(jaxmpi_[a-z_]+)|custom_call @(jaxmpi_[a-z_]+)')


def compare(f, sharding, *operands):
    """Compiles f for the GPU. XLA keeps each call of the program, and makes no further one."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), operands)
    lowered = jax.jit(f).trace(*shapes).lower(lowering_platforms=(PLATFORM,))
    given, made = lowered.as_text(), lowered.compile().as_text()
    calls = [sorted(max(found) for found in CALL.findall(text)) for text in (given, made)]
    assert calls[0], "nothing communicates"
    assert calls[0] == calls[1]


def row(*shape):
    return jnp.zeros((*shape, LENGTH), jnp.float32)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("operation", SLICED)
def test_slices(operation, way, sharding):
    compare(lambda x: way(operation, x), sharding, row(ROWS))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_operations(case, sharding, comm, rank, size):
    """Each reads a row of an array and its result becomes a row, in a loop and outside of one."""
    shape = case.shape((LENGTH,), rank, size, 0)

    def in_loop(x):
        return lax.scan(lambda total, x: (total, case.call(x, comm, 0)), 0.0, x)[1]

    x = jnp.zeros((ROWS, *shape), jnp.float32)
    compare(in_loop, sharding, x)
    compare(lambda x: case.call(x[2], comm, 0), sharding, x)


@pytest.mark.parametrize("names", [("exchange",), ("start", "finish")], ids=" ".join)
def test_grids(names, sharding, comm):
    grid = jaxmpi.Grid((comm.size, 1), shape=(comm.size * (ROWS - 2), LENGTH - 2), comm=comm)

    def whole(x):
        return grid.exchange(x) if names == ("exchange",) else grid.finish(grid.start(x))

    def steps(x):
        return lax.scan(lambda x, _: ((y := whole(x)), y), x, length=3)

    compare(steps, sharding, row(ROWS))
    compare(jax.grad(lambda x: jnp.sum(jnp.sin(steps(x)[0]) ** 2)), sharding, row(ROWS))


def test_fields_stay_where_they_are(sharding, comm):
    """An exchange in a loop is one call, of what travels, and nothing copies the field."""
    grid = jaxmpi.Grid((comm.size, 1), shape=(64 * comm.size, 64), periodic=True, comm=comm)
    shape = jax.ShapeDtypeStruct((66, 66), jnp.float32, sharding=sharding)
    steps = jax.jit(lambda x: lax.fori_loop(0, 9, lambda _, x: grid.exchange(jnp.sin(x)), x), donate_argnums=0)
    made = steps.trace(shape).lower(lowering_platforms=(PLATFORM,)).compile().as_text()
    (call,) = (line for line in made.splitlines() if 'custom_call_target="jaxmpi_exchange"' in line)
    assert not re.search(r"\[66,66\]", call)
    assert not re.search(r"f32\[66,66\]\S* copy\(", made)
    assert "callback" not in made


def test_index_maps(sharding, rank, size):
    ghosts = [(rank + 1) % size * ROWS + i for i in (0, 2)] if size > 1 else []
    points = jaxmpi.IndexMap(range(rank * ROWS, (rank + 1) * ROWS), ghosts)
    x = row(ROWS + len(ghosts))

    def steps(x):
        return lax.scan(lambda x, _: ((y := points.accumulate(jnp.sin(points.exchange(x)))), y), x, length=3)

    compare(steps, sharding, x)
    compare(jax.grad(lambda x: jnp.sum(steps(x)[0] ** 2)), sharding, x)


def test_order(sharding, rank):
    """Calls of different kinds stay in the order of the program."""

    def several(x):
        y = jaxmpi.bcast(x, 0)
        jaxmpi.barrier()
        z = jaxmpi.allreduce(jnp.cos(x), MPI.SUM)
        return jaxmpi.scan(z, MPI.SUM) + y

    shape = jax.ShapeDtypeStruct((LENGTH,), jnp.float32, sharding=sharding)
    made = jax.jit(several).trace(shape).lower(lowering_platforms=(PLATFORM,)).compile().as_text()
    assert [max(found) for found in CALL.findall(made)] == [
        f"jaxmpi_{name}" for name in ("bcast", "barrier", "allreduce", "scan")
    ]
