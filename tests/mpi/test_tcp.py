"""Whether the suites run over TCP where `make test-tcp` says so."""

import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxmpi

BYTES = 32 << 20


def received():
    """The bytes that this machine has received on all its interfaces, the one to itself included."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.partition(":")[2].split()[0]) for line in lines)


@pytest.mark.skipif("JAXMPI_TEST_TCP" not in os.environ, reason="set by make test-tcp")
@pytest.mark.ranks(2)
def test_messages_are_sent_by_tcp(comm, rank):
    before = received()
    result = jaxmpi.bcast(jnp.full(BYTES // 8, 3.0) if rank == 0 else jnp.zeros(BYTES // 8), 0)
    np.testing.assert_array_equal(result, 3.0)
    comm.Barrier()
    assert received() - before > BYTES
