"""The derivatives of a function of all ranks in random directions: by reverse mode, forward mode and differences.

The function is L = sum over invariant results of <w, y> + sum over ranks and varying results of <w, y>. The weights w
are random, or 1 if there is one real number. The derivative of L along a direction u of one variable is

    forward mode    the same sums with the tangents of the results in the place of y.
    differences     (L(x + h u) - L(x - h u)) / 2h.
    reverse mode    <g, u> with the gradient g. An invariant variable is one for all ranks, and each rank has this
                    value. A varying variable is a different one on each rank, and the values are summed over the ranks.

<a, b> is the real part of the sum of all a b, without a conjugate, as in JAX's derivatives. It is computed in double
precision.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi._testing.problem import Leaf, Problem
from jaxmpi._testing.together import Ranks


@dataclass(frozen=True)
class Precision:
    """The accuracy of derivatives in the least precise of some dtypes."""

    eps: float
    """The distance of 1 to the next number."""
    rtol: float
    step: float
    """The longest step of differences, relative to the size of an argument."""

    @classmethod
    def from_dtypes(cls, dtypes: Sequence[Any]) -> "Precision":
        eps = max(float(jnp.finfo(dtype).eps) for dtype in dtypes)
        for most, rtol, step in ((1e-12, 1e-7, 1e-2), (1e-6, 1e-3, 5e-2), (2e-3, 3e-2, 0.25)):
            if eps < most:
                return cls(eps, rtol, step)
        return cls(eps, 0.1, 0.25)


@dataclass(frozen=True)
class Derivative:
    """A derivative along one direction, with the same figures on all ranks."""

    value: float
    size: float
    """The root of the sum of the squares of the terms. Errors are relative to it."""
    error: float = 0.0
    """An estimate of the error of the differences, from the differences themselves."""
    of_ranks: tuple[float, ...] = ()
    """The part that must be the same on all ranks, as each rank has it."""


@dataclass(frozen=True)
class Gradient:
    """The product of gradient and direction of one variable, on each rank."""

    parts: tuple[float, ...]
    invariant: bool
    size: float

    @property
    def values(self) -> tuple[float, ...]:
        """The numbers that must equal the derivative."""
        return self.parts if self.invariant else (sum(self.parts),)


def _terms(a: Any, b: Any) -> np.ndarray:
    """Return the terms of <a, b>."""
    wide = [np.asarray(x).astype(np.complex128 if np.iscomplexobj(x) else np.float64) for x in (a, b)]
    return np.real(wide[0] * wide[1])


def _random(key: Sequence[int], like: Any) -> np.ndarray:
    """Return normally distributed numbers of the shape and kind of an array."""
    generator = np.random.default_rng(key)
    numbers = generator.normal(size=like.shape)
    return numbers + 1j * generator.normal(size=like.shape) if np.iscomplexobj(like) else numbers


class Weights:
    """The weights that make one number of the results."""

    def __init__(self, leaves: Sequence[Leaf], values: Sequence[np.ndarray], rank: int) -> None:
        self._leaves = leaves
        single = len(values) == 1 and leaves[0].invariant and values[0].shape == () and np.isrealobj(values[0])
        self.single = single
        """Whether there is one real number, whose weight is 1."""
        keys = [(3, i) if leaf.invariant else (4, i, rank) for i, leaf in enumerate(leaves)]
        drawn = [np.ones(()) if single else _random(key, y) for key, y in zip(keys, values, strict=True)]
        self.values = [w.astype(y.dtype) for w, y in zip(drawn, values, strict=True)]

    def sums(self, results: Sequence[Any]) -> np.ndarray:
        """Return this rank's sums of invariant and of varying results, each with the sum of squares of the terms."""
        sums = np.zeros((2, 2))
        for leaf, w, y in zip(self._leaves, self.values, results, strict=True):
            terms = _terms(w, y)
            sums[int(not leaf.invariant)] += terms.sum(), (terms**2).sum()
        return sums


class Point:
    """The point at which derivatives are taken: the variables, a direction for each, the weights of the results."""

    def __init__(self, problem: Problem, ranks: Ranks, results: Sequence[Leaf], values: Sequence[np.ndarray]) -> None:
        self.problem, self.ranks = problem, ranks
        self._weights = Weights(results, values, ranks.rank)
        self.single = self._weights.single
        self._values = [np.asarray(x) for x in problem.values]
        self.directions = self._draw()
        self.precision = Precision.from_dtypes([x.dtype for x in (*self._values, *values)])
        self.at = self._combine(ranks.gather(self._weights.sums(values)))

    def _draw(self) -> list[np.ndarray]:
        """Draw a random direction of the size of the values for each variable, for an invariant one on all ranks the
        same."""
        squares = [(np.sum(np.abs(x).astype(np.float64) ** 2), x.size) for x in self._values]
        every = np.sum(self.ranks.gather(np.array(squares)), axis=0)
        directions = []
        for i, (leaf, x, (total, count)) in enumerate(zip(self.problem.variables, self._values, every, strict=True)):
            size = math.sqrt(total / count) if 0 < total < math.inf else 1.0
            key = (1, i) if leaf.invariant else (2, i, self.ranks.rank)
            directions.append((size * _random(key, x)).astype(x.dtype))
        return directions

    def _combine(self, sums: Any) -> Derivative:
        """Combine the sums of all ranks."""
        (invariant, invariant_squares), (varying, varying_squares) = np.moveaxis(np.asarray(sums), 0, -1)
        size = math.sqrt(invariant_squares[0] + varying_squares.sum())
        return Derivative(float(invariant[0] + varying.sum()), size, of_ranks=tuple(invariant.tolist()))

    def gradients(self, leaves: Sequence[Any]) -> list[Gradient]:
        """Return the products of a gradient with the directions. `leaves`: the arrays of the gradient on this rank."""
        terms = [_terms(g, u) for g, u in zip(leaves, self.directions, strict=True)]
        terms_of_ranks = np.asarray(self.ranks.gather([(t.sum(), (t**2).sum()) for t in terms]))
        gradients = []
        for leaf, (parts, squares) in zip(self.problem.variables, np.moveaxis(terms_of_ranks, 0, -1), strict=True):
            size = math.sqrt(squares.max() if leaf.invariant else squares.sum())
            gradients.append(Gradient(tuple(parts.tolist()), leaf.invariant, size))
        return gradients

    def reverse(self, function: Callable[..., list[Any]]) -> list[Any]:
        """Return the gradient of a function like that of the problem, in reverse mode: the arrays on this rank."""

        def gradient() -> list[Any]:
            _, pull = jax.vjp(function, *self.problem.values)
            return jax.block_until_ready(list(pull([jnp.asarray(w) for w in self._weights.values])))

        return self.ranks.together("differentiate f in reverse mode", gradient)

    def by_function(self, gradient: Callable[..., Any]) -> list[Any]:
        """Return the gradient by a function of the user."""
        return self.ranks.together("compute gradient", lambda: self.problem.select(self.problem.apply(gradient)))

    def forward(self) -> list[Derivative]:
        """Return the derivative along the direction of each variable, in forward mode."""
        every = range(len(self._values))
        tangents = self.ranks.together("differentiate f in forward mode", lambda: [*map(self._tangent, every)])
        return [self._combine(sums) for sums in zip(*self.ranks.gather(tangents), strict=True)]

    def _tangent(self, which: int) -> np.ndarray:
        tangents = [jnp.asarray(u if i == which else np.zeros_like(u)) for i, u in enumerate(self.directions)]
        _, results = jax.jvp(self.problem.function, self.problem.values, tangents)
        return self._weights.sums(jax.block_until_ready(results))

    def _moved(self, which: Sequence[int], h: float) -> np.ndarray:
        """Return the sums of the results of this rank at x + h u, along the directions of these variables."""
        values = list(self.problem.values)
        for i in which:
            x, u = self._values[i], self.directions[i]
            wide = np.complex128 if np.iscomplexobj(x) else np.float64
            values[i] = jnp.asarray((x.astype(wide) + h * u.astype(wide)).astype(x.dtype))
        return self._weights.sums(jax.block_until_ready(self.problem.function(*values)))

    def differences(self, which: Sequence[int], longest: float) -> Derivative:
        """Return the derivative along these directions together, by central differences with several steps."""
        steps = [longest / _RATIO**k for k in range(_STEPS)]
        moved = lambda: [[self._moved(which, -h), self._moved(which, h)] for h in steps]  # noqa: E731
        sums = np.asarray(self.ranks.gather(self.ranks.together("call f near its arguments", moved)))
        sides = [[self._combine(sums[:, k, side]) for side in (0, 1)] for k in range(len(steps))]
        return _extrapolated(steps, sides, self.at, self.precision.eps)


_RATIO, _STEPS = 4, 4
"""The ratio of each step of differences to the next shorter one, and the number of steps."""
SHORTER = _RATIO**_STEPS
"""The factor between the first series of steps and a second shorter one, for the case that the first does not agree."""


def _extrapolated(
    steps: Sequence[float], sides: Sequence[Sequence[Derivative]], at: Derivative, eps: float
) -> Derivative:
    """Return the limit of central differences, by Ridders' extrapolation to step 0.

    The error of a central difference is a series in the squares of the step. The error of the limit is the distance of
    the two best approximations, and at least the effect of the rounding of the results.
    """
    rounding = 8 * eps * at.size
    best = Derivative(math.nan, 0.0, math.inf)
    before: list[float] = []
    for h, (left, right) in zip(steps, sides, strict=True):
        row = [(right.value - left.value) / (2 * h)]
        for j, coarser in enumerate(before):
            factor = _RATIO ** (2 * (j + 1))
            row.append((factor * row[j] - coarser) / (factor - 1))
            error = max(abs(row[-1] - row[-2]), abs(row[-1] - coarser)) + rounding / h
            if error < best.error:
                best = Derivative(row[-1], 0.0, error)
        before = row
    of_ranks = [(np.asarray(b.of_ranks) - a.of_ranks) / (2 * h) for h, (a, b) in zip(steps, sides, strict=True)]
    return replace(best, of_ranks=tuple(of_ranks[1].tolist()))
