"""Readies JAX for its own sharded programs over the processes of an MPI job: `python -m jaxmpi.run --collectives`.

What must be done before jax is imported (`offer`) and right after it (`prepare`). Loaded by path on each rank before
the program runs, so nothing here imports mpi4py or this package before JAX makes its devices.
"""

import functools
import mmap
import os
import re
import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

KINDS = ("mpi", "gloo")
"""What carries JAX's collectives: this machine's MPI, by jaxmpi, or gloo, which is part of jaxlib."""

LIBRARY = "MPITRAMPOLINE_LIB"
"""The variable that names the library in which jaxlib, as it is loaded, looks for MPI."""

PREEMPTION = "JAX_ENABLE_PREEMPTION_SERVICE"
"""The variable of a service of JAX that takes SIGTERM, by which launchers end jobs: off if it is not set."""

_NAME_OF_CLUSTER = "jaxmpi"


@dataclass
class State:
    """What has been done for JAX in this process."""

    offered: str | None = None
    """The library that jaxlib was given."""
    refused: str | None = None
    """The reason why jaxlib was given none."""
    kind: str | None = None
    """What carries JAX's collectives; None if JAX has not been readied for any."""


state = State()

_NAME = re.compile(rb"\0(MPIX?ABI_\w+)(?=\0)")


def _versions() -> Any:
    """The module beside this one, which was loaded by path as well, or is imported."""
    name = "jaxmpi._launcher.versions"
    return sys.modules.get(name) or import_module(name)


def _names_in(file: Path) -> set[bytes]:
    with open(file, "rb") as library, mmap.mmap(library.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return set(_NAME.findall(content))


def _lacking(core_file: str) -> set[bytes]:
    """The names that jaxlib looks up in vain in our core: it would end the process as it is imported."""
    spec = find_spec("jaxlib")
    tried, numbers = _versions().NEWEST_TRIED, _versions().numbers
    if spec is None or spec.origin is None or numbers(version("jaxlib")) <= numbers(tried):
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
            state.refused = f"jaxlib {version('jaxlib')} looks for {len(lacking)} names that this jaxmpi lacks"
            return
        os.environ[LIBRARY] = state.offered = core_file


def taken() -> None:
    """jaxlib has been loaded: processes that this one starts need not load our core."""
    if state.offered == os.environ.get(LIBRARY):
        os.environ.pop(LIBRARY, None)


def why_not_mpi() -> str:
    """Why JAX cannot communicate by MPI in this process; empty if it can."""
    if state.refused is not None:
        return state.refused + ": use a newer jaxmpi, or --collectives gloo"
    if state.offered is None:
        return (
            "jax was imported before jaxmpi, or MPITRAMPOLINE_LIB names another library: import jaxmpi first, or start "
            "with 'python -m jaxmpi.run --collectives mpi'"
        )
    return ""


def prepare(kind: str) -> None:
    """Makes JAX start its distributed runtime on all ranks, at the latest as it makes its devices.

    A program may also call `jax.distributed.initialize()`, without arguments or with its own. After jax is imported,
    before it makes devices.
    """
    import jax
    from jax._src import xla_bridge

    jax.config.update("jax_cpu_collectives_implementation", kind)
    if PREEMPTION not in os.environ and hasattr(jax.config, PREEMPTION.lower()):
        jax.config.update(PREEMPTION.lower(), False)
    if state.kind not in (None, kind):
        raise RuntimeError(f"jaxmpi: JAX was readied for --collectives {state.kind} already")
    state.kind = kind
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

    register()


def register() -> None:
    """Lets `jax.distributed.initialize()` find out about this job, under any launcher. After jax is imported.

    JAX asks MPI only if it is told to (`cluster_detection_method="mpi4py"`), knows no variables of MPICH, and none that
    Open MPI has set since its version 5.
    """
    try:
        from jax._src import clusters, distributed

        types, initialize = clusters.ClusterEnv._cluster_types, distributed.State.initialize
    except (ImportError, AttributeError):
        return  # a JAX that finds its processes in another way, which the program then chooses
    if any(getattr(kind, "name", "") == _NAME_OF_CLUSTER for kind in types):  # in older versions of JAX some have none
        return

    class Cluster(clusters.ClusterEnv):
        name = _NAME_OF_CLUSTER
        met = False
        """Whether this call of `initialize` has left it to us to find the other processes."""

        @classmethod
        def is_env_present(cls) -> bool:
            cls.met = False
            others = (kind for kind in types if kind is not cls and not getattr(kind, "opt_in_only_method", False))
            return (
                state.kind is not None or _sharded().world()[1] > 1 or not any(kind.is_env_present() for kind in others)
            )

        @classmethod
        def get_coordinator_address(cls, timeout_secs: int | None = None, *_: Any, **__: Any) -> str:
            address = _sharded().meet(timeout_secs)
            cls.met = True
            return address

        @classmethod
        def get_process_count(cls) -> Any:
            return cls._of_world(1)

        @classmethod
        def get_process_id(cls) -> Any:
            return cls._of_world(0)

        @classmethod
        def _of_world(cls, which: int) -> Any:
            world = _sharded().world()
            # Alone, with a coordinator of the program's choice: others may have been started without MPI.
            return world[which] if cls.met or world[1] > 1 or state.kind is not None else None

        @classmethod
        def get_local_process_id(cls) -> int | None:
            return _sharded().local_device() if cls.met else None

    types.insert(0, types.pop(types.index(Cluster)))  # before those that find a scheduler's variables

    @functools.wraps(initialize)
    def initialize_here(*arguments: Any, **options: Any) -> None:
        try:
            initialize(*arguments, **options)
        finally:
            if Cluster.met:
                _sharded().forget_address()

    distributed.State.initialize = initialize_here  # type: ignore[method-assign]


def _sharded() -> Any:
    from jaxmpi._sharded import meeting

    return meeting
