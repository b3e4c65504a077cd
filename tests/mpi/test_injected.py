"""MPI functions that fail, are late or never return, at a chosen call on a chosen rank: by tests/inject/inject.c."""

import os
import random
import re
import subprocess
from pathlib import Path

import pytest
from mpi4py import MPI

from jaxmpi._mpi import library as bound
from support import drawing
from support.launch import launch, written
from support.rows import one_each_time

pytestmark = [pytest.mark.alone, pytest.mark.sampled, pytest.mark.seconds(120)]

SECONDS = 240
"""The limit of a job with a fault; most end in 3. What waits in them waits for much longer."""
RANDOM = range(int(os.environ.get("JAXMPI_TEST_FAULTS", "1")))
"""The seeds of the random programs."""
ROOT = Path(__file__).resolve().parents[2]
CODE = MPI.ERR_OTHER
TEXT = MPI.Get_error_string(CODE)


@pytest.fixture(autouse=True)
def _compared_only_if_asked_for(monkeypatch):
    """So that the calls of MPI that are counted are those of the operations."""
    monkeypatch.setenv("JAXMPI_CHECK", "0")


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The file to be preloaded, for the MPI library of this process."""
    mpi = Path(bound.LIBRARY.path)
    made = tmp_path_factory.mktemp("inject") / "inject.so"
    options = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-shared", "-fPIC"]
    options += [f"-I{ROOT / 'csrc'}", f'-DABI_HEADER="mpi/abi/{bound.LIBRARY.abi}.h"']
    source = ROOT / "tests" / "inject" / "inject.c"
    functions = (ROOT / "csrc" / "mpi" / "mpi.def").read_text()
    with made.with_name("functions.def").open("w") as file:
        for name, types in re.findall(r"^REQUIRED\((\w+), \(([^()]*)\)\)", functions, re.MULTILINE):
            kinds = enumerate(types.split(","))
            declared = {f"p{i}": f"__typeof__({kind}) p{i}" for i, kind in kinds}
            print(f"FUNCTION({name}, ({types}), ({', '.join(declared.values())}), ({', '.join(declared)}))", file=file)
    options.append(f"-I{made.parent}")
    linked = [str(mpi), f"-Wl,-rpath,{mpi.parent}"]
    subprocess.run([os.environ.get("CC", "cc"), *options, str(source), "-o", str(made), *linked], check=True)
    return made


BEGIN = """
import ctypes, os, sys, threading, time, warnings
import jax, jax.numpy as jnp
from mpi4py import MPI
import jaxmpi

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
x = jnp.arange(1.0, 4.0)
grid = jaxmpi.Grid((size,), (size,), periodic=True)
table = lambda x: jnp.stack([x] * size)
here = jax.block_until_ready
inject = lambda rules: ctypes.CDLL(os.environ["LD_PRELOAD"]).inject(rules.encode())

def barrier(x):
    jaxmpi.barrier()
    return x

def to_itself(x):
    jaxmpi.send(x, rank, tag=5)
    return jaxmpi.recv(x, rank, tag=5)

def long_exchange(grid, x):
    return grid.exchange(jnp.broadcast_to(x, (20_000, 3)))[7]

calls = {
    "allgather": lambda x: jaxmpi.allgather(x).mean(0),
    "allgatherv": lambda x: jaxmpi.allgatherv(x, [3] * size).reshape(size, 3).mean(0),
    "allreduce": lambda x: jaxmpi.allreduce(x, MPI.SUM) / size,
    "alltoall": lambda x: jaxmpi.alltoall(table(x)).mean(0),
    "alltoallv": lambda x: jaxmpi.alltoallv(table(x).reshape(-1), [3] * size, [3] * size).reshape(size, 3).mean(0),
    "barrier": barrier,
    "bcast": lambda x: jaxmpi.bcast(x, size - 1),
    "exchange": lambda x: grid.exchange(x),
    "long exchange": lambda x: long_exchange(grid, x),
    "gather": lambda x: x + jaxmpi.gather(x, 0).sum() / 100,
    "exscan": lambda x: jaxmpi.exscan(x, MPI.SUM) + 1,
    "iallreduce": lambda x: jaxmpi.wait(jaxmpi.iallreduce(x, MPI.SUM)) / size,
    "ialltoall": lambda x: jaxmpi.wait(jaxmpi.ialltoall(table(x))).mean(0),
    "ibarrier": lambda x: jaxmpi.wait(jaxmpi.ibarrier(), after=x)[1],
    "ibcast": lambda x: jaxmpi.wait(jaxmpi.ibcast(x, size - 1)),
    "gatherv": lambda x: x + jaxmpi.gatherv(x, [3] * size, 0).sum() / 100,
    "reduce_scatter": lambda x: jaxmpi.reduce_scatter(table(x), MPI.SUM) / size,
    "reduce_scatterv": lambda x: jaxmpi.reduce_scatter(table(x).reshape(-1), MPI.SUM, [3] * size) / size,
    "scatterv": lambda x: jaxmpi.scatterv(table(x).reshape(-1) if rank == 0 else x, [3] * size, 0),
    "reduce": lambda x: jaxmpi.reduce(x, MPI.SUM, 0) / 2,
    "scan": lambda x: jaxmpi.scan(x, MPI.SUM) / size,
    "scatter": lambda x: jaxmpi.scatter(table(x) if rank == 0 else x, 0),
    "send": to_itself,
    "sendrecv": lambda x: jaxmpi.sendrecv(x, x, (rank + 1) % size, (rank - 1) % size),
}
ways = {
    "eager": lambda f: f,
    "jax.jit": jax.jit,
    "jaxmpi.jit": jaxmpi.jit,
    "loop": lambda f: jaxmpi.jit(lambda x: jax.lax.fori_loop(0, 3, lambda i, x: f(x), x)),
    "loop in jax.jit": lambda f: jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda i, x: f(x), x)),
}
add = jax.jit(calls["allreduce"])
comm.Barrier()  # a rank that starts late is none that waits for long
add(x).block_until_ready()
"""

OF_MESSAGES = ("MPI_Mprobe", "MPI_Get_count", "MPI_Mrecv")
COLLECTIVES = ("allgather", "allgatherv", "allreduce", "alltoall", "alltoallv", "barrier", "bcast", "exscan", "gather")
COLLECTIVES += ("gatherv", "iallreduce", "ialltoall", "ibarrier", "ibcast", "reduce", "scan", "scatter", "scatterv")
MADE = {name: (f"MPI_{name.capitalize()}",) for name in COLLECTIVES} | {
    "exchange": ("MPI_Irecv", "MPI_Isend", "MPI_Wait"),
    "long exchange": ("MPI_Irecv", "MPI_Isend", "MPI_Mprobe", "MPI_Mrecv", "MPI_Wait"),
    "reduce_scatter": ("MPI_Reduce_scatter_block",),
    "reduce_scatterv": ("MPI_Reduce_scatter",),
    "send": ("MPI_Send", *OF_MESSAGES),
    "sendrecv": ("MPI_Isend", *OF_MESSAGES, "MPI_Wait"),
}
"""The calls of MPI that an entry of `calls` in the program makes."""

SEVERAL_TIMES = {("exchange", "MPI_Wait"): 2, ("long exchange", "MPI_Isend"): 2, ("long exchange", "MPI_Wait"): 3}
"""How often it makes them, where not once."""


def said(operation, function):
    """The operation that fails, and how its error begins after the rank."""
    if operation == "send" and function in OF_MESSAGES:
        operation = "recv"
    shown = {"exchange": "Grid.exchange", "long exchange": "Grid.exchange", "reduce_scatterv": "reduce_scatter"}
    return shown.get(operation, operation), f"{function} failed: {TEXT}"


@pytest.mark.parametrize("fault", [f"fail={CODE}", f"fail-after={CODE}@1"])
def test_caught(fault, library, tmp_path):
    """Every function that operations call, every way to call them, with --brief one way for each function. Then the
    next operations are right on all ranks.

    Nothing is called on any rank, or all is done, but one rank is told that it failed.
    """
    failing = 2 if fault.startswith("fail=") else 3  # of 3 passes through a loop, so that no rank goes on alone
    cases = [
        (name, function, *said(name, function), SEVERAL_TIMES.get((name, function), 1))
        for name, functions in MADE.items()
        for function in functions
    ]
    if fault.startswith("fail-after"):  # MPI would still expect what it says it does not
        cases = [case for case in cases if case[1] != "MPI_Irecv"]
    # The rank that fails takes no message off the channel.
    lost = [case for case in cases if fault.startswith("fail=") and case[1] in OF_MESSAGES]
    lost += [case for case in cases if case[0].endswith("exchange") and case not in lost]
    body = f"""
    fails = {fault.startswith("fail=")} or rank == 1
    lost = {lost!r}
    for tag, (name, function, operation, told, times) in enumerate({cases!r}):
        for turn, (way, transformed) in enumerate(ways.items()):
            if {drawing.brief} and (turn - tag) % len(ways) > 0:
                continue
            if (name, function, operation, told, times) in lost:  # so no later case may take it for its own
                again = jaxmpi.Grid((size,), (size,), periodic=True, comm=comm.Dup())
                f = lambda x, tag=1000 * len(way) + tag, again=again: (
                    again.exchange(x) if name == "exchange"
                    else long_exchange(again, x) if name == "long exchange"
                    else jaxmpi.sendrecv(x, x, rank, rank, sendtag=tag, recvtag=tag) if name == "sendrecv"
                    else (jaxmpi.send(x, rank, tag=tag), jaxmpi.recv(x, rank, tag=tag))[1]
                )
            else:
                f = calls[name]
            inject(f"{{function}}:{{times * ({failing} if 'loop' in way else 1)}}:{fault}")
            error = ""
            try:
                jax.block_until_ready(transformed(f)(x))
            except jax.errors.JaxRuntimeError as raised:
                error = str(raised)
            inject("")
            expected = f"jaxmpi.{{operation}} on rank {{rank}} of {{size}}: {{told}}" if fails else ""
            assert expected in error and bool(expected) == bool(error), (name, function, way, error)
            comm.Barrier()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # of the computation that failed
                assert jnp.all(jaxmpi.allreduce(x * rank, MPI.SUM) == x * (size * (size - 1) // 2))
            assert jnp.all(jaxmpi.jit(calls["allreduce"])(x) == x)
    inject("MPI_Allreduce:1:fail={CODE} MPI_Error_string:1:fail={CODE}")
    try:
        jax.block_until_ready(jaxmpi.jit(calls["allreduce"])(x))
    except jax.errors.JaxRuntimeError as raised:
        assert "MPI_Allreduce failed: MPI error code {CODE}" in str(raised), raised
    else:
        assert False
    print("all caught")
    """
    # Messages that one rank does not receive may not hold up the other.
    buffered = {"OMPI_MCA_btl_sm_eager_limit": str(1 << 18), "OMPI_MCA_btl_vader_eager_limit": str(1 << 18)}
    done = launch(2, written(tmp_path, BEGIN, body), timeout=3 * SECONDS, LD_PRELOAD=str(library), **buffered)
    assert done.stdout.count("all caught") == 2


WAIT = """
if rank != 1:
    jax.block_until_ready(jaxmpi.recv(x, 1, tag=99))
print("not reached")
"""

CAUGHT_BY_NOBODY = {
    "a loop in jax.jit": ("MPI_Scan:2", 'here(ways["loop in jax.jit"](calls["scan"])(x))', "scan"),
    "a derivative": ("MPI_Reduce:1", 'here(jax.jit(jax.grad(lambda x: (calls["bcast"](x) ** 3).sum()))(x))', "reduce"),
    "a result that is not used": (
        "MPI_Allreduce:1",
        "y = jax.jit(lambda x: add(jax.lax.fori_loop(0, 20000, lambda i, v: jnp.sin(v), jnp.ones(9999)) + x[0]))(x)\n"
        "if rank == 1: sys.exit()",
        "allreduce",
    ),
    "a thread": (
        "MPI_Allgather:1",
        't = threading.Thread(target=lambda: here(calls["allgather"](x))); t.start(); t.join()',
        "allgather",
    ),
    "the comparison of ranks": ("MPI_Isend:2", 'here(ways["loop"](calls["alltoall"])(x))', "alltoall"),
}
"""The call that fails on rank 1, in what, and the operation that is to be told."""


@pytest.mark.parametrize("way", one_each_time(CAUGHT_BY_NOBODY, "a loop in jax.jit", "the comparison of ranks"))
def test_caught_by_nobody(way, library, tmp_path):
    """The job ends with the traceback of the rank where MPI failed."""
    call, does, operation = CAUGHT_BY_NOBODY[way]
    program = written(tmp_path, BEGIN, f'inject("{call}:fail={CODE}@1")', does, WAIT)
    check = {"JAXMPI_CHECK": "1"} if way == "the comparison of ranks" else {}
    done = launch(2, program, check=False, timeout=SECONDS, LD_PRELOAD=str(library), **check)
    assert done.returncode != 0
    function = call.partition(":")[0]
    assert f"jaxmpi.{operation} on rank 1 of 2: {function} failed: {TEXT}" in done.stderr
    assert "jaxmpi.run: uncaught exception on rank 1" in done.stderr
    assert "not reached" not in done.stdout


@pytest.mark.parametrize("check", one_each_time(["0", "1"], "1"))
def test_error_ends_the_job_if_that_is_asked_for(check, library, tmp_path):
    """At once, also under plain mpiexec, and though the program would catch it; also where the ranks are compared."""
    body = f"""
    inject("MPI_Allgather:2:fail={CODE}@1")
    try:
        ways["loop"](calls["allgather"])(x).block_until_ready()
    except Exception:
        print("not reached")
    """
    limits = {"JAXMPI_ON_ERROR": "abort", "JAXMPI_CHECK": check, "LD_PRELOAD": str(library)}
    done = launch(2, written(tmp_path, BEGIN, body, WAIT), check=False, timeout=SECONDS, plain=True, **limits)
    assert done.returncode != 0
    assert f"jaxmpi.allgather on rank 1 of 2: MPI_Allgather failed: {TEXT}" in done.stderr
    assert "The job ends, as JAXMPI_ON_ERROR=abort says" in done.stderr
    assert "not reached" not in done.stdout


LATE = {
    "MPI_Allreduce:2": ('ways["loop"](calls["allreduce"])(x)', "x", "allreduce of 3 float32, op SUM"),
    "MPI_Mprobe:1": ('calls["sendrecv"](x)', "x", "sendrecv of 3 float32"),
}


@pytest.mark.parametrize("call", one_each_time(LATE, "MPI_Mprobe:1"))
def test_late(call, library, tmp_path):
    """Nothing is lost: one report of what waits, another when it has come, and the results are right."""
    does, result, told = LATE[call]
    body = f"""
    log = open(f"{tmp_path}/{{rank}}.log", "w+")
    os.dup2(log.fileno(), 2)
    inject("{call}:delay=2@1")
    assert jnp.all({does} == {result})
    assert jnp.all(jaxmpi.allreduce(x, MPI.SUM) == size * x)
    while rank == 1 and "is done" not in open(log.name).read(): time.sleep(0.05)
    print("right", flush=True)
    """
    settings = {"LD_PRELOAD": str(library), "JAXMPI_TIMEOUT": "1", "JAX_ENABLE_X64": "0"}
    done = launch(2, written(tmp_path, BEGIN, body), timeout=SECONDS, **settings)
    assert done.stdout.count("right") == 2
    logs = "".join((tmp_path / f"{rank}.log").read_text() for rank in (0, 1))
    assert logs.count("jaxmpi: rank 1 has been waiting for ") == 1
    assert f" s in {told}" in logs
    assert logs.count("jaxmpi: rank 1 is done with operation") == 1


WAITED = "jaxmpi: rank {} has been waiting for .* s in {} of 3 float"
HANGING = {
    "eager": ("MPI_Gather:1:hang@1", 'calls["gather"](x)', WAITED.format(1, "gather")),
    "jax.jit": ("MPI_Scatter:1:hang@1", 'ways["jax.jit"](calls["scatter"])(x)', WAITED.format(1, "scatter")),
    # Rank 0 waits as well, and may tell so and end the job first.
    "the comparison of ranks": ("MPI_Isend:2:hang@1", 'ways["loop"](calls["scan"])(x)', WAITED.format("[01]", "scan")),
    # Each waits until the other has its message, which is never; so the error is told before.
    "both fail to receive": (
        f"MPI_Mprobe:1:fail={CODE}",
        'calls["sendrecv"](jnp.ones(1 << 20))',
        rf"on rank [01] of 2: MPI_Mprobe failed: {TEXT}. This rank waits until its own message is received\n(.*\n)*"
        r".*has been waiting for",
    ),
    "no abort": (f"MPI_Wait:1:hang@1 MPI_Abort:1:fail={CODE}@1", 'calls["sendrecv"](x)', WAITED.format(1, "sendrecv")),
}


@pytest.mark.parametrize("way", one_each_time(HANGING, "no abort"))
def test_hanging(way, library, tmp_path):
    """What never returns is reported, and ends the job if that is asked for, even if MPI_Abort fails."""
    rules, does, told = HANGING[way]
    limits = {"JAXMPI_TIMEOUT": "1.5", "JAXMPI_TIMEOUT_ACTION": "abort", "LD_PRELOAD": str(library)}
    limits["JAXMPI_CHECK"] = "1" if way == "the comparison of ranks" else "0"
    # Rank 0 must not be reported, or it might end the job first.
    rest = "if rank != 1: time.sleep(1000)\nprint('not reached')"
    program = written(tmp_path, BEGIN, f'inject("{rules}")\n{does}.block_until_ready()', rest)
    # Without the launcher nothing waits for its table.
    done = launch(2, program, check=False, timeout=SECONDS, plain=way != "eager", **limits)
    assert done.returncode != 0
    assert re.search(told, done.stderr), done.stderr
    assert "not reached" not in done.stdout


IMPORTING = {
    "MPI_Comm_create_keyval": "has no working MPI_Comm_create_keyval",
    "MPI_Comm_set_attr": f"RuntimeError: MPI refused: {TEXT}",
}


@pytest.mark.parametrize("function", one_each_time(IMPORTING, "MPI_Comm_set_attr"))
def test_import_fails(function, library, tmp_path):
    """On one rank: it says why, and the others do not wait."""
    program = tmp_path / "program.py"
    program.write_text("import jaxmpi\nfrom mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\nprint('not reached')")
    rules = f"{function}:1:fail={CODE}@1"
    done = launch(2, program, check=False, timeout=SECONDS, LD_PRELOAD=str(library), JAXMPI_INJECT=rules)
    assert done.returncode != 0
    assert IMPORTING[function] in done.stderr
    assert "not reached" not in done.stdout


# --- random programs ------------------------------------------------------------------------------------------------

REPEATS = {"eager": 1, "jax.jit": 1, "jaxmpi.jit": 1, "loop": 3, "loop in jax.jit": 3}


def random_case(seed):
    """Steps (way, operations), ranks, and a rule: a call of the steps that fails, is late or hangs on one rank."""
    draw = random.Random(seed)
    ranks = draw.choice((2, 2, 3))
    steps = [(draw.choice(list(REPEATS)), draw.choices(list(MADE), k=draw.randint(1, 4))) for _ in range(5)]
    made = [
        (operation, function)
        for way, operations in steps
        for _ in range(REPEATS[way])
        for operation in operations
        for function in MADE[operation]
    ]
    at = draw.randrange(len(made))
    operation, function = made[at]
    call = 1 + sum(other == function for _, other in made[:at])
    fault = draw.choice((f"fail={CODE}", f"fail={CODE}", f"fail-after={CODE}", "delay=0.5", "hang"))
    return steps, ranks, operation, function, call, fault, draw.randrange(ranks)


@pytest.mark.parametrize("seed", RANDOM)
def test_random(seed, library, tmp_path):
    """Mixed operations, of which one call fails: the job ends and says where, or its result is what it is without."""
    steps, ranks, operation, function, call, fault, rank = random_case(seed)
    body = f"""
    def one_after_the_other(names):
        def f(x):
            for name in names:
                x = calls[name](x)
            return x
        return f
    steps = [ways[way](one_after_the_other(names)) for way, names in {steps!r}]
    def work(x):
        for step in steps:
            x = step(x)
        return jax.block_until_ready(x)
    expected = work(x)
    inject("{function}:{call}:{fault}@{rank}")
    result = work(x)
    comm.Barrier()
    assert jnp.all(result == expected)
    print("right")
    """
    program = written(tmp_path, BEGIN, body)
    limits = {"JAXMPI_TIMEOUT": "3", "JAXMPI_TIMEOUT_ACTION": "abort"} if fault == "hang" else {}
    done = launch(ranks, program, check=False, timeout=SECONDS, LD_PRELOAD=str(library), **limits)
    assert done.stdout.count("right") == (ranks if fault.startswith("delay") else 0), (done, random_case(seed))
    if fault == "hang":
        assert f"jaxmpi: rank {rank} has been waiting for" in done.stderr, done.stderr
    elif fault.startswith("fail"):
        operation, told = said(operation, function)
        assert f"jaxmpi.{operation} on rank {rank} of {ranks}: {told}" in done.stderr, done.stderr
    assert (done.returncode == 0) == fault.startswith("delay")
