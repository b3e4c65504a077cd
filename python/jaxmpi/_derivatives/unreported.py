"""Communication inside primitives of other libraries that do not report the effect.

A primitive like `linear_solve` of lineax evaluates functions of the user, for example a matvec. The abstract evaluation
calls `jax.eval_shape`, which does not pass effects on. So JAX would lower its equation without a token, could move or
drop it, and the operations inside would have no token either. Here every equation with the effect leaves a mark when it
is staged. A primitive whose abstract evaluation leaves a mark without reporting the effect reports it from then on.
"""

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src.interpreters import partial_eval

from jaxmpi._jax import internals
from jaxmpi._primitive.effect import EFFECT

_unreporting: set[Any] = set()
"""Primitives that evaluate functions that communicate, and do not report the effect."""


class _Staged(threading.local):
    """A record of what a thread has staged."""

    effect = False
    """Whether an equation that communicates has been staged since this was last cleared."""


_staged = _Staged()


def report_effects() -> None:
    """Make every primitive report the effect of the functions that the abstract evaluation traces."""
    internals.replace(partial_eval, "_cached_abstract_eval", "", _evaluate)


def report_effect_of(primitive: Any, communicates: Callable[[Sequence[Any], dict[str, Any]], bool]) -> None:
    """Make a primitive of JAX report the effect for the operands and parameters with which it communicates."""
    own = getattr(primitive.abstract_eval, "jaxmpi_own", primitive.abstract_eval)

    def evaluate(*avals: Any, **params: Any) -> Any:
        result, reported = own(*avals, **params)
        return result, {*reported, EFFECT} if communicates(avals, params) else reported

    evaluate.jaxmpi_own = own  # type: ignore[attr-defined]
    primitive.abstract_eval = evaluate


def _evaluate(own: Any, primitive: Any, /, *avals: Any, **params: Any) -> Any:
    outer, _staged.effect = _staged.effect, False
    try:
        result, reported = own(primitive, *avals, **params)
        if _staged.effect and EFFECT not in reported:
            primitive.abstract_eval = functools.partial(_evaluate_and_report, primitive.abstract_eval)
            _unreporting.add(primitive)
            own.cache_clear()
            result, reported = own(primitive, *avals, **params)
        outer = outer or EFFECT in reported
        return result, reported
    finally:
        _staged.effect = outer


def _evaluate_and_report(own: Callable[..., Any], /, *avals: Any, **params: Any) -> Any:
    outer, _staged.effect = _staged.effect, False
    try:
        result, reported = own(*avals, **params)
        return result, {*reported, EFFECT} if _staged.effect else reported
    finally:
        _staged.effect = outer


def communicates(primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> bool:
    """Return whether a primitive of another library communicates with these operands."""
    return primitive in _unreporting and EFFECT in primitive.abstract_eval(*map(jax.typeof, operands), **params)[1]


def differentiated_operands(primitive: Any, params: dict[str, Any]) -> list[int] | None:
    """Return the operands that can have tangents; None if it is not known how the primitive is differentiated.

    Only lineax's solver is known, also under `jax.vmap`. The operator and the right-hand side can have tangents, state
    and options cannot. Its derivative depends on which operands have tangents, so all that can get one are returned.
    """
    lineax, equinox = (sys.modules.get(name) for name in ("lineax._solve", "equinox.internal._primitive"))
    mapped = getattr(equinox, "_vprim_p", None)
    while primitive is not None and primitive is mapped:
        primitive, params = params["prim"], dict(params["params"])
    if equinox is None or primitive is None or primitive is not getattr(lineax, "linear_solve_p", None):
        return None
    indices = iter(range(len(params["static"])))
    positions = [next(indices) if x is equinox._missing_dynamic else None for x in params["static"]]
    operator, _, vector, *_ = jax.tree.unflatten(params["treedef"], positions)
    return [i for i in jax.tree.leaves((operator, vector)) if isinstance(i, int)]
