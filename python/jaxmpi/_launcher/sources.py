"""The source texts of a program: its own and those of the modules beside it that it imports. Nothing is executed."""

import ast
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

_MOST_BYTES = 4 << 20
"""How much is read at most: about a second."""


@dataclass(frozen=True)
class Source:
    """A text, the name of its file, and its place among packages: `a.b` for `a/b.py`, also for `a/b/__init__.py`."""

    file: str
    text: bytes
    module: str = ""
    is_package: bool = False


def of_program(kind: str | None, program: str) -> Iterator[Source]:
    """The texts of a program as `jaxmpi.run` is told it: a script, a folder, `-m` a module or `-c` a text.

    Modules are looked for where the program is; of an installed package only its own. Zip files are not read.
    """
    if kind == "-c":
        yield from _with_imports(os.getcwd(), [Source("<string>", program.encode(errors="replace"))])
    elif kind == "-m":
        package = program.partition(".")[0]
        for root in [os.getcwd(), *sys.path]:
            first = [*_found(root, program), *_found(root, f"{program}.__main__")]
            if first:
                yield from _with_imports(root, first, within=package if root in sys.path[1:] else "")
                return
    else:
        folder = os.path.isdir(program)
        file = os.path.join(program, "__main__.py") if folder else program
        yield from _with_imports(program if folder else os.path.dirname(os.path.abspath(program)), _read(file, ""))


def _read(file: str, module: str) -> list[Source]:
    try:
        with open(file, "rb") as opened:
            return [Source(file, opened.read(_MOST_BYTES), module, os.path.basename(file) == "__init__.py")]
    except OSError:
        return []


def _found(root: str, module: str) -> list[Source]:
    path = os.path.join(root, *module.split("."))
    return _read(f"{path}.py", module) or _read(os.path.join(path, "__init__.py"), module)


def _with_imports(root: str, first: list[Source], within: str = "") -> Iterator[Source]:
    """The texts, and those that they import from the folder `root`; only the package `within`, if that is given."""
    waiting, seen, left = list(first), {source.module for source in first}, _MOST_BYTES
    while waiting and left > 0:
        source = waiting.pop(0)
        left -= len(source.text)
        yield source
        for module in _imported(source):
            if module not in seen and (not within or module.partition(".")[0] == within):
                seen.add(module)
                waiting += _found(root, module)


def _imported(source: Source) -> Iterator[str]:
    """The modules that a text may import, their packages first; `from a import b` may name one."""
    try:
        nodes = ast.walk(ast.parse(source.text))
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = source.module.split(".") if node.level else []
            above = above[: len(above) + source.is_package - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" if base else alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[:n]) for n in range(1, len(parts) + 1))
