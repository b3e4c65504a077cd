"""States in files, on the ranks of this job: against NumPy over the whole arrays, and what zarr and xarray read.

hypothesis draws grids, chunks, halos and fields. A case is written on some ranks and read on other ones.
"""

import collections
import errno
import itertools
import json
import math
import os
import shutil
import warnings
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from mpi4py import MPI

import jaxmpi
from jaxmpi import io
from jaxmpi._files import dtypes, store
from support import drawing
from support.divided import Divisions, Rows, some_divisions, some_processes, some_rows
from support.rows import each
from support.table import dtype_of

zarr = pytest.importorskip("zarr", minversion="3")
xarray = pytest.importorskip("xarray")

EXAMPLES = 16
STANDARD = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]
NARROW = ["bfloat16", "float8_e5m2", "float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e5m2fnuz", "float8_e4m3fnuz"]
NEWER = ["float8_e4m3", "float8_e3m4", "float8_e8m0fnu", "int4", "uint4"]
Numbers = collections.namedtuple("Numbers", "first second")


@pytest.fixture(scope="module")
def parts():
    """Communicators of the first ranks, by their number."""
    made = {}
    for number in range(1, MPI.COMM_WORLD.size + 1):
        made[number] = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank < number)
    yield made
    for comm in made.values():
        comm.Free()


def bits(x):
    """The bits of an array, with its dtype and shape."""
    array = np.asarray(x)
    return array.dtype.name, array.shape, np.ascontiguousarray(array).reshape(-1).view(np.uint8).tobytes()


def random(shape, dtype, *seed):
    """An array of random bits; of truth values and narrow integers of random values."""
    rng = np.random.default_rng([*seed])
    kind = dtype_of(dtype)
    if dtype == "bool" or "int" in dtype:
        return rng.integers(0, 2 if dtype == "bool" else 8, shape).astype(kind)
    raw = rng.integers(0, 256, (*shape, kind.itemsize), np.uint8)
    return raw.reshape(-1).view(kind).reshape(shape)


# --- fields of a grid -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case(Divisions):
    chunks: tuple[int, ...] | None
    compressor: str | None

    def part(self, which, parts):
        """The grid, on its ranks."""
        number = math.prod(map(len, self.blocks[which]))
        return self.grid(which, parts[number]) if MPI.COMM_WORLD.rank < number else None

    def whole(self, number):
        return random(self.shape(self.fields[number]), self.fields[number].dtype, self.seed, number)

    def tree(self, which, grid, halo):
        """The fields of this rank, some of them as arrays of NumPy."""
        for number, field in enumerate(self.fields):
            block = self.block(which, field, grid.coordinates, self.whole(number), halo)
            yield block if (number + self.seed) % 2 else jnp.asarray(block)


@st.composite
def cases(draw, size):
    dimensions = draw(st.integers(1, 3))
    dims = [draw(some_processes(draw(st.integers(1, size)), dimensions)) for _ in range(2)]
    least = draw(st.sampled_from([0, 1, 3]))
    return Case(
        **draw(some_divisions(dims, STANDARD + NARROW, least, min(least, 2))),
        chunks=draw(st.none() | st.tuples(*[st.integers(1, 9)] * dimensions)),
        compressor=draw(st.sampled_from([None, None, None, "zstd"])),
    )


@pytest.mark.seconds(400)
def test_round_trips(comm, folder, parts):
    numbers = itertools.count()

    def check(case):
        path = folder / f"{next(numbers)}.zarr"
        grid = case.part(0, parts)
        if grid is not None:
            tree = list(case.tree(0, grid, 1))
            more = {"chunks": case.chunks, "compressor": case.compressor}
            io.save(path, tree, grid=grid, width=case.widths[0], axes=case.axes, **more)
        comm.Barrier()
        grid = case.part(1, parts)
        if grid is not None:
            found = io.load(path, grid=grid, width=case.widths[1])
        comm.Barrier()  # what follows may fail on one rank alone
        if grid is not None:
            for x, right in zip(found, case.tree(1, grid, None), strict=True):
                assert type(x) is type(right), case
                assert bits(x) == bits(right), case
        if comm.rank == 0:
            group = zarr.open_group(path, mode="r")
            data = group if drawing.brief else xarray.open_zarr(path)
            for number in range(len(case.fields)):
                whole = dtypes.encode(case.whole(number))
                assert bits(group[str(number)][...]) == bits(whole), case
                assert bits(np.asarray(data[str(number)])) == bits(whole), case

    drawing.on_all_ranks(comm, cases(comm.size), check, EXAMPLES)


def test_no_chunk_is_written_twice(comm, folder, monkeypatch):
    """Whatever the chunks are, each is written once, by one rank."""
    written = []
    write = store.write_file
    monkeypatch.setattr(store, "write_file", lambda *args: (write(*args), written.append(str(args[0]))))
    grid = jaxmpi.Grid((0, 0), (13, 10))
    for chunks in (None, 1, 3, (13, 1), (2, 10), 100):
        written.clear()
        shape = tuple(n + 1 for n in grid.local_shape)
        io.save(folder / "state", {"h": jnp.ones(shape), "p": np.arange(5)}, grid=grid, chunks=chunks, overwrite=True)
        everyone = list(itertools.chain(*comm.allgather([path for path in written if f"{os.sep}h{os.sep}" in path])))
        assert len(everyone) == len(set(everyone))
        sizes = zarr.open_array(folder / "state" / "h", mode="r").chunks
        assert len(everyone) == math.prod(-(-n // size) for n, size in zip((14, 11), sizes, strict=True))


def test_blocks_are_chunks(folder, size, monkeypatch):
    """Where all blocks are of one size, they are written as they lie in memory."""
    grid = jaxmpi.Grid((0, 0), tuple(4 * n for n in jaxmpi.Grid((0, 0)).processes))
    monkeypatch.setattr("jaxmpi._files.chunks.redistribute", None)
    x = jnp.arange(16.0).reshape(4, 4)
    io.save(folder / "state", x, grid=grid)
    assert bits(io.load(folder / "state", grid=grid)) == bits(x)


def test_points_that_blocks_share(comm, folder, size):
    """Of a point that two blocks have in common, the second one's is stored, as by `Grid.gather`."""
    grid = jaxmpi.Grid((0,), (2 * size,))
    x = jnp.full(3, comm.rank, jnp.int32)
    io.save(folder / "state", x, grid=grid)
    assert np.array_equal(io.load(folder / "state"), [*np.repeat(np.arange(size), 2), size - 1])


def test_large_chunks_are_divided():
    from jaxmpi._files.chunks import LARGEST, limited

    for shape in ((4096, 4096), (7, 1 << 24), (10007, 10007), (3, 5, 1 << 25), (1 << 28,)):
        cut = limited(shape, 8)
        assert math.prod(cut) * 8 <= LARGEST
        assert math.prod(cut) * 8 * 8 > LARGEST, "not much too small"
    assert limited((4096, 4096), 8) == [2048, 4096]


# --- rows of a map ----------------------------------------------------------------------------------------------------


@st.composite
def maps(draw, size):
    """Two maps of the same rows."""
    first, ranks = Rows(*draw(some_rows(size))), draw(st.integers(1, size))
    owner = {index: draw(st.integers(0, ranks - 1)) for index in sorted(first.owner())}
    owned = tuple(tuple(index for index in owner if owner[index] == rank) for rank in range(ranks))
    ghosts = st.lists(st.sampled_from(list(owner)), max_size=5).map(tuple) if owner else st.just(())
    second = Rows(owned, draw(st.tuples(*[ghosts] * ranks)))
    return (first, second), draw(st.sampled_from(["float32", "bfloat16", "int64"])), draw(st.none() | st.integers(1, 9))


@pytest.mark.seconds(400)
def test_rows(comm, folder, parts):
    numbers = itertools.count()

    def check(case):
        divisions, dtype, chunks = case
        path = folder / f"rows-{next(numbers)}.zarr"
        ids = sorted(divisions[0].owner())
        whole = random((len(ids), 2), dtype, len(ids))
        values = dict(zip(ids, whole, strict=True))

        def local(map):
            rows = [values[i] for i in (*map.owned.tolist(), *map.ghosts.tolist())]
            return np.array(rows, whole.dtype).reshape(-1, 2)

        made = [its.on(parts[its.ranks]) if comm.rank < its.ranks else None for its in divisions]
        if made[0] is not None:
            tree = {"u": jnp.asarray(local(made[0])), "n": local(made[0]), "t": 1.5}
            io.save(path, tree, grid=made[0], chunks=chunks)
        comm.Barrier()
        if made[1] is not None:
            found, everything = io.load(path, grid=made[1]), io.load(path, comm=made[1].comm)
        comm.Barrier()  # what follows may fail on one rank alone
        if made[1] is not None:
            assert bits(found["u"]) == bits(found["n"]) == bits(local(made[1]))
            assert found["t"] == 1.5
            assert bits(everything["n"]) == bits(whole)
        if comm.rank == 0:
            data = zarr.open_group(path, mode="r") if drawing.brief else xarray.open_zarr(path)
            assert bits(np.asarray(data["u"])) == bits(dtypes.encode(whole))
            if ids != list(range(len(ids))):
                assert np.asarray(data["index"]).tolist() == ids

    drawing.on_all_ranks(comm, maps(comm.size), check, EXAMPLES)


# --- what is the same on all ranks ------------------------------------------------------------------------------------


def known(names):
    return [name for name in names if hasattr(np, name) or hasattr(ml_dtypes, name)]


def test_bits_of_dtypes(comm, folder):
    """Every bit comes back: of a field, of an array of all ranks, and through another division."""
    grid, names = jaxmpi.Grid((0, 1), (8 * comm.size + 3, 40)), known(STANDARD + NARROW + NEWER)
    wholes = {name: random(grid.global_shape, name, 7) for name in names}
    tree = {"field": {}, "same": {}, "numpy": {}, "scalar": {}, "empty": {}}
    for name, whole in wholes.items():
        tree["field"][name] = jnp.asarray(whole[grid.slices])
        tree["same"][name], tree["numpy"][name] = jnp.asarray(whole[:3]), whole[:3]
        tree["scalar"][name], tree["empty"][name] = jnp.asarray(whole[0, 0]), whole[:0]
    divisions = {kind: grid if kind == "field" else None for kind in tree}
    io.save(folder / "state", tree, grid=divisions, chunks=(5, 7))
    found = io.load(folder / "state", grid=grid)

    def check(name):
        for kind, its in tree.items():
            assert its[name].dtype == dtype_of(name)
            assert bits(found[kind][name]) == bits(its[name])
            assert type(found[kind][name]) is type(its[name])
        if comm.rank == 0:
            data = zarr.open_array(folder / "state" / f"field.{name}", mode="r")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about what is not a number
                same = np.array_equal(data[...].astype(complex), wholes[name].astype(complex), equal_nan=True)
            assert same
            assert data.metadata.dimension_names == ("axis_0", "axis_1")

    each(names, check)


@pytest.mark.alone
def test_every_value_of_narrow_dtypes():
    def check(name):
        kind = dtype_of(name)
        every = np.arange(16 if "float4" in name else 256**kind.itemsize).astype(f"u{kind.itemsize}").view(kind)
        stored = dtypes.encode(every)
        assert stored.dtype in (np.float16, np.float32)
        assert bits(dtypes.decode(stored, name)) == bits(every)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            np.testing.assert_array_equal(stored.astype(np.float64), every.astype(np.float64))

    each(known([*NARROW, "float8_e4m3", "float8_e3m4", "float8_e8m0fnu", "float4_e2m1fn"]), check)


def test_any_tree(folder):
    """Values and types come back, to the last bit."""
    tree = {
        "int": 3, "negative": -5, "wide": 2**64 - 1, "huge": -(10**40), "float": 0.1, "nan": math.nan, "inf": -math.inf,
        "complex": 1 - 2j, "bool": True, "text": "a/b ü", "none": None, "empty": {}, "tuple": (1, (2.0, [None, ()])),
        "scalar": np.float32(0.1), "numpy": np.arange(6.0).reshape(2, 3)[:, ::2], "zero": np.zeros((0, 3)),
        "jax": jnp.arange(3), "half": jnp.float16(2), "a/b": 1, 5: {"x": 2},
        "weak": jnp.asarray(0.5), "weaker": jnp.asarray(0.5) * jnp.arange(2), "c/b": 1,
    }  # fmt: skip
    tree = {str(key): value for key, value in tree.items()}
    io.save(folder / "state", tree)
    found = io.load(folder / "state")
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    for mine, its in zip(jax.tree.leaves(tree), jax.tree.leaves(found), strict=True):
        assert type(mine) is type(its)
        assert mine == its if isinstance(mine, str | int) else bits(mine) == bits(its)
        assert getattr(mine, "weak_type", False) == getattr(its, "weak_type", False)
    io.save(folder / "one", 7)
    assert io.load(folder / "one") == 7


def test_random_keys(comm, folder):
    key = jax.random.key(3)
    grid = jaxmpi.Grid((0,), (2 * comm.size + 1,))
    whole = jax.random.split(key, 2 * comm.size + 1)
    io.save(folder / "state", {"key": key, "each": whole[grid.slices]}, grid=grid)
    found = io.load(folder / "state", grid=grid)
    for mine, its in ((key, found["key"]), (whole[grid.slices], found["each"])):
        assert mine.dtype == its.dtype
        assert bits(jax.random.key_data(mine)) == bits(jax.random.key_data(its))


def test_states_of_optax(folder):
    optax = pytest.importorskip("optax")
    params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2, jnp.bfloat16)}
    optimizer = optax.adam(1e-3)
    state = optimizer.init(params)
    _, state = optimizer.update(jax.tree.map(jnp.ones_like, params), state, params)
    io.save(folder / "state", (params, state))
    with pytest.raises(ValueError, match=r"optax.*like="):
        io.load(folder / "state")
    for like in ((params, optimizer.init(params)), jax.eval_shape(lambda: (params, optimizer.init(params)))):
        found = io.load(folder / "state", like=like)
        assert jax.tree.structure(found) == jax.tree.structure((params, state))
        assert list(map(bits, jax.tree.leaves(found))) == list(map(bits, jax.tree.leaves((params, state))))


def test_like(folder):
    io.save(folder / "state", {"a": np.arange(3.0), "b": 2, "n": Numbers(1, 2.5)})
    assert io.load(folder / "state", like={"n": Numbers(0, 0.0)}) == {"n": Numbers(1, 2.5)}
    found = io.load(folder / "state", like={"a": jax.ShapeDtypeStruct((3,), np.float64)})["a"]
    assert isinstance(found, jax.Array)
    assert bits(found) == bits(np.arange(3.0))
    for like, text in (
        ({"c": 1}, "like has c"),
        ({"b": 1.0}, "b in like is of type float"),
        ({"a": np.zeros(3, np.float32)}, "a in like is of dtype float32"),
        ({"a": np.zeros(4)}, r"a in like has shape \(4,\)"),
    ):
        with pytest.raises(ValueError, match=text):
            io.load(folder / "state", like=like)


def test_what_xarray_reads(comm, folder):
    grid = jaxmpi.Grid((0, 0), (6, 8))
    x = np.arange(3.0)[:, None, None] + np.arange(6.0)[:, None] * np.ones(8)
    block = jnp.asarray(x[(slice(None), *grid.slices)])
    row, column = grid.slices
    u = jnp.asarray(np.arange(7.0)[row.start : row.stop + 1, None] * np.ones(8)[column])
    io.save(
        folder / "state",
        {"state": {"h": block, "u": u}, "t": 2.5},
        grid=grid,
        dims=("y", "x"),
        coords={"x": np.linspace(0, 1, 8), "y_outer": jnp.arange(7)},
        attrs={"": {"title": "a test"}, "state.h": {"units": "m", "range": np.array([0, 5])}, "x": {"units": "km"}},
    )
    if comm.rank == 0:
        data = xarray.open_zarr(folder / "state")
        assert data["state.h"].dims == ("state.h_0", "y", "x")
        assert data["state.u"].dims == ("y_outer", "x")
        assert data["state.h"].attrs == {"units": "m", "range": [0, 5]}
        assert data.attrs["title"] == "a test"
        assert data.x.attrs == {"units": "km"}
        np.testing.assert_array_equal(data["state.h"].values, x)
        np.testing.assert_array_equal(data["state.u"].sel(x=0, y_outer=3).values, 3)
        assert data.t == 2.5
        group = zarr.open_consolidated(folder / "state")
        assert sorted(group.array_keys()) == ["state.h", "state.u", "t", "x", "y_outer"]


# --- errors -----------------------------------------------------------------------------------------------------------


def assert_nothing(comm, folder, *but):
    """Nothing is left in the folder, as all ranks see it."""
    assert sorted(os.listdir(folder)) == sorted(but)
    comm.Barrier()


WRONG = {
    "leaf": (lambda grid: {"tree": {"a": object()}}, TypeError, "a is <object"),
    "traced": (lambda grid: {"tree": np.array(["text"])}, TypeError, "dtype <U4 cannot be stored"),
    "names": (lambda grid: {"tree": {"a": {"b": 1}, "a.b": 2}}, ValueError, "both be called 'a.b'"),
    "name": (lambda grid: {"tree": {"__a": 1}}, ValueError, "no name for an array"),
    "grid": (lambda grid: {"grid": 5}, TypeError, "grid is 5 of int"),
    "prefix": (lambda grid: {"grid": {"b": None}}, ValueError, "does not have the structure"),
    "field": (lambda grid: {"tree": np.zeros(99), "grid": grid}, ValueError, "cells along the axes"),
    "comm": (lambda grid: {"comm": 5}, TypeError, "comm must be"),
    "path": (lambda grid: {"path": 5}, TypeError, "path must be"),
    "url": (lambda grid: {"path": "s3://bucket/x"}, ValueError, "file system"),
    "overwrite": (lambda grid: {"overwrite": 1}, TypeError, "overwrite must be"),
    "compressor": (lambda grid: {"compressor": "gzip"}, ValueError, "compressor is 'gzip'"),
    "codec": (lambda grid: {"compressor": 3}, TypeError, "compressor is 3"),
    "chunks": (lambda grid: {"grid": grid, "chunks": 0}, ValueError, "chunks is 0"),
    "dims": (lambda grid: {"grid": grid, "dims": ("x", "y")}, ValueError, "dims has 2 entries"),
    "coords": (lambda grid: {"coords": {"q": [1]}}, ValueError, "coords has 'q'"),
    "sizes": (lambda grid: {"grid": grid, "coords": {"axis_0": [1]}}, ValueError, r"has shape \(1,\)"),
    "attrs": (lambda grid: {"attrs": {"q": {}}}, ValueError, "attrs has 'q'"),
    "json": (lambda grid: {"attrs": {"": {"f": print}}}, TypeError, "JSON"),
}


def test_wrong_arguments(comm, folder):
    """All ranks raise, also if the argument is wrong on the last one alone, and nothing is made."""
    grid = jaxmpi.Grid((0,), (3 * comm.size,))
    right = {"path": folder / "state", "tree": jnp.zeros(3), "grid": grid}

    def check(which, everywhere=False):
        make, kind, text = WRONG[which]
        wrong = {**right, **make(grid)} if everywhere or comm.rank == comm.size - 1 else right
        call = lambda path, tree, **more: io.save(path, tree, **more)  # noqa: E731
        with pytest.raises(kind, match=text if wrong is not right else None):
            call(**wrong)

    each(WRONG, check)
    check("leaf", everywhere=True)
    assert_nothing(comm, folder)


OTHERS = {
    "value": {"x": jnp.zeros(3).at[1].set(-0.0), "step": 1},
    "shape": {"x": jnp.zeros(4), "step": 1},
    "dtype": {"x": jnp.zeros(3, jnp.float16), "step": 1},
    "structure": {"x": jnp.zeros(3), "steps": 1},
}


@pytest.mark.ranks(2)
def test_ranks_that_differ(comm, folder):
    grid, right = jaxmpi.Grid((0,), (3 * comm.size,)), {"x": jnp.zeros(3), "step": 1}
    calls = {
        name: lambda tree=tree: io.save(folder / "s", tree if comm.rank else right) for name, tree in OTHERS.items()
    }
    calls["grid"] = lambda: io.save(folder / "s", right, grid=grid if comm.rank else None)
    calls["keep"] = lambda: io.checkpoint(folder / "s", right, keep=1 + comm.rank)

    def check(name):
        with pytest.raises(ValueError, match="differs from rank 0"):
            calls[name]()

    each(calls, check)
    assert_nothing(comm, folder)


def test_path_exists(comm, folder):
    (folder / "file").write_text("mine") if comm.rank == 0 else None
    (folder / "folder").mkdir() if comm.rank == 0 else None
    io.save(folder / "state", 1)
    for name in ("file", "folder", "state"):
        with pytest.raises(FileExistsError, match=name):
            io.save(folder / name, 2)
    for name in ("file", "folder"):
        with pytest.raises(FileExistsError, match=r"not a state of jaxmpi\.io"):
            io.save(folder / name, 2, overwrite=True)
    with pytest.raises(OSError, match="save"):
        io.save(folder / "file" / "state", 2)
    io.save(folder / "state", 2, overwrite=True)
    assert io.load(folder / "state") == 2
    assert_nothing(comm, folder, "file", "folder", "state")


@pytest.mark.parametrize(
    ("place", "name", "call"),
    [
        (store, "write_file", 1),
        (store, "write_file", 3),
        (store, "make", 1),
        (store, "replace", 1),
        (os, "rename", 1),
    ],
)
def test_no_room(comm, folder, monkeypatch, place, name, call):
    """One rank cannot write: all raise, the old state remains, and nothing is left."""
    grid = jaxmpi.Grid((0,), (7 * comm.size + 1,))
    x = jnp.zeros(grid.local_shape)
    io.save(folder / "state", {"x": x, "n": 1}, grid=grid)
    true, numbers, failing = getattr(place, name), itertools.count(1), comm.size - 1 if name == "write_file" else 0

    def fails(*arguments, **options):
        if comm.rank == failing and next(numbers) >= call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return true(*arguments, **options)

    monkeypatch.setattr(place, name, fails)
    with pytest.raises(OSError, match="No space left") as raised_here:
        io.save(folder / "state", {"x": x + 1, "y": x, "n": 2}, grid=grid, chunks=2, overwrite=True)
    assert (raised_here.value.errno == errno.ENOSPC) == (comm.rank == failing)
    monkeypatch.undo()
    comm.Barrier()
    assert io.load(folder / "state")["n"] == 1
    assert_nothing(comm, folder, "state")


def test_damaged_chunks(comm, folder):
    """An error on all ranks, and never wrong numbers: also if one rank alone reads the chunk."""
    grid = jaxmpi.Grid((0,), (4 * comm.size,))

    def check(row):
        compressor, damage = row
        x = jnp.arange(4.0) + comm.rank
        io.save(folder / "state", {"x": x}, grid=grid, compressor=compressor, overwrite=True)
        if comm.rank == 0:
            path = folder / "state" / "x" / "c" / str(comm.size - 1)
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 4
            new = {"cut": data[:-3], "longer": data + b"x", "bit": data, "empty": b""}
            path.write_bytes(new[damage]) if damage in new else path.unlink()
        comm.Barrier()
        with pytest.raises(OSError, match=f"the chunk .*x/c/{comm.size - 1} is (missing|damaged)"):
            io.load(folder / "state", grid=grid)

    each([*itertools.product((None, "zstd"), ("missing", "cut", "longer", "bit", "empty"))], check)


def test_damaged_metadata(comm, folder):
    io.save(folder / "state", {"x": np.arange(3)})
    good = (folder / "state" / "zarr.json").read_bytes()
    comm.Barrier()

    def put(data):
        (folder / "state" / "zarr.json").write_bytes(data) if comm.rank == 0 else None
        comm.Barrier()

    root = json.loads(good)
    del root["consolidated_metadata"]["metadata"]["x"]
    newer = json.loads(good)
    newer["attributes"]["jaxmpi"] = json.dumps({**json.loads(newer["attributes"]["jaxmpi"]), "format": 99})
    for data, text in (
        (good[: len(good) // 2], "is damaged"),
        (b"", "is damaged"),
        (b"[]", "is damaged"),
        (json.dumps(root).encode(), "is damaged"),
        (json.dumps(newer).encode(), "later version"),
        (b'{"zarr_format": 3, "node_type": "group", "attributes": {}}', "no state of jaxmpi.io"),
    ):
        put(data)
        with pytest.raises(ValueError, match=text):
            io.load(folder / "state")
    for path in ("nothing", "state/x/c", "state/x/c/0"):
        with pytest.raises(FileNotFoundError, match=r"there is no|is no state"):
            io.load(folder / path)


def test_other_grids(comm, folder):
    grid = jaxmpi.Grid((0,), (4 * comm.size,))
    io.save(folder / "state", {"x": jnp.zeros((2, 4))}, grid=grid)
    with pytest.raises(ValueError, match=r"x has .* cells along the axes of the grid"):
        io.load(folder / "state", grid=jaxmpi.Grid((0,), (5 * comm.size,)))
    with pytest.raises(ValueError, match="axes= says"):
        io.load(folder / "state", grid=jaxmpi.Grid((0, 1), (2, 4 * comm.size)))
    with pytest.raises(ValueError, match="load: x: a block of 4 cells"):  # the halo is wider
        io.load(folder / "state", grid=jaxmpi.Grid((0,), (4 * comm.size,), periodic=True), width=5)
    two = jaxmpi.Grid((1, 0), (2, 4 * comm.size))
    assert io.load(folder / "state", grid=two, axes=(0, 1))["x"].shape == two.local_shape
    map = jaxmpi.IndexMap(np.arange(comm.rank, 9, comm.size), [])
    with pytest.raises(ValueError, match="not divided by an IndexMap"):
        io.load(folder / "state", grid=map)
    io.save(folder / "rows", {"x": jnp.zeros(map.sizes[0])}, grid=map)
    with pytest.raises(ValueError, match="has 9 rows"):
        io.load(folder / "rows", grid=jaxmpi.IndexMap(np.arange(comm.rank, 8, comm.size), []))
    with pytest.raises(ValueError, match="other rows: the file has no rows 9"):
        io.load(folder / "rows", grid=jaxmpi.IndexMap(np.arange(1 + comm.rank, 10, comm.size), []))


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_checkpoints(comm, folder):
    path = folder / "deep" / "states"
    assert io.latest(path) is None
    for i in range(5):
        state = io.checkpoint(path, {"i": i})
        assert state == path / f"{i:08d}"
        assert io.load(io.latest(path))["i"] == i
        comm.Barrier()
        assert sorted(os.listdir(path)) == [f"{j:08d}" for j in range(max(0, i - 2), i + 1)]
        comm.Barrier()
    io.checkpoint(path, {"i": 40}, step=40, keep=1)
    comm.Barrier()
    assert os.listdir(path) == ["00000040"]
    assert io.checkpoint(path, {"i": 41}, keep=None).name == "00000041"
    with pytest.raises(FileExistsError):
        io.checkpoint(path, {"i": 0}, step=40)
    io.checkpoint(path, {"i": 7}, step=40, overwrite=True, keep=None)
    assert io.load(path / "00000040")["i"] == 7
    # An older one than all others is not removed as it is written.
    assert io.checkpoint(path, {"i": 3}, step=3, keep=1).exists()
    for wrong in ({"keep": 0}, {"step": -1}):
        with pytest.raises(ValueError, match=r"checkpoint: (keep|step)"):
            io.checkpoint(path, 1, **wrong)


def test_what_dead_runs_leave(comm, folder):
    """Half-written and half-removed states are not there, and go with the next one; a replaced state is found."""
    for i in range(2):
        io.checkpoint(folder, {"i": i})
    if comm.rank == 0:
        (folder / ".00000002.partial" / "x").mkdir(parents=True)
        shutil.copytree(folder / "00000000", folder / ".00000000.removed")
        os.rename(folder / "00000001", folder / ".00000001.replaced")
        (folder / "notes.txt").write_text("mine")
    comm.Barrier()
    assert io.latest(folder).name == "00000001"
    assert io.load(io.latest(folder))["i"] == 1
    assert io.checkpoint(folder, {"i": 2}).name == "00000002"
    assert_nothing(comm, folder, "00000000", "00000001", "00000002", "notes.txt")


def test_replacement_that_was_interrupted(comm, folder):
    io.save(folder / "state", 1)
    if comm.rank == 0:
        shutil.copytree(folder / "state", folder / ".state.partial")
        os.rename(folder / "state", folder / ".state.replaced")
    comm.Barrier()
    assert io.load(folder / "state") == 1
    comm.Barrier()
    with pytest.raises(FileExistsError):
        io.save(folder / "state", 2)
    io.save(folder / "state", 2, overwrite=True)
    assert io.load(folder / "state") == 2
    assert_nothing(comm, folder, "state")


def test_byte_order_masks_and_deleted_arrays(comm, folder):
    """Arrays in another byte order are as others are, also where they are redistributed. What no file holds is told."""
    grid = jaxmpi.Grid(comm.size, (5 * comm.size + 1,), comm=comm)
    whole = np.arange(5 * comm.size + 1)
    for dtype in (">f4", "<f4", ">i8", ">u2", ">c16"):
        block = whole.astype(dtype)[grid.slices]
        io.save(
            folder / "s", {"x": block, "y": whole.astype(dtype)}, grid={"x": grid, "y": None}, chunks=4, overwrite=True
        )
        found = io.load(folder / "s", grid=grid)
        assert np.array_equal(found["x"], block)
        assert np.array_equal(found["y"], whole)
        assert found["x"].dtype.isnative
    masked = np.ma.masked_array(np.arange(3.0), [0, 1, 0])
    with pytest.raises(TypeError, match="m is a masked array"):
        io.save(folder / "m", {"m": masked}, comm=comm)
    deleted = jnp.arange(3)
    deleted.delete()
    with pytest.raises(ValueError, match="d has been deleted"):
        io.save(folder / "m", {"d": deleted}, comm=comm)
    with pytest.raises(ValueError, match="save: the tree"):
        io.save(folder / "m", {1: 2, "1": 3}, comm=comm)
    io.save(folder / "m", {"t": np.str_("text")}, comm=comm)
    assert io.load(folder / "m", comm=comm) == {"t": "text"}


def test_what_is_loaded_is_as_other_arrays(comm, folder):
    """An exchange of arrays that one rank has read, and others have made: what ranks compare is the same."""
    grid = jaxmpi.Grid(comm.size, (2 * comm.size,), periodic=True, comm=comm)
    whole = np.arange(2 * comm.size, dtype=np.int32) * 1000
    io.save(folder / "s", {"x": whole}, comm=comm)
    loaded = io.load(folder / "s", comm=comm)["x"]
    x = jnp.asarray(loaded if comm.rank == 0 else whole)[grid.slices]
    padded = grid.exchange(jnp.pad(x, 1), 1)
    start = grid.slices[0].start
    assert np.array_equal(padded, np.take(whole, range(start - 1, start + 3), mode="wrap"))
