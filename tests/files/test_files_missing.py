"""What files say where zarr is missing, or cannot be had. These tests need none."""

import sys

import jax.numpy as jnp
import pytest

from jaxmpi import io


def test_zarr_is_missing(comm, folder, monkeypatch):
    """All ranks say what to do, and nothing is written."""
    monkeypatch.setitem(sys.modules, "zarr", None)
    for call in (
        lambda: io.save(folder / "s", {"x": jnp.zeros(3)}),
        lambda: io.load(folder / "s"),
        lambda: io.checkpoint(folder / "states", {"x": jnp.zeros(3)}),
        lambda: io.Writer(folder / "w"),
    ):
        with pytest.raises(ImportError, match=r"files need zarr 3 or newer: pip install 'zarr>=3', with Python 3.11"):
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
