"""The benchmarks' check of data, with contenders that are wrong on purpose, and their formulas and tables."""

import importlib.util
import json
import statistics
import textwrap
from pathlib import Path

import numpy as np
import pytest

from support.launch import launch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
START = f"import sys\nsys.path.insert(0, {str(BENCHMARKS)!r})\nimport contenders\nfrom contenders import Contender\n"
SHORT = ("--rounds", "1", "--seconds", "0")

# mpi4py, with mistakes: in the second call alone (in bcast and in a ping-pong the next call would make good for it, so
# there they go on), from the second call on, and in all but the first call of each batch.
WRONG_PEERS = """
import calls
import numpy as np
from dataclasses import replace


def skips(result, x, last):
    return np.broadcast_to(x, result.shape).copy()

def stale(result, x, last):
    return last

def shifts(result, x, last):
    return np.roll(result, 1, axis=-1)

def one_element(result, x, last):
    result.flat[5] *= 1.00001
    return result

def once(made, calls, operation):
    return made == 2 or made > 2 and operation in ("bcast", "pingpong")

def onwards(made, calls, operation):
    return made >= 2

def again(made, calls, operation):
    return made % calls != 1

def made(mistake, builder, when):
    def build(data, calls):
        right, made, last = data.operation.numpy, 0, None

        def numpy(x, y):
            nonlocal made, last
            made += 1
            before = x.copy()
            result = right(x, y)
            kept = result.copy()
            if when(made, calls, data.operation.name):
                result = mistake(result, before, last)
            last = kept
            return result

        return builder(replace(data, operation=replace(data.operation, numpy=numpy)), calls)

    return build

contenders.CONTENDERS = (
    *(c for c in contenders.CONTENDERS if c.name in ("C", "mpi4py", "jaxmpi", "x + 1")),
    *(
        Contender(kind, f"{mistake.__name__} {when.__name__}", made(mistake, builder, when), 1.0)
        for mistake in (skips, stale, shifts, one_element)
        for kind, builder, when in (
            ("loop", contenders._numpy_loop, once),
            ("loop", contenders._numpy_loop, onwards),
            ("loop", contenders._numpy_loop, again),
            ("eager", contenders._numpy_eager, onwards),
        )
    ),
)
calls.main()
"""

# jaxmpi, if its allreduce returned its operand.
WRONG_JAXMPI = """
import types
import jax

idle = types.SimpleNamespace(allreduce=lambda x, op, comm: x)
contenders.CONTENDERS = tuple(
    Contender("jit", "jaxmpi", contenders._jax_call(idle, jax.jit), 1.0) if (c.kind, c.name) == ("jit", "jaxmpi") else c
    for c in contenders.CONTENDERS if c.name in ("jaxmpi", "x + 1")
)
"""

# The figures of quick.py, of less data.
SMALL_QUICK = """
import quick

small, donated = contenders.build, contenders.build_donated
quick.build = lambda operation, nbytes, seconds, only=None: small(operation, min(nbytes, 4096), 0, only=only)
quick.build_donated = lambda nbytes, calls: donated(4096, 2)
quick.LEAVES = 3
quick.main()
"""


@pytest.fixture
def program(tmp_path):
    def write(*parts):
        path = tmp_path / "program.py"
        path.write_text(START + "".join(textwrap.dedent(part) for part in parts))
        return path

    return write


def load(name):
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.sampled
def test_wrong_peers_are_shown(program, tmp_path):
    """Every mistake in every operation is found, nothing else is, and the run goes on."""
    output = tmp_path / "calls.json"
    operations = ("allreduce", "pingpong", "exchange", "bcast", "allgather", "alltoall")
    done = launch(
        2, program(WRONG_PEERS), "--operations", *operations, "--bytes", 4096, *SHORT, "--output", output, timeout=100
    )
    records = json.loads(output.read_text())["calls"]
    right = [record for record in records if record["contender"] in ("C", "mpi4py", "jaxmpi", "x + 1")]
    wrong = [record for record in records if record not in right]
    assert {record["kind"] for record in right if record["contender"] == "jaxmpi"} == {"loop", "jit", "eager"}
    assert [record for record in right if record["wrong"] != 0] == []
    assert len(wrong) == 16 * len(operations)
    assert [record for record in wrong if record["wrong"] == 0] == []
    for record in wrong:
        assert f"WRONG DATA: {record['contender']}, {record['kind']}, {record['operation']} of 4096 B" in done.stdout
    counted = {(record["operation"], record["kind"], record["contender"]): record["wrong"] for record in wrong}
    # One element on each of two ranks, in two rounds, in the last call of each and in the one more call.
    assert counted["allreduce", "eager", "one_element onwards"] == 8
    # All elements of one round.
    assert counted["allreduce", "loop", "skips once"] == 2 * 1024

    figures = next(record for record in right if record["operation"] == "alltoall")
    seconds = statistics.median(figures["seconds"])
    assert figures["latency_us"] == pytest.approx(1e6 * seconds)
    assert figures["algbw_GBps"] == pytest.approx(2 * 4096 / seconds / 1e9)
    assert figures["busbw_GBps"] == pytest.approx(4096 / seconds / 1e9)
    assert next(record for record in right if record["contender"] == "x + 1")["busbw_GBps"] is None


@pytest.mark.alone
@pytest.mark.sampled
@pytest.mark.parametrize("name", ["calls", pytest.param("quick", marks=pytest.mark.nightly)])
def test_wrong_jaxmpi_is_an_error(program, tmp_path, name):
    output = tmp_path / "calls.json"
    if name == "calls":
        options = ("--operations", "allreduce", "--bytes", 4096, *SHORT, "--output", output)
        done = launch(2, program(WRONG_JAXMPI, "import calls\ncalls.main()\n"), *options, timeout=100, check=False)
        records = json.loads(output.read_text())["calls"]
        assert {record["kind"]: record["wrong"] for record in records if record["contender"] == "jaxmpi"} == {
            "loop": 0,
            "jit": 2 * 2 * 1024,  # all elements of two ranks, in two rounds
            "eager": 0,
        }
    else:
        done = launch(2, program(WRONG_JAXMPI, SMALL_QUICK), timeout=100, check=False)
        assert f"wrong_elements: {2 * 26}  (goal 0)" in done.stdout
    assert done.returncode != 0
    assert "WRONG DATA: jaxmpi, " in done.stdout


@pytest.mark.alone
@pytest.mark.parametrize(
    ("operation", "nbytes", "ranks", "algorithm", "bus"),
    [
        ("allreduce", 8e9, 2, 4.0, 4.0),
        ("allreduce", 8e9, 4, 4.0, 6.0),
        ("allgather", 2e9, 4, 4.0, 3.0),  # a part of four
        ("alltoall", 2e9, 4, 4.0, 3.0),
        ("allgather", 4e9, 2, 4.0, 2.0),
        ("bcast", 8e9, 4, 4.0, 4.0),
        ("pingpong", 8e9, 2, 4.0, 4.0),
        ("exchange", 8e9, 4, 4.0, 4.0),
        ("barrier", 4, 4, None, None),
    ],
)
def test_bandwidth(operation, nbytes, ranks, algorithm, bus):
    """In two seconds."""
    bandwidth = load("bandwidth")
    assert bandwidth.algbw(operation, nbytes, ranks, 2.0) == pytest.approx(algorithm)
    assert bandwidth.busbw(operation, nbytes, ranks, 2.0) == pytest.approx(bus)


@pytest.mark.alone
def test_tables_and_plots(tmp_path, capsys):
    """What was wrong is named, bandwidth stands beside it; files without either are read as well."""
    report = load("report")
    figures = {"operation": "allreduce", "kind": "loop", "seconds": [1e-6] * 9}
    measured = {"algbw_GBps": 1.5, "busbw_GBps": 2.25}
    records = [
        {**figures, **measured, "bytes": 4, "contender": "C", "wrong": 0},
        {**figures, **measured, "bytes": 4, "contender": "mpi4jax", "wrong": 12},
        {**figures, **measured, "bytes": 1024, "contender": "mpi4jax", "wrong": 0},
        {**figures, "bytes": 4096, "contender": "C"},
    ]
    path = tmp_path / "calls.json"
    report.write(path, {"calls": records})
    calls, rest = report.read([path])
    report.markdown(calls, rest)
    lines = capsys.readouterr().out.splitlines()
    assert "| operation | bytes | C | mpi4jax | jaxmpi / C | mpi4jax / jaxmpi | wrong |" in lines
    assert "| allreduce | 4 B | 1 (1-1) | 1 (1-1) |  |  | mpi4jax: 12 |" in lines
    assert "| allreduce | 1 KiB |  | 1 (1-1) |  |  | 0 |" in lines
    assert "| allreduce | 4 KiB | 1 (1-1) |  |  |  |  |" in lines
    assert "| allreduce | 4 B | 1.5 / 2.25 | 1.5 / 2.25 |" in lines
    assert not any(line.startswith("| allreduce | 4 KiB |") and "/" in line for line in lines)
    pytest.importorskip("matplotlib")
    report.plot(calls, tmp_path)
    assert (tmp_path / "calls-loop.png").stat().st_size > 0


@pytest.mark.alone
def test_what_is_simulated_is_what_the_formulas_say(monkeypatch):
    """The model of many ranks: alike where nothing disturbs a rank, later where something does, and then in proportion
    to the operating system's share."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    model = load("scaling_model")
    quiet = model.Noise()
    for ranks in (2, 8, 64, 512):
        done = model.simulate_allreduce(model.OURS, np.zeros(ranks), 8, quiet)
        assert done == pytest.approx(model.allreduce(model.OURS, ranks, 8))
    for ranks in (8, 64, 512):
        done = model.simulate_exchange(model.OURS, np.zeros(ranks), model.HALO, quiet)
        assert done == pytest.approx(model.exchange(model.OURS, ranks, model.HALO))
    late = np.zeros(64)
    late[5] = 1.0  # a sum waits for all, an exchange for neighbours
    assert model.simulate_allreduce(model.OURS, late, 8, quiet).min() > 1
    waiting = model.simulate_exchange(model.OURS, late, model.HALO, quiet) > 1
    assert waiting.sum() == 27
    disturbed = [model.simulate_steps(model.OURS, 64, model.Noise(length, 1e-2), 1e-3) for length in (0, 1e-6, 1e-4)]
    assert disturbed[0] < disturbed[1] < disturbed[2]
    assert model.allreduce(model.OURS, 1, 8) == model.OURS.call
    assert model.fourier(model.OURS, 1, 8) == 0
