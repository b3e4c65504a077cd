"""The steps of a check. If one finds a difference, it raises an AssertionError on all ranks."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxmpi._jax import jaxprs
from jaxmpi._mpi.communicators import CHECK
from jaxmpi._primitive.params import Reducing
from jaxmpi._testing import verdict
from jaxmpi._testing.figures import SHORTER, Derivative, Point
from jaxmpi._testing.problem import Problem
from jaxmpi._testing.together import Ranks, number
from jaxmpi._testing.verdict import Tolerance

_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerIntegerConversionError,
)


def differentiable(problem: Problem, ranks: Ranks, forward: bool, reverse: bool) -> Callable[..., list[Any]]:
    """Return the function that reverse mode differentiates.

    Trace it and the derivatives that the user asks for. This sends nothing, so that an error of one rank while tracing
    becomes an error of all ranks before any of them waits for it.
    """

    def trace() -> Any:
        def derivatives(*values: Any) -> Any:
            tangents = jax.jvp(problem.function, values, values)[1] if forward else []
            results, pull = jax.vjp(problem.function, *values) if reverse else ([], lambda _: [])
            return tangents, pull(results)

        try:
            jax.make_jaxpr(derivatives)(*problem.values)
            return jax.make_jaxpr(problem.function)(*problem.values) if CHECK else None
        except _NEEDS_VALUES:
            return None

    traced = ranks.together("differentiate f", trace)
    if any(ranks.gather(traced is None)):
        return problem.function
    return functools.partial(jaxprs.evaluate, _without_comparison(jaxprs.without_objects(traced)))


def _without_comparison(value: Any) -> Any:
    """Return a jaxpr, or a parameter of an equation, without the comparison of cotangents by JAXMPI_CHECK. If they are
    wrong, this comparison would raise on some ranks alone."""
    if isinstance(value, Reducing):
        return dataclasses.replace(value, line=None)
    if isinstance(value, tuple):
        changed = map(_without_comparison, value)
        return value._make(changed) if hasattr(value, "_make") else type(value)(changed)
    if not hasattr(jaxprs.open_jaxpr(value), "eqns"):
        return value

    def change(jaxpr: Any) -> Any:
        params = [{name: _without_comparison(x) for name, x in e.params.items()} for e in jaxpr.eqns]
        return jaxpr.replace(eqns=[e.replace(params=own) for e, own in zip(jaxpr.eqns, params, strict=True)])

    return jaxprs.change_open(value, change)


def evaluated(problem: Problem, ranks: Ranks) -> Point:
    """Call the function, and return the point at which derivatives are taken."""
    result = ranks.together("call f", lambda: jax.block_until_ready(problem.call(*problem.values)))
    leaves, values = ranks.together("take the result of f", lambda: problem.results(result))
    names = ranks.gather([leaf.name for leaf in leaves])
    if names.count(names[0]) < ranks.size:
        raise ValueError("check_grads: f must return arrays of the same names on all ranks, in pytrees of one form.")
    for leaf, y in zip(leaves, values, strict=True):
        if not all(ranks.gather(bool(np.all(np.isfinite(y))))):
            raise AssertionError(f"check_grads: the {leaf.name} of f is not finite, so f has no derivative here.")
        if leaf.invariant and (difference := ranks.difference(y)) is not None:
            raise AssertionError(
                f"check_grads: the {leaf.name} of f is not the same on all ranks: {difference}.\n"
                "A loss must be one number: what each rank computes from its own data becomes that of all data by\n"
                "jaxmpi.allreduce(loss, MPI.SUM). If each rank shall have a result of its own: invariant_out=False."
            )
    return Point(problem, ranks, leaves, values)


class Check:
    """Comparisons between the derivatives of a function at a point."""

    def __init__(self, point: Point, forward: bool, rtol: float | None, atol: float | None, eps: float | None) -> None:
        self._point, self._by_forward, precision = point, forward, point.precision
        self._names = [leaf.name for leaf in point.problem.variables]
        longest = precision.step if eps is None else eps
        self._steps = longest, longest / SHORTER
        self._differences: dict[int, Derivative] = {}
        self._derivatives = point.forward() if forward else [*map(self._by_differences, range(len(self._names)))]
        if atol is None:
            largest = max(max(d.size, abs(d.value)) for d in self._derivatives)
            atol = precision.eps * (10 * largest + point.at.size)
        self._tolerance = Tolerance(precision.rtol if rtol is None else rtol, atol)

    def _by_differences(self, which: int) -> Derivative:
        """Return the derivative along the direction of one variable, by differences: by the longer steps, or by the
        shorter ones if these agree better."""
        if which not in self._differences:
            series = [self._point.differences([which], step) for step in self._steps]
            self._differences[which] = min(series, key=lambda derivative: derivative.error)
        return self._differences[which]

    def one_function(self) -> None:
        """Check that all ranks have the same derivatives of the invariant results."""
        for name, derivative in zip(self._names, self._derivatives, strict=True):
            if not self._tolerance.same(derivative.of_ranks, derivative.size + derivative.error):
                raise AssertionError(
                    "check_grads: f has the same result on all ranks here, but not the same derivative. In a random "
                    f"direction of {name}\nit is {verdict.of_ranks(derivative.of_ranks)}. So each rank has a function "
                    "of its own: make one of them,\nfor example by jaxmpi.allreduce(loss, MPI.SUM)."
                )

    def forward(self) -> None:
        """Check that forward mode agrees with differences, along all directions together."""
        value, size = (sum(getattr(d, name) for d in self._derivatives) for name in ("value", "size"))
        for step in self._steps:
            together = self._point.differences(range(len(self._names)), step)
            if self._tolerance.close(value, together, size):
                return
        each = zip(self._names, self._derivatives, map(self._by_differences, range(len(self._names))), strict=True)
        wrong = [(name, d.value, e) for name, d, e in each if not self._tolerance.close(d.value, e, d.size)]
        wrong = wrong or [("all arguments together", value, together)]
        lines = [f"  {name}: forward mode {number(d)}, differences {e.value:.3g}" for name, d, e in wrong]
        lines = [
            f"check_grads: forward mode does not agree with differences. {_WHAT}",
            *lines[:_MOST_REPORTED],
            _NOT_BY_REPLICATE,
        ]
        raise AssertionError("\n".join(lines))

    def reverse(self, function: Callable[..., list[Any]]) -> None:
        """Check that reverse mode has the same derivatives."""
        self._compare(self._point.reverse(function), "reverse mode", _BY_REPLICATE)

    def gradient(self, gradient: Callable[..., Any]) -> None:
        """Check that a gradient that the user computes has the same derivatives."""
        if not self._point.single:
            raise ValueError("check_grads: with gradient, f must return one real number, the same on all ranks.")
        self._compare(self._point.by_function(gradient), "gradient")

    def _compare(self, arrays: Sequence[Any], name: str, *advice: str) -> None:
        gradients = self._point.gradients(arrays)
        pairs = zip(gradients, self._derivatives, strict=True)
        wrong = [i for i, pair in enumerate(pairs) if not self._tolerance.right(*pair)]
        if not wrong:
            self._conclusive()
            return
        lines = []
        for i in wrong:
            figures = [f"{name} {verdict.of_ranks(gradients[i].values)}"]
            figures += [f"forward mode {number(self._derivatives[i].value)}"] if self._by_forward else []
            figures += [f"differences {self._by_differences(i).value:.3g}"] if i in wrong[:_MOST_REPORTED] else []
            lines.append(f"  {self._names[i]}: {'; '.join(figures)}")
            relation = verdict.relation(gradients[i], self._derivatives[i], self._point.ranks.size, self._tolerance)
            lines += [f"    {relation}"] if relation else []
        lines += advice if self._point.ranks.size > 1 else ()
        raise AssertionError("\n".join([f"check_grads: the gradient is wrong. {_WHAT}", *lines]))

    def _conclusive(self) -> None:
        """Check that differences are precise enough to show a wrong gradient, if forward mode is not available."""
        largest = max(abs(d.value) for d in self._derivatives)
        for name, d in zip(self._names, self._derivatives, strict=True):
            if not 6 * d.error <= max(abs(d.value), largest / 100):
                raise AssertionError(
                    f"check_grads: inconclusive. In a random direction of {name} differences are {number(d.value)}, "
                    f"and may be off by\n{number(3 * d.error)}: try eps, jax_enable_x64, or forward mode."
                )


_WHAT = "Derivatives in a random direction of each argument:"
_BY_REPLICATE = (
    "A replicate or invariant may be missing, or be one too many: docs/gradients.md has the usual mistakes. Or the "
    "rule\nof a jax.custom_vjp is wrong."
)
_NOT_BY_REPLICATE = (
    "That is not a matter of replicate and invariant, which change reverse mode alone. A derivative may be wrong\n"
    "(jax.custom_jvp, jax.lax.stop_gradient), f may jump or have a kink here: check it at other arguments.\n"
    "Or differences are too coarse: try eps, or jax_enable_x64."
)
_MOST_REPORTED = 8
"""The largest number of variables whose differences are reported."""
