"""Steps in a file: random ones against NumPy, what readers see meanwhile, errors, ranks that die."""

import collections
import json
import os
import random
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from mpi4py import MPI

import jaxmpi
from jaxmpi import _core, io
from support import drawing
from support.divided import some_processes
from support.launch import launch
from support.table import draw, dtype_of

zarr = pytest.importorskip("zarr", reason="files need zarr")

from jaxmpi._files import layout, saving, store  # noqa: E402

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size


@pytest.fixture
def grid():
    return jaxmpi.Grid(SIZE, (2 * SIZE,))


def read(path):
    """All arrays, by zarr alone; on rank 0, when all ranks are here."""
    COMM.Barrier()
    if RANK > 0:
        return None
    return {name: array[...] for name, array in zarr.open_group(str(path), mode="r").arrays()}


def check(path, expected):
    """Compares with the arrays that are expected, on rank 0."""
    found = read(path)
    if RANK > 0:
        return
    assert set(found) == set(expected)
    for name, right in expected.items():
        assert found[name].shape == right.shape, name
        assert found[name].tobytes() == np.ascontiguousarray(right, found[name].dtype).tobytes(), name


# --- random steps -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    shape: tuple
    fields: tuple
    """Of each its axes in front, where it is staggered, its halo, its dtype."""
    chunks: tuple | None
    every: int
    behind: int
    time_chunk: int
    compressor: str | None
    runs: tuple
    """Of each writer the processes along each axis, and the times of its appends; all but the first resume."""

    def whole(self, field, step, time):
        levels, staggered, _, dtype = self.fields[field]
        shape = (*levels, *(size + extra for size, extra in zip(self.shape, staggered, strict=True)))
        return draw(shape, dtype_of(dtype), field, hash((step, time)) % 1000)


@st.composite
def cases(draw_):
    axes = draw_(st.integers(1, 2))
    shape = tuple(draw_(st.integers(max(2, SIZE), 9)) for _ in range(axes))
    field = st.tuples(
        st.sampled_from(((), (2,), (1, 3))),
        st.tuples(*[st.booleans()] * axes),
        st.sampled_from((0, 1, 2)),
        st.sampled_from(("float32", "float64", "int16", "bool", "complex64")),
    )
    runs, last = [], 0
    for _ in range(draw_(st.integers(1, 3))):
        begin = max(0, last - draw_(st.integers(0, 3)))
        last = begin + draw_(st.integers(0, 6))
        runs.append((tuple(draw_(some_processes(SIZE, axes))), tuple(range(begin, last))))
    return Case(
        shape,
        tuple(draw_(st.lists(field, min_size=1, max_size=3))),
        draw_(st.one_of(st.none(), st.tuples(*[st.integers(1, 5)] * axes))),
        draw_(st.integers(1, 3)),
        draw_(st.integers(1, 3)),
        draw_(st.sampled_from((1, 1, 2, 3, 7))),
        draw_(st.sampled_from((None, None, "zstd"))),
        tuple(runs),
    )


def test_random_steps(folder):
    """Several writers one after the other, of which later ones go on from some time, against what NumPy has."""
    number = 0

    def run(case):
        nonlocal number
        number += 1
        path = folder / f"{number}.zarr"
        names = [f"f{i}" for i in range(len(case.fields))]
        widths = {name: field[2] for name, field in zip(names, case.fields, strict=True)}
        there = []  # time, and the arrays
        for turn, (processes, times) in enumerate(case.runs):
            grid = jaxmpi.Grid(processes, case.shape)
            options = dict(width=widths, every=case.every, behind=case.behind, chunks=case.chunks)
            options["time_chunk"] = case.time_chunk + 2 * turn  # of a file that is there its own is taken
            with io.Writer(path, grid, resume=turn > 0, compressor=case.compressor, **options) as out:
                for count, now in enumerate(times):
                    wholes = [case.whole(i, turn, now) for i in range(len(names))]
                    tree = {}
                    for name, whole in zip(names, wholes, strict=True):
                        sizes = zip(grid.slices, whole.shape[-len(case.shape) :], case.shape, strict=True)
                        block = whole[(..., *(slice(part.start, part.stop + n - m) for part, n, m in sizes))]
                        pads = [(0, 0)] * (whole.ndim - len(case.shape)) + [(widths[name],) * 2] * len(case.shape)
                        tree[name] = jnp.asarray(np.pad(block, pads, constant_values=1))
                    out.append(now, tree)
                    if now % 3 == 1:
                        out.flush()
                    if count % case.every == 0:
                        if count == 0:
                            there = [step for step in there if step[0] < now]
                        there.append((now, wholes))
        if not any(times for _, times in case.runs):
            assert COMM.bcast(not path.exists())
            return
        expected = {"time": np.array([step[0] for step in there], np.float64)}
        for i, name in enumerate(names):
            expected[name] = np.stack([step[1][i] for step in there])
        check(path, expected)

    drawing.on_all_ranks(COMM, cases(), run, 40)


def test_rows_of_a_map(folder):
    """With gaps in the indices, which an array of the file has; resumed with the same rows, of other ranks."""
    indices = np.random.default_rng(0).permutation(40)[:25] * 3
    everything, path = np.sort(indices), folder / "rows.zarr"
    for turn in range(2):
        rows = jaxmpi.IndexMap(np.array_split(np.roll(indices, 9 * turn), SIZE)[RANK], indices[:2])
        local = np.concatenate([rows.owned, rows.ghosts])
        with io.Writer(path, rows, resume=turn > 0) as out:
            for step in range(3 * turn, 3 * turn + 3):
                out.append(step, {"x": jnp.asarray(local * 10.0 + step), "y": jnp.asarray(np.outer(local, [1, step]))})
    steps = np.arange(6)
    check(
        path,
        {
            "time": steps.astype(float),
            "index": everything,
            "x": everything * 10.0 + steps[:, None],
            "y": np.stack([np.outer(everything, [1, step]) for step in steps]),
        },
    )
    others, count = jaxmpi.IndexMap(rows.owned + 1, []), rows.sizes[0]
    with pytest.raises(ValueError, match="index differs from the one in"):
        io.Writer(path, others, resume=True).append(9, {"x": jnp.zeros(count), "y": jnp.zeros((count, 2), int)})


def test_donated_and_overwritten(folder):
    """What is appended may be donated, or overwritten where it is NumPy's, at once."""
    grid = jaxmpi.Grid(SIZE, (6 * SIZE,))
    advance = jax.jit(lambda x: x + 1, donate_argnums=0)
    x, y = jnp.zeros(grid.local_shape), np.zeros(grid.local_shape)
    with io.Writer(folder / "s", grid, behind=9) as out:
        for step in range(8):
            out.append(step, {"x": x, "y": y})
            x, y[...] = advance(x), step + 1
    steps = np.repeat(np.arange(8.0)[:, None], 6 * SIZE, 1)
    check(folder / "s", {"time": np.arange(8.0), "x": steps, "y": steps})


State = collections.namedtuple("State", "z n a")


def test_parts_are_worked_out_once(folder, monkeypatch):
    """Who writes which chunk, and how blocks get there, for all steps whose fields are alike; then the bits are right,
    in whatever order and structure the tree has its leaves."""
    made, right, plan = [], layout.parts, _core.plan
    monkeypatch.setattr(layout, "parts", lambda *args: made.append("parts") or right(*args))
    monkeypatch.setattr(_core, "plan", lambda *args: made.append("plan") or plan(*args))
    grid = jaxmpi.Grid(SIZE, (3 * SIZE + 1,))
    whole = np.arange(3 * SIZE + 1.0)
    block = np.pad(whole[grid.slices], 1)
    counts = []
    with io.Writer(folder / "s", grid, ("z", "n", "a"), width=1, chunks=2) as out:
        for step in range(9):
            z, a = jnp.asarray(block + step, jnp.float32), (block * step).astype("<f8" if step % 2 else ">f8")
            out.append(step, State(z, step * 3, a) if step < 6 else {"a": a, "n": step * 3, "z": z})
            counts.append((made.count("parts"), made.count("plan")))
    assert counts[1][0] == counts[0][0] == 1, counts
    assert counts[5] == counts[1], counts
    assert [parts for parts, _ in counts[6:]] == [1, 1, 1], counts
    steps = np.arange(9.0)
    expected = {
        "time": steps,
        "z": (whole + steps[:, None]).astype(np.float32),
        "n": np.arange(0, 27, 3),
        "a": whole * steps[:, None],
    }
    check(folder / "s", expected)


def test_leaves_that_are_wrong_later(folder, grid):
    """They are looked at each time, on the rank that has them, and all ranks say so."""
    x = np.zeros(grid.local_shape)
    deleted = jnp.asarray(x)
    deleted.delete()
    for number, (wrong, text) in enumerate(
        (
            (deleted, "x has been deleted"),
            (np.ma.masked_array(x, x > 0), "x is a masked array"),
            ("sea", "not those of the steps before|texts are for"),
            (None, "not those of the steps before"),
        )
    ):
        good = jnp.asarray(x) if wrong is deleted else x
        out = io.Writer(folder / str(number), grid)
        for step in range(2):
            out.append(step, {"x": good})
        with pytest.raises((ValueError, TypeError), match=text):
            out.append(2, {"x": wrong if RANK == SIZE - 1 else good})


def test_names_and_attributes(folder):
    """They are where xarray looks for them."""
    xarray = pytest.importorskip("xarray")
    grid = jaxmpi.Grid((SIZE, 1), (2 * SIZE, 3))
    units = {"time": {"units": "days since 2000-01-01"}, "h": {"units": "m"}, "x": {"units": "km"}}
    options = {"dims": ("y", "x"), "coords": {"x": np.linspace(0, 1, 3)}, "attrs": {**units, "": {"title": "sea"}}}
    with io.Writer(folder / "s", grid, ("h", "n"), **options) as out:
        for step in range(3):
            out.append(step, {"h": jnp.full(grid.local_shape, step, jnp.float32), "u": jnp.zeros(3), "n": 7 * step})
    COMM.Barrier()
    if RANK == 0:
        data = xarray.open_zarr(folder / "s")
        assert data.h.dims == ("time", "y", "x")
        assert (data.h.units, data.x.units, data.title) == ("m", "km", "sea")
        assert data.n.attrs == {}
        assert set(data) == {"h", "n"}
        assert list(data.n.values) == [0, 7, 14]
        assert [str(time)[:10] for time in data.time.values] == ["2000-01-01", "2000-01-02", "2000-01-03"]
        assert np.array_equal(data.h.mean(("x", "y")), [0, 1, 2])


def test_numbers_of_any_kind(folder, grid):
    """The first append and later ones may have arrays of NumPy or JAX, and numbers: name, shape and dtype count."""
    x, n = np.arange(2.0) + 2 * RANK, np.float64(3)
    kinds = ((x, n), (jnp.asarray(x), jnp.asarray(n)), (x, 3.0), (jnp.asarray(x), np.array(3.0)))
    for turn in range(2):
        with io.Writer(folder / "s", grid, resume=turn > 0) as out:
            for step, (field, number) in enumerate(kinds[turn:]):
                out.append(10 * turn + step, {"x": field, "n": number})
    expected = {"time": np.array([0, 1, 2, 3, 10, 11, 12.0]), "x": np.tile(np.arange(2.0 * SIZE), (7, 1))}
    check(folder / "s", {**expected, "n": np.full(7, 3.0)})


def test_overwrite(folder, grid):
    """The old file is there until the new one is. Both at once, and neither where something is there, are errors."""
    x = {"x": jnp.ones(grid.local_shape)}
    with io.Writer(folder / "s", grid) as out:
        out.append(1, {"y": x["x"]})
    COMM.Barrier()
    for options, error in (({}, FileExistsError), ({"resume": True, "overwrite": True}, ValueError)):
        with pytest.raises(error, match=r"resume=True goes on with (it|a file), overwrite=True replaces it"):
            io.Writer(folder / "s", grid, **options)
    again = io.Writer(folder / "s", grid, overwrite=True)
    check(folder / "s", {"time": np.ones(1), "y": np.ones((1, 2 * SIZE))})
    COMM.Barrier()
    again.append(2, x)
    again.close()
    check(folder / "s", {"time": np.array([2.0]), "x": np.ones((1, 2 * SIZE))})


def test_fewer_files(folder):
    """Several steps are in one chunk; what a reader sees is complete, whatever is flushed."""
    grid, path = jaxmpi.Grid(SIZE, (2 * SIZE,)), folder / "s"
    with io.Writer(path, grid, time_chunk=4) as out:
        for step in range(10):
            out.append(step, {"x": jnp.full(2, step)})
            if step == 5:
                out.flush()
            if step in (5, 9):
                found = read(path)
                assert RANK > 0 or len(found["time"]) >= 6
                assert RANK > 0 or found["x"][:, 0].tolist() == [*range(len(found["time"]))]
                COMM.Barrier()
    COMM.Barrier()
    files = [name for _, _, names in os.walk(path / "x" / "c") for name in names]
    assert len(files) == 3 * SIZE
    with io.Writer(path, grid, resume=True) as out:
        out.append(9, {"x": jnp.full(2, 90)})
    steps = np.array([*range(9), 90])
    check(path, {"time": np.arange(10.0), "x": np.repeat(steps[:, None], 2 * SIZE, 1)})


def test_flush(folder, grid):
    """All steps can be read, and a job that goes on from a checkpoint finds those that it does not compute again."""
    states = folder / "states"
    with pytest.raises(KeyError), io.Writer(folder / "s", grid) as out:  # noqa: PT012
        out.flush()
        for step in range(0, 100, 10):
            out.append(step, {"x": jnp.full(2, step)})
            if step == 50:
                out.flush()
                io.checkpoint(states, {"step": step})
            if step in (50, 60):
                found = read(folder / "s")
                assert RANK > 0 or len(found["time"]) >= 6
                COMM.Barrier()
            if step == 70:
                raise KeyError
    begin = io.load(io.latest(states))["step"] + 10
    with io.Writer(folder / "s", grid, resume=True) as out:
        for step in range(begin, 100, 10):
            out.append(step, {"x": jnp.full(2, step)})
    steps = np.arange(0, 100, 10)
    check(folder / "s", {"time": steps.astype(float), "x": np.repeat(steps[:, None], 2 * SIZE, 1)})
    with pytest.raises(ValueError, match=r"Writer\.flush: .* is closed"):
        out.flush()


# --- what is there, and when ------------------------------------------------------------------------------------------


def complete(path):
    """The steps that the metadata name, each of which must have all of its chunks."""
    root = json.loads((path / "zarr.json").read_bytes())
    arrays = root["consolidated_metadata"]["metadata"]
    count, meta = arrays["time"]["shape"][0], arrays["x"]
    stored = store.Stored.from_meta(path / "x", meta)
    assert meta["shape"][0] == count
    own = json.loads((path / "x" / "zarr.json").read_bytes())["shape"][0]
    assert own >= count
    for first, last in (*((step, step + 1) for step in range(count)), (0, own)):  # reading checks each chunk
        store.read(stored, [(first, last), *((0, n) for n in meta["shape"][1:])])
    return count


def test_readers_see_complete_steps_alone(folder, monkeypatch):
    """Also while one rank's files are slower than all others'."""
    slow = store.write

    def write(stored, region, values, lead=(), anew=False):
        time.sleep(0.02 * (SIZE - 1 - RANK))
        slow(stored, region, values, lead, anew)

    monkeypatch.setattr(store, "write", write)
    grid, seen = jaxmpi.Grid(SIZE, (3 * SIZE,)), []
    with io.Writer(folder / "s", grid) as out:
        for step in range(12):
            out.append(step, {"x": jnp.full(grid.local_shape, float(step))})
            if RANK == 0:
                seen.append(complete(folder / "s"))
    if RANK == 0:
        assert complete(folder / "s") == 12
        assert seen == sorted(seen)
        assert all(step + 1 - count <= 5 for step, count in enumerate(seen)), seen


def test_memory_is_bounded(folder, monkeypatch):
    """An append waits while as many steps as `behind` are not yet written."""
    right, gate, begun = store.write, threading.Semaphore(0), []

    def write(stored, region, values, lead=(), anew=False):
        gate.acquire()
        right(stored, region, values, lead, anew)

    monkeypatch.setattr(store, "write", write)
    grid = jaxmpi.Grid(SIZE, (SIZE,))

    def let_go():
        while out._worker._waiting < 3:
            time.sleep(0.005)
        for _ in range(8):
            time.sleep(0.05)
            begun.append(out._worker._waiting)
            gate.release()

    opener = threading.Thread(target=let_go)
    with io.Writer(folder / "s", grid, behind=3) as out:
        opener.start()
        for step in range(8):
            out.append(step, {"x": jnp.zeros(1)})
    opener.join()
    assert max(begun) == 3, begun


# --- errors -----------------------------------------------------------------------------------------------------------


def test_wrong_arguments(folder, grid):
    x = jnp.zeros(grid.local_shape)
    for error, arguments in (
        (ValueError, {"every": 0}),
        (TypeError, {"every": 1.5}),
        (ValueError, {"behind": 0}),
        (TypeError, {"resume": "yes"}),
        (TypeError, {"fields": (1,)}),
        (TypeError, {"fields": ()}),
        (ValueError, {"compressor": "lz77"}),
    ):
        with pytest.raises(error, match="Writer"):
            io.Writer(folder / "s", grid, **arguments)
    for error, text, now, tree, options in (
        (ValueError, "fields has 'q'", 0, {"x": x}, {"fields": ("q",)}),
        (ValueError, "is finite", float("nan"), {"x": x}, {}),
        (TypeError, "time must be a number", "now", {"x": x}, {}),
        (ValueError, "times are float64", 2**60 + 100, {"x": x}, {}),
        (ValueError, "called 'time'", 0, {"time": x}, {}),
        (TypeError, "texts are for", 0, {"x": x, "name": "sea"}, {}),
        (ValueError, "width has 'z'", 0, {"x": x}, {"width": {"z": 1}}),
        (ValueError, "coords has 'q'", 0, {"x": x}, {"coords": {"q": [1]}}),
    ):
        with pytest.raises(error, match=text):
            io.Writer(folder / "s", grid, **options).append(now, tree)
    assert COMM.bcast(os.listdir(folder)) == []


def test_steps_that_do_not_fit(folder, grid):
    x = jnp.zeros(grid.local_shape)
    for number, (now, tree, text) in enumerate(
        (
            (1, {"x": x}, "it must grow"),
            (2, {"y": x}, "not those of the steps before"),
            (2, {"x": x.astype(jnp.int32)}, "not those of the steps before"),
            (2, {"x": jnp.zeros(5 + 2 * SIZE)}, "not those of the steps before"),
        )
    ):
        out = io.Writer(folder / str(number), grid)
        out.append(1, {"x": x})
        with pytest.raises(ValueError, match=text):
            out.append(now, tree)
        with pytest.raises(ValueError, match="has failed before"):
            out.append(3, {"x": x})
        out.close()
        assert "jaxmpi.io.Writer" not in [thread.name for thread in threading.enumerate()]
        check(folder / str(number), {"time": np.ones(1), "x": np.zeros((1, 2 * SIZE))})
    out = io.Writer(folder / "closed", grid)
    out.append(1, {"x": x})
    out.close()
    out.close()
    with pytest.raises(ValueError, match="is closed"):
        out.append(2, {"x": x})
    check(folder / "closed", {"time": np.ones(1), "x": np.zeros((1, 2 * SIZE))})


def test_other_files_stay(folder, grid):
    """What exists is neither replaced nor gone on with, unless it is such a file and that is wanted."""
    x = {"x": jnp.zeros(grid.local_shape)}
    with io.Writer(folder / "s", grid) as out:
        out.append(1, x)
    io.save(folder / "state", x, grid=grid)
    for path, error, options in (
        ("s", FileExistsError, {}),
        ("state", ValueError, {"resume": True}),
        ("state", FileExistsError, {}),
    ):
        with pytest.raises(error, match=path):
            io.Writer(folder / path, grid, **options).append(2, x)
    for tree in ({"y": x["x"]}, {"x": x["x"].astype(jnp.int32)}, {"x": jnp.zeros((2, *grid.local_shape))}):
        with pytest.raises(ValueError, match="the fields are not those of"):
            io.Writer(folder / "s", grid, resume=True).append(2, tree)
    with pytest.raises(ValueError, match="has dimensions"):
        io.Writer(folder / "s", grid, resume=True, dims="y").append(2, x)
    with pytest.raises(ValueError, match="series"):
        io.load(folder / "s", grid=grid)
    check(folder / "s", {"time": np.ones(1), "x": np.zeros((1, 2 * SIZE))})
    assert COMM.bcast(sorted(os.listdir(folder))) == ["s", "state"]


@pytest.mark.ranks(2)
def test_ranks_that_differ(folder, grid):
    x = jnp.zeros(grid.local_shape)
    for number, (now, tree, options, text) in enumerate(
        (
            (RANK, {"x": x}, {}, "time differs from rank 0"),
            (5, {"x": x, "n": RANK}, {}, "last bit"),
            (5, {"x": x} if RANK else {"y": x}, {}, "not those of the steps|on rank"),
        )
    ):
        out = io.Writer(folder / str(number), grid, **options)
        out.append(-1, {"x": x, "n": 1} if "n" in tree else {"x": x})
        with pytest.raises(ValueError, match=text):
            out.append(now, tree)
    for options, tree in (
        (({"chunks": 1 + RANK}), {"x": x}),
        ({"time_chunk": 1 + RANK}, {"x": x}),
        ({}, {f"x{RANK}": x}),
        ({"resume": RANK == 0}, {"x": x}),
    ):
        with pytest.raises(ValueError, match=r"from rank 0|on rank"):
            io.Writer(folder / "q", grid, **options).append(0, tree)
    assert COMM.bcast(not (folder / "q").exists())


@pytest.mark.ranks(2)
def test_nothing_is_dropped_where_ranks_differ_in_the_time(folder, grid):
    """What comes again would be dropped from the time of rank 0 on."""
    x = {"x": jnp.zeros(grid.local_shape)}
    with io.Writer(folder / "s", grid) as out:
        for step in range(4):
            out.append(step, x)
    for error, text, time_here in (
        (ValueError, "time differs from rank 0", 1 + RANK),
        ((TypeError, ValueError), "time must be a number", "now" if RANK else 1),
    ):
        with pytest.raises(error, match=text):
            io.Writer(folder / "s", grid, resume=True).append(time_here, x)
    check(folder / "s", {"time": np.arange(4.0), "x": np.zeros((4, 2 * SIZE))})


@pytest.mark.parametrize("rank", [0, -1])
@pytest.mark.parametrize("at", [0, 2, 5])
def test_error_of_one_thread_is_raised_on_all_ranks(folder, monkeypatch, rank, at, grid):
    """Steps before it are there, it and those behind it are not."""
    right = store.write

    def write(stored, region, values, lead=(), anew=False):
        if lead == (at,) and rank % SIZE == RANK:
            raise OSError(28, "No space left on device")
        right(stored, region, values, lead, anew)

    monkeypatch.setattr(store, "write", write)
    appended = 0
    out = io.Writer(folder / "s", grid)
    with pytest.raises(OSError, match="No space left"), out:  # noqa: PT012
        for step in range(6):
            out.append(step, {"x": jnp.full(grid.local_shape, float(step))})
            appended += 1
    assert at < appended <= min(6, at + 4)
    COMM.Barrier()
    if RANK == 0:
        assert complete(folder / "s") == at
    monkeypatch.undo()
    with io.Writer(folder / "s", grid, resume=True) as out:
        for step in range(8):
            if step != at:
                out.append(step, {"x": jnp.full(grid.local_shape, float(step))})
    steps = np.array([step for step in range(8) if step != at], float)
    check(folder / "s", {"time": steps, "x": np.repeat(steps[:, None], 2 * SIZE, 1)})


@pytest.mark.alone
def test_a_writer_that_is_not_closed_is_told(tmp_path):
    grid = jaxmpi.Grid(1, (2,))
    out = io.Writer(tmp_path / "s", grid)
    out.append(0, {"x": jnp.zeros(2)})
    with pytest.warns(ResourceWarning, match="was not closed"):
        del out


# --- ranks that die or do not come ------------------------------------------------------------------------------

PROGRAM = """
import os, signal, sys, threading
import jax.numpy as jnp, numpy as np
import jaxmpi
from jaxmpi import io

path, first, end, victim, last, delay = sys.argv[1], *map(int, sys.argv[2:6]), float(sys.argv[6])
grid = jaxmpi.Grid((0, 0), (24, 30))
rows, columns = np.mgrid[grid.slices]
with io.Writer(path, grid, resume=True, chunks=(7, 11)) as out:
    for step in range(first, end):
        out.append(step, {"x": jnp.asarray(1000 * step + 30 * rows + columns), "n": step * step})
        if grid.comm.rank == 0:
            print("appended", step, flush=True)
        if (grid.comm.rank, step) == (victim, last):
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
"""


def steps_of(path):
    """How many there are; each must be right."""
    data = zarr.open_group(str(path), mode="r")
    steps, cells = np.arange(len(data["time"][...])), np.arange(24 * 30).reshape(24, 30)
    np.testing.assert_array_equal(data["time"][...], steps)
    np.testing.assert_array_equal(data["n"][...], steps**2)
    np.testing.assert_array_equal(data["x"][...], 1000 * steps[:, None, None] + cells)
    return len(steps)


@pytest.mark.alone
@pytest.mark.seconds(300)
def test_a_rank_is_killed(tmp_path):
    """After some of many steps: all that can be read is right, and the next job goes on from there."""
    program, path, chance, seen = tmp_path / "program.py", tmp_path / "s", random.Random(2), [0]
    program.write_text(PROGRAM)
    for _ in range(1 if drawing.brief else 10):
        last = seen[-1] + chance.randrange(5, 100)
        killed = chance.randrange(2), 0.05 * chance.random()
        job = launch(2, program, path, seen[-1], 10_000, killed[0], last, killed[1], check=False, JAX_ENABLE_X64="1")
        assert job.returncode != 0
        told = int(job.stdout.split("appended ")[-1].split()[0])
        seen.append(steps_of(path))
        assert told - 4 <= seen[-1] <= told + 2, job.stdout
    assert seen == sorted(set(seen))
    launch(1, program, path, seen[-1], seen[-1] + 3, -1, 0, 0, JAX_ENABLE_X64="1")
    assert steps_of(path) == seen[-1] + 3


@pytest.mark.alone
@pytest.mark.sampled
def test_a_rank_that_does_not_come_is_reported(tmp_path):
    """Where ranks agree by messages that are no operations: here, and as maps are made. It comes when it reads so."""
    program, reports = tmp_path / "program.py", tmp_path / "reports"
    program.write_text(f"""
import os, time
import jax.numpy as jnp
import jaxmpi
from jaxmpi import io
grid = jaxmpi.Grid((0,), (8,))
x, rank = jnp.zeros(grid.local_shape), grid.comm.rank
out = io.Writer({str(tmp_path / "s")!r}, grid)
out.append(0, x)
reports = os.open({str(reports)!r}, os.O_RDWR | os.O_CREAT)
if rank == 0:
    os.dup2(reports, 2)
for name, call in {{
    "io.Writer.append": lambda: out.append(1, x),
    "IndexMap": lambda: jaxmpi.IndexMap([rank], [0]),
}}.items():
    while rank == 1 and f"in {{name}}, as rank 0 of 2".encode() not in os.pread(reports, 1 << 20, 0):
        time.sleep(0.02)
    call()
out.close()
print("done")
""")
    job = launch(2, program, JAXMPI_TIMEOUT="0.2")
    assert job.stdout.count("done") == 2
    where = rf"as rank 0 of 2 .*; Python is at {program}:\d+ \(<lambda>\)"
    assert re.search(rf"waiting for \S+ s in IndexMap, {where}", reports.read_text()), reports.read_text()


@pytest.mark.ranks(2)
def test_hosts_that_do_not_share_the_folder(folder, monkeypatch, grid):
    """A rank that sees another folder under this path, as on another host: nothing is written, and all say so."""
    x = {"x": jnp.zeros(grid.local_shape)}
    with io.Writer(folder / "old", grid) as out:
        out.append(0, x)
    monkeypatch.setattr(saving, "_SECONDS", 0.1)
    if RANK == SIZE - 1:
        monkeypatch.setattr(Path, "exists", lambda path: False)
    for call in (
        lambda: io.save(folder / "s", x, grid=grid),
        lambda: io.checkpoint(folder / "c", x, grid=grid),
        lambda: io.Writer(folder / "t", grid).append(0, x),
        lambda: io.Writer(folder / "old", grid, resume=True).append(1, x),
    ):
        with pytest.raises(OSError, match="all ranks share"):
            call()
    monkeypatch.undo()
    check(folder / "old", {"time": np.zeros(1), "x": np.zeros((1, 2 * SIZE))})
    assert COMM.bcast([path.name for path in sorted(folder.rglob("*")) if path.suffix == ".shared"]) == []
    assert COMM.bcast(sorted(os.listdir(folder))) in (["c", "old"], ["old"])
