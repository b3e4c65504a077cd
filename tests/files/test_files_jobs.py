"""States in files of jobs of their own: other numbers of ranks, ranks that are killed, folders without room."""

import os
import random

import numpy as np
import pytest

from jaxmpi import io
from support import drawing
from support.disks import mounted, needs_root
from support.launch import launch

pytest.importorskip("zarr", minversion="3")
pytestmark = [pytest.mark.alone, pytest.mark.sampled, pytest.mark.seconds(400)]

STATE = """
    import sys
    import numpy as np
    from jaxmpi import io

    H = np.arange(3 * 13 * 10, dtype=np.float32).reshape(3, 13, 10)
    U = np.arange(14 * 10, dtype=np.int16).reshape(14, 10)
    ROWS = np.arange(2 * 29.0).reshape(29, 2)
    IDS = np.arange(29) ** 2

    g = jaxmpi.Grid((0, 0), (13, 10))
    owner = np.random.default_rng(size).integers(0, size, 29)
    m = jaxmpi.IndexMap(IDS[owner == rank], np.random.default_rng(rank).choice(IDS, 4))
    rows = dict(zip(IDS.tolist(), ROWS))
    local = np.array([rows[i] for i in (*m.owned.tolist(), *m.ghosts.tolist())]).reshape(-1, 2)
    mine = {"blocks": g.scatter({"h": H, "u": U}, None, width=1), "rows": local, "step": 7}
    its = {"blocks": g, "rows": m, "step": None}
"""


@pytest.mark.parametrize("written", [2, 3, 4])
def test_other_numbers_of_ranks(script, tmp_path, written):
    """What some ranks have written, others read: bit-equal to what they have themselves."""
    program = script(
        STATE
        + """
    half = {"half": jnp.asarray(H[0][g.slices]).astype(jnp.bfloat16), "key": jax.random.key(0)}
    if sys.argv[2] == "write":
        io.save(sys.argv[1] + "/a", mine, grid=its, width=1)
        io.save(sys.argv[1] + "/b", half, grid=g)
    for path, wanted, division, width in (("/a", mine, its, 1), ("/b", half, g, 0)):
        found = io.load(sys.argv[1] + path, grid=division, width=width)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            if isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
            assert np.asarray(a).dtype == np.asarray(b).dtype
            np.testing.assert_array_equal(a, b)
    """
    )
    launch(written, program, tmp_path, "write")
    whole = io.load(tmp_path / "a")
    np.testing.assert_array_equal(whole["blocks"]["h"], np.arange(390).reshape(3, 13, 10))
    np.testing.assert_array_equal(whole["rows"], np.arange(58.0).reshape(29, 2))
    for read in (1, 8) if drawing.brief else (1, 2, 3, 4, 5, 6, 7, 8):
        launch(read, program, tmp_path, "read")


def test_without_wide_types(script, tmp_path):
    """NumPy's wide numbers keep their bits where JAX has none of 64 bits; JAX's own are an error that helps. And the
    import is light: the first call imports zarr."""
    program = script(
        """
    import sys
    import numpy as np
    from jaxmpi import io
    assert "zarr" not in sys.modules and "google_crc32c" not in sys.modules
    assert not jax.config.read("jax_enable_x64")
    whole = np.random.default_rng(0).random((7, 9))
    g = jaxmpi.Grid((0, 1), whole.shape)
    block = whole[g.slices]
    ids = np.arange(rank, 11, size)
    m = jaxmpi.IndexMap(ids, [0, 5])
    rows = np.concatenate([m.owned, m.ghosts]) + 0.1
    tree = {"f": block, "z": block * 1j, "n": (block * 2.0**60).astype(np.int64), "p": 0.1, "r": rows, "i": 2**40}
    io.save(sys.argv[1] + "/a", tree, grid={**dict.fromkeys("fzn", g), "p": None, "r": m, "i": None}, chunks=2)
    found = io.load(sys.argv[1] + "/a", grid={**dict.fromkeys("fzn", g), "p": None, "r": m, "i": None}, width=1)
    for name in "fzn":
        assert found[name].dtype == tree[name].dtype
        assert np.array_equal(found[name][1:-1, 1:-1], tree[name]), name
    assert np.array_equal(found["r"], rows) and found["p"] == 0.1 and found["i"] == 2**40
    try:
        io.load(sys.argv[1] + "/a", like={"f": jax.ShapeDtypeStruct((7, 9), np.float64)})
    except ValueError as error:
        assert "jax_enable_x64" in str(error), error
    else:
        raise AssertionError
    assert io.load(sys.argv[1] + "/a", like={"f": np.empty((7, 9))})["f"].dtype == np.float64
    """
    )
    launch(2, program, tmp_path, JAX_ENABLE_X64="0")


CHECKPOINTS = (
    STATE
    + """
    folder = sys.argv[1]
    last = io.latest(folder)
    step = io.load(last, grid=its, width=1)["step"] + 1 if last else 0
    if last:
        assert int(last.name) == step - 1
        np.testing.assert_array_equal(io.load(last)["blocks"]["h"], H + step - 1)
    print("begins with", step, flush=True)
    until = step + int(sys.argv[2])
    while step < until:
        blocks = {**mine["blocks"], "h": mine["blocks"]["h"] + step}
        path = io.checkpoint(folder, {**mine, "blocks": blocks, "step": step}, keep=2, grid=its, width=1, chunks=3)
        assert int(path.name) == step
        if rank == 0:
            print("wrote", step, flush=True)
        step += 1
"""
)


@pytest.mark.seconds(900)
def test_killed_ranks(script, tmp_path):
    """A rank is killed at random times while it writes. Each time the last complete state is there, and the next run
    goes on with it as if nothing had been."""
    program = script(
        CHECKPOINTS
        + """
        if rank == int(sys.argv[3]) and step == until - int(sys.argv[2]) + 1:
            import os, signal, threading
            threading.Timer(float(sys.argv[4]), os.kill, (os.getpid(), signal.SIGKILL)).start()
"""
    )
    chance, folder, reached = random.Random(1), tmp_path / "states", 0
    for _ in range(4 if drawing.brief else 20):
        # It begins with the last complete state, and writes more until a rank is killed.
        rank, delay = chance.randrange(3), chance.random() * 0.3
        done = launch(3, program, folder, 400, rank, delay, check=False)
        assert done.returncode != 0
        wrote = [int(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("wrote")]
        begun = int(done.stdout.split("begins with ")[1].split()[0])
        assert reached <= begun <= reached + 1
        reached = max(wrote, default=begun - 1) + 1
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
        assert reached - 1 <= int(names[-1]) <= reached
    launch(2, program, folder, 3, -1, 0)
    assert len(os.listdir(folder)) == 2


@needs_root
def test_full_file_system(script, tmp_path):
    """A state that does not fit: an error on all ranks, the last one loads, nothing is left, and a smaller one fits."""
    with mounted(tmp_path / "small", "size=6m") as small:
        program = script(
            """
    import errno, os, sys
    import numpy as np
    from jaxmpi import io
    folder = sys.argv[1]
    g = jaxmpi.Grid((0,), (1 << 20,))
    x = np.arange(1 << 20, dtype=np.float32)[g.slices]
    io.checkpoint(folder, {"x": x, "i": 0}, grid=g)
    for call in (io.checkpoint, lambda path, *a, **b: io.save(path + "/other", *a, **b)):
        try:
            call(folder, {"x": x + 1, "i": 1}, grid=g)
        except OSError as error:
            assert "No space left" in str(error), error
        else:
            raise AssertionError
        assert os.listdir(folder) == ["00000000"]
        MPI.COMM_WORLD.Barrier()
    found = io.load(io.latest(folder), grid=g)
    assert found["i"] == 0 and np.array_equal(found["x"], x)
    io.checkpoint(folder, {"x": x[: len(x) // 4], "i": 1}, grid=jaxmpi.Grid((0,), (1 << 18,)))
    assert io.load(io.latest(folder))["i"] == 1
    """
        )
        launch(2, program, small)
