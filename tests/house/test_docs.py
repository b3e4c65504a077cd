"""The programs in README and docs/ run as they are printed, on any number of ranks, and print on two what is shown.

The blocks of a page marked `python` are executed in their order, in one namespace. A block marked `text` that follows
one is what both of two ranks print, in any order of lines; where the block prints a line of itself, it is shown as
that of `program.py`. `<!--- skip: next "reason" -->` leaves a block out.
"""

import contextlib
import io
import os
import re
import signal
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import jax
import pytest

sybil = pytest.importorskip("sybil")
from sybil.evaluators.python import PythonEvaluator  # noqa: E402
from sybil.parsers.markdown import CodeBlockParser, SkipParser  # noqa: E402

from support.table import NEW_JAX  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OF_LIBRARIES = {"training": ("equinox", "optax"), "sampling": ("numpyro", "blackjax")}
"""What pages need beside the tests' own packages: `make test-clients` runs these pages, also on four ranks."""
SHOWN = "what the ranks print in an example: set by the test"

pytestmark = pytest.mark.seconds(300)


class Program(CodeBlockParser):
    """Executes a block, and keeps what it prints."""

    language = "python"

    def evaluate(self, example):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            PythonEvaluator()(example)
        example.namespace[SHOWN] = _as_program(printed.getvalue(), example)


def _as_program(printed, example):
    """What the block would have printed as a program of its own: lines of the page are those of `program.py`."""
    before = example.line + example.parsed.line_offset
    return re.sub(
        rf"{re.escape(str(example.path))}:(\d+)", lambda found: f"program.py:{int(found[1]) - before}", printed
    )


class Output(CodeBlockParser):
    """Compares the block with what the ranks have printed since the last one."""

    language = "text"

    def __init__(self, comm):
        super().__init__()
        self.comm = comm

    def evaluate(self, example):
        if SHOWN not in example.namespace:
            return
        printed = self.comm.allgather(example.namespace.pop(SHOWN))
        if len(printed) == 2:
            lines = [sorted(text.strip().splitlines()) for text in ("\n".join(printed), example.parsed)]
            lines = [[line.rstrip() for line in some if line.strip()] for some in lines]
            assert lines[0] == lines[1], f"{example.path}:{example.line}: printed {lines[0]}, shown {lines[1]}"


def examples(page, comm=None):
    return list(sybil.Sybil([Program(), Output(comm), SkipParser()]).parse(page).examples())


def _case(page):
    """The checks of gradients on one page take as long as all other pages together."""
    return pytest.param(page, marks=pytest.mark.nightly if page.stem == "gradients" else ())


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize("page", [_case(page) for page in PAGES], ids=lambda page: page.name)
def test_page(page, comm, monkeypatch):
    if not NEW_JAX:
        pytest.skip("derivatives are on most pages")
    if comm.size > 2 and page.stem not in OF_LIBRARIES:
        pytest.skip("on one rank and on two")
    if page.stem in ("files", "slurm", "training"):
        pytest.importorskip("zarr", minversion="3")
    for library in OF_LIBRARIES.get(page.stem, ()):
        pytest.importorskip(library)
    terminated = signal.getsignal(signal.SIGTERM)
    with mock.patch.dict(os.environ), jax.enable_x64(False), tempfile.TemporaryDirectory() as folder:
        monkeypatch.chdir(comm.bcast(folder))
        for example in examples(page, comm):
            comm.Barrier()
            try:
                example.evaluate()
            except unittest.SkipTest:  # this block alone
                example.namespace.pop(SHOWN, None)
        monkeypatch.undo()
        comm.Barrier()  # the folder is rank 0's
    signal.signal(signal.SIGTERM, terminated)  # which a program takes
    jax.effects_barrier()


@pytest.mark.alone
def test_programs_are_found():
    """On the pages that are there for their programs, with their outputs."""

    def count(page, kind):
        evaluators = [example.region.evaluator for example in examples(page)]
        return sum(isinstance(getattr(evaluator, "__self__", None), kind) for evaluator in evaluators)

    programs, outputs = ({page.stem: count(page, kind) for page in PAGES} for kind in (Program, Output))
    assert programs["README"] >= 1
    assert programs["tutorial"] >= outputs["tutorial"] >= 5
    assert programs["debugging"] >= outputs["debugging"] >= 5
