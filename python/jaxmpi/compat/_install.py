"""Replacement of other packages by modules."""

import dataclasses
import importlib
import importlib.machinery
import sys
from types import ModuleType

from jaxmpi.compat import _jpi, _mpi4jax
from jaxmpi_launch.stand_ins import STAND_INS, Finder

_installed: dict[str, str] = {}
"""The packages replaced so far, each with the API that replaces it."""

_APIS = ("notoken", "token")


def install(key: str) -> None:
    """Install a stand-in by the name that `python -m jaxmpi.run --as` takes. Do nothing if it is installed.

    Raise RuntimeError if another module, or the package's other API, has the name.
    """
    name, api, version = dataclasses.astuple(STAND_INS[key])
    if name in sys.modules:
        if name not in _installed:
            raise RuntimeError(
                f"jaxmpi.compat: {name} has been imported already, so part of the program may use it. Install before "
                f"the first 'import {name}', or start the program with 'python -m jaxmpi.run --as {name} ...'."
            )
        if _installed[name] != api:
            raise RuntimeError(
                f"jaxmpi.compat: {name} is installed already, with api={_installed[name]!r}, not {api!r}."
            )
        return
    modules = _jpi.modules() if name == "jpi" else _mpi4jax.modules(api, version)
    for dotted, names in modules.items():  # the package itself first
        module = ModuleType(dotted, f"jaxmpi in the place of {name}: see jaxmpi.compat.")
        module.__spec__ = importlib.machinery.ModuleSpec(dotted, None, origin="jaxmpi.compat", is_package=True)
        module.__path__ = []
        module.__dict__.update(names)
        module.__all__ = [n for n in names if not n.startswith("_")]  # type: ignore[attr-defined]
        sys.modules[dotted] = module
        parent, _, last = dotted.rpartition(".")
        if parent and not hasattr(sys.modules[parent], last):
            setattr(sys.modules[parent], last, module)
    _installed[name] = api
    Finder(key, install).install()
    importlib.invalidate_caches()


def install_as_mpi4jax(api: str = "notoken") -> None:
    """Make `import mpi4jax` give a module with the same functions, implemented by jaxmpi, in this whole process.

    Positions, defaults and names of arguments are the same as in mpi4jax. So are the kinds of exceptions (TypeError for
    a traced root or a wrong communicator, ValueError for shapes), MPI4JAX_DEBUG and `__version__`.

    Args:
      api: "notoken", the API of mpi4jax 0.8 and later: functions return the result alone, `send` and `barrier` nothing,
        and `token=` raises a RuntimeError. Or "token", the API of mpi4jax up to 0.7: functions return
        `(result, token)`, `send` and `barrier` the token. They accept any `token=`, and `mpi4jax.experimental` exists.

    Raises:
      RuntimeError: mpi4jax has been imported already, or is installed with another `api`.
      ValueError: unknown `api`.
    """
    if api not in _APIS:
        raise ValueError(f"install_as_mpi4jax: api must be one of {_APIS}, got {api!r}")
    install("mpi4jax" if api == "notoken" else "mpi4jax-token")


def install_as_jpi() -> None:
    """Make `import jpi` give a module with the same functions, implemented by jaxmpi, in this whole process.

    Switch JAX to 64-bit types (`jax_enable_x64`), as an import of JPI does.

    Raises:
      RuntimeError: jpi has been imported already.
    """
    install("jpi")
