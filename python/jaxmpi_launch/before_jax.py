"""Ready JAX for its own sharded programs over the processes of an MPI job, right after jax is imported.

Nothing here imports mpi4py or jaxmpi before JAX makes its devices.
"""

import functools
import os
from typing import Any

from jaxmpi_launch.sharded_state import PREEMPTION, state

_NAME_OF_CLUSTER = "jaxmpi"


def prepare(kind: str) -> None:
    """Make JAX start jax.distributed on all ranks, at the latest when JAX makes devices.

    Call this after jax is imported and before JAX makes devices. A program may also call
    `jax.distributed.initialize()`, with or without arguments.
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
    """Let `jax.distributed.initialize()` detect this job, under any launcher. Call this after jax is imported.

    JAX asks MPI only with `cluster_detection_method="mpi4py"`. It knows no variables of MPICH, and none of Open MPI 5.
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
        """Whether this call of `initialize` leaves it to jaxmpi to find the other processes."""

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
