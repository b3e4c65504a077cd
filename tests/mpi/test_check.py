"""JAXMPI_CHECK: ranks compare their first calls by default, all with 1, none with 0; tests/programs/checked.py.

Each number of a record is tested in tests/c/test_compare.c."""

import pytest

from programs import checked
from support import jobs
from support.launch import launch
from support.rows import rows

pytestmark = [pytest.mark.alone, pytest.mark.sampled, pytest.mark.seconds(250)]


@rows("functions", checked.BY_DEFAULT, ids=jobs.name)
def test_compared_by_default(functions):
    """A rank that waited in vain for the comparison, 10 seconds, would be reported."""
    done = jobs.check(3, functions, timeout=200, JAXMPI_TIMEOUT="9")
    assert "has been waiting" not in done.stderr


@rows("functions", checked.ALWAYS, ids=jobs.name)
def test_all_compared(functions):
    jobs.check(2, functions, timeout=200, JAXMPI_CHECK="1")


@pytest.mark.nightly
@rows("functions", checked.NEVER, ids=jobs.name)
def test_none_compared(functions):
    """Here at MPI_THREAD_SERIALIZED."""
    done = jobs.check(2, functions, JAXMPI_CHECK="0", MPI4PY_RC_THREAD_LEVEL="serialized")
    assert done.stderr == ""


@pytest.mark.nightly
@rows("functions", checked.WITH_MPI4PY, ids=jobs.name)
def test_beside_mpi4py(functions):
    done = jobs.check(3, functions, timeout=200)
    assert "Error" not in done.stderr, done.stderr


@pytest.mark.nightly
def test_what_one_rank_asks_for_all_do():
    program = (
        "import os\nfrom mpi4py import MPI\nrank = MPI.COMM_WORLD.rank\n"
        "if rank == 1: os.environ['JAXMPI_CHECK'] = '1'\nimport jaxmpi\n"
        "try: jaxmpi.bcast(1.0, rank).block_until_ready()\n"
        "except Exception as error: print('the ranks differ' in str(error), flush=True)\n"
    )
    assert launch(2, "-c", program, check=False).stdout.count("True") == 2
