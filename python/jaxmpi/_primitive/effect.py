"""The effect of communication, and what communicates, as far as the hooks into JAX need to know.

XLA keeps computations with the same ordered effect in program order, in all control flow, and drops none of them.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jaxmpi._jax import internals, jaxprs, primitives, runtime_token
from jaxmpi._jax.internals import Unsupported as Unsupported


class Communication(internals.Effect):
    """The effect of talking to other ranks."""

    def __repr__(self) -> str:
        return "MPI communication"

    __str__ = __repr__

    def __reduce__(self) -> str:
        """Return the name of the only one, also in what is serialized: JAX keeps the order of equal effects only."""
        return "EFFECT"


EFFECT = Communication()


def install() -> None:
    """Make JAX keep communication in program order, whatever it does with a program."""
    internals.permit_effect(Communication)
    jaxprs.lower_calls_inline(EFFECT)
    internals.pass_token_when_compiled(EFFECT)
    runtime_token.guard_repetitions(EFFECT)
    runtime_token.guard_calls_of_jax(EFFECT)


@contextlib.contextmanager
def during(variable: "contextvars.ContextVar[Any]", value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


JaxParams = dict[str, Any]
"""The parameters of an equation, by name. An operation of this package has one, `call`: see `params`."""

CALLS = (primitives.closed_call_p, internals.remat_p, primitives.jit_p)

REQUEST = (2,), np.dtype(np.float32)
"""Shape and dtype of the id of a request: `_operations.requests`."""

ZERO = np.zeros((), jax.dtypes.canonicalize_dtype(float))

_PLAIN = (int, float, bool, str, type(None))


def may_be_request(x: Any) -> bool:
    """Return whether `x` may be a request, or a batch of requests: a request with a tangent has an adjoint."""
    aval = jax.typeof(x)
    return (aval.shape[-1:], aval.dtype) == REQUEST


check: Callable[[], None]
"""Called before anything that communicates is differentiated; raises if that is not possible."""


def communicates(params: JaxParams) -> bool:
    """Return whether a computation in the parameters of a primitive communicates."""
    return any(_inside(value) for value in params.values() if type(value) not in _PLAIN)


def _inside(value: Any) -> bool:
    if EFFECT in getattr(value, "effects", ()):
        return True
    if isinstance(value, (tuple, list)):
        return any(_inside(x) for x in value if type(x) not in _PLAIN)
    if hasattr(value, "eqns"):
        return False
    inner, more = getattr(value, "jaxpr", None), getattr(value, "params", None)  # of a primitive that is an object
    return (inner is not None and _inside(inner)) or (isinstance(more, dict) and communicates(more))


cannot_be_traced: contextvars.ContextVar[bool] = contextvars.ContextVar("cannot_be_traced", default=False)
"""Whether operations are refused, because the function around them may not be differentiated."""


def communicates_when_called(
    function: Any, avals: Iterable[Any], arguments: Callable[..., tuple[Any, ...]] = lambda *xs: xs
) -> bool:
    """Return whether a function wrapped by JAX communicates when called with the `arguments` made of values of these
    types. Traces it unless it has been traced."""
    if not function.transforms and (traced := getattr(function.f, "args", ())) and hasattr(traced[0], "effects"):
        return EFFECT in traced[0].effects
    try:
        return EFFECT in jax.make_jaxpr(lambda *xs: (function.call_wrapped(*arguments(*xs)), ())[1])(*avals).effects
    finally:
        forget(function)


def forget(function: Any) -> None:
    """Undo the tracing of a wrapped function, which stores the structure of what it returned."""
    for store in function.stores:
        if store:
            store.reset()


def unsupported(what: str) -> Unsupported:
    return Unsupported(
        f"jaxmpi: {what} is not known to be differentiated on all ranks alike by JAX {jax.__version__} where it "
        "communicates. Communicate outside of it, or differentiate inside of it."
    )
