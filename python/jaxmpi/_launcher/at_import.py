"""Something that is done as the program first imports a module.

Loaded by path on each rank before the program runs, so nothing here imports jax, mpi4py or this package.
"""

import importlib.abc
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def _nothing() -> None:
    pass


class AtImport(importlib.abc.MetaPathFinder):
    """Does something right before and right after the program first imports a module.

    So the variables that the program sets before, and what it sets in the module afterwards, are respected.
    """

    def __init__(self, name: str, after: Callable[[ModuleType], None], before: Callable[[], None] = _nothing) -> None:
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
