"""On a real GPU, which the ranks may share: where arrays lie, and ranks whose arrays lie in different memory.

What the operations do there is said by the other suites, run on the GPU: `make test-gpu`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import jaxmpi
from support.table import CASES

pytestmark = pytest.mark.skipif(jax.default_backend() == "cpu", reason="needs a GPU: make test-gpu")
LARGE = 5 << 20  # bytes: more than a chunk


def arrays(size, count=LARGE // 4):
    return [np.random.default_rng(r).integers(0, 100, count).astype(np.float32) for r in range(size)]


def test_supported():
    platform = jax.devices()[0].client.platform_version.lower()
    assert jaxmpi.has_rocm_support() if "rocm" in platform else jaxmpi.has_cuda_support()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_stays_on_the_device(case, comm, size, rank):
    """Results lie where the operands lay, and JAX carries nothing between host and device."""
    xs = case.inputs((LARGE // 4,), np.float32, size, 0)
    x = jax.device_put(xs[rank], jax.devices()[0])
    call = jaxmpi.jit(lambda x: case.call(x, comm, 0))
    y = call(x).block_until_ready()
    with jax.transfer_guard("disallow"):
        y = call(x).block_until_ready()
    assert y.devices() == x.devices()
    np.testing.assert_array_equal(y, case.expected(xs, rank, 0))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("odd", [0, 1])
def test_different_memory(odd, size, rank):
    """One rank's arrays lie in CPU memory, the others' on the device; on the default communicator, so in chunks."""
    xs = arrays(size)
    device = jax.devices("cpu")[0] if rank == odd else jax.devices()[0]
    x = jax.device_put(xs[rank], device)
    left, right = (rank - 1) % size, (rank + 1) % size
    for _ in range(2):
        np.testing.assert_array_equal(jaxmpi.allreduce(x, MPI.SUM), sum(xs))
        np.testing.assert_array_equal(jaxmpi.bcast(x, odd), xs[odd])
        np.testing.assert_array_equal(jaxmpi.scan(x, MPI.MAX), np.max(xs[: rank + 1], axis=0))
        np.testing.assert_array_equal(jaxmpi.sendrecv(x, x, left, right), xs[left])
        np.testing.assert_array_equal(jaxmpi.allgather(x), np.stack(xs))
    assert jaxmpi.allreduce(x, MPI.SUM).devices() == {device}


def test_order_with_kernels(comm, size, rank):
    """Communication between long computations, without a wait on the host: the data are those of the right step."""

    @jaxmpi.jit
    def steps(x):
        def step(i, x):
            y = jnp.sin(x) + i
            y = jaxmpi.sendrecv(y, y, (rank - 1) % size, (rank + 1) % size, comm=comm)
            return y * 0.5 + jaxmpi.allreduce(y, MPI.SUM, comm=comm) / size

        return jax.lax.fori_loop(0, 20, step, x)

    xs = arrays(size, 200_000)
    expected = np.stack(xs).astype(np.float64)
    for i in range(20):
        moved = np.roll(np.sin(expected) + i, 1, axis=0)
        expected = moved * 0.5 + moved.mean(axis=0)
    np.testing.assert_allclose(steps(jnp.asarray(xs[rank])), expected[rank], rtol=2e-4, atol=2e-4)
