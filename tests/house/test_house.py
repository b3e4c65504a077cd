"""The structure of the sources: layers, each of which uses only those below it, and no circles."""

import ast
import functools
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.alone
ROOT = Path(__file__).resolve().parents[2]

BESIDE = ("_derivatives", "_operations", "_sharded"), ("_grid", "_unstructured")
LAYERS = ("jaxmpi_launch", "_jax", "_mpi", "_primitive", *BESIDE, "_files")
"""The packages in python/jaxmpi/, from the ground; the modules and packages that are not named stand on top of them."""

UPWARD = {
    ("jaxmpi_launch.before_jax", "_sharded.meeting"): "called by JAX as it makes its devices",
    ("jaxmpi_launch.child", "compat._install"): "called as the program imports mpi4jax or JPI",
    ("jaxmpi_launch.command", "_mpi.import_errors"): "how to install an MPI library",
}
"""Imports of what stands higher, with the reason for each: what runs on a rank before the package can be imported."""

JAX_IS_KNOWN_TO = ("_jax.", "_derivatives.")
"""Where private names of JAX may stand."""

NAMES_OF_JAX = {
    "_contract": "looks for the names that the hooks replace",
    "jaxmpi_launch.before_jax": "runs before the package can be imported",
    "_sharded.communicators": "JAX's compiled programs",
    "_sharded.meeting": "JAX's distributed runtime",
    "sharded": "asks whether JAX has made its devices, before the package's own modules may be imported",
}
"""The other modules with private names of JAX, with the reason for each."""


@functools.cache
def _sources():
    """name -> tree, of each module of the package."""
    folder = ROOT / "python"
    return {
        ".".join(path.relative_to(folder).with_suffix("").parts).removeprefix("jaxmpi."): ast.parse(path.read_text())
        for path in folder.rglob("*.py")
    }


def _imported(name, tree, names):
    """The modules of the package that a module imports anywhere: inside of functions, `try` and conditions as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative imports are not read by these tests"
            found = [f"{node.module}.{alias.name}" for alias in node.names] + [str(node.module)]
        elif isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        else:
            continue
        inner = [module.removeprefix("jaxmpi.") for module in found if module.startswith(("jaxmpi.", "jaxmpi_launch"))]
        # The more special name comes first: of `from a import b`, where b is a module, it is a.b.
        found = [module for module in inner if module in names]
        yield from found[:1] if isinstance(node, ast.ImportFrom) else found


@functools.cache
def imports():
    """module -> the others that it imports."""
    sources = _sources()
    return {
        name: {other for other in _imported(name, tree, sources) if (name, other) not in UPWARD} - {name}
        for name, tree in sources.items()
    }


CSRC = ROOT / "csrc"

C_LAYERS = ("base", "core", "observe", "requests", "execute", ("devices", "mpi", "sharded"), "python")
"""The folders of csrc/, from the ground."""


def includes():
    """For each pair of a C source and its header the other headers and lists that they include, without the ending."""
    graph = {}
    for path in (*CSRC.rglob("*.c"), *CSRC.rglob("*.h")):
        found = re.findall(r'^ *# *include "([^"]+)\.(?:h|def)"', path.read_text(), re.MULTILINE)
        graph.setdefault(str(path.relative_to(CSRC).with_suffix("")), set()).update(found)
    return {name: found - {name} for name, found in graph.items()}


def _names(layer):
    return layer if isinstance(layer, tuple) else (layer,)


def _layer(name, layers):
    """The number of the layer on which a module of the package, or a C file, stands."""
    folder = re.split("[./]", name)[0]
    return next((number for number, layer in enumerate(layers) if folder in _names(layer)), len(layers))


def test_layers():
    """No module and no C file uses one that stands higher. Packages of one layer do not use each other, and folders of
    C do so in no circle."""
    assert {path.name for path in CSRC.iterdir()} == {name for layer in C_LAYERS for name in _names(layer)}
    assert all(name in _sources() for pair in UPWARD for name in pair)
    wrong, folders = [], {}
    for graph, layers in ((imports(), LAYERS), (includes(), C_LAYERS)):
        for name, others in graph.items():
            for other in others:
                own, its = _layer(name, layers), _layer(other, layers)
                beside = layers is LAYERS and own == its < len(LAYERS) and name.split(".")[0] != other.split(".")[0]
                if its > own or beside:
                    wrong.append(f"{name} uses {other}")
    assert not wrong
    for name, others in includes().items():
        folder = name.partition("/")[0]
        folders.setdefault(folder, set()).update({other.partition("/")[0] for other in others} - {folder})
    list(TopologicalSorter(folders).static_order())


def test_header_of_each_source():
    """A function that a header of the C core declares is defined there, or in the source of this name. So no circle of
    calls is hidden behind a header that declares what several sources define."""
    declared, defined = {}, {}
    for path in CSRC.rglob("*.[ch]"):
        name = str(path.relative_to(CSRC).with_suffix(""))
        text = re.sub(r"__attribute__\(\(.*?\)\)\)? ?", "", path.read_text())
        # Functions begin at the beginning of a line, and so do their types.
        for match in re.finditer(r"^(?!static|#| |typedef)[\w *]*?\b(\w+)\((?:[^;{}]*?)\)( \{|;)", text, re.MULTILINE):
            (defined if match[2] == " {" else declared).setdefault(match[1], set()).add(name)
    elsewhere = {
        function: (names, defined[function])
        for function, names in declared.items()
        if function in defined and not defined[function] <= names
    }
    assert len(declared) > 100
    assert not elsewhere


def test_no_wait_of_c_depends_on_the_time_of_day():
    texts = {str(path.relative_to(CSRC)): path.read_text() for path in CSRC.rglob("*.[ch]")}
    waits = {"CLOCK_REALTIME": set(), "pthread_cond_timedwait": {"base/threads.c"}}
    assert waits == {word: {name for name, text in texts.items() if word in text} for word in waits}


def test_one_name_for_each_function_of_c():
    """Static ones, too: readers look for a function by its name. Sources of python/ name theirs as Python does, and
    sources for a kind of memory have the same steps for another driver."""
    defined = {}
    for path in CSRC.rglob("*.[ch]"):
        text = re.sub(r"__attribute__\(\(.*?\)\)\)? ?", "", path.read_text())
        for name in re.findall(r"^(?!#| |typedef)[\w *]*?\b(\w+)\([^;{}]*?\) \{", text, re.MULTILINE):
            if path.parent.name != "python" and not path.name.startswith("memory_") and name != "BODY":
                defined.setdefault(name, set()).add(path.name)
    assert len(defined) > 400
    assert not {name: places for name, places in defined.items() if len(places) > 1}


ATOMIC = re.compile(
    r"\*_Atomic (\w+)"
    r"|_Atomic\([^)]*\) (\w+)"
    r"|\b_Atomic (?:enum |struct )?\w+ (\w+)[;\[ =]"
    r"|\batomic_(?:bool|int|long|u?int_least64_t) (\w+)"
)


def test_orders_of_all_atomic_objects():
    """docs/memory_order.md has each atomic object of the core."""
    page = (ROOT / "docs" / "memory_order.md").read_text()
    texts = (path.read_text() for path in CSRC.rglob("*.[ch]"))
    names = {name for text in texts for match in ATOMIC.findall(text) for name in match if name}
    assert len(names) > 40
    assert not {name for name in names if f"`{name}`" not in page}


@pytest.mark.parametrize("graph", [imports, includes])
def test_no_circles(graph):
    edges = graph()
    assert len(edges) > 15
    assert sum(map(len, edges.values())) > len(edges)
    list(TopologicalSorter(edges).static_order())  # raises CycleError, which names one


def test_private_names_of_jax():
    """They stand where they are looked for when a version of JAX has moved one."""
    uses = set()
    for name, tree in _sources().items():
        for node in ast.walk(tree):
            module = getattr(node, "module", None) if isinstance(node, ast.ImportFrom) else None
            named = [module, *(a.name for a in node.names)] if isinstance(node, ast.ImportFrom | ast.Import) else []
            attribute = isinstance(node, ast.Attribute) and node.attr == "_src"
            if attribute or any(str(found).startswith("jax._src") for found in named):
                uses.add(name)
    assert {name for name in uses if not name.startswith(JAX_IS_KNOWN_TO)} == set(NAMES_OF_JAX)


_FIRST = "The same|Of|Which|Both|Whose|That|Its|Those|So|And|Also|Otherwise|In|For|By|Until|From|Along"
FRAGMENTS = re.compile(rf"({_FIRST})\b|.*\bthat (is|are) none\b")
"""What a docstring that cannot be read alone begins with, or has: it runs on from the one before, or lacks a noun."""

UNFORMATTED = re.compile(r"^ *(Args|Raises|Returns|Yields): \S", re.MULTILINE)
"""What the site sets as prose: the head of a section that has text in the same line."""


def _docstrings(tree):
    """Each string that stands alone in a module: of a function, a class, an attribute or a constant."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def test_docstrings_can_be_read_alone():
    wrong = [
        f"{name}, line {line}: {text[:60]}"
        for name, tree in _sources().items()
        for line, text in _docstrings(tree)
        if FRAGMENTS.match(text) or UNFORMATTED.search(text)
    ]
    assert not wrong


GLOSSARY = ROOT / "docs" / "glossary.md"
MOST_TERMS = 30


def _terms():
    """term -> definition, of the page of private terms."""
    return dict(re.findall(r"^\*\*(.+?)\*\*: (.+(?:\n(?!\n|\*\*).+)*)", GLOSSARY.read_text(), re.MULTILINE))


def test_glossary():
    """It is short, defines each term once, and all its terms occur in the sources."""
    names = re.findall(r"^\*\*(.+?)\*\*: ", GLOSSARY.read_text(), re.MULTILINE)
    assert len(names) == len(set(names)) == len(_terms())
    assert 20 < len(names) <= MOST_TERMS
    assert "docs/glossary.md" in (ROOT / "CONTRIBUTING.md").read_text()
    assert "glossary.md" in (ROOT / "docs" / "index.md").read_text()
    folders = (ROOT / "python" / "jaxmpi", ROOT / "csrc")
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in {".py", ".c", ".h", ".def"}]
    sources = " ".join(re.sub(r"[\s*#]+", " ", path.read_text()) for path in files)
    missing = [name for name in names if not re.search(rf"\b{re.escape(name)}", sources, re.IGNORECASE)]
    assert not missing
