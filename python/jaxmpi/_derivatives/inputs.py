"""Traces that differentiate: all communication in them depends on the differentiated inputs, with which they start."""

import contextvars
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax._src import core
from jax._src.interpreters import ad as private_ad

from jaxmpi._jax import internals
from jaxmpi._jax.dependence import depends_on
from jaxmpi._primitive.effect import ZERO, Unsupported, during

_TRACERS = {private_ad.JVPTrace: private_ad.JVPTracer, private_ad.LinearizeTrace: private_ad.LinearizeTracer}

_inputs: "weakref.WeakKeyDictionary[Any, list[Any] | tuple[Any, ...]]" = weakref.WeakKeyDictionary()
"""The differentiated inputs of a trace: the values with which it started, each with a tangent. Once `inputs_of` has
made a tuple of the list, no more inputs are added."""


def record_input(own: Callable[..., None], tracer: Any, trace: Any, primal: Any, tangent: Any) -> None:
    own(tracer, trace, primal, tangent)
    known = _inputs.get(trace)
    if known is None:
        known = _inputs[trace] = []
        if (place := place_of_dummy.get()) is not None:
            _places[trace] = place
    if type(known) is list and type(tangent) is not internals.ad.Zero and internals.inexact(tangent):
        known.append((primal, tangent))


place_of_dummy: contextvars.ContextVar[int | None] = contextvars.ContextVar("place_of_dummy", default=None)
"""The place of the dummy operand among the differentiated inputs of the trace that is about to start, which
differentiates the computation inside of a higher-order primitive. None if there is no dummy operand, or the trace has
started."""

_places: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()
"""The place of the dummy operand among the differentiated inputs of a trace that has one."""


def without_dummy(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a hook that is called for each equation, and may start traces, which have no dummy operand."""

    @functools.wraps(hook)
    def call(*args: Any, **options: Any) -> Any:
        if place_of_dummy.get() is None:
            return hook(*args, **options)
        with during(place_of_dummy, None):
            return hook(*args, **options)

    return call


def inputs_of(trace: Any) -> tuple[Any, ...]:
    """Return the differentiated inputs of a trace, and close the list."""
    inputs = _inputs.get(trace, ())
    if type(inputs) is not tuple:
        inputs = _inputs[trace] = tuple(inputs)
    return inputs


def _as_one_number(trace: Any, of_tangents: bool, always: bool = False) -> list[Any]:
    """Return a number that depends on all values of the differentiated inputs, or on all their tangents. It is made in
    the current trace.

    A value that depends on it then needs one operand, not one for each input.
    """
    inputs = [pair[of_tangents] for pair in inputs_of(trace)]
    if len(inputs) < 2:
        return inputs
    known = _numbers.setdefault(trace, {})
    if (of_tangents, always) not in known:
        known[of_tangents, always] = depends_on(None, inputs, like=ZERO, always=always)
    return [known[of_tangents, always]]


_numbers: "weakref.WeakKeyDictionary[Any, dict[tuple[bool, bool], Any]]" = weakref.WeakKeyDictionary()


def tangents_of(trace: Any, tracers: Sequence[Any]) -> list[Any]:
    return [trace.to_primal_tangent_pair(x)[1] for x in tracers]


def has_tangent(trace: Any, tracers: Sequence[Any]) -> bool:
    return any(type(tangent) is not internals.ad.Zero for tangent in tangents_of(trace, tracers))


def make_operands_depend(
    trace: Any, tracers: Sequence[Any], which: Iterable[int], why: str, always: bool = True
) -> list[Any]:
    """Return the operands of a primitive. Those at the positions `which` get tangents that are linear in all
    differentiated inputs.

    `why`: what communicates, for the error if there is no input. `always`: any `vmap` outside maps these tangents. On
    another rank they may depend on what it maps, even if not here.
    """
    tracers = list(tracers)
    inputs = inputs_of(trace)
    for i in which:
        primal, tangent = trace.to_primal_tangent_pair(tracers[i])
        own = None if type(tangent) is internals.ad.Zero else tangent
        if own is None and not inputs:
            raise Unsupported(
                f"{why} communicates in a function that is differentiated with respect to nothing on this rank: an "
                "empty pytree, or integers alone. All ranks take part in a derivative: give each a floating-point "
                "argument to differentiate with respect to. The function of a custom_root is one, too: let it close "
                "over a floating-point array that is made outside of it."
            )
        with core.set_current_trace(getattr(trace, "tangent_trace", trace.parent_trace)):
            tangent = depends_on(own, _as_one_number(trace, True, always), like=jax.typeof(primal), always=always)
        tracers[i] = _TRACERS[type(trace)](trace, primal, tangent)
    return tracers


inside_higher_order: contextvars.ContextVar[bool] = contextvars.ContextVar("inside_higher_order", default=False)
"""Whether JAX is differentiating the computation inside of a higher-order primitive."""


def make_value_depend(trace: Any, tracer: Any) -> Any:
    """Return a tracer with the value of another, which depends on the differentiated inputs.

    A `vmap` that maps the values of the differentiated inputs maps it. So does any other `vmap` that does not map their
    tangents: on another rank the value may depend on what it maps.

    A `vmap` over tangents alone, as in `jax.jacfwd`, expects a value that is not mapped. Inside of higher-order
    primitives the tangents do not show this: they depend on all differentiated inputs and are always mapped. There the
    values depend on the dummy operand, which depends on the differentiated inputs outside. The values do not depend on
    the other operands. Mapped tangents of an earlier derivative may be among these; they are differentiated inputs on
    some ranks and constants on others.
    """
    primal, tangent = trace.to_primal_tangent_pair(tracer)
    with core.set_current_trace(trace.parent_trace):
        if type(trace) is private_ad.LinearizeTrace:
            primal = depends_on(primal, [], always=True)
        elif inside_higher_order.get():
            place = _places.get(trace)
            inputs = _as_one_number(trace, False) if place is None else [inputs_of(trace)[place][0]]
            primal = depends_on(primal, inputs)
        else:
            unless = _as_one_number(trace, True)
            primal = depends_on(primal, _as_one_number(trace, False), always=True, unless=unless)
    return primal if type(tangent) is internals.ad.Zero else _TRACERS[type(trace)](trace, primal, tangent)
