"""The public names of mpi4jax, in both of its APIs."""

import functools
from collections.abc import Callable
from typing import Any

import jaxmpi
from jaxmpi import tokens
from jaxmpi.compat import _private
from jaxmpi.compat._private import unpack_hashable
from jaxmpi_launch.written_for import FUNCTIONS

_SUPPORT = ("has_cuda_support", "has_sycl_support")


def _unpacking(function: Callable[..., Any], api: str) -> Callable[..., Any]:
    """Wrap `function` for arguments that may be wrapped. With API "notoken" it refuses the argument `token`."""
    name = function.__name__

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if api == "notoken" and "token" in kwargs:
            raise RuntimeError(
                f"{name}: from mpi4jax 0.8 on there are no tokens, and order is kept without them. Drop the argument "
                f"and take the result alone: 'y = mpi4jax.{name}(...)' instead of 'y, token = mpi4jax.{name}(..., "
                "token=token)'. For a program that uses tokens: --as mpi4jax-token, or "
                "jaxmpi.compat.install_as_mpi4jax(api='token')."
            )
        return function(*map(unpack_hashable, args), **{key: unpack_hashable(x) for key, x in kwargs.items()})

    call.__module__ = "mpi4jax"
    return call


def modules(api: str, version: str) -> dict[str, dict[str, Any]]:
    support = {name: getattr(jaxmpi, name) for name in _SUPPORT}
    rest = {**support, "__version__": version}
    if api == "notoken":
        functions = {name: _unpacking(getattr(jaxmpi, name), api) for name in FUNCTIONS}
        return {"mpi4jax": {**functions, **rest}, **_private.modules(functions, support)}
    functions = {name: _unpacking(getattr(tokens, name), api) for name in FUNCTIONS}
    without = {name: _unpacking(getattr(jaxmpi, name), "notoken") for name in FUNCTIONS}
    return {
        "mpi4jax": {**functions, **rest},
        "mpi4jax.notoken": without,
        "mpi4jax.experimental": {"auto_tokenize": lambda function: function},  # order needs no tokens
        "mpi4jax.experimental.notoken": without,
        **_private.modules(functions, support),
    }
