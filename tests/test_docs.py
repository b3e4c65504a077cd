"""The programs in README and docs/ run as they are printed, on any number of ranks, and print on two what is shown.

The blocks of a page marked `python` are executed in their order, in one namespace. A block marked `text` that follows
one is what both of two ranks print, in any order of lines. `<!--- skip: next "reason" -->` leaves a block out.
"""

import contextlib
import io
import os
import tempfile
import unittest
from pathlib import Path

import jax
import pytest

sybil = pytest.importorskip("sybil")
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser  # noqa: E402

from table import NEW_JAX  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHOWN = "what the ranks print in an example: set by the test"

pytestmark = pytest.mark.seconds(300)


class Program(PythonCodeBlockParser):
    """Executes a block, and keeps what it prints."""

    def evaluate(self, example):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            super().evaluate(example)
        example.namespace[SHOWN] = printed.getvalue()


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page(page, comm, monkeypatch):
    if not NEW_JAX:
        pytest.skip("derivatives are on most pages")
    variables = dict(os.environ)
    with jax.enable_x64(False), tempfile.TemporaryDirectory() as folder:
        monkeypatch.chdir(folder)
        for example in examples(page, comm):
            comm.Barrier()
            try:
                example.evaluate()
            except unittest.SkipTest:  # this block alone
                example.namespace.pop(SHOWN, None)
        monkeypatch.undo()
    jax.effects_barrier()
    os.environ.clear()
    os.environ.update(variables)


@pytest.mark.alone
def test_programs_are_found():
    """On the pages that are there for their programs."""
    counts = {page.stem: sum(isinstance(e.region.evaluator.__self__, Program) for e in examples(page)
              if hasattr(e.region.evaluator, "__self__")) for page in PAGES}  # fmt: skip
    assert counts["README"] >= 1
    assert counts["tutorial"] >= 5
