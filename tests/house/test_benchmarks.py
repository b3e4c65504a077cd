"""The benchmarks' check of data, with a contender that is wrong on purpose, and their formulas and tables."""

import importlib.util
import json
import statistics
from pathlib import Path

import pytest

from support.launch import launch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
START = f"import sys\nsys.path.insert(0, {str(BENCHMARKS)!r})\nimport contenders\nfrom contenders import Contender\n"

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


def load(name):
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.alone
def test_wrong_jaxmpi_is_an_error(tmp_path):
    program, output = tmp_path / "program.py", tmp_path / "calls.json"
    program.write_text(f"{START}{WRONG_JAXMPI}import calls\ncalls.main()\n")
    options = ("--operations", "allreduce", "--bytes", 4096, "--rounds", "1", "--seconds", "0", "--output", output)
    done = launch(2, program, *options, timeout=100, check=False)
    assert done.returncode != 0
    assert "WRONG DATA: jaxmpi, jit, allreduce of 4096 B" in done.stdout
    records = [record for record in json.loads(output.read_text())["calls"] if record["contender"] == "jaxmpi"]
    # All elements of two ranks, in two rounds.
    assert {record["kind"]: record["wrong"] for record in records} == {"loop": 0, "jit": 2 * 2 * 1024, "eager": 0}
    figures, seconds = records[0], statistics.median(records[0]["seconds"])
    assert figures["latency_us"] == pytest.approx(1e6 * seconds)
    assert figures["algbw_GBps"] == figures["busbw_GBps"] == pytest.approx(4096 / seconds / 1e9)


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
