"""The operations without tokens: each returns its result alone; `send` and `barrier` return None.

Same arguments as in `jaxmpi`, without `token`; program order is kept all the same.
"""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar, cast

from jaxmpi._operations import nonblocking, operations
from jaxmpi._primitive.order import Token

Function = TypeVar("Function", bound=Callable[..., Any])


def _without_token(function: Function) -> Function:
    """Type checkers take the signatures from notoken.pyi; editors find the docstring by the return type `Function`."""
    signature = inspect.signature(function)
    parameters = [p for name, p in signature.parameters.items() if name != "token"]
    result = None if signature.return_annotation is Token else Any

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "token" in kwargs:
            raise TypeError(f"jaxmpi.notoken.{function.__name__} takes no token: order needs none. Drop the argument.")
        returned = function(*args, **kwargs)
        return returned[0] if isinstance(returned, tuple) else None

    text = re.sub(r"\n      token: accepted, handed back, and not needed\.", "", function.__doc__ or "")
    text = re.sub(r"`\(result, token\)`: ", "", text)
    text = re.sub(r"`\((\(result, \w+\)), token\)`", r"`\1`", text)
    text = text.replace("A token. The message", "Nothing. The message")
    call.__doc__ = text.replace("      A token.\n", "      Nothing.\n")
    call.__signature__ = signature.replace(parameters=parameters, return_annotation=result)  # type: ignore[attr-defined]
    call.__annotations__ = {**{p.name: p.annotation for p in parameters}, "return": result}
    call.__module__ = __name__
    return cast(Function, call)


__all__ = [*operations.__all__, *nonblocking.__all__]

for _name in __all__:
    _function = getattr(operations, _name, None) or getattr(nonblocking, _name)
    _takes_one = "token" in inspect.signature(_function).parameters
    globals()[_name] = _without_token(_function) if _takes_one else _function
