"""The structure of the sources: what uses what, without circles."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.alone
ROOT = Path(__file__).resolve().parent.parent


def imports():
    """For each module of the package the others that it imports as it is loaded."""
    folder = ROOT / "python"
    names = {".".join(path.relative_to(folder).with_suffix("").parts): path for path in folder.rglob("*.py")}
    names = {name.removesuffix(".__init__"): path for name, path in names.items()}
    for name, path in names.items():
        statements = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)]
        found = {f"{node.module}.{alias.name}" for node in statements for alias in node.names}
        found |= {str(node.module) for node in statements}
        # The package itself is in the way of each import, and begins with nothing.
        yield name, {other for other in found if other in names} - {name, "jaxmpi"}


def includes():
    """For each pair of a C source and its header the other headers that they include."""
    folder = ROOT / "csrc"
    graph = {}
    for path in (*folder.rglob("*.c"), *folder.rglob("*.h")):
        found = re.findall(r'^#include "([^"]+)\.h"', path.read_text(), re.MULTILINE)
        graph.setdefault(str(path.relative_to(folder).with_suffix("")), set()).update(found)
    for name, found in graph.items():
        yield name, found - {name}


@pytest.mark.parametrize("graph", [imports, includes])
def test_no_circles(graph):
    edges = dict(graph())
    assert len(edges) > 15
    assert sum(map(len, edges.values())) > len(edges)
    list(TopologicalSorter(edges).static_order())  # raises CycleError, which names one


def test_one_version():
    """Of what pip, Meson and those who cite it read."""
    places = {
        "pyproject.toml": '^version = "(.+)"',
        "meson.build": "^  version: '(.+)',",
        "CITATION.cff": "^version: (.+)",
    }
    found = {re.search(text, (ROOT / name).read_text(), re.MULTILINE).group(1) for name, text in places.items()}
    assert len(found) == 1, found
