"""The timeline of a job: JAXMPI_TRACE, and what `python -m jaxmpi.trace` makes of it."""

import calendar
import contextlib
import gzip
import io
import json
import os
import random
import re
import resource
import subprocess
import sys
import time
import types
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from mpi4py import MPI

from jaxmpi import trace
from jaxmpi._mpi import timeline
from jaxmpi._trace import clocks, files, matching, report
from programs import errors_page
from support.launch import launch

pytestmark = [pytest.mark.alone, pytest.mark.sampled]

BEGIN = """
import os, sys, time
import jax, jax.numpy as jnp
from mpi4py import MPI
import jaxmpi
world = MPI.COMM_WORLD
rank, size = world.rank, world.size
x = jnp.arange(6.0)
"""

RANDOM = """
import random
half = world.Split(rank % 2)
half.Set_name("half")
draw = random.Random(1)
def right(x): return jaxmpi.sendrecv(x, x, source=(rank - 1) % size, dest=(rank + 1) % size, sendtag=3)
def reversed_order(x):
    if rank == 0: jaxmpi.send(x, size - 1, tag=5)
    return jaxmpi.recv(x, 0, tag=5) if rank == size - 1 else x
def in_flight(x):
    a, b = (jaxmpi.irecv(x, (rank - 1) % size, tag=4) for _ in range(2))
    c, d = jaxmpi.isend(x, (rank + 1) % size, tag=4), jaxmpi.isend(x + 1, (rank + 1) % size, tag=4)
    second = jaxmpi.wait(b)
    (first, _, _), _ = jaxmpi.waitall([a, c, d], after=jnp.sin(x))
    return second - first
def started(x):
    total, root = jaxmpi.iallreduce(x, MPI.SUM), jaxmpi.ibcast(x, size - 1)
    return jaxmpi.wait(root) + jaxmpi.wait(total) / size
KINDS = {
    "in flight": in_flight,
    "started": started,
    "start grad": lambda x: jax.grad(lambda x: jaxmpi.wait(jaxmpi.ibcast(x, 0)).sum())(x),
    "allreduce": lambda x: jaxmpi.allreduce(x, MPI.SUM) / size,
    "half": lambda x: jaxmpi.allreduce(x, MPI.MAX, comm=half),
    "bcast": lambda x: jaxmpi.bcast(x, 1),
    "alltoall": lambda x: jaxmpi.alltoall(jnp.stack([x] * size))[0],
    "right": right,
    "message": reversed_order,
    "grad": lambda x: jax.grad(lambda x: jaxmpi.bcast(x, 0).sum())(x),
}
for _ in range(60):
    kind, way, times = draw.choice(sorted(KINDS)), draw.choice(["eager", "jit", "loop"]), draw.randrange(1, 5)
    f = KINDS[kind]
    if way == "eager":
        for _ in range(times): x = f(x)
    elif way == "jit":
        g = jax.jit(f)
        for _ in range(times): x = g(x)
    else:
        x = jax.jit(lambda x: jax.lax.fori_loop(0, times, lambda i, x: f(x), x))(x)
"""


def run_traced(tmp_path, ranks, program, **options):
    folder = tmp_path / "trace"
    path = tmp_path / "program.py"
    path.write_text(BEGIN + program)
    done = launch(ranks, path, JAXMPI_TRACE=str(folder), **options)
    return folder, done


def report_of(folder, *options, **more):
    command = [sys.executable, "-m", "jaxmpi.trace", str(folder), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, **more)


def started(*names):
    return {label: 1 for name in names for label in (name, f"wait for {name}")}


EXECUTED = {
    **{name: {name: 1} for name in ("allreduce", "bcast", "alltoall")},
    "half": {"allreduce": 1},
    "right": {"sendrecv": 1},
    "message": {},
    "grad": {"bcast": 1, "reduce of cotangents": 1},
    "in flight": {label: 2 * count for label, count in started("isend", "irecv").items()},
    "started": started("iallreduce", "ibcast"),
    "start grad": started("ibcast", "ibcast of cotangents"),
}
"""What each rank executes in a kind of RANDOM; in a message only its two ends do."""


def expected(ranks):
    """How often each rank executes each operation of RANDOM, by the same draws, and the messages between ranks."""
    draw, counts, messages = random.Random(1), [Counter() for _ in range(ranks)], Counter()
    for _ in range(60):
        kind, _, times = draw.choice(sorted(EXECUTED)), draw.choice(["eager", "jit", "loop"]), draw.randrange(1, 5)
        for rank in range(ranks):
            counts[rank].update({label: times * count for label, count in EXECUTED[kind].items()})
            if kind in ("right", "in flight"):
                messages[rank, (rank + 1) % ranks] += times * (2 if kind == "in flight" else 1)
        if kind == "message":
            counts[0]["send"] += times
            counts[ranks - 1]["recv"] += times
            messages[0, ranks - 1] += times
    return counts, messages


def test_random_programs_are_in_it(tmp_path):
    """Each operation on each rank, and who talks to whom."""
    folder, _ = run_traced(tmp_path, 3, RANDOM)
    told = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    lists = [fact["args"]["ranks"] for facts in told for fact in facts if "ranks" in fact["args"]]
    assert [sorted(ranks for ranks in lists if len(ranks) > 1)] == [[[0, 2]]]  # once, not once for each of its ranks
    ranks = files.read(folder)
    counts, messages = expected(3)
    assert [Counter(event.label for event in rank.events) for rank in ranks] == counts
    assert all(rank.lost == 0 for rank in ranks)
    matched = matching.match(ranks)
    assert matched.unmatched == 0
    assert Counter((m.sent.rank, m.received.rank) for m in matched.messages) == messages
    assert sum(len(one.events) for one in matched.collectives) == sum(
        count
        for each in counts
        for name, count in each.items()
        if name not in matching.MESSAGES and not name.startswith("wait")
    )
    for one in matched.all:  # the clock is one
        assert all(late.end >= early.begin for late, early in one.needs())
    for rank in ranks:
        assert all(re.search(r"program.py:\d+ \(", event.arguments["line"]) for event in rank.events)
        comms = {event.arguments["comm"] for event in rank.events}
        assert {rank.communicators[comm].name for comm in comms} == {"the default communicator", "half"}
        members = {tuple(rank.communicators[comm].ranks) for comm in comms}
        assert members == {(0, 1, 2), (1,) if rank.rank == 1 else (0, 2)}
        assert {event.nbytes for event in rank.events} == {24, 72}


SLEEPS = """
f = jax.jit(lambda x: jaxmpi.allreduce(x, MPI.SUM))
f(x).block_until_ready(); world.Barrier()
for _ in range(3):
    if rank == 0: world.send("comes", 1)
    else: world.recv(source=0); time.sleep(0.8)
    f(x).block_until_ready()
if rank == 0:
    world.recv(source=1)
    time.sleep(0.4)
    jaxmpi.send(x, 1)
else:
    world.send("comes", 0)
    jaxmpi.recv(x, 0).block_until_ready()
"""


def test_waiting_is_for_whom_one_waits(tmp_path):
    """And the report of the same job."""
    folder, _ = run_traced(tmp_path, 2, SLEEPS)
    ranks = files.read(folder)
    matched = matching.match(ranks)
    assert clocks.align(ranks, matched) == 0
    caused = matching.add_waiting(matched)
    waits = [event.waited / 1e6 for event in ranks[0].events if event.name == "allreduce"]
    assert all(wait > 0.2 for wait in waits[1:])  # of rank 0 for rank 1, which sleeps when rank 0 comes
    assert caused[0, 1] / 1e6 == pytest.approx(sum(waits), abs=0.3)
    assert caused[1, 0] / 1e6 > 0.3  # rank 1 for rank 0, in recv
    received = next(event for event in ranks[1].events if event.name == "recv")
    assert 0.3 <= received.waited / 1e6 <= received.seconds
    told = report_of(folder).stdout
    assert re.search(r"allreduce +4 .*program.py:10 \(<lambda>\)\n", told)
    assert re.search(r"\n +0 -> 1 +1 +24 B", told)
    assert "Note" not in told
    merged = json.loads((folder / "timeline.json").read_text())
    assert Counter(event["ph"] for event in merged)["X"] == 4 + 4 + 2
    assert min(event["ts"] for event in merged if event["ph"] == "X") == 0


PROFILED = """
f = jax.jit(lambda x: jaxmpi.sendrecv(jaxmpi.allreduce(x, MPI.SUM), x, 1 - rank, 1 - rank))
f(x).block_until_ready()
with jax.profiler.trace(os.environ["PROFILE"] + str(rank)):
    f(x).block_until_ready()
"""


@pytest.mark.nightly
def test_profiler_of_jax_names_operations(tmp_path):
    run_traced(tmp_path, 2, PROFILED, PROFILE=str(tmp_path / "profile"))
    for rank in (0, 1):
        (path,) = (tmp_path / f"profile{rank}").rglob("*.trace.json.gz")
        names = {event.get("name", "") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
        for operation in ("allreduce", "sendrecv"):
            assert any(name.startswith(f"jaxmpi_{operation}") for name in names), names


KILLED = """
f = jax.jit(lambda x: jaxmpi.allreduce(x, MPI.SUM))
for _ in range(100): f(x)
if rank == 1:
    time.sleep(2)
    os.kill(os.getpid(), 9)
f(x)
f(x).block_until_ready()
"""


def test_killed_job_has_a_timeline(tmp_path):
    """Also of the operation in which a rank waited as the job ended."""
    folder, done = run_traced(tmp_path, 2, KILLED, check=False)
    assert done.returncode != 0
    ranks = files.read(folder)
    assert [len(rank.events) for rank in ranks] == [101, 100]
    assert [event.complete for event in ranks[0].events] == [True] * 100 + [False]
    matched = matching.match(ranks)
    notes = "\n".join(report.caveats(ranks, matched, clocks.align(ranks, matched)))
    assert "rank 0 never came back from allreduce, called at" in notes
    assert "rank 1 was killed" in notes


def test_no_folder():
    done = launch(0, "-c", "import jaxmpi", check=False, JAXMPI_TRACE="/dev/null/folder")
    assert done.returncode != 0
    assert "JAXMPI_TRACE=/dev/null/folder: no timeline can be written there" in done.stderr


@pytest.mark.parametrize("fault", ["is open to all", "belongs to another user"])
def test_trace_folders_that_are_not_safe(fault, tmp_path):
    """In which others could have put links to files of ours."""
    folder = tmp_path / "trace"
    folder.mkdir()
    if fault == "is open to all":
        told = "everyone may replace files in it"
        folder.chmod(0o777)
    elif os.geteuid() == 0:
        told = "it belongs to another user"
        os.chown(folder, 1234, 1234)
    else:
        pytest.skip("another user's folder needs root")
    begin = time.monotonic()
    done = launch(2, "-c", "import jaxmpi", check=False, JAXMPI_TRACE=str(folder))
    told = f"no timeline can be written there: {told}"
    errors_page.note(f"a trace folder {fault}", told, time.monotonic() - begin)
    assert done.returncode != 0
    assert f"JAXMPI_TRACE={folder}: {told}" in done.stderr
    assert not list(folder.iterdir())


def test_files_are_new(tmp_path, monkeypatch):
    """No file is overwritten, and no link is followed."""
    monkeypatch.setattr(timeline, "SETTINGS", types.SimpleNamespace(trace=str(tmp_path)))
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link"):
        with pytest.raises(FileExistsError):
            timeline._new_file(name)
    assert (tmp_path / "file").read_text() == "old"
    assert not (tmp_path / "nowhere").exists()
    os.close(timeline._new_file("new"))


def test_folder_under_an_umask_of_0(tmp_path):
    """It is made so that not all may write there."""
    launch(
        1, "-c", "import jaxmpi", through=("sh", "-c", 'umask 0; exec "$@"', "sh"), JAXMPI_TRACE=str(tmp_path / "new")
    )
    assert len(list((tmp_path / "new").iterdir())) == 1


def test_bad_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(trace.signal, "signal", lambda *_: None)
    for number, content in enumerate(({}, {"a.00000.json": "[\n"}, {"a.00000.json": "[\nnothing\n"})):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, text in content.items():
            (folder / name).write_text(text)
        with pytest.raises(SystemExit, match=r"^jaxmpi\.trace: "):
            trace.main([str(folder)])


BARRIERS = "for _ in range({}): jaxmpi.barrier()"


def test_jobs_in_one_folder(tmp_path):
    """At once, one after the other, of fewer ranks, and of one process that no launcher has started."""
    sizes, folder = {5: 2, 6: 1, 7: 3, 8: 2, 9: 0}, tmp_path / "trace"

    def job(barriers):
        (tmp_path / str(barriers)).mkdir()
        path = tmp_path / str(barriers) / "program.py"
        path.write_text(BEGIN + BARRIERS.format(barriers))
        launch(sizes[barriers], path, JAXMPI_TRACE=str(folder))

    with ThreadPoolExecutor() as pool:
        list(pool.map(job, [5, 6]))
    for barriers in (7, 8, 9):
        job(barriers)
    found = {}
    for one in files.jobs(folder):
        ranks = files.read(folder, one.name)
        (barriers,) = {len(rank.events) for rank in ranks}
        assert f"{barriers}/program.py" in one.program
        assert [rank.rank for rank in ranks] == list(range(one.size))
        assert matching.match(ranks).unmatched == 0
        found[barriers] = one
    assert {barriers: one.size for barriers, one in found.items()} == sizes | {9: 1}
    refused = report_of(folder)
    assert refused.returncode == 1
    assert not refused.stdout
    assert "5 jobs have written into" in refused.stderr
    for barriers, one in found.items():
        assert re.search(rf"\n  {one.name}  ({one.size}) of \1 ranks?  .*{barriers}/program.py", refused.stderr)
    told = report_of(folder, "--job", found[7].name)
    assert told.returncode == 0
    assert told.stdout.startswith("3 ranks, ")
    assert "; 5 names begin with 2" in report_of(folder, "--job", "2").stderr
    assert "; no names begin with x" in report_of(folder, "--job", "x").stderr
    assert report_of(folder, "--job", found[7].name, "--top", "-1").returncode == 2
    errors_page.goes_on("two jobs trace into one folder")


ROWS = """
import jaxmpi
right = jax.jit(lambda: jaxmpi.allreduce(jnp.zeros(8), MPI.SUM))  # line of 8
single = jax.jit(lambda: jaxmpi.allreduce(x[:4], MPI.SUM))  # line of 4
trees = jax.jit(lambda: jaxmpi.allreduce([x[:4], x[:3], x[:2]], MPI.SUM))  # line of 9
for f in (right, single, trees): jax.block_until_ready(f())
jaxmpi.allreduce([x[:4], x[:1]], MPI.SUM)  # line of 5
jaxmpi.bcast((x[:4], x[:3]), 0)  # line of 7
rows = jaxmpi.IndexMap(range(3 * rank, 3 * rank + 3), [(3 * rank - 1) % (3 * size)])
u = jnp.ones(4, jnp.float32)
jaxmpi.jit(lambda u: rows.accumulate(rows.exchange({"a": u, "b": u})))(u)
jax.grad(lambda u: jaxmpi.wait(rows.start(u)).sum() + rows.accumulate(u).sum())(u)
jaxmpi.migrate({"a": u, "b": u > 0, "c": u.astype(int)}, jnp.full(4, rank))
grids = jaxmpi.Grid((size, 1), (size, size)), jaxmpi.Grid((1, size), (size, size))
jaxmpi.redistribute(jnp.ones((1, size)), *grids)
jax.block_until_ready(jaxmpi.wait(jaxmpi.iredistribute(jnp.ones((1, size)), *grids)))
"""


def test_rows_and_grids_are_named_as_users_know_them(tmp_path):
    """Exchanges by index and their derivatives, rows that move, redistributions: their names, sizes, lines. Where the
    leaves of a tree are one operation, the lines are known by the size of all together."""
    folder, _ = run_traced(tmp_path, 2, ROWS)
    ranks = files.read(folder)
    lines = (tmp_path / "program.py").read_text().splitlines()
    expected = {
        "allreduce": 4, "bcast": 1,
        "IndexMap.exchange": 1, "IndexMap.accumulate": 2, "IndexMap.accumulate of cotangents": 1, "IndexMap.start": 1,
        "wait for IndexMap.start": 1, "IndexMap.start of cotangents": 1, "wait for IndexMap.start of cotangents": 1,
        "wait": 1,  # for nothing: the cotangent of what the exchange leaves as it is
        "counts of migrate": 1, "migrate": 2, "redistribute": 1, "iredistribute": 1, "wait for iredistribute": 1,
    }  # fmt: skip
    for rank in ranks:
        assert Counter(event.label for event in rank.events) == expected
        assert all("program.py:" in event.arguments["line"] for event in rank.events), rank.events
        for event in (event for event in rank.events if event.label in ("allreduce", "bcast")):
            number = 1 + next(i for i, line in enumerate(lines) if f"line of {event.arguments['count']}" in line)
            assert f"program.py:{number} (" in event.arguments["line"]
            assert " or " not in event.arguments["line"]
        exchanged = next(event for event in rank.events if event.label == "IndexMap.exchange")
        assert exchanged.nbytes == 24  # a label and a row of either array, with 8 bytes for each
    matched = matching.match(ranks)
    assert matched.unmatched == 0
    told = report_of(folder).stdout
    for name in ("IndexMap.exchange", "IndexMap.accumulate", "counts of migrate", "migrate", "redistribute"):
        assert re.search(rf"\n +{name} +[12] ", told), told


SPAWNS = """
import jaxmpi
parent = MPI.Comm.Get_parent()
if parent == MPI.COMM_NULL:
    parent = MPI.COMM_SELF.Spawn(sys.executable, [sys.argv[0]], 1)
    jaxmpi.barrier()
jaxmpi.barrier(); jax.effects_barrier()
parent.Disconnect()
"""


@pytest.mark.nightly
@pytest.mark.skipif(
    "Open MPI" not in MPI.Get_library_version(),
    reason="MPICH 5 spawns nothing where mpiexec binds ranks, as the launcher asks: 'duplicate setting: binding'",
)
def test_spawned_processes_are_a_job(tmp_path):
    path, folder = tmp_path / "program.py", tmp_path / "trace"
    path.write_text(BEGIN + SPAWNS)
    launch(1, "--mpiexec-args=--bind-to none --oversubscribe", path, JAXMPI_TRACE=str(folder))
    ranks = [files.read(folder, job.name) for job in files.jobs(folder)]
    assert sorted(len(rank.events) for job in ranks for rank in job) == [1, 2]


ALONE = r"""
import subprocess
code = "import jaxmpi; jaxmpi.barrier(); jaxmpi.barrier()"
subprocess.run([sys.executable, "-c", code], check=True)
if os.fork() == 0: sys.exit(0)
os.wait()
name = "/long \"name\" \\ \n é/" + "a" * 3000 + ".py"
half = world.Dup()
half.Set_name('half "\n\\')
exec(compile("def f(x): return jaxmpi.allreduce(x, MPI.SUM, comm=half)", name, "exec"))
f(x); jax.jit(f)(x).block_until_ready()
"""


def test_long_names_and_other_processes(tmp_path):
    """Processes that a rank starts write nothing."""
    folder, _ = run_traced(tmp_path, 1, ALONE)
    (path,) = folder.glob("*.json")
    json.loads(path.read_text())
    (rank,) = files.read(folder)
    assert [event.name for event in rank.events] == ["allreduce"] * 2
    for event in rank.events:
        assert re.fullmatch(r'/long "name" \\ \n é/a{3000}\.py:1 \(f\)', event.arguments["line"])
    told = report_of(folder, env={"PATH": "/bin", "PYTHONIOENCODING": "ascii"})
    assert told.returncode == 0
    assert re.search(r'\n *allreduce +2 .* /long "name" \\ \\n \\xe9/a{3000}\.py:1 \(f\)\n', told.stdout)


def no_space():
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))


@pytest.mark.filterwarnings("ignore")  # of JAX about the fork of subprocess
@pytest.mark.parametrize("way", ["full", "a folder is there", "no folder"])
def test_table_without_files(way, tmp_path):
    make_file(tmp_path, 0, 1)
    more = {"preexec_fn": no_space} if way == "full" else {}
    options = ["--output", "/dev/null/folder"] if way == "no folder" else []
    if way == "a folder is there":
        (tmp_path / "timeline.json").mkdir()
    else:
        (tmp_path / "timeline.json").write_text("old")
    there = sorted(path.name for path in tmp_path.iterdir())
    told = report_of(tmp_path, *options, **more)
    assert told.returncode == 1
    assert re.search(r"\n +barrier +1 .*a.py:3 \(f\)\n", told.stdout)
    assert "Written" not in told.stdout
    assert re.match(r"jaxmpi.trace: /.*/timeline.json cannot be written: .*--output names another folder", told.stderr)
    assert "Traceback" not in told.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == there
    assert way == "a folder is there" or (tmp_path / "timeline.json").read_text() == "old"


def test_files_are_written_elsewhere(tmp_path):
    """And not through a link that someone has put there."""
    make_file(tmp_path / "trace", 0, 1)
    (tmp_path / "output").mkdir()
    (tmp_path / "mine").write_text("old")
    (tmp_path / "output/timeline.json").symlink_to(tmp_path / "mine")
    told = report_of(tmp_path / "trace", "--output", str(tmp_path / "output"))
    assert told.returncode == 0
    assert len(list((tmp_path / "trace").iterdir())) == 1
    assert (tmp_path / "mine").read_text() == "old"
    assert len(json.loads((tmp_path / "output/timeline.json").read_text())) == 3


# --- files that are made up ------------------------------------------------------------------------------------------


def make_file(folder, rank, size, job="j", launched="l", realtime=0, facts=(), name=None, events=1):
    """A rank's timeline."""
    folder.mkdir(exist_ok=True)
    header = {"job": job, "launched": launched, "rank": rank, "size": size, "host": "a", "program": ["a.py"]}
    header |= {"clock": "a", "monotonic": 0, "realtime": realtime, "versions": []}
    place = {"pid": rank, "tid": 1}
    lines = [("jaxmpi", "M", header), ("jaxmpi_communicator", "M", {"number": 1, "name": "c"}), *facts]
    lines += [("barrier", "X", {"comm": 1, "line": "a.py:3 (f)"})] * events + [("jaxmpi_end", "M", {"lost": 0})]
    written = [
        json.dumps(
            {"name": name, "ph": phase, "args": arguments, **place, **({"ts": 1.0, "dur": 2.0} if phase == "X" else {})}
        )
        for name, phase, arguments in lines
    ]
    path = folder / f"{name or job or f'own{rank}'}.{rank:05d}.json"
    path.write_text("[\n" + ",\n".join(written) + "\n]\n")


def test_ranks_that_do_not_know_their_job(tmp_path):
    """They are known by those that were launched with them. What one launch has started as two
    jobs tells a rank nothing: it is in neither."""
    make_file(tmp_path, 0, 3, job="x")
    make_file(tmp_path, 1, 3, job=None, launched="l")
    make_file(tmp_path, 2, 3, job=None)
    for launched, name, ranks in (("k", "other", (0, 1)), ("m", "third", (1, 0))):
        for rank in (0, 1):
            make_file(tmp_path, rank, 2, job=None, launched=launched, name=f"{name}{ranks[rank]}")
    for job in ("first", "second"):
        make_file(tmp_path, 0, 2, job=job, launched="n")
    make_file(tmp_path, 1, 2, job=None, launched="n", name="neither")
    assert [(job.name, job.size, list(job.paths)) for job in files.jobs(tmp_path)] == [
        ("first", 2, [0]),
        ("neither", 2, [1]),
        ("other0", 2, [0, 1]),
        ("second", 2, [0]),
        ("third0", 2, [0, 1]),
        ("x", 3, [0, 1, 2]),
    ]
    assert matching.match(files.read(tmp_path, "x")).unmatched == 0


def test_jobs_of_one_second_have_other_names():
    begin = int(time.time())
    made = [timeline.new_job() for _ in range(1000)]
    assert all(begin <= job >> 30 <= time.time() for job in made)
    names = {timeline._name(job) for job in made}
    assert len(names) == 1000
    assert all(re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{8}", name) for name in names)


def test_names_of_jobs_have_the_time_in_utc(monkeypatch):
    """In all zones of time: ranks on other machines, and those who look for a file, need not know this one's."""
    try:
        with monkeypatch.context() as changed:
            changed.setenv("TZ", "EST5")
            time.tzset()
            name = timeline._name(calendar.timegm((2026, 12, 31, 23, 59, 59)) << 30 | 0x0123ABCD)
    finally:
        time.tzset()
    assert name == "20261231-235959-0123abcd"


@pytest.mark.parametrize("other", [{}, {"rank": 0}, {"size": 3}, {"realtime": 1e9}], ids=str)
def test_jobs_are_not_mixed(other, tmp_path):
    """Of those that know their job a rank may begin when it wants."""
    make_file(tmp_path / "known", 0, 2)
    make_file(tmp_path / "known", 1, 2, realtime=1e9)
    assert [rank.rank for rank in files.read(tmp_path / "known")] == [0, 1]
    make_file(tmp_path, 0, 2, job=None, name="first")
    make_file(tmp_path, **{"rank": 1, "size": 2, "job": None, "name": "second", **other})
    with pytest.raises(ValueError, match="may be of different jobs") if other else contextlib.nullcontext():
        files.read(tmp_path)


def test_ranks_of_communicators_are_listed_once(tmp_path):
    """Where the file that lists them is missing nothing is known of who waited, and what is missing is said."""
    comm = {"number": 1, "name": "half", "members": "h"}
    for rank in (1, 2):
        listed = {"ranks": [1, 2]} if rank == 1 else {}
        make_file(tmp_path, rank, 3, facts=[("jaxmpi_communicator", "M", comm | listed)])
    make_file(tmp_path, 0, 3, events=0)
    ranks = files.read(tmp_path)
    assert [list(rank.communicators[1].ranks) for rank in ranks] == [[0, 1, 2], [1, 2], [1, 2]]
    assert [len(one.events) for one in matching.match(ranks).collectives] == [2]
    (tmp_path / "j.00001.json").unlink()
    assert matching.match(files.read(tmp_path)).unmatched == 1


def test_communicators_of_one_name(tmp_path):
    """They are told apart by their order, of those with the same ranks. Two threads may tell one, and one may get
    another name later, which has been its name from the beginning for all others."""
    told = [(2, "c"), (3, "c"), (2, "c"), (1, "d"), (4, "c"), (5, "c", "h"), (6, "c")]
    named = [{"number": number, "name": name} for number, name, *_ in told]
    with_members = [{"members": members[0], "ranks": [0]} if members else {} for _, _, *members in told]
    facts = [("jaxmpi_communicator", "M", one | more) for one, more in zip(named, with_members, strict=True)]
    make_file(tmp_path, 0, 1, facts=facts)
    (rank,) = files.read(tmp_path)
    keys = [("d", "", 0), ("c", "", 0), ("c", "", 1), ("c", "", 2), ("c", "h", 0), ("c", "", 3)]
    assert {number: comm.key for number, comm in rank.communicators.items()} == dict(enumerate(keys, 1))


TRACKS = [
    *[("B", 1, 10.0), ("B", 2, 20.0), ("E", 2, 25.0), ("E", 1, 30.0)],  # one while the other lasts
    *[("B", 3, 32.0), ("B", 1, 35.0), ("E", 3, 38.0), ("B", 2, 40.0)],  # one before the other ends
    *[("B", 5, 42.0), ("B", 5, 44.0)],  # one whose end cannot be read, and another one
    ("E", 4, 45.0),  # one whose beginning cannot be read
]


@pytest.mark.parametrize("lost", [0, 1])
def test_beginnings_and_ends_of_several_threads(lost, tmp_path):
    """What has no end was going on when the process ended, or its end is one of the lines that were left out."""
    make_file(tmp_path, 0, 1, events=0)
    written = "".join(
        json.dumps({"name": "barrier", "ph": phase, "pid": 0, "tid": track, "ts": at, "args": {"comm": 1}}) + ",\n"
        for phase, track, at in TRACKS
    )
    path = tmp_path / "j.00000.json"
    text = path.read_text().replace('{"name": "jaxmpi_end"', written + '{"name": "jaxmpi_end"')
    path.write_text(text.replace('"lost": 0', f'"lost": {lost}'))
    (rank,) = files.read(tmp_path)
    found = [(event.track, event.begin, event.end) for event in rank.events if event.complete]
    assert found == [(1, 10, 30), (2, 20, 25), (3, 32, 38), (4, 45, 45)]
    going_on = [(event.track, event.begin, event.end) for event in rank.events if not event.complete]
    assert going_on == ([] if lost else [(1, 35, 45), (2, 40, 45), (5, 44, 45)])
    assert rank.events == sorted(rank.events, key=lambda event: event.begin)


def test_lines_that_cannot_be_read_are_told(tmp_path):
    make_file(tmp_path, 0, 1)
    path = tmp_path / "j.00000.json"
    path.write_text(path.read_text().replace('"jaxmpi_end"', '"jaxmpi_end') + '{"name": "bar')
    ranks = files.read(tmp_path)
    assert "1 lines of the timeline of rank 0 cannot be read" in report.caveats(ranks, matching.match(ranks), 0.0)


@pytest.mark.parametrize("line", ["[]", "5", "{}", '{"name": "barrier", "ph": "X", "args": {"comm": 1}}'])
def test_damaged_timelines(line, tmp_path):
    """The error names the file."""
    make_file(tmp_path, 0, 1)
    path = tmp_path / "j.00000.json"
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=f"{path} is no timeline, or is damaged"):
        files.read(tmp_path)


@pytest.mark.parametrize("where", ['"host": "', '"line": "', '"program": ["'])
def test_no_name_changes_the_terminal(where, tmp_path):
    told_by_error = "program" in where
    for job in ("a", "b") if told_by_error else "a":
        make_file(tmp_path, 0, 1, job=job)
        path = tmp_path / f"{job}.00000.json"
        path.write_text(path.read_text().replace(where, where + r"\u001b[2J"))
    done = report_of(tmp_path)
    assert r"\x1b[2J" in done.stdout + done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert done.returncode == told_by_error


def test_a_job_of_many_ranks(tmp_path):
    """Takes no memory for those of which there is nothing."""
    make_file(tmp_path, 5, 1 << 24)
    limited = ["sh", "-c", 'ulimit -v 8388608; exec "$@"', "sh", sys.executable, "-m", "jaxmpi.trace", tmp_path]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "ranks 0 to 4, 6 to 16777215 have no timeline" in done.stdout


# --- clocks, on timelines that are made up ---------------------------------------------------------------------------


def ranks_of(size, *machines):
    """Ranks without events, on these machines, who have one communicator."""
    made = [files.Rank(rank, size, machines[rank], machines[rank], 0.0, 0.0, lost=0) for rank in range(size)]
    for rank in made:
        rank.communicators[1] = files.Communicator("", tuple(range(size)))
    return made


def made_up(shift, drift):
    """Four ranks on two machines, whose second clock is `shift` microseconds ahead and runs faster by `drift`; the true
    times of their events."""
    draw = random.Random(3)
    ranks, truth = ranks_of(4, "m0", "m0", "m1", "m1"), {}
    free = [0.0] * 4

    def add(rank, name, begin, end, **arguments):
        event = files.Event(rank, 1, name, begin, end, {"comm": 1, **arguments})
        truth[id(event)] = (begin, end)
        if rank >= 2:
            event.begin, event.end = (time * (1 + drift) + shift for time in (begin, end))
        ranks[rank].events.append(event)
        free[rank] = end

    for _ in range(2000):
        begins = [time + draw.expovariate(1 / 2e4) for time in free]
        if draw.random() < 0.5:
            done = max(begins) + draw.uniform(5, 30)
            for rank in range(4):
                add(rank, "allreduce", begins[rank], done + draw.uniform(0, 5), sent=4, received=4)
        else:
            a, b = draw.sample(range(4), 2)
            add(a, "send", begins[a], begins[a] + 2, dest=b, tag=0, sent=4)
            arrived = max(begins[a] + draw.uniform(5, 30), begins[b]) + 1
            add(b, "recv", begins[b], arrived, source=a, tag=0, received=4, **{"from": a, "from_tag": 0})
    return ranks, truth


@pytest.mark.parametrize(("shift", "drift"), [(0.0, 0.0), (3e9, 0.0), (-7e8, 2e-7)])
def test_clocks_of_machines(shift, drift):
    ranks, truth = made_up(shift, drift)
    matched = matching.match(ranks)
    assert matched.unmatched == 0
    uncertainty = clocks.align(ranks, matched)
    first = min(begin for begin, _ in truth.values())
    errors = [abs(event.begin - (truth[id(event)][0] - first)) for rank in ranks for event in rank.events]
    assert max(errors) <= uncertainty + 2
    assert 0 < uncertainty < 40
    notes = "\n".join(report.caveats(ranks, matched, uncertainty))
    assert re.search(r"the clocks of different machines were compared to [\d.]+ us, by their operations", notes)


def test_who_sends_and_goes_on_does_not_wait():
    """A message that is on its way when its receiver comes late; and one whose sender is held up until then."""
    for end, waited in ((3.0, 0.0), (902.0, 900.0)):
        ranks = ranks_of(2, "m", "m")
        ranks[0].events.append(files.Event(0, 1, "send", 0.0, end, {"comm": 1, "dest": 1, "tag": 0, "sent": 4}))
        received = {"comm": 1, "source": 0, "tag": 0, "received": 4, "from": 0, "from_tag": 0}
        ranks[1].events.append(files.Event(1, 1, "recv", 900.0, 903.0, received))
        matched = matching.match(ranks)
        caused = matching.add_waiting(matched)
        assert len(matched.messages) == 1
        assert ranks[0].events[0].waited == waited
        assert ranks[1].events[0].waited == 0
        assert caused.get((0, 1), 0.0) == waited


@pytest.mark.parametrize("order", [(7, 8), (8, 7)], ids=["in order", "reversed"])
def test_messages_are_in_the_order_of_starts(order):
    """Not in that of the waits. Who sends by isend is held up in its wait, if anywhere, and in between it is in flight.
    A receive that has come when its rank begins to wait has waited for nobody."""
    ranks = ranks_of(2, "m", "m")

    def add(rank, name, begin, end, request, **more):
        event = files.Event(rank, 1, name, begin, end, {"comm": 1, "request": request, **more})
        ranks[rank].events.append(event)

    for i, request in enumerate((1, 2)):
        add(0, "isend", 10.0 * i, 10.0 * i + 1, request, dest=1, tag=0, sent=4 + i)
        add(1, "irecv", 100.0 + i, 100.5 + i, request + 6, source=0, tag=0, received=4 + i)
    add(0, "wait", 20.0, 130.0, 1)
    add(0, "wait", 130.0, 131.0, 2)
    for i, request in enumerate(order):
        add(1, "wait", 200.0 + i, 200.5 + i, request, **{"from": 0, "from_tag": 0})
    for rank in ranks:
        files._join_ends(rank)
    matched = matching.match(ranks)
    assert matched.unmatched == 0
    assert [message.nbytes for message in matched.messages] == [4, 5]
    assert [message.received.arguments["request"] for message in matched.messages] == [7, 8]
    assert [message.received.nbytes for message in matched.messages] == [4, 5]
    caused = matching.add_waiting(matched)
    assert caused == {(0, 1): 80.0, (1, 0): 0.0}
    assert [event.waited for event in ranks[0].events if event.name == "wait"] == [80.0, 0.0]
    assert all(event.waited == 0 for event in ranks[1].events)
    assert all(message.on_the_way is None for message in matched.messages)
    report.merge(merged := io.BytesIO(), ranks, matched)
    assert merged.getvalue().count(b'"name": "in flight"') == 2 * 4


def test_clocks_that_nothing_connects():
    ranks, _ = made_up(5e8, 0.0)
    for rank in ranks:
        rank.events = [event for event in rank.events if event.name == "send"][:1]
        rank.realtime = 1e15
        rank.monotonic = 5e8 if rank.rank >= 2 else 0.0
    matched = matching.match(ranks)
    assert clocks.align(ranks, matched) == float("inf")
    assert max(event.begin for rank in ranks for event in rank.events) < 1e8
    assert "by their time of day alone" in "\n".join(report.caveats(ranks, matched, float("inf")))
