"""Public functions that communicate nothing: static arguments, and what this process supports."""

from typing import Any, TypeVar

from mpi4py import MPI

from jaxmpi._mpi import communicators, devices
from jaxmpi._mpi import static as static_arguments
from jaxmpi._primitive import arguments

CommOrOp = TypeVar("CommOrOp", bound=MPI.Comm | MPI.Op)


def static(x: CommOrOp) -> CommOrOp:
    """Return a communicator or a reduction that may be an argument of compiled functions; mpi4py's own have no hash.

    The result is one of mpi4py's objects as well, with the same handle. Besides, it may be a static argument of
    `jax.jit`, static data of a pytree, or part of any other argument, where it is a pytree without leaves. Two of them
    are equal if they are of the same communicator. A freed one is not equal to any later one.

    Args:
      x: an intra-communicator or an operation of mpi4py, such as `MPI.COMM_WORLD` or `MPI.SUM`. It is not duplicated:
        `Free()` of either frees both.

    Returns:
      The static one. Nothing is communicated; other ranks need not call it.

    Raises:
      TypeError: `x` is neither. ValueError: it has been freed, or is an inter-communicator.
    """
    if isinstance(x, MPI.Op):
        lifetime: Any = arguments.reduction(x, "static")
    elif isinstance(x, MPI.Comm):
        lifetime = communicators.resolve(x, "static")
    else:
        raise TypeError(
            f"static: a communicator or an operation of mpi4py is needed, such as MPI.COMM_WORLD or MPI.SUM, got {x!r} "
            f"of type {type(x).__name__}."
        )
    return x if isinstance(x, static_arguments.Static) else static_arguments.make(x, lifetime)


def has_cuda_support() -> bool:
    """Return whether arrays in CUDA memory can be communicated: a driver is installed and shows a device to this
    process."""
    return devices.count("CUDA") > 0


def has_rocm_support() -> bool:
    """Return whether arrays in ROCm memory can be communicated: HIP is installed and shows a device to this process."""
    return devices.count("ROCM") > 0


def has_sycl_support() -> bool:
    """Return whether arrays in SYCL memory (Intel GPUs) can be communicated: JAX's plugin for them is installed, and
    Level Zero shows a device to this process."""
    return devices.count("ONEAPI") > 0
