"""The meaning of derivatives of a function, in words."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxmpi._testing.figures import Derivative, Gradient
from jaxmpi._testing.together import number


@dataclass(frozen=True)
class Tolerance:
    rtol: float
    atol: float

    def close(self, value: float, derivative: Derivative, size: float = 0.0) -> bool:
        """Return whether it is the derivative, as far as both are precise. `size`: of the terms of the value."""
        scale = max(abs(value), abs(derivative.value), derivative.size, size)
        return abs(value - derivative.value) <= self.atol + self.rtol * scale + 3 * derivative.error

    def right(self, gradient: Gradient, derivative: Derivative) -> bool:
        return all(self.close(value, derivative, gradient.size) for value in gradient.values)

    def same(self, values: Sequence[float], size: float = 0.0) -> bool:
        return max(values) - min(values) <= self.atol + self.rtol * max(size, *map(abs, values))


def of_ranks(values: Sequence[float], most: int = 4) -> str:
    """Return a number of each rank as text."""
    if len(set(map(number, values))) == 1:
        return number(values[0])
    shown = [f"{number(value)} on rank {rank}" for rank, value in enumerate(values[:most])]
    return ", ".join([*shown, "..."] if len(values) > most else shown)


def relation(gradient: Gradient, derivative: Derivative, ranks: int, tolerance: Tolerance) -> str:
    """Describe how a wrong gradient is related to the derivative. Empty: in no simple way."""

    def close(value: float) -> bool:
        return tolerance.close(value, derivative, gradient.size)

    values = gradient.values
    if gradient.invariant and not tolerance.same(values, gradient.size):
        if close(sum(values)):
            return "each rank has a part of the derivative: their sum is right"
        if close(sum(values) / ranks):
            return "the ranks differ, and their mean is right"
        return "the ranks differ, and should have the same"
    for factor in range(ranks, 1, -1):
        if all(close(value / factor) for value in values):
            return f"{factor} times the derivative" + (", as many times as there are ranks" if factor == ranks else "")
        if all(close(value * factor) for value in values):
            return f"the derivative divided by {factor}" + (", the number of ranks" if factor == ranks else "")
    return ""
