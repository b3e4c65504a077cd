"""Tests whose functions run in one job, by tests/programs/functions.py:

    @rows("functions", checked.ALWAYS, ids=jobs.name)
    def test_checked(functions):
        jobs.check(2, functions, JAXMPI_CHECK="1")

Each function takes a communicator, and asserts. All those of one job are in one file of tests/programs/.
"""

import json
from operator import attrgetter
from pathlib import Path

from support.launch import launch
from support.rows import each

PROGRAM = Path(__file__).resolve().parents[1] / "programs" / "functions.py"
name = attrgetter("__name__")


def check(ranks, functions, **options):
    """Runs the functions in one job, and fails with the names of those that failed on a rank. Returns the job."""
    module = functions[0].__module__.rpartition(".")[2]
    done = launch(ranks, PROGRAM, module, *map(name, functions), **options)
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name": ')]

    def returned(function):
        errors = {line["rank"]: line["error"] for line in told if line["name"] == name(function)}
        assert set(errors) == set(range(ranks)), f"told by ranks {sorted(errors)} of {ranks}"
        wrong = [f"rank {rank}: {error}" for rank, error in sorted(errors.items()) if error]
        assert not wrong, "\n".join(wrong)

    each(functions, returned, name)
    return done
