"""JAX's own sharded programs over the MPI of this job: `shard_map`, `jax.jit` with shardings, `psum`.

Under `python -m jaxmpi.run --collectives mpi` nothing has to be imported. Under another launcher a program begins with

    import jaxmpi.collectives
    jaxmpi.collectives.install()

before it imports jax. See docs/sharded.md.
"""

from jaxmpi._launcher import sharded as _sharded

__all__ = ["install", "why_not_mpi"]


def why_not_mpi() -> str:
    """Why JAX cannot communicate by MPI in this process; empty if it can."""
    if "refused" in _sharded.state:
        return _sharded.state["refused"] + ": use a newer jaxmpi, or --collectives gloo"
    if "offered" not in _sharded.state:
        return (
            "jax was imported before jaxmpi, or MPITRAMPOLINE_LIB names another library: import jaxmpi first, or start "
            "with 'python -m jaxmpi.run --collectives mpi'"
        )
    return ""


def install(kind: str = "mpi") -> None:
    """Readies JAX for sharded programs over all processes of COMM_WORLD. All ranks call it, before JAX makes devices.

    From then on `jax.devices()` are the devices of all ranks, one CPU device for each, and `jax.process_index()` is the
    rank. `jax.distributed` is started as JAX makes its devices: all ranks do that, or none goes on.

    Args:
      kind: "mpi": this job's MPI carries JAX's collectives on CPU memory; "gloo": what JAX uses by itself.

    Raises:
      ValueError: another kind.
      RuntimeError: JAX has made its devices already, or, for "mpi", jax was imported before jaxmpi.
    """
    import jax

    if kind not in _sharded.KINDS:
        raise ValueError(f"jaxmpi.collectives.install: kind must be one of {', '.join(_sharded.KINDS)}, got {kind!r}")
    if _sharded.state.get("kind") != kind and jax._src.xla_bridge.backends_are_initialized():
        raise RuntimeError(
            "jaxmpi.collectives.install: JAX has made its devices already (an array, jax.devices()): call it before"
        )
    if kind == "mpi" and (reason := why_not_mpi()):
        raise RuntimeError(f"jaxmpi.collectives.install: {reason}")
    _sharded.prepare(kind)
