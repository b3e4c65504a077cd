"""What files say where zarr is missing, or cannot be had. These tests need none."""

import sys

import jax.numpy as jnp
import pytest

from jaxmpi import io
from jaxmpi._files import store


@pytest.mark.parametrize(
    ("oldest", "text"),
    [
        ((3, 0), r"files need zarr 3 or newer: pip install 'jaxmpi\[io\]'"),
        ((99, 0), r"zarr 3 or newer, which needs Python 3\.11, and this is Python 3\.\d+\.\d+.*: run the program with"),
    ],
)
def test_zarr_is_missing(comm, folder, monkeypatch, oldest, text):
    """All ranks say what to do, and nothing is written."""
    monkeypatch.setattr(store, "OLDEST_PYTHON", oldest)
    monkeypatch.setitem(sys.modules, "zarr", None)
    for call in (
        lambda: io.save(folder / "s", {"x": jnp.zeros(3)}),
        lambda: io.load(folder / "s"),
        lambda: io.checkpoint(folder / "states", {"x": jnp.zeros(3)}),
        lambda: io.Writer(folder / "w"),
    ):
        with pytest.raises(ImportError, match=text):
            call()
    comm.Barrier()
    assert not list(folder.iterdir())


def test_the_last_state_is_found_without_zarr(comm, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "zarr", None)
    assert io.latest(folder) is None
    comm.Barrier()
    if comm.rank == 0:
        state = folder / "00000007"
        state.mkdir()
        (state / "zarr.json").write_text('{"attributes": {"jaxmpi": {"format": 1}}}')
    comm.Barrier()
    assert io.latest(folder) == folder / "00000007"


@pytest.mark.skipif(sys.version_info >= store.OLDEST_PYTHON, reason="this Python has zarr 3")
def test_a_python_without_zarr(tmp_path):
    with pytest.raises(ImportError, match=r"needs Python 3\.11, and this is Python 3\.10"):
        io.save(tmp_path / "s", 1)
