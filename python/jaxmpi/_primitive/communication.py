"""What communicates, as far as the hooks into JAX need to know."""

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import primitives

from jaxmpi._jax import internals
from jaxmpi._primitive.order import EFFECT


@contextlib.contextmanager
def during(variable: "contextvars.ContextVar[Any]", value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


Params = dict[str, Any]

DERIVATIVE = "derivative"
"""Parameter of an operation: what it communicates. The messages of derivatives have tags of their own, so that they
never match those of the function itself: see `_mpi.tags`."""

TANGENT, COTANGENT, VALUE = "tangent", "cotangent", "value"
"""Its values. VALUE: a tangent or cotangent whose operation is differentiated again, and then counts as a value."""

CALLS = (primitives.closed_call_p, internals.remat_p, internals.jit_p)

REQUEST = (2,), np.dtype(np.float32)
"""Shape and dtype of the numbers of a request: `_operations.request_table`."""

ZERO = np.zeros((), jax.dtypes.canonicalize_dtype(float))

_PLAIN = (int, float, bool, str, type(None))


def may_be_request(x: Any) -> bool:
    """Whether these may be numbers of a request, or of a batch of them: with a tangent they have an adjoint."""
    aval = jax.typeof(x)
    return (aval.shape[-1:], aval.dtype) == REQUEST


check: Callable[[], None]
"""Called before anything that communicates is differentiated; raises if that is not possible."""


def communicates(params: Params) -> bool:
    """Whether a computation in the parameters of a primitive communicates."""
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


def is_ours(primitive: Any) -> bool:
    return type(primitive) is Operation


cannot_be_traced: contextvars.ContextVar[bool] = contextvars.ContextVar("cannot_be_traced", default=False)
"""Whether operations are refused, since the function around them may not be differentiated."""


_names: set[str] = set()  # of operations, as users know them


class Operation(internals.Primitive):
    """A primitive that communicates, always with a list of results."""

    multiple_results = True

    def __init__(self, name: str, shown: str = "") -> None:
        """`shown`: the name that users know, where that is another."""
        super().__init__(f"jaxmpi.{name}")
        self.shown = f"jaxmpi.{shown or name}"
        _names.add(shown or name)
        self.traced: Callable[[Any, Params], None] | None = None  # called with operands and parameters
        self.several = False  # takes any number of arrays
        self.starts = False  # something that is waited for: its result is a request
        self.waits = False  # for a request, whose tangent is linear in all that its start was linked to

    def linked(self, operands: Iterable[Any]) -> list[int]:
        """The operands that are linked, so that the operation is differentiated: of one that takes several arrays all
        of them, so that each is mapped on all ranks alike."""
        possible = [] if self.waits else internals.inexact_among(operands)
        return possible if self.several else possible[:1]

    def bind_with_trace(self, trace, args, *more):
        if type(trace).__name__ == "JetTrace" and any(map(internals.inexact, args)):
            raise NotImplementedError(
                f"{self.shown}: jax.experimental.jet has no rule for communication. Nested jax.jvp gives the same "
                "derivatives, on all ranks alike."
            )
        if cannot_be_traced.get():
            raise refusal("a function with jax.custom_jvp or jax.custom_vjp that looks at values")
        if type(trace) is internals.DynamicJaxprTrace and self.traced is not None:
            self.traced(args, more[-1])
        return super().bind_with_trace(trace, args, *more)


def communicates_when_called(
    function: Any, avals: Iterable[Any], arguments: Callable[..., tuple[Any, ...]] = lambda *xs: xs
) -> bool:
    """Whether a function wrapped by JAX communicates when called with the `arguments` made of values of these types.
    Traces it unless it has been traced."""
    if not function.transforms and (traced := getattr(function.f, "args", ())) and hasattr(traced[0], "effects"):
        return EFFECT in traced[0].effects
    try:
        return EFFECT in jax.make_jaxpr(lambda *xs: (function.call_wrapped(*arguments(*xs)), ())[1])(*avals).effects
    finally:
        forget(function)


def forget(function: Any) -> None:
    """Undoes the tracing of a wrapped function, which stores the structure of what it returned."""
    for store in function.stores:
        if store:
            store.reset()


def refusal(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"jaxmpi: {what} is not known to be differentiated on all ranks alike by JAX {jax.__version__} where it "
        "communicates. Communicate outside of it, or differentiate inside of it."
    )


def is_error_of_ours(error: BaseException) -> bool:
    """Whether an operation or a hook of this package has raised an error."""
    return str(error).startswith(("jaxmpi", *(f"{name} " for name in _names)))
