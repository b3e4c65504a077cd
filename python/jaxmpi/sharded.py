"""JAX's own sharded programs over the MPI of this job: `shard_map`, `jax.jit` with shardings, `psum`.

Under `python -m jaxmpi.run --collectives mpi` a program imports nothing. Under another launcher a program begins with

    import jaxmpi.sharded
    jaxmpi.sharded.install()

before it imports jax. See docs/sharded.md.
"""

from jaxmpi_launch import before_jax as _before_jax
from jaxmpi_launch.sharded_state import COLLECTIVES as _COLLECTIVES
from jaxmpi_launch.sharded_state import state as _state
from jaxmpi_launch.sharded_state import why_not_mpi

__all__ = ["install", "why_not_mpi"]


def install(kind: str = "mpi") -> None:
    """Prepare JAX for sharded programs over all processes of COMM_WORLD. All ranks call it, before JAX makes devices.

    From then on `jax.devices()` are the devices of all ranks, one CPU device for each, and `jax.process_index()` is the
    rank. JAX starts `jax.distributed` when it makes the devices. All ranks must do that, otherwise none continues.

    Args:
      kind: "mpi": this job's MPI carries JAX's collectives on CPU memory. "gloo": the library that JAX uses by default.

    Raises:
      ValueError: `kind` is neither of the two.
      RuntimeError: JAX has made devices already, or, for "mpi", jax was imported before jaxmpi.
    """
    import jax

    if kind not in _COLLECTIVES:
        raise ValueError(f"jaxmpi.sharded.install: kind must be one of {', '.join(_COLLECTIVES)}, got {kind!r}")
    if _state.kind != kind and jax._src.xla_bridge.backends_are_initialized():
        raise RuntimeError(
            "jaxmpi.sharded.install: JAX has made its devices already (an array, jax.devices()). Call it before."
        )
    if kind == "mpi" and (reason := why_not_mpi()):
        raise RuntimeError(f"jaxmpi.sharded.install: {reason}")
    _before_jax.prepare(kind)
