"""What files are where other jobs, deaths and damage come in between: at every call of the file system, on one rank.

A job is stopped before each of its calls in turn. Meanwhile a second process reads or writes the same files, or the
job dies there. The state must then be one of those that were written, whole, and each job must know whether its own is.
"""

import contextlib
import fcntl
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest

from jaxmpi import io
from support import drawing
from support.launch import outside_of_a_job

zarr = pytest.importorskip("zarr", minversion="3")
pytestmark = [pytest.mark.alone, pytest.mark.seconds(400)]

CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "fcntl.flock")
KINDS = (*CHANGES, "open", "os.listdir", "os.scandir")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Dead(BaseException):
    """The job has died: none of its calls does anything any more."""


class Calls:
    """Counts calls of the file system, and does something before one of them."""

    def __init__(self):
        self.count, self.at, self.work = 0, None, None
        self.changes = {}
        """What changes files: the call and the name, without numbers; and where it comes first."""
        self.active = False
        sys.addaudithook(self.heard)

    def heard(self, event, args):
        if self.active and event in KINDS and (event, args[-1]) != ("fcntl.flock", fcntl.LOCK_UN):
            self.note((event, args[0]) if event in CHANGES or (event == "open" and args[-1] & WRITING) else None)

    def note(self, change=None):
        self.count += 1
        if change is not None:
            event, path = change
            name = "" if isinstance(path, int) else os.path.basename(path)
            self.changes.setdefault((event, re.sub("[0-9a-f]{16,}|[0-9]|^[abc]$", "", name)), self.count)
        if self.count == self.at:
            self.active = False
            self.active = self.work() or True
        if self.active == "dead":  # so are all calls that follow, of those who would clean up
            raise Dead if threading.current_thread() is threading.main_thread() else OSError("dead")

    @contextlib.contextmanager
    def before(self, at=None, work=None):
        """Calls `work` before call number `at` of what happens in this block."""
        self.count, self.at, self.work, self.active, self.changes = 0, at, work, True, {}
        looks = {name: getattr(os, name) for name in ("stat", "lstat", "writev")}  # these are not announced
        for name, look in looks.items():
            setattr(os, name, lambda *args, look=look, **more: (self.active and self.note(), look(*args, **more))[1])
        try:
            yield
        finally:
            self.active = False
            for name, look in looks.items():
                setattr(os, name, look)


@pytest.fixture(scope="module")
def calls():
    return Calls()


# --- jobs: each returns what it has read, or raises -------------------------------------------------------------------


def tree(value):
    return {"a": np.full(5, value), "b": np.full((2, 3), value, np.float32)}


def value_of(found):
    """The one value of a tree, which must be whole."""
    values = {*found["a"].tolist(), *found["b"].ravel().tolist()}
    assert len(values) == 1, f"a mixture: {found}"
    assert found["a"].shape == (5,)
    return int(values.pop())


def save(folder, value):
    io.save(folder / "s", tree(value), overwrite=True)


def make(folder, value):
    io.save(folder / "s", tree(value))


def load(folder, value):
    return value_of(io.load(folder / "s"))


def checkpoint(folder, value):
    io.checkpoint(folder / "states", tree(value), keep=2)


def replace(folder, value):
    io.checkpoint(folder / "states", tree(value), step=1, overwrite=True)


def load_latest(folder, value):
    return value_of(io.load(io.latest(folder / "states")))


def append(folder, value):
    with io.Writer(folder / "w", resume=True) as out:
        out.append(value, tree(value))
        out.flush()
        out.append(value + 0.5, tree(value))


def series(folder, value):
    with io.Writer(folder / "w", overwrite=True) as out:
        out.append(value, tree(value))


def times(folder):
    return zarr.open_group(str(folder / "w"), mode="r")["time"][...].tolist() if (folder / "w").exists() else []


JOBS = {job.__name__: job for job in (save, make, load, checkpoint, replace, load_latest, append, series)}
REFUSED = "is being written|exists|another program has changed"


def attempt(job, folder, value):
    """What a job has read, True for one that has written, or the error."""
    try:
        found = job(folder, value)
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return True if found is None else found


if __name__ == "__main__":  # the second process: does jobs that it is told to do
    print("ready", flush=True)
    for line in sys.stdin:
        name, place, given = json.loads(line)
        print(json.dumps(attempt(JOBS[name], Path(place), given)), flush=True)
    sys.exit()


@pytest.fixture(scope="module")
def second():
    """Lets another process do a job, and returns what that says."""
    words = [sys.executable, __file__]
    path = os.pathsep.join(filter(None, [os.path.dirname(os.path.dirname(__file__)), os.environ.get("PYTHONPATH")]))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, env=outside_of_a_job() | {"PYTHONPATH": path}, **pipes) as process:
        assert process.stdout.readline() == "ready\n"

        def ask(job, folder, value):
            print(json.dumps([job.__name__, str(folder), value]), file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()


def begin(folder, job):
    """A folder in which everything is there, with value 1."""
    folder.mkdir()
    if job is not make:
        save(folder, 1)
    checkpoint(folder, 0)
    checkpoint(folder, 1)
    append(folder, 1)
    return folder


PLACES = 3


def points(calls, tmp_path, job, other=None):
    """The numbers of a job's calls.

    With `--brief` those before which files may look in a new way, since a call is the first that changes something of
    that name; and of these so many as are enough, others for each pair of jobs."""
    for name in ("warm", "count"):
        folder = begin(tmp_path / name, job)
        with calls.before():
            job(folder, 2)
    if not drawing.brief:
        return range(1, calls.count + 1)
    numbers = [*calls.changes.values()] if len(calls.changes) > PLACES else [*range(1, calls.count + 1)]
    step = -(-len(numbers) // PLACES)
    return numbers[zlib.crc32(repr([job.__name__, other and other.__name__]).encode()) % step :: step]


def refused(said):
    return isinstance(said, str) and any(word in said for word in REFUSED.split("|"))


WRITERS = {"s": (save, make), "states": (checkpoint, replace), "w": (append, series)}
PAIRS = [
    *itertools.product((save,), (save, load)),
    *itertools.product((make,), (make, save)),
    (load, save),
    *itertools.product((checkpoint, replace), (checkpoint, replace, load_latest)),
    *itertools.product((load_latest,), (checkpoint, replace)),
    *itertools.product((append, series), (append, series)),
]


@pytest.mark.parametrize(("job", "other"), PAIRS, ids=lambda job: job.__name__)
def test_a_second_process_in_between(calls, second, tmp_path, job, other):
    """Before each call of a job another one does a whole job: both are told the truth, and one state is there."""
    here = next((name for name, jobs in WRITERS.items() if job in jobs), None)
    for at in points(calls, tmp_path, job, other):
        folder, said = begin(tmp_path / str(at), job), []
        with calls.before(at, lambda folder=folder, said=said: said.append(second(other, folder, 3))):
            mine = attempt(job, folder, 2)
        about = f"at call {at}: {job.__name__} has said {mine!r}, {other.__name__} {said}"
        assert said, about
        theirs = said[0]
        writers = [own for own, result in ((2, mine), (3, theirs)) if result is True]
        if job in (load, load_latest):
            assert mine in (1, 3), about
        else:
            assert mine is True or refused(mine), about
        if other in (load, load_latest):
            assert theirs in (1, 2), about
        else:
            assert theirs is True or refused(theirs), about
        if here == "s":
            assert load(folder, 0) in (writers or [1]), about
            assert writers or job is make, about
        if here == "states":
            last = [own for own, its in ((2, job), (3, other)) if own in writers and its is checkpoint]
            assert load_latest(folder, 0) in (last or writers or [1]), about
        if here == "w":
            assert writers, about
            kept = {int(time) for time in times(folder)}
            assert kept <= {1, *writers}, about
            assert kept & {*writers}, about
            for name, right in (("a", 5), ("b", 6)):
                data = zarr.open_group(str(folder / "w"), mode="r")[name][...]
                assert [int(row.sum()) for row in data] == [int(time) * right for time in times(folder)], about
        if job is make and other is make:
            assert len(writers) == 1, about
        check_nothing_is_left(folder, about)


def check_nothing_is_left(folder, about):
    """The next job goes on as if nothing had been, and nothing of the others is left."""
    save(folder, 7)
    checkpoint(folder, 7)
    assert load(folder, 0) == load_latest(folder, 0) == 7, about
    append(folder, 7)
    assert times(folder)[-1] == 7.5, about
    hidden = [name for _, folders, files in os.walk(folder) for name in (*folders, *files) if name.startswith(".")]
    assert not hidden, (hidden, about)


@pytest.mark.parametrize("job", [save, make, checkpoint, replace, append, series], ids=lambda job: job.__name__)
def test_a_job_that_dies(calls, tmp_path, job):
    """Before each of its calls: what was there is there, or what it has written, whole; and the next job goes on."""
    for at in points(calls, tmp_path, job):
        folder = begin(tmp_path / str(at), job)
        with pytest.raises((Dead, OSError)), calls.before(at, lambda: "dead"):
            job(folder, 2)
        about = f"at call {at}"
        if job is not make or (folder / "s").exists():
            assert load(folder, 0) in (1, 2), about
        assert load_latest(folder, 0) in (1, 2), about
        assert {int(time) for time in times(folder)} <= {1, 2}, about
        check_nothing_is_left(folder, about)


@pytest.mark.parametrize("job", [save, checkpoint, append], ids=lambda job: job.__name__)
def test_an_interrupt(calls, tmp_path, job):
    """Ctrl-C before each call, of which a notebook keeps the traceback: the path is free at once."""

    def interrupt():
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt

    for at in points(calls, tmp_path, job):
        folder, kept = begin(tmp_path / str(at), job), None
        try:
            with calls.before(at, interrupt):
                job(folder, 2)
        except KeyboardInterrupt as error:
            kept = error
        assert load(folder, 0) in (1, 2), at
        check_nothing_is_left(folder, at)
        del kept


# --- damage -----------------------------------------------------------------------------------------------------------


def test_damaged_bytes_of_metadata(tmp_path):
    """Each byte of the metadata is another one: what is loaded is right, or refused by an error that names the path."""
    whole = {"a": np.arange(6).reshape(2, 3), "n": 10**30 + 7, "t": ("text", 0.5, np.float32(2)), "b": np.arange(6) * 2}
    io.save(tmp_path / "s", whole)
    meta = tmp_path / "s" / "zarr.json"
    good = meta.read_bytes()
    chance, refusals = np.random.default_rng(0), 0
    tried = range(0, len(good), 16 if drawing.brief else 1)
    for at in tried:
        data = bytearray(good)
        data[at] ^= 1 << int(chance.integers(8))
        meta.write_bytes(data)
        try:
            found, error = io.load(tmp_path / "s"), None
        except (OSError, ValueError) as raised:
            found, error = whole, raised
        assert type(error) in (type(None), ValueError, OSError, FileNotFoundError), (at, error)
        assert error is None or str(meta.parent) in str(error), (at, error)
        assert same(found, whole), (at, bytes(data[max(0, at - 40) : at + 40]))
        refusals += error is not None
    assert refusals > len(tried) // 2


def test_damaged_bytes_of_a_series(tmp_path):
    """Likewise, where a job goes on with it: what others read then is right."""
    append(tmp_path, 1)
    meta = tmp_path / "w" / "zarr.json"
    good, chance, refusals = meta.read_bytes(), np.random.default_rng(0), 0
    shutil.copytree(tmp_path / "w", tmp_path / "good")
    tried = range(0, len(good), 48 if drawing.brief else 2)
    for at in tried:
        data = bytearray(good)
        data[at] ^= 1 << int(chance.integers(8))
        meta.write_bytes(data)
        said = attempt(append, tmp_path, 2)
        assert said is True or str(meta.parent) in said, (at, said)
        if said is True:
            assert times(tmp_path) == [1, 1.5, 2, 2.5], at
            assert zarr.open_group(str(tmp_path / "w"), mode="r")["a"][:, 0].tolist() == [1, 1, 2, 2], at
        shutil.rmtree(tmp_path / "w")
        shutil.copytree(tmp_path / "good", tmp_path / "w")
        refusals += said is not True
    assert refusals > len(tried) // 2


def same(found, whole):
    if isinstance(whole, dict | tuple):
        keys = whole if isinstance(whole, dict) else range(len(whole))
        return type(found) is type(whole) and len(found) == len(whole) and all(same(found[k], whole[k]) for k in keys)
    return type(found) is type(whole) and np.array_equal(found, whole) and np.shape(found) == np.shape(whole)


@pytest.mark.parametrize("compressor", [None, "zstd"])
def test_files_that_are_exchanged(tmp_path, compressor):
    """Two chunks, two arrays, or an array of another state: each has its right checksum, and is refused."""
    for value in (1, 2):
        io.save(tmp_path / str(value), {"a": np.arange(8.0) * value, "b": np.ones(8) * value}, compressor=compressor)
    names = [(1, "a", 1, "b"), (1, "a", 2, "a"), (1, "b", 2, "b")]
    for here, first, there, second in names:
        for part in ("c/0", ""):
            pair = tmp_path / str(here) / first / part, tmp_path / str(there) / second / part
            exchange(tmp_path, *pair)
            with pytest.raises(OSError, match="belongs to another array, or to another state"):
                io.load(tmp_path / "1")
            exchange(tmp_path, *pair)
    assert same(io.load(tmp_path / "1"), {"a": np.arange(8.0), "b": np.ones(8)})


def exchange(folder, one, two):
    os.rename(one, folder / "passing")
    os.rename(two, one)
    os.rename(folder / "passing", two)


HOSTILE = {
    "out": lambda text: text["leaves"][0].update(name="../other/a"),
    "whole": lambda text: text["leaves"][0].update(name="/etc/a"),
    "type": lambda text: text["leaves"][0].update(dtype="int66"),
    "kind": lambda text: text["leaves"][0].update(type="pickle"),
    "shape": lambda text: text["leaves"][0].update(shape=[5]),
    "axes": lambda text: text["leaves"][0].update(axes=[9], division="grid"),
    "index": lambda text: text["leaves"][0].update(index="b"),
    "more": lambda text: text["leaves"][0].update(more=1),
    "none": lambda text: text.update(leaves=None),
    "tree": lambda text: text.update(tree={"dict": [["a", "z"]]}),
    "deep": lambda text: text.update(tree=json.loads("[" * 900 + "]" * 900)),
    "sums": lambda text: text["sums"].update(a="AAAA"),
    "words": lambda text: text.update(format="2"),
}


@pytest.mark.parametrize("change", HOSTILE)
def test_metadata_that_somebody_has_written(tmp_path, change):
    """With a right checksum: an error that names the file, and no file elsewhere is read."""
    from jaxmpi._files import metadata

    io.save(tmp_path / "s", {"a": np.arange(6), "b": np.arange(6)})
    meta = tmp_path / "s" / "zarr.json"
    root = json.loads(meta.read_bytes())
    text = json.loads(root["attributes"]["jaxmpi"])
    HOSTILE[change](text)
    form = text.pop("format")
    arrays = root["consolidated_metadata"]["metadata"]
    arrays |= {"../other/a": arrays["a"], "/etc/a": arrays["a"]}
    sealed = metadata.encode(arrays, {}, text if form == 2 else {**text, "format": form})
    meta.write_bytes(sealed)
    with pytest.raises(ValueError, match=r"s/zarr\.json is damaged") as error:
        io.load(tmp_path / "s")
    assert type(error.value) is ValueError
