"""What programs do that the launcher has started, on two ranks: by functions.py, with JAX_NUM_CPU_DEVICES=2."""

import os
import runpy
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import xla_bridge
from jax._src.lib import xla_client
from mpi4py import MPI

import jaxmpi

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL_EXAMPLES = ("global_sum", "send_recv", "scatter_grad")

# As beside a GPU, where JAX has a device of the CPU, too. JAX makes its devices once.
xla_bridge.register_backend_factory("other", xla_client.make_cpu_client, priority=1000)
jax.config.update("jax_platforms", "cpu,other")


def small_examples(world):
    """Each asserts the values that its docstring states."""
    for name in SMALL_EXAMPLES:
        with mock.patch.object(sys, "argv", [name]):
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def recover_without_survive(world):
    """It says how to start the job."""
    with pytest.raises(RuntimeError, match=r"Start it by python -m jaxmpi.run --survive"):
        jaxmpi.survive.recover()


def settings(world):
    """What ranks find of the launcher's settings."""
    assert os.environ["OMP_NUM_THREADS"] == os.environ["PJRT_NPROC"]


def devices_of_one_platform(world):
    _several_devices(world, *jax.devices("cpu"))


def devices_of_two_platforms(world):
    _several_devices(world, jax.devices("cpu")[0], *jax.devices("other"))


def _several_devices(world, first, second):
    """Operands on either of two devices of this process: results lie there too, as with jax.jit."""
    rank, size = world.rank, world.size
    f = jaxmpi.jit(lambda x: jaxmpi.allreduce(x, MPI.SUM, comm=world) + 1)
    g = jax.jit(lambda x: jaxmpi.allreduce(x, MPI.SUM, comm=world) + 1)
    for call in (f, lambda x: jaxmpi.allreduce(x, MPI.SUM, comm=world), lambda x: f(g(x))):
        for device in (second, first, None, second, None):
            x = jnp.ones(3) if device is None else jax.device_put(jnp.ones(3), device)
            for _ in range(3):
                y = call(x)
            assert y.devices() == {device or first}
            assert y.committed == (device is not None)
            assert y[0] >= size

    # Each rank draws the devices on its own, and long computations come before short ones: calls stay in order.
    def long(x):
        return jnp.linalg.matrix_power(jnp.full((300, 300), x[0]) / 300, 9)[0, :3] * 0 + x

    def passed(g):
        return jaxmpi.jit(lambda x: jaxmpi.sendrecv(g(x), x, (rank - 1) % size, (rank + 1) % size, comm=world))

    functions, draw = [passed(g) for g in (long, lambda x: x)], np.random.default_rng(rank)
    results = [
        functions[draw.integers(2)](jax.device_put(jnp.full(3, 1.0 * i), (first, second)[draw.integers(2)]))
        for i in range(60)
    ]
    np.testing.assert_array_equal(results, np.repeat(np.arange(60.0), 3).reshape(60, 3))


EACH_TIME = [small_examples, recover_without_survive, settings, devices_of_one_platform]
NIGHTLY = [devices_of_two_platforms]
