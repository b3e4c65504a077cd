"""What is around states and series: paths and names, other things in a folder, other jobs, communicators, settings of
JAX; and arguments that would be without effect."""

import collections
import gc
import os
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import jaxmpi
from jaxmpi import io
from jaxmpi._files import commit, layout

zarr = pytest.importorskip("zarr", minversion="3")
COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size


@pytest.fixture
def grid():
    return jaxmpi.Grid(SIZE, (4 * SIZE + 1,))


def on_root(work):
    """Calls it on rank 0, before the others go on."""
    if RANK == 0:
        work()
    COMM.Barrier()


def listed(folder):
    return COMM.bcast(sorted(os.listdir(folder)))


# --- paths and names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["a b", "ü 日本", "trailing/", "./x/../y", "memory::x", "#?*", "x" * 240])
def test_paths(folder, monkeypatch, path):
    monkeypatch.chdir(folder)
    for compressor in (None, "zstd"):
        io.save(path, {"a": np.zeros(3), "memory::b": np.arange(4)}, compressor=compressor, overwrite=True)
        found = io.load(folder / path)
        assert [*found] == ["a", "memory::b"]
        assert np.array_equal(found["a"], np.zeros(3))  # zarr by itself would write no file of zeros
        assert np.array_equal(found["memory::b"], np.arange(4))


def test_empty_path(folder, monkeypatch):
    """It would be the working folder."""
    monkeypatch.chdir(folder)
    for call in (lambda: io.save("", 1), lambda: io.checkpoint("", 1), lambda: io.latest(""), lambda: io.load("")):
        with pytest.raises(ValueError, match="path is ''"):
            call()
    assert listed(folder) == []


def test_links(folder):
    """The folder that a link leads to is written, and the link stays."""
    io.save(folder / "there", 1)
    on_root(lambda: [(folder / "link").symlink_to("there"), (folder / "early").symlink_to("deep/later")])
    for value in (2, 3):
        io.save(folder / "link", value, overwrite=True)
        assert io.load(folder / "there") == value
    io.save(folder / "early", 4)
    assert io.load(folder / "deep" / "later") == 4
    with io.Writer(folder / "link2", None) as out:
        out.append(0, {"n": 1})
    on_root(lambda: (folder / "link3").symlink_to(folder / "link2"))
    with io.Writer(folder / "link3", None, resume=True) as out:
        out.append(1, {"n": 2})
    assert zarr.open_group(str(folder / "link2"), mode="r")["n"][...].tolist() == [1, 2]
    COMM.Barrier()
    assert listed(folder) == ["deep", "early", "link", "link2", "link3", "there"]


@pytest.mark.parametrize("name", ["", ".", "..", "zarr.json", ".zarr.json.partial", "\ud800", "\0", "__x", "x" * 241])
def test_names_that_no_array_has(folder, name):
    with pytest.raises(ValueError, match="no name for an array"):
        io.save(folder / "state", {name: np.arange(3)})
    assert listed(folder) == []


def test_names_with_bars(folder):
    """Zarr divides folders by both; what has been written is read by others, and comes back."""
    tree = {"a\\b": np.arange(3), "c/d": {"e": 1.5}}
    io.save(folder / "state", tree)
    found = io.load(folder / "state")
    assert [*found] == [*tree]
    assert np.array_equal(found["a\\b"], np.arange(3))
    data = zarr.open_group(str(folder / "state"), mode="r")
    assert sorted(data.array_keys()) == ["a.b", "c.d.e"]
    with pytest.raises(ValueError, match=r"would both be called 'a\.b'"):
        io.save(folder / "t", {"a\\b": 1, "a.b": 2})


def test_dicts_with_other_keys(folder):
    io.save(folder / "state", {(1, 2): 3})
    with pytest.raises(ValueError, match=r"^load: \S*/state has a dict whose keys are no texts or integers"):
        io.load(folder / "state")
    assert io.load(folder / "state", like={(1, 2): 0}) == {(1, 2): 3}


def test_numbers_that_are_called_as_axes(folder, grid):
    """xarray could not open such a file."""
    x = jnp.zeros(grid.local_shape)
    with pytest.raises(ValueError, match="a leaf of the tree and an axis are both called 'x'"):
        io.save(folder / "state", {"h": x, "x": 1.5}, grid=grid, dims="x")
    with pytest.raises(ValueError, match="a leaf of the tree and an axis are both called 'x'"):
        io.save(folder / "state", {"x": jnp.stack([x, x])}, grid=grid, dims="x")
    io.save(folder / "state", {"h": x, "p": {"x": 1.5}}, grid=grid, dims="x")
    with io.Writer(folder / "series", grid, dims="x") as out:  # here numbers have an axis
        out.append(0, {"h": x, "x": 1.5})
    if RANK == 0:
        xarray = pytest.importorskip("xarray")
        assert float(xarray.open_zarr(folder / "state")["p.x"]) == 1.5
        assert xarray.open_zarr(folder / "series")["x"].values.tolist() == [1.5]


# --- folders of checkpoints -------------------------------------------------------------------------------------------


def test_other_things_in_a_folder_stay(folder):
    """What is not ours is neither taken for a state nor removed, whatever its name; later states get later numbers."""

    def put():
        (folder / "20240101").mkdir()
        (folder / "20240101" / "results.txt").write_text("mine")
        (folder / "00000005").write_text("a file")
        (folder / "000000012").mkdir()
        (folder / "00000003").symlink_to("nowhere")

    on_root(put)
    others = ["000000012", "00000003", "00000005", "20240101"]
    assert io.latest(folder) is None
    for i in range(3):
        assert io.checkpoint(folder, {"i": i}, keep=1).name == f"{20240102 + i}"
        COMM.Barrier()
        assert listed(folder) == [*others, f"{20240102 + i}"]
    on_root(lambda: (folder / "20250101").mkdir())  # such as a copy that is not complete
    assert io.load(io.latest(folder)) == {"i": 2}
    COMM.Barrier()
    assert (folder / "20240101" / "results.txt").exists()


def test_states_that_are_links(folder):
    """Old ones are removed as links, and what they lead to stays."""
    io.save(folder / "kept", {"i": 7})
    on_root(lambda: [(folder / "states").mkdir(), (folder / "states" / "00000001").symlink_to(folder / "kept")])
    assert io.load(io.latest(folder / "states")) == {"i": 7}
    COMM.Barrier()
    io.checkpoint(folder / "states", {"i": 8}, keep=1)
    COMM.Barrier()
    assert listed(folder / "states") == ["00000002"]
    assert io.load(folder / "kept") == {"i": 7}


def test_a_state_is_no_folder_of_states(folder):
    io.save(folder / "state", 1)
    with pytest.raises(FileExistsError, match="is a state itself"):
        io.checkpoint(folder / "state", 2)
    io.checkpoint(folder / "states", 3)
    with pytest.raises(FileNotFoundError, match=r"a folder of states: pass jaxmpi\.io\.latest"):
        io.load(folder / "states")


# --- other jobs -------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_ranks_that_call_other_functions(folder):
    """It is an error on all of them, before anything is read or written."""
    io.save(folder / "s", 1)
    calls = [lambda: io.load(folder / "s"), lambda: io.save(folder / "t", 1), lambda: io.latest(folder)]
    for first, second in ((0, 1), (1, 2), (2, 0)):
        with pytest.raises(ValueError, match=r"the function of jaxmpi.io differs from rank 0: .* and .*"):
            calls[second if RANK == SIZE - 1 else first]()
    assert listed(folder) == ["s"]


def test_two_writers(folder, grid):
    """The second raises, and the first goes on."""
    x = {"x": jnp.zeros(grid.local_shape)}
    first, second = io.Writer(folder / "s", grid), io.Writer(folder / "s", grid, resume=True)
    first.append(0, x)
    for call in (lambda: second.append(1, x), lambda: io.save(folder / "s", 1, overwrite=True)):
        with pytest.raises(BlockingIOError, match="is being written"):
            call()
    first.append(2, x)
    first.close()
    assert zarr.open_group(str(folder / "s"), mode="r")["time"][...].tolist() == [0, 2]
    COMM.Barrier()
    for end in ("close", "fail", "raise"):  # each gives the folder free
        out = io.Writer(folder / "s", grid, resume=True)
        out.append(3, x)
        if end == "close":
            out.close()
        elif end == "fail":
            with pytest.raises(ValueError, match="must grow"):
                out.append(3, x)
        else:
            with pytest.raises(KeyError), out:
                raise KeyError
    with pytest.raises(ValueError, match="the fields are not those of"):
        io.Writer(folder / "s", grid, resume=True).append(4, {"y": x["x"]})
    with io.Writer(folder / "c", grid, coords={"axis_0": np.arange(4 * SIZE + 1)}) as out:
        out.append(0, x)
    for _ in range(2):  # what has not been opened is not being written either
        with pytest.raises(ValueError, match="differs from the one in"):
            io.Writer(folder / "c", grid, coords={"axis_0": np.ones(4 * SIZE + 1)}, resume=True).append(4, x)
    with io.Writer(folder / "s", grid, resume=True) as out:
        out.append(4, x)


@pytest.mark.ranks(1)
def test_file_systems_without_locks(folder, monkeypatch):
    def flock(file, how):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(commit.fcntl, "flock", flock)
    for value in (1, 2):
        io.save(folder / "state", value, overwrite=True)
        assert io.load(folder / "state") == value
    assert listed(folder) == ["state"]


def test_what_is_no_series(folder, grid):
    x = {"x": jnp.zeros(grid.local_shape)}

    def put():
        (folder / "file").write_text("x")
        for name, text in (("cut", "{"), ("other", "{}"), ("half", '{"attributes": {"jaxmpi": {"series": true}}}')):
            (folder / name).mkdir()
            (folder / name / "zarr.json").write_text(text)
        (folder / "empty").mkdir()

    on_root(put)
    for name, text in (
        ("file", "is no series"),
        ("empty", "is no series"),
        ("cut", "is damaged"),
        ("other", "is damaged"),
        ("half", "is damaged"),
    ):
        with pytest.raises(ValueError, match=f"{name}.*{text}"):
            io.Writer(folder / name, grid, resume=True).append(0, x)


# --- communicators ----------------------------------------------------------------------------------------------------


def test_maps_of_other_ranks(folder):
    """It is an error, and nothing wrong is remembered of the maps."""
    owned = np.arange(RANK, 4 * SIZE, SIZE)
    of_all, own = jaxmpi.IndexMap(owned, []), jaxmpi.IndexMap(np.arange(4), [], comm=MPI.COMM_SELF)
    tree = {"a": jnp.zeros(4), "b": jnp.asarray(owned)}
    if SIZE > 1:
        with pytest.raises(ValueError, match="communicators of other ranks"):
            io.save(folder / "a", tree, grid={"a": own, "b": of_all})
    io.save(folder / "b", {"b": tree["b"]}, grid=of_all)
    assert np.array_equal(io.load(folder / "b")["b"], np.arange(4 * SIZE))


def test_maps_go_with_the_program_that_made_them(folder):
    """A program that makes maps again and again, and saves their rows, does not grow by all of them."""
    gone = []
    for turn in range(3):
        map = jaxmpi.IndexMap(np.arange(RANK, 4 * SIZE, SIZE) * (turn + 1), [])
        tree = {"x": jnp.arange(4) + turn}
        io.save(folder / f"s{turn}", tree, grid=map)
        assert np.array_equal(io.load(folder / f"s{turn}", grid=map)["x"], tree["x"])
        with io.Writer(folder / f"w{turn}", map) as out:
            out.append(0, tree)
        gone.append(weakref.ref(map))
        del map, out
    gc.collect()
    assert [its() for its in gone] == [None] * 3


def test_maps_that_are_equal(folder):
    """What is known of one of them does not go with another one."""
    owned = np.arange(RANK, 4 * SIZE, SIZE) * 3
    first, second = (jaxmpi.IndexMap(owned, []) for _ in range(2))
    tree = {"x": jnp.asarray(owned), "y": jnp.asarray(owned) + 1}
    io.save(folder / "s", tree, grid={"x": first, "y": second})
    out = io.Writer(folder / "w", second)
    out.append(0, tree)
    del first
    gc.collect()
    out.append(1, collections.OrderedDict(tree))  # another structure, whose parts are worked out again
    out.close()
    found = io.load(folder / "s", grid={"x": second, "y": jaxmpi.IndexMap(owned, [])})
    assert all(np.array_equal(found[name], tree[name]) for name in tree)


def test_communicator_that_is_freed(folder):
    comm = COMM.Dup()
    grid = jaxmpi.Grid(SIZE, (2 * SIZE,), comm=comm)
    out = io.Writer(folder / "s", grid)
    out.append(0, {"x": jnp.zeros(2)})
    comm.Free()
    with pytest.raises(ValueError, match="the communicator has been freed"):
        out.append(1, {"x": jnp.zeros(2)})
    for call in (
        lambda: io.save(folder / "f", {"x": jnp.zeros(2)}, grid=grid),
        lambda: io.load(folder / "f", grid=grid),
        lambda: io.latest(folder, comm=comm),
    ):
        with pytest.raises(ValueError, match="freed"):
            call()


class Counted(MPI.Intracomm):
    """A communicator that counts the collectives that are called on it."""

    calls: list[str] = []  # noqa: RUF012

    def __getattribute__(self, name):
        if name.lower() in ("allreduce", "bcast", "allgather", "gather", "barrier", "exscan", "alltoall"):
            self.calls.append(name)
        return super().__getattribute__(name)


def test_how_often_ranks_agree(folder, grid, monkeypatch):
    """Errors are told together with what ranks tell each other anyway: few small collectives, on many ranks too."""
    right = layout.clone_of
    monkeypatch.setattr(layout, "clone_of", lambda comm: Counted(right(comm)))
    tree, states = {"x": jnp.arange(grid.local_shape[0]), "step": 3}, folder / "states"
    map = jaxmpi.IndexMap(np.arange(RANK, 4 * SIZE, SIZE), [])
    out = io.Writer(folder / "w", grid)
    again = io.Writer(folder / "w", grid, resume=True)
    for most, call in (
        (6, lambda: io.save(folder / "s", tree, grid=grid)),
        (6, lambda: io.save(folder / "s", tree, grid=grid, overwrite=True, chunks=3)),
        (8, lambda: io.checkpoint(states, tree, grid=grid)),
        (3, lambda: io.latest(states)),
        (5, lambda: io.load(folder / "s", grid=grid, width=1)),
        (8, lambda: out.append(0, tree)),
        (1, lambda: out.append(1, tree)),
        (2, out.close),
        (8, lambda: again.append(2, tree)),
        (2, again.close),
        (10, lambda: io.save(folder / "rows", {"x": jnp.arange(4)}, grid=map)),
        (8, lambda: io.save(folder / "others", {"x": jnp.arange(4)}, grid=map)),
    ):
        Counted.calls.clear()
        call()
        assert len(Counted.calls) <= most, Counted.calls


# --- JAX --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap, jaxmpi.jit])
def test_functions_that_are_traced(folder, grid, transform):
    """There they would be called once, or with what is no number."""
    x = {"x": jnp.zeros(grid.local_shape)}
    io.save(folder / "s", x, grid=grid)
    out = io.Writer(folder / "w", grid)
    for call in (
        lambda: io.save(folder / "t", x, grid=grid),
        lambda: io.load(folder / "s", grid=grid, width=1),
        lambda: io.checkpoint(folder, x, grid=grid),
        lambda: io.latest(folder),
        lambda: out.append(0, x),
    ):

        def traced(y, call=call):
            call()
            return y * 1.0

        with pytest.raises(TypeError, match="in a function that JAX is tracing"):
            transform(traced)(jnp.ones(3) if transform is jax.vmap else 1.0)
    out.append(0, x)
    out.close()
    assert listed(folder) == ["s", "w"]


@pytest.mark.parametrize(
    ("setting", "dtype"),
    [
        ("jax_debug_nans", "float32"),
        ("jax_debug_infs", "bfloat16"),
        ("jax_disable_jit", "float32"),
        ("jax_check_tracer_leaks", "bfloat16"),
    ],
)
def test_settings(folder, grid, setting, dtype):
    """A state with what is no number is often just what is wanted of a run that is looked into."""
    map = jaxmpi.IndexMap(np.arange(RANK, 4 * SIZE, SIZE), [RANK])
    x, y = jnp.full(grid.local_shape, jnp.nan, dtype), jnp.full(sum(map.sizes), jnp.inf, dtype)
    divisions = {"x": grid, "y": map}
    jax.config.update(setting, True)
    try:
        io.save(folder / "s", {"x": x, "y": y}, grid=divisions, chunks=3)
        found = io.load(folder / "s", grid=divisions, width=1)
    finally:
        jax.config.update(setting, False)
    assert np.isnan(np.asarray(found["x"], np.float32)[1:-1]).all()
    assert np.isinf(np.asarray(found["y"], np.float32)).all()


# --- arguments --------------------------------------------------------------------------------------------------------


def test_arguments_without_effect(folder):
    """They are errors: a halo would become part of a field, for example."""
    grid = jaxmpi.Grid((SIZE, 1), (2 * SIZE, 3))
    x = {"x": jnp.zeros(grid.local_shape)}
    io.save(folder / "s", x, grid=grid)
    map = jaxmpi.IndexMap(np.arange(RANK, 2 * SIZE, SIZE), [])
    line = jaxmpi.Grid(SIZE, (2 * SIZE,))
    for text, call in (
        ("width and axes", lambda: io.save(folder / "t", x, width=1)),
        ("width and axes", lambda: io.save(folder / "t", x, width={"x": 1})),
        ("width and axes", lambda: io.save(folder / "t", x, grid=map, width=1)),
        ("width and axes", lambda: io.save(folder / "t", x, axes=(0,))),
        ("width and axes", lambda: io.load(folder / "s", width=1)),
        ("width and axes", lambda: io.load(folder / "s", grid={"x": None}, axes=(0, 1))),
        ("chunks is for fields", lambda: io.save(folder / "t", x, chunks=2)),
        ("chunks has 1 entries", lambda: io.save(folder / "t", x, grid=grid, chunks=(2,))),
        ("chunks has 3 entries", lambda: io.save(folder / "t", x, grid=grid, chunks=(2, 2, 2))),
        ("attrs of the group has", lambda: io.save(folder / "t", x, grid=grid, attrs={"": {"jaxmpi": 1}})),
        ("pass names without /", lambda: io.save(folder / "t", x, grid=grid, dims=("a/b", "c"))),
        (
            "two grids or maps that differ",
            lambda: io.save(folder / "t", {**x, "y": jnp.zeros(2)}, grid={"x": line, "y": map}, dims="x"),
        ),
        ("dims has 'time'", lambda: io.Writer(folder / "t", grid, dims=("time", "x")).append(0, x)),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    for attrs in ("x", {"time": "s"}, {"time": {"a": float("nan")}}):
        with pytest.raises(TypeError, match="attrs"):
            io.Writer(folder / "t", grid, attrs=attrs).append(0, x)
    assert listed(folder) == ["s"]


@pytest.mark.ranks(2)
def test_ranks_that_differ_in_width_or_path(folder, grid):
    """Without a comparison one of them would wait for a halo for ever, or its path would be of no effect."""
    x = jnp.zeros(grid.local_shape)
    io.save(folder / "s", {"x": x}, grid=grid)
    with pytest.raises(ValueError, match="what is wanted of x differs from rank 0"):
        io.load(folder / "s", grid=grid, width=RANK)
    with pytest.raises(ValueError, match="differs from rank 0"):
        io.save(folder / "t", {"x": jnp.pad(x, RANK)}, grid=grid, width=RANK)
    for path in (folder / f"w{RANK}", folder / str(RANK) / "w"):
        for call in (
            lambda path=path: io.Writer(path, grid).append(0, {"x": x}),
            lambda path=path: io.save(path, {"x": x}, grid=grid),
            lambda path=path: io.checkpoint(path, {"x": x}, grid=grid),
        ):
            with pytest.raises(ValueError, match="path differs from rank 0"):
                call()
    assert listed(folder) == ["s"]
