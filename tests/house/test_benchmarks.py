"""The check of data in the benchmarks, with a contender that is wrong on purpose."""

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


def test_wrong_jaxmpi_is_an_error(tmp_path):
    program, output = tmp_path / "program.py", tmp_path / "calls.json"
    program.write_text(f"{START}{WRONG_JAXMPI}import calls\ncalls.main()\n")
    options = ("--operations", "allreduce", "--bytes", 4096, "--rounds", "1", "--seconds", "0", "--json", output)
    done = launch(2, program, *options, check=False)
    assert done.returncode != 0
    assert "WRONG DATA: jit jaxmpi, allreduce of 4096 B" in done.stdout
    records = [record for record in json.loads(output.read_text())["rows"] if record["contender"] == "jaxmpi"]
    # All elements of two ranks, in two rounds.
    assert {record["kind"]: record["wrong"] for record in records} == {"loop": 0, "jit": 2 * 2 * 1024, "eager": 0}
    figures, median = records[0], statistics.median(records[0]["microseconds_by_round"])
    assert figures["microseconds_median"] == median
    assert figures["bus_bandwidth_gigabytes_per_second"] == pytest.approx(4096 / median / 1e3)
