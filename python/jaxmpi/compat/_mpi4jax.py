"""The public names of mpi4jax, in its two APIs."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

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

# The newest releases with these APIs: what a program that asks for the version wants to know.
_VERSIONS = {"notoken": "0.9.1", "token": "0.7.1"}


def _refusing_tokens(name: str) -> Callable[..., Any]:
    function = getattr(notoken, name)
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "token" in kwargs:
            raise RuntimeError(
                f"{name}: from mpi4jax 0.8 on there are no tokens; order is kept without. Drop the argument and take "
                f"the result alone: 'y = mpi4jax.{name}(...)' instead of 'y, token = mpi4jax.{name}(..., "
                "token=token)'. For a program that uses tokens: jaxmpi.compat.install_as_mpi4jax(api='token')."
            )
        return function(*args, **kwargs)

    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__module__ = "mpi4jax"
    return call


def _auto_tokenize(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` itself: order needs no tokens."""
    return function


def modules(api: str) -> dict[str, dict[str, Any]]:
    support = {name: getattr(jaxmpi, name) for name in _SUPPORT}
    if api == "notoken":
        functions = {name: _refusing_tokens(name) for name in _FUNCTIONS}
        return {"mpi4jax": {**functions, **support, "__version__": _VERSIONS[api]}}
    functions = {name: getattr(jaxmpi, name) for name in _FUNCTIONS}
    without = {name: getattr(notoken, name) for name in _FUNCTIONS}
    return {
        "mpi4jax": {**functions, **support, "__version__": _VERSIONS[api]},
        "mpi4jax.experimental": {"auto_tokenize": _auto_tokenize},
        "mpi4jax.experimental.notoken": without,
    }
