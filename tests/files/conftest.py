from pathlib import Path

import pytest


@pytest.fixture
def folder(comm, tmp_path):
    """A folder that all ranks share."""
    return Path(comm.bcast(str(tmp_path)))
