"""The packages in whose place jaxmpi can be: their APIs and versions, and what finds them.

Loaded by path on each rank before the program runs, after at_import.py, so nothing here imports jax, mpi4py or the rest
of this package.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxmpi._launcher.at_import import AtImport


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


class _Distribution(metadata.Distribution):
    """What `importlib.metadata` says of a package that is replaced: name and version, and no files."""

    files: list[metadata.PackagePath] = []  # noqa: RUF012 (a property of the base)

    def __init__(self, replaced: StandIn) -> None:
        head = f"Metadata-Version: 2.1\nName: {replaced.package}\nVersion: {replaced.version}\n"
        self._texts = {"METADATA": head, "top_level.txt": f"{replaced.package}\n"}

    def read_text(self, filename: Any) -> str | None:
        return self._texts.get(str(filename))

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parents[2] / path


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Replaces a package by jaxmpi only when the program imports it, which can thus configure mpi4py before.

    Its metadata are found from the beginning on.
    """

    def __init__(self, name: str) -> None:
        self.name, self.replaced = name, STAND_INS[name]

    def find_spec(self, fullname: Any, path: Any = None, target: Any = None) -> Any:
        if fullname == self.replaced.package:
            return importlib.machinery.ModuleSpec(fullname, self, origin="jaxmpi.compat", is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        from jaxmpi.compat._install import INSTALLERS

        INSTALLERS[self.name]()
        return sys.modules[self.replaced.package]

    def exec_module(self, module: Any) -> None:
        pass

    def find_distributions(self, context: Any = None) -> Iterator[metadata.Distribution]:
        """Tells importlib.metadata of the package; not if the distributions of certain folders are asked for."""
        context = context or metadata.DistributionFinder.Context()
        if (context.name or self.replaced.package).lower() == self.replaced.package and "path" not in vars(context):
            yield _Distribution(self.replaced)

    def install(self) -> None:
        """Lets Python find the package and its metadata, also pkg_resources, which looks into folders only."""
        if any(isinstance(other, Finder) and other.name == self.name for other in sys.meta_path):
            return
        sys.meta_path[:0] = [self, AtImport("pkg_resources", self._add_to)]
        if "pkg_resources" in sys.modules:
            self._add_to(sys.modules["pkg_resources"])

    def _add_to(self, pkg_resources: ModuleType) -> None:
        made = {"project_name": self.replaced.package, "version": self.replaced.version}
        pkg_resources.working_set.add(pkg_resources.Distribution(**made))
