"""What happens as a program imports a module: jaxmpi replaces another package, or a function runs before or after."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class StandIn:
    """A package that can be replaced. The version is the newest one with this API, for programs that look at it."""

    package: str
    api: str
    version: str


STAND_INS = {
    "mpi4jax": StandIn("mpi4jax", "notoken", "0.9.1"),
    "mpi4jax-token": StandIn("mpi4jax", "token", "0.7.2"),
    "jpi": StandIn("jpi", "token", "0.1.0"),
}
"""The stand-ins by the names that `python -m jaxmpi.run --as` takes."""


class AtImport(importlib.abc.MetaPathFinder):
    """Calls a function right before, and one right after the program first imports a module.

    So jaxmpi respects the variables that the program sets before, and what it sets in the module afterwards.
    """

    def __init__(self, name: str, after: Callable[[ModuleType], None], before: Callable[[], None] = lambda: None):
        self.name, self.before, self.after = name, before, after

    def find_spec(self, fullname: Any, path: Any = None, target: Any = None) -> Any:
        if fullname != self.name:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_between(module: Any) -> None:
                self.before()
                execute(module)
                self.after(module)

            spec.loader.exec_module = execute_between  # type: ignore[method-assign]
        return spec


class _Distribution(metadata.Distribution):
    """What `importlib.metadata` says about a package that is replaced: name and version."""

    def __init__(self, replaced: StandIn) -> None:
        self._text = f"Metadata-Version: 2.1\nName: {replaced.package}\nVersion: {replaced.version}\n"

    def read_text(self, filename: Any) -> str | None:
        return self._text if str(filename) == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return path


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Replaces a package by jaxmpi only when the program imports it, which can thus configure mpi4py before.

    `importlib.metadata` finds the version of the package from the beginning on. `replace(name)` makes the module.
    """

    def __init__(self, name: str, replace: Callable[[str], None]) -> None:
        self.name, self.replaced, self.replace = name, STAND_INS[name], replace

    def find_spec(self, fullname: Any, path: Any = None, target: Any = None) -> Any:
        if fullname == self.replaced.package:
            return importlib.machinery.ModuleSpec(fullname, self, origin="jaxmpi.compat", is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        self.replace(self.name)
        return sys.modules[self.replaced.package]

    def exec_module(self, module: Any) -> None:
        pass

    def find_distributions(self, context: Any = None) -> Iterator[metadata.Distribution]:
        name = getattr(context, "name", None)
        if name is not None and name.lower() == self.replaced.package:
            yield _Distribution(self.replaced)

    def install(self) -> None:
        if not any(isinstance(other, Finder) and other.name == self.name for other in sys.meta_path):
            sys.meta_path.insert(0, self)
