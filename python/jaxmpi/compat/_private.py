"""Names in mpi4jax's private modules, `mpi4jax._src`, that public programs import and that jaxmpi can offer.

The other names belong to the implementation of mpi4jax.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
from mpi4py import MPI

import jaxmpi
import jaxmpi._core as _core
from jaxmpi._mpi import communicators
from jaxmpi._mpi.library import handle_of
from jaxmpi._mpi.settings import SETTINGS
from jaxmpi._primitive.effect import EFFECT

Names = dict[str, Any]


class HashableMPIType:
    """An object of mpi4py as a static argument of a compiled function, compared and hashed as by `jaxmpi.static`."""

    def __init__(self, wrapped: Any):
        self.wrapped = wrapped
        self._static = jaxmpi.static(wrapped) if isinstance(wrapped, MPI.Comm | MPI.Op) else id(wrapped)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HashableMPIType) and self._static == other._static

    def __hash__(self) -> int:
        return hash(self._static)

    def __repr__(self) -> str:
        return f"HashableMPIType({self.wrapped!r})"


def wrap_as_hashable(x: Any) -> HashableMPIType:
    return x if isinstance(x, HashableMPIType) else HashableMPIType(x)


def unpack_hashable(x: Any) -> Any:
    return x.wrapped if isinstance(x, HashableMPIType) else x


def flush(platform: str | None = None) -> None:
    """Wait for the communication of compiled functions."""
    jax.effects_barrier()


def versiontuple(text: str) -> tuple[int, ...]:
    """Return the first three numbers of a version."""
    numbers = re.match(r"[\d.]*", text)
    assert numbers is not None
    return tuple(int(number) for number in numbers[0].split(".") if number)[:3]


class _Log:
    """The debug log, which MPI4JAX_DEBUG switches on at the start."""

    def __init__(self) -> None:
        self.on = SETTINGS.log

    def set_logging(self, enable: bool) -> None:
        self.on = bool(enable)
        _core.configure(log=self.on)

    def get_logging(self) -> bool:
        return self.on


def _needs(present: bool, platform: str) -> Callable[[], None]:
    def ensure() -> None:
        if not present:
            raise ImportError(f"jaxmpi finds no {platform} driver: `python -m jaxmpi.info` shows what it looks for.")

    return ensure


def modules(functions: Names, support: Names) -> dict[str, Names]:
    """Return `mpi4jax._src` and the modules in it, of any release."""
    cuda, sycl = support["has_cuda_support"](), support["has_sycl_support"]()
    log = _Log()
    logging = {"set_logging": log.set_logging, "get_logging": log.get_logging}
    comm = {"get_default_comm": communicators.default_mpi}
    utils: Names = {f.__name__: f for f in (HashableMPIType, wrap_as_hashable, unpack_hashable)}
    utils |= {"to_mpi_handle": handle_of, "ordered_effect": EFFECT, **comm, **support}
    ensure = {"ensure_cuda_ext": _needs(cuda, "CUDA"), "ensure_xpu_ext": _needs(sycl, "SYCL")}
    bridges = {"": {**logging, "HAS_GPU_EXT": cuda, "HAS_CUDA_EXT": cuda, "HAS_XPU_EXT": sycl}}
    bridges |= {".mpi_xla_bridge": logging, ".mpi_xla_bridge_cpu": logging}
    names_of_module: dict[str, Names] = {
        "": {**functions, **support},
        "collective_ops": {},
        **{f"collective_ops.{name}": {name: function} for name, function in functions.items()},
        "comm": comm,
        "decorators": {**ensure, "ensure_gpu_ext": ensure["ensure_cuda_ext"]},
        "flush": {"flush": flush},
        "jax_compat": {"versiontuple": versiontuple},
        "utils": utils,
        **{f"xla_bridge{name}": names for name, names in bridges.items()},
    }
    return {f"mpi4jax._src.{name}".rstrip("."): names for name, names in names_of_module.items()}
