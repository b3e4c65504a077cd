"""What JAX can do and operations cannot is refused with a reason."""

import jax
import jax.numpy as jnp
import pytest
from mpi4py import MPI

import jaxmpi
from support.launch import launch


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit, jaxmpi.jit], ids=["plain", "jax", "jaxmpi"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_jet(jit):
    """On every rank, also where its operand is a constant; integers have no derivatives and pass."""
    jet = pytest.importorskip("jax.experimental.jet").jet
    f = jit(lambda x: jnp.sin(jaxmpi.allreduce(x, MPI.SUM)))
    with pytest.raises(NotImplementedError, match=r"allreduce.*jet.*jax\.jvp"):
        jet(f, (1.0,), ((1.0, 0.0),))
    g = jit(lambda x: x * jaxmpi.allreduce(jnp.arange(2), MPI.SUM)[1])
    value, _ = jet(g, (1.0,), ((1.0, 0.0),))
    assert float(value) == pytest.approx(MPI.COMM_WORLD.size)


@pytest.mark.nightly
@pytest.mark.alone
def test_operand_on_two_devices(script):
    """Refused before anything is sent, and without XLA's dump of its stack; one device: tests/programs/launched.py."""
    program = script("""
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        f = lambda x: jaxmpi.allreduce(x, MPI.SUM)
        for spec in (PartitionSpec("i"), PartitionSpec()):
            x = jax.device_put(jnp.arange(4.0), NamedSharding(Mesh(jax.devices(), "i"), spec))
            for call in (f, jaxmpi.jit(f), jax.jit(f), jax.grad(lambda x: jnp.sum(f(x)))):
                try:
                    call(x)
                    raise SystemExit("not refused")
                except NotImplementedError as error:
                    assert "allreduce" in str(error) and "2 devices" in str(error), error
        print("said;")
    """)
    done = launch(2, program, JAX_NUM_CPU_DEVICES="2", XLA_FLAGS="")
    assert done.stdout.count("said;") == 2
    assert "stack trace" not in done.stderr
