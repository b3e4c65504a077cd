"""How jobs of sharded programs begin, what they refuse, and how they end."""

import re
import signal
import socket

import pytest

from jaxmpi._sharded.hlo import groups_of
from support.launch import launch, written
from support.rows import each

pytestmark = [pytest.mark.alone, pytest.mark.sampled]

COMMON = """
import os, sys, time
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

def place(array, mesh):
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, P("p")), lambda index: array[index])

def over(mesh, body):
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("p"), out_specs=P("p")))

def line():
    return Mesh(np.array(jax.devices()), ("p",))

def total(value=1.0, dtype=np.float32):
    mesh = line()
    x = place(np.full(mesh.size, value, dtype), mesh)
    return float(over(mesh, lambda x: lax.psum(x, "p"))(x).addressable_data(0)[0])
"""


@pytest.fixture
def job(tmp_path):
    """Runs a program behind COMMON, or without it, as a job of sharded programs."""

    def run(text, *options, ranks=2, common=True, collectives="mpi", arguments=(), **settings):
        program = written(tmp_path, COMMON if common else "", text)
        chosen = ["--collectives", collectives] if collectives else []
        return launch(ranks, *chosen, *options, program, *arguments, **settings)

    return run


SAID = """
print(f"{jax.process_index()} of {jax.process_count()}: {total()};")
"""
EXPECTED = ["0 of 2: 2.0;", "1 of 2: 2.0;"]


def said(done):
    return sorted(re.findall(r"\d of \d: [\d.]+;", done.stdout))


PROXY = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
BEGINNINGS = {
    "mpi, behind a proxy that cannot reach them": ("", {**PROXY}),
    "gloo, behind a proxy that cannot reach them": ("", {"collectives": "gloo", **PROXY}),
    "jax.distributed.initialize": ("import jax\njax.distributed.initialize()\n", {}),
    # By the older name; the tests below use the newer one.
    "plain launcher": ("import jaxmpi.collectives\njaxmpi.collectives.install()\n", {"collectives": "", "plain": True}),
}


@pytest.mark.nightly
@pytest.mark.parametrize("how", BEGINNINGS)
def test_beginnings(job, how):
    """The processes find each other without a word, or with few."""
    text, options = BEGINNINGS[how]
    assert said(job(f"{text}{COMMON}{SAID}", common=False, **options)) == EXPECTED


ADDRESSES = """
import pathlib
from jax._src import distributed
jax.devices()
if jax.process_index() == 0:
    port = f"{int(distributed.global_state.coordinator_address.rpartition(':')[2]):04X}"
    rows = [row.split() for kind in ("tcp", "tcp6") for row in pathlib.Path("/proc/net", kind).open()]
    places = [row[1].partition(":")[0][-8:] for row in rows if row[1].endswith(f":{port}") and row[3] == "0A"]
    print("listens at", *places, "told", os.environ.get("JAX_COORDINATOR_BIND_ADDRESS"), end=";")
"""


@pytest.mark.parametrize(
    ("how", "given"),
    [
        ("mpi", ""),
        ("mpi", "the port and the address"),
        ("plain launcher", ""),
        *(pytest.param("plain launcher", given, marks=pytest.mark.nightly) for given in ("port", "port and address")),
        *(pytest.param(*row, marks=pytest.mark.nightly) for row in (("mpi", "the port"), ("gloo", ""))),
    ],
)
def test_coordinator_listens_where_it_is_needed(how, given, job):
    """JAX's coordinator asks nobody who he is: other machines must not reach it where all ranks are on one.

    What JAX is told of its address is gone when it listens; what the user has said stays. Once jaxmpi is imported, JAX
    finds the processes of the job under a plain launcher of any MPI."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        free = str(listening.getsockname()[1])
    plain = how == "plain launcher"
    settings = {"JAX_COORDINATOR_PORT": free} if "port" in given else {}
    settings |= {"JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{free}"} if "address" in given else {}
    begin = FOUND + "jax.distributed.initialize()\n" + FOUND_AND_SUMMED if plain else "import jaxmpi\n"
    done = job(begin + ADDRESSES, collectives="" if plain else how, plain=plain, **settings)
    told = settings.get("JAX_COORDINATOR_BIND_ADDRESS")
    assert f"listens at 0100007F told {told};" in done.stdout  # 127.0.0.1
    assert not plain or re.findall(r"\d: .*?;", "\n".join(sorted(done.stdout.splitlines()))) == [
        "0: 3, 3.0;",
        "1: 3, 3.0;",
    ]


FOUND = """
import numpy as np
from mpi4py import MPI
import jaxmpi

rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
"""
FOUND_AND_SUMMED = """
assert (jax.process_index(), jax.process_count(), len(jax.devices())) == (rank, size, size)
mesh = Mesh(np.array(jax.devices()), "x")
whole = jax.make_array_from_callback((size,), NamedSharding(mesh, P("x")), lambda i: np.arange(1.0, 1 + size)[i])
sharded = int(jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, P()))(whole))
print(f"{rank}: {sharded}, {jaxmpi.allreduce(float(rank + 1), MPI.SUM)};")
"""


@pytest.mark.nightly
def test_initialize_with_some_arguments_under_a_plain_launcher(job):
    """What the program says is kept, the rest is found."""
    start = 'jax.distributed.initialize(f"127.0.0.1:{MPI.COMM_WORLD.bcast(20000 + os.getpid() % 20000)}")\n'
    done = job(FOUND + start + FOUND_AND_SUMMED, collectives="", plain=True)
    assert sorted(re.findall(r".*;", done.stdout)) == ["0: 3, 3.0;", "1: 3, 3.0;"]


def test_installed_too_late(job):
    text = """
    import jax
    import jaxmpi.sharded
    for kind in ("mpi", "smoke"):
        try:
            jaxmpi.sharded.install(kind)
        except (RuntimeError, ValueError) as error:
            print(f"{type(error).__name__}: {error};")
    jax.devices()
    try:
        jaxmpi.sharded.install("gloo")
    except RuntimeError as error:
        print(error)
    """
    done = job(text, ranks=1, common=False, collectives="")
    assert "RuntimeError: jaxmpi.sharded.install: jax was imported before jaxmpi" in done.stdout
    assert "ValueError: jaxmpi.sharded.install: kind must be one of mpi, gloo, got 'smoke'" in done.stdout
    assert "JAX has made its devices already" in done.stdout


@pytest.mark.parametrize("missing", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_rank_that_does_not_come_is_named(job, missing):
    text = f"""
    from mpi4py import MPI
    if MPI.COMM_WORLD.rank == {missing}:
        time.sleep(1000)
    jax.distributed.initialize(initialization_timeout=3)
    """
    done = job(text, ranks=3, check=False, JAXMPI_TIMEOUT="1")
    assert done.returncode != 0
    assert f"waits for rank {missing} to start jax.distributed" in done.stderr
    assert re.search(rf"rank {missing} (of 3 did not begin|has not begun) to use JAX", done.stderr)


REFUSED = """
def refused(call, *args):
    try:
        jax.block_until_ready(call(*args))
    except Exception as error:
        return f"{type(error).__name__}: {error};"
    return "not refused;"

import jaxmpi
from mpi4py import MPI
reports = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
jax.devices()
if jax.process_index() == 0:
    os.dup2(reports, 2)
for told in (b"setup of JAX's collectives", b"allreduce of 1 float32, op SUM"):
    while jax.process_index() == 1 and told not in os.pread(reports, 1 << 20, 0):
        time.sleep(0.02)
    total()

mesh = line()
x = place(np.ones(2 * mesh.size, np.float32), mesh)
add = lambda x: jaxmpi.allreduce(x, MPI.SUM)
cases = {
    "half": (over(mesh, lambda x: lax.psum(x, "p")), x.astype(np.float16)),
    "global": (add, x),
    "global in jit": (jax.jit(add), x),
    "shard_map": (over(mesh, add), x),
    "send": (lambda x: jaxmpi.send(x, 1 - jax.process_index()), x),
}
for name, case in cases.items():
    said = refused(*case)
    if jax.process_index() == 0:
        print(f"{name}: {said}")
assert total() == mesh.size
"""


def test_what_waits_is_reported_and_what_is_refused(job, tmp_path):
    """Of waiting, in a collective, and before it, as the communicator is made. What is refused is so with an error of
    ours, before anything is sent: the next operation works."""
    done = job(REFUSED, arguments=[tmp_path / "reports"], JAXMPI_TIMEOUT="1")
    reports = (tmp_path / "reports").read_text()
    assert re.search(r"rank 0.*setup of JAX's collectives", reports), reports
    assert "; \n" not in reports
    assert "; ," not in reports
    assert re.search(r"rank 0.*allreduce of 1 float32, op SUM.*JAX's processes 0, 1", reports), reports
    errors = dict(re.findall(r"^([\w ]+): (.*;)$", done.stdout, re.MULTILINE))
    assert re.match(r"TypeError: jaxmpi: XLA's all-reduce by MPI has no f16 .*--collectives gloo", errors["half"])
    for name in ("global", "global in jit", "shard_map", "send"):
        assert errors[name].startswith("NotImplementedError: "), errors[name]
        assert "x.addressable_data(0)" in errors[name]


WRONG = {
    "another process than the rank": (
        """
        from mpi4py import MPI
        address = MPI.COMM_WORLD.bcast(f"127.0.0.1:{20000 + os.getpid() % 20000}")
        jax.distributed.initialize(address, 2, 1 - MPI.COMM_WORLD.rank)
        jax.devices()
        """,
        {},
        r"got process \d of 2, but this is rank \d of 2",
    ),
    "several devices of a process": (
        "total()",
        {"JAX_NUM_CPU_DEVICES": "2", "XLA_FLAGS": ""},
        "NotImplementedError: jaxmpi: a collective between 4 devices of 2 processes",
    ),
    "other lengths on other processes": (
        """
        mesh = line()
        x = place(np.ones(2 * (3 + jax.process_index()), np.float32), mesh)
        over(mesh, lambda x: lax.psum(x, "p"))(x).block_until_ready()
        """,
        {"JAXMPI_CHECK": "1"},
        r"allreduce on rank \d of 2: .*(3 float32|4 float32)",
    ),
    "a JAX that executes programs in another way": (
        """
        jax.devices()
        from jaxmpi._sharded import communicators
        communicators._ready = lambda execute: None
        total()
        """,
        {},
        "jaxmpi has no communicator for this program",
    ),
}
"""Programs, settings, and what is said."""


@pytest.mark.nightly
@pytest.mark.parametrize("what", WRONG)
def test_a_job_that_is_wrong(job, what):
    text, settings, told = WRONG[what]
    done = job(text, check=False, **settings)
    assert done.returncode != 0
    assert re.search(told, done.stderr), done.stderr


@pytest.mark.parametrize(
    "how",
    ["os.kill(os.getpid(), 9)", pytest.param("os._exit(0)", marks=pytest.mark.nightly), "raise ValueError('gone')"],
)
def test_a_process_that_goes_while_others_wait(job, how):
    text = f"""
    total()
    if jax.process_index() == 1:
        {how}
    total(2.0)
    print("not reached;")
    """
    done = job(text, check=False)
    assert done.returncode != 0
    assert "not reached;" not in done.stdout
    if "raise" in how:
        assert "ValueError: gone" in done.stderr


def test_sigterm_of_the_launcher(job):
    """JAX's preemption service would take the signal by which launchers end ranks."""
    text = """
    total()
    print("ready;", flush=True)
    time.sleep(1000)
    print("not reached;")
    """
    done = job(text, check=False, interrupt_at="ready;", said=2, by=signal.SIGTERM)
    assert done.returncode != 0
    assert "not reached;" not in done.stdout


# --- what is refused of a program's text: on one rank alone ---


TEXT = """HloModule jit_f, replica_count=2

ENTRY %main {{
  ROOT %x.1 = {} {}(%y), {}, metadata={{op_name="jit(f)/here"}}
}}
"""
PAIRS, GROUPS = "source_target_pairs={{0,1}}", "replica_groups={{0,1}}"
XLA = [
    ("f32[2147483647]{0}", "all-reduce", GROUPS, None),
    ("f32[2147483648]{0}", "all-reduce", GROUPS, "more than 2147483647 elements"),
    ("(f32[3]{0}, f32[65536,65536]{1,0})", "all-reduce", GROUPS, "more than 2147483647 elements"),
    ("bf16[7]{0}", "all-reduce", GROUPS, "has no bf16"),
    ("f8e4m3fn[7]{0}", "all-gather", GROUPS, "has no f8e4m3fn"),
    ("f8e4m3fn[2147483647]{0}", "collective-permute", PAIRS, None),
    ("f32[536870912]{0}", "collective-permute", PAIRS, "more than 2147483647 bytes"),
    ("(c128[134217728]{0})", "all-to-all", GROUPS, "more than 2147483647 bytes"),
    ("pred[]", "all-reduce", GROUPS, None),
    ("f32[7]{0}", "collective-broadcast", GROUPS, "XLA has no collective-broadcast by MPI"),
    ("f32[7]{0}", "all-to-none", GROUPS, "XLA has no all-to-none by MPI"),
    (
        "f32[]",
        "all-reduce",
        "replica_groups=mesh['a'=2] {'a'}|{'b'}",
        r"cannot read \(.*instead of an attribute.*\): use ",
    ),
    ("f32[]", "all-reduce", "replica_groups={{0},{0}}", r"cannot read \(.*do not have each of 2 ids once.*\): use "),
    ("f32[]", "all-reduce", "replica_groups=mesh['it's'=2] {'it's'}", r"cannot read \(.*instead of.*\): use --coll"),
]


def test_what_xla_cannot_pass_to_mpi():
    def check(row):
        shape, name, groups, error = row
        text = TEXT.format(shape, name, groups)
        if error is None:
            assert groups_of(text, 2) == [(0, 1)]
            return
        with pytest.raises((TypeError, ValueError, NotImplementedError), match=error) as raised:
            groups_of(text, 2)
        assert "cannot read" in error or "(jit(f)/here)" in str(raised.value)

    each(XLA, check)
    with pytest.raises(NotImplementedError, match="2 devices instead of 3"):
        groups_of(TEXT.format("f32[]", "all-reduce", "replica_groups={}"), 3)
