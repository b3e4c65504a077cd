"""The operations in the form with tokens, which programs for mpi4jax up to 0.7 use: each takes a token and returns one.

The order of operations does not depend on tokens. An operation returns the token unchanged, so that a loop may carry
it. The names and signatures are in _tokens.pyi.
"""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

from jaxmpi import notoken
from jaxmpi._primitive.jit import Token

_TOKEN = Token()


def with_token(function: Callable[..., Any]) -> Any:
    """Return an operation in the form with tokens. It takes a `token` too, and returns `(result, token)`, or the token
    alone if the operation has no result."""
    signature = inspect.signature(function)
    has_result = signature.return_annotation is not None

    if has_result:

        @functools.wraps(function)
        def call(*args: Any, token: Any = None, **kwargs: Any) -> Any:
            return function(*args, **kwargs), _TOKEN if token is None else token

    else:

        @functools.wraps(function)
        def call(*args: Any, token: Any = None, **kwargs: Any) -> Any:
            function(*args, **kwargs)
            return _TOKEN if token is None else token

    parameters = [
        *signature.parameters.values(),
        inspect.Parameter("token", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Any),
    ]
    result = tuple[Any, Token] if has_result else Token
    call.__signature__ = signature.replace(parameters=parameters, return_annotation=result)  # type: ignore[attr-defined]
    call.__annotations__ = {**{p.name: p.annotation for p in parameters}, "return": result}
    call.__doc__ = function.__doc__ and _documented(inspect.cleandoc(function.__doc__))  # None with `python -OO`
    call.__module__ = "jaxmpi"
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


for _name in notoken.__all__:
    if (_function := getattr(getattr(notoken, _name), "__wrapped__", None)) is not None:
        globals()[_name] = with_token(_function)
