"""Examples that are stopped and go on, on the same number of ranks and on others, and what they write meanwhile."""

import shutil

import numpy as np
import pytest

from support import drawing, examples
from support.examples import run

pytestmark = examples.MARKS
zarr = pytest.importorskip("zarr", reason="files need zarr")


def gone_on(tmp_path, name, ranks, first, rest, fields, atol):
    """Compares fields of a run at once on two ranks with those of runs that stop and go on: bit by bit on as many
    ranks, but for rounding on others. Returns the state of the first, and the series of each of the others."""
    _, whole = run(tmp_path, name, 2, *rest)
    run(tmp_path, name, 2, *first, "--output", tmp_path / "first.zarr", "--checkpoints", tmp_path / "saved")
    series = []
    for n in ranks:
        files = tmp_path / f"{n}.zarr", tmp_path / f"saved{n}"
        for source, target in zip((tmp_path / "first.zarr", tmp_path / "saved"), files, strict=True):
            shutil.copytree(source, target)
        words = ("--output", files[0], "--checkpoints", files[1], "--restart")
        _, state = run(tmp_path, name, n, *rest, *words)
        for field in fields:
            allowed = 0 if n == 2 else atol
            np.testing.assert_allclose(
                state[field], whole[field], rtol=0, atol=allowed, err_msg=f"{field} on {n} ranks"
            )
        series.append(zarr.open_group(str(files[0]), mode="r"))
    return whole, series


@pytest.mark.nightly
@pytest.mark.seconds(400)
def test_shallow_water(tmp_path):
    size = ("--size", "72", "36")
    rest, first = (*size, "--days", "0.25"), (*size, "--days", "0.125")
    whole, series = gone_on(
        tmp_path, "shallow_water", (2, 3) if drawing.brief else (2, 3, 4), first, rest, ("h", "u", "v"), 1e-4
    )
    for data in series:
        times = data["time"][...]
        assert len(times) == 80
        assert (np.diff(times) > 0).all()
        assert times[-1] == pytest.approx(0.25, rel=0.01)
        assert data["h"].shape == (80, 36, 72)
        np.testing.assert_allclose(data["h"][-1], whole["h"], atol=1e-4)
        assert np.ptp(data["h"][0] - data["h"][-1]) > 0


@pytest.mark.nightly
@pytest.mark.seconds(300)
def test_heat_inverse(tmp_path):
    """With the state of the optimizer, as if the run had died before the last checkpoint."""
    options = ("--size", "12", "--iterations", "30")
    _, whole = run(tmp_path, "heat_inverse", 2, *options)
    files = ("--output", tmp_path / "k.zarr", "--checkpoints", tmp_path / "saved")
    run(tmp_path, "heat_inverse", 2, *options, *files)
    shutil.rmtree(max((tmp_path / "saved").iterdir()))
    _, state = run(tmp_path, "heat_inverse", 3, *options, *files, "--restart")
    for name, values in whole.items():
        np.testing.assert_allclose(state[name], values, rtol=1e-8, err_msg=name)
    assert zarr.open_group(str(tmp_path / "k.zarr"), mode="r")["time"][...].tolist() == [0, 10, 20]
