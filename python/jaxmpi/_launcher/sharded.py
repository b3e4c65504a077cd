"""Readies JAX for its own sharded programs over the processes of an MPI job: `python -m jaxmpi.run --collectives`.

What must be done before jax is imported (`offer`) and right after it (`prepare`). Loaded by path on each rank before
the program runs, so nothing here imports mpi4py or this package before JAX makes its devices.
"""

import mmap
import os
import re
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NEWEST_TRIED = "0.12.0.1"
"""The newest version of JAX and jaxlib with which the tests of jaxmpi were run."""

KINDS = ("mpi", "gloo")
"""What carries JAX's collectives: this machine's MPI, by jaxmpi, or gloo, which is part of jaxlib."""

LIBRARY = "MPITRAMPOLINE_LIB"
"""The variable that names the library in which jaxlib, as it is loaded, looks for MPI."""

PREEMPTION = "JAX_ENABLE_PREEMPTION_SERVICE"
"""The variable of a service of JAX that takes SIGTERM, by which launchers end jobs: off if it is not set."""

state: dict[str, str] = {}
"""`offered`: the library that jaxlib was given; `refused`: why it was given none; `kind`: what JAX was readied for."""


_NAME = re.compile(rb"\0(MPIX?ABI_\w+)(?=\0)")


def numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, without those of its build."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("dev")[0].partition("+")[0]))


def _names_in(file: Path) -> set[bytes]:
    with open(file, "rb") as library, mmap.mmap(library.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return set(_NAME.findall(content))


def _lacking(core_file: str) -> set[bytes]:
    """The names that jaxlib looks up in vain in our core: it would end the process as it is imported."""
    spec = find_spec("jaxlib")
    if spec is None or spec.origin is None or numbers(version("jaxlib")) <= numbers(NEWEST_TRIED):
        return set()
    looked_up = (_names_in(file) for file in Path(spec.origin).parent.glob("*.so"))
    return set[bytes]().union(*looked_up) - _names_in(Path(core_file))


def offer(core_file: str | None = None) -> None:
    """Lets jaxlib find our core as it looks for MPI. Before jax is imported; one that the user names is kept.

    `core_file`: for those who must not import this package.
    """
    if core_file is None:
        core_file = getattr(find_spec("jaxmpi._core"), "origin", None)
    if core_file and "jaxlib" not in sys.modules and LIBRARY not in os.environ:
        if lacking := _lacking(core_file):
            state["refused"] = f"jaxlib {version('jaxlib')} looks for {len(lacking)} names that this jaxmpi lacks"
            return
        os.environ[LIBRARY] = state["offered"] = core_file


def taken() -> None:
    """jaxlib has been loaded: processes that this one starts need not load our core."""
    if state.get("offered") == os.environ.get(LIBRARY):
        os.environ.pop(LIBRARY, None)


def prepare(kind: str) -> None:
    """Makes JAX start its distributed runtime on all ranks, at the latest as it makes its devices.

    A program may also call `jax.distributed.initialize()`, without arguments or with its own. After jax is imported,
    before it makes devices.
    """
    import jax
    from jax._src import clusters, xla_bridge

    jax.config.update("jax_cpu_collectives_implementation", kind)
    if PREEMPTION not in os.environ and hasattr(jax.config, PREEMPTION.lower()):
        jax.config.update(PREEMPTION.lower(), False)
    if state.setdefault("kind", kind) != kind:
        raise RuntimeError(f"jaxmpi: JAX was readied for --collectives {state['kind']} already")
    if getattr(xla_bridge.backends, "jaxmpi_own", None) is not None:
        return
    own = xla_bridge.backends
    starting = False

    def backends() -> Any:
        nonlocal starting
        if not starting and not xla_bridge.backends_are_initialized():
            starting = True
            try:
                _sharded().start()
            finally:
                starting = False
        return own()

    backends.jaxmpi_own = own  # type: ignore[attr-defined]
    xla_bridge.backends = backends

    class Cluster(clusters.ClusterEnv):  # what `jax.distributed.initialize()` asks
        name = "jaxmpi"

        @classmethod
        def is_env_present(cls) -> bool:
            return True

        @classmethod
        def get_coordinator_address(cls, timeout_secs: int | None = None, *_: Any, **__: Any) -> str:
            return _sharded().meet(timeout_secs)

        @classmethod
        def get_process_count(cls) -> int:
            return _sharded().world()[1]

        @classmethod
        def get_process_id(cls) -> int:
            return _sharded().world()[0]

        @classmethod
        def get_local_process_id(cls) -> None:
            return None  # which devices a process has, the launcher has decided

    types = clusters.ClusterEnv._cluster_types
    types.insert(0, types.pop(types.index(Cluster)))  # before those that find a launcher's or a scheduler's variables


def _sharded() -> Any:
    from jaxmpi import _sharded

    return _sharded
