"""The benchmarks' check of data, with a contender that is wrong on purpose, and their formulas and tables."""

import importlib.util
import json
import statistics
from pathlib import Path

import pytest

from support.launch import launch

pytestmark = pytest.mark.alone
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


def test_wrong_jaxmpi_is_an_error(tmp_path):
    program, output = tmp_path / "program.py", tmp_path / "calls.json"
    program.write_text(f"{START}{WRONG_JAXMPI}import calls\ncalls.main()\n")
    options = ("--operations", "allreduce", "--bytes", 4096, "--rounds", "1", "--seconds", "0", "--output", output)
    done = launch(2, program, *options, check=False)
    assert done.returncode != 0
    assert "WRONG DATA: jaxmpi, jit, allreduce of 4096 B" in done.stdout
    records = [record for record in json.loads(output.read_text())["calls"] if record["contender"] == "jaxmpi"]
    # All elements of two ranks, in two rounds.
    assert {record["kind"]: record["wrong"] for record in records} == {"loop": 0, "jit": 2 * 2 * 1024, "eager": 0}
    figures, seconds = records[0], statistics.median(records[0]["seconds"])
    assert figures["latency_us"] == pytest.approx(1e6 * seconds)
    assert figures["algbw_GBps"] == figures["busbw_GBps"] == pytest.approx(4096 / seconds / 1e9)


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
