"""The public names of mpi4jax, in its two APIs."""

import functools
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

import jaxmpi
from jaxmpi import notoken

_FUNCTIONS = (
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "bcast",
    "gather",
    "recv",
    "reduce",
    "scan",
    "scatter",
    "send",
    "sendrecv",
)
_SUPPORT = ("has_cuda_support", "has_sycl_support")

# The newest releases with these APIs, for programs that look at the version.
_VERSIONS = {"notoken": "0.9.1", "token": "0.7.2"}


class HashableMPIType:
    """An object of mpi4py as a static argument of a compiled function: compared and hashed as by `jaxmpi.static`."""

    def __init__(self, wrapped: Any):
        self.wrapped = wrapped
        self._static = jaxmpi.static(wrapped)

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


def _unpacking(function: Callable[..., Any], tokens: bool = True) -> Callable[..., Any]:
    """`function` for arguments that may be wrapped. Without `tokens` it refuses the argument `token`."""
    name = function.__name__

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not tokens and "token" in kwargs:
            raise RuntimeError(
                f"{name}: from mpi4jax 0.8 on there are no tokens; order is kept without. Drop the argument and take "
                f"the result alone: 'y = mpi4jax.{name}(...)' instead of 'y, token = mpi4jax.{name}(..., "
                "token=token)'. For a program that uses tokens: --as mpi4jax-token, or "
                "jaxmpi.compat.install_as_mpi4jax(api='token')."
            )
        return function(*map(unpack_hashable, args), **{key: unpack_hashable(x) for key, x in kwargs.items()})

    call.__module__ = "mpi4jax"
    return call


def _auto_tokenize(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` itself: order needs no tokens."""
    return function


def modules(api: str) -> dict[str, dict[str, Any]]:
    support = {name: getattr(jaxmpi, name) for name in _SUPPORT}
    version = {"__version__": _VERSIONS[api]}
    without = {name: _unpacking(getattr(notoken, name), tokens=False) for name in _FUNCTIONS}
    # Not public, but mpi4jax has no other way to pass a communicator as a static argument.
    utils = {f.__name__: f for f in (HashableMPIType, unpack_hashable, wrap_as_hashable)}
    private = {"mpi4jax._src": {}, "mpi4jax._src.utils": {**utils, **support}}
    if api == "notoken":
        return {"mpi4jax": {**without, **support, **version}, **private}
    functions = {name: _unpacking(getattr(jaxmpi, name)) for name in _FUNCTIONS}
    return {
        "mpi4jax": {**functions, **support, **version},
        "mpi4jax.notoken": without,
        "mpi4jax.experimental": {"auto_tokenize": _auto_tokenize},
        "mpi4jax.experimental.notoken": without,
        **private,
    }
