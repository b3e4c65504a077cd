"""The state of JAX's own collectives in this process: `python -m jaxmpi.run --collectives`."""

import mmap
import os
import re
import sys
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from jaxmpi_launch import accelerators
from jaxmpi_launch.versions import NEWEST_TRIED, numbers

COLLECTIVES = ("mpi", "gloo")
"""The libraries that can carry JAX's collectives: MPI, by jaxmpi, or gloo, which is part of jaxlib."""

LIBRARY = "MPITRAMPOLINE_LIB"
"""The variable that names the library in which jaxlib, as it is loaded, looks for MPI."""

PREEMPTION = "JAX_ENABLE_PREEMPTION_SERVICE"
"""The variable of a service of JAX that takes SIGTERM, by which launchers end jobs: off if it is not set."""


@dataclass
class State:
    """The state of JAX's own collectives in this process."""

    offered: str | None = None
    """The library that jaxlib loads."""
    refused: str | None = None
    """The reason why jaxlib loads none."""
    kind: str | None = None
    """The library that carries JAX's collectives; None if nobody has chosen one."""


state = State()

_NAME = re.compile(rb"\0(MPIX?ABI_\w+)(?=\0)")


def _names_in(file: Path) -> set[bytes]:
    with open(file, "rb") as library, mmap.mmap(library.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return set(_NAME.findall(content))


def _lacking(core_file: str) -> set[bytes]:
    """Return the names that jaxlib looks up and our core lacks: jaxlib would end the process at import."""
    spec = find_spec("jaxlib")
    if spec is None or spec.origin is None or numbers(version("jaxlib")) <= numbers(NEWEST_TRIED):
        return set()
    looked_up = (_names_in(file) for file in Path(spec.origin).parent.glob("*.so"))
    return set[bytes]().union(*looked_up) - _names_in(Path(core_file))


def offer() -> None:
    """Let jaxlib load our core as MPI. Call this before jax is imported. A library that the user names stays."""
    core_file = accelerators.core_file()
    if core_file and "jaxlib" not in sys.modules and LIBRARY not in os.environ:
        if lacking := _lacking(core_file):
            state.refused = f"jaxlib {version('jaxlib')} looks for {len(lacking)} names that this jaxmpi lacks"
            return
        os.environ[LIBRARY] = state.offered = core_file


def taken() -> None:
    """Remove the variable, once jaxlib is loaded: processes that this one starts need not load our core."""
    if state.offered == os.environ.get(LIBRARY):
        os.environ.pop(LIBRARY, None)


def why_not_mpi() -> str:
    """Return why JAX cannot communicate by MPI in this process; empty if it can."""
    if state.refused is not None:
        return state.refused + ": use a newer jaxmpi, or --collectives gloo"
    if state.offered is None:
        return (
            "jax was imported before jaxmpi, or MPITRAMPOLINE_LIB names another library: import jaxmpi first, or start "
            "with 'python -m jaxmpi.run --collectives mpi'"
        )
    return ""
