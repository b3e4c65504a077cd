"""The operations in the form with tokens, as programs for mpi4jax up to 0.7 and for JPI use them.

Each operation takes a token and returns `(result, token)`; `send` and `barrier` return the token, `isend` and
`ibarrier` `(request, token)`. Order needs no token: jaxmpi hands it back as it came, so that a loop may carry it.
`import jaxmpi.tokens as mpi4jax` runs a program of that time. The signatures are in tokens.pyi.
"""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import jaxmpi
from jaxmpi import has_cuda_support, has_rocm_support, has_sycl_support
from jaxmpi._primitive.jit import Token

_OPERATIONS = (
    "allgather",
    "allgatherv",
    "allreduce",
    "alltoall",
    "alltoallv",
    "barrier",
    "bcast",
    "exscan",
    "gather",
    "gatherv",
    "iallreduce",
    "ialltoall",
    "ibarrier",
    "ibcast",
    "irecv",
    "isend",
    "neighbor_allgather",
    "neighbor_alltoall",
    "recv",
    "reduce",
    "reduce_scatter",
    "scan",
    "scatter",
    "scatterv",
    "send",
    "sendrecv",
    "wait",
    "waitall",
)

_TOKEN = Token()


def with_token(function: Callable[..., Any]) -> Any:
    """Return an operation in the form with tokens. It takes a `token` too, and returns `(result, token)`, or the token
    alone if the operation has no result."""
    signature = inspect.signature(function)
    has_result = signature.return_annotation is not None

    @functools.wraps(function)
    def call(*args: Any, token: Any = None, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        token = _TOKEN if token is None else token
        return (result, token) if has_result else token

    parameters = [
        *signature.parameters.values(),
        inspect.Parameter("token", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Any),
    ]
    result = tuple[Any, Token] if has_result else Token
    call.__signature__ = signature.replace(parameters=parameters, return_annotation=result)  # type: ignore[attr-defined]
    call.__annotations__ = {**{p.name: p.annotation for p in parameters}, "return": result}
    call.__doc__ = function.__doc__ and _documented(inspect.cleandoc(function.__doc__))  # None with `python -OO`
    call.__module__ = __name__
    del call.__wrapped__  # type: ignore[attr-defined]  # the wrapped function takes no token
    return call


def _documented(text: str) -> str:
    """Return the docstring with the token among the arguments and the results."""
    before, arguments, after = re.split(r"(?<=Args:\n)(.*?(?=\n\n|$))", text, maxsplit=1, flags=re.DOTALL)
    arguments += "\n  token: accepted, returned unchanged, and not needed."
    if "Returns:\n" not in after:
        return f"{before}{arguments}\n\nReturns:\n  A token.{after}"
    start, result = after.split("Returns:\n  ")
    return f"{before}{arguments}{start}Returns:\n  `(result, token)`: {result[0].lower()}{result[1:]}"


__all__ = ["Token", "has_cuda_support", "has_rocm_support", "has_sycl_support", *_OPERATIONS]
for _name in _OPERATIONS:
    globals()[_name] = with_token(getattr(jaxmpi, _name))
