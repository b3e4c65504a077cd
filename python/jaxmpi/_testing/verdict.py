"""What derivatives say of a function, in words."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxmpi._testing import changes, walking
from jaxmpi._testing.changes import Change
from jaxmpi._testing.figures import Derivative, Gradient
from jaxmpi._testing.together import number


@dataclass(frozen=True)
class Tolerance:
    rtol: float
    atol: float

    def close(self, value: float, derivative: Derivative, size: float = 0.0) -> bool:
        """Whether it is the derivative, as far as both can tell. `size` is that of the value's terms."""
        scale = max(abs(value), abs(derivative.value), derivative.size, size)
        return abs(value - derivative.value) <= self.atol + self.rtol * scale + 3 * derivative.error

    def right(self, gradient: Gradient, derivative: Derivative) -> bool:
        return all(self.close(value, derivative, gradient.size) for value in gradient.values)

    def same(self, values: Sequence[float], size: float = 0.0) -> bool:
        return max(values) - min(values) <= self.atol + self.rtol * max(size, *map(abs, values))


def of_ranks(values: Sequence[float], most: int = 4) -> str:
    """A number of each rank."""
    if len(set(map(number, values))) == 1:
        return number(values[0])
    shown = [f"{number(value)} on rank {rank}" for rank, value in enumerate(values[:most])]
    return ", ".join([*shown, "..."] if len(values) > most else shown)


def relation(gradient: Gradient, derivative: Derivative, ranks: int, tolerance: Tolerance) -> str:
    """How a wrong gradient is related to the derivative; empty if in no simple way."""

    def close(value: float) -> bool:
        return tolerance.close(value, derivative, gradient.size)

    values = gradient.values
    if gradient.invariant and not tolerance.same(values, gradient.size):
        if close(sum(values)):
            return "each rank has a part of the derivative: their sum is right"
        if close(sum(values) / ranks):
            return "the ranks differ, and their mean is right"
        return "the ranks differ, and should have the same"
    if ranks > 1 and all(close(value / ranks) for value in values):
        return f"{ranks} times the derivative, as many times as there are ranks"
    if ranks > 1 and all(close(value * ranks) for value in values):
        return f"the derivative divided by {ranks}, the number of ranks"
    return ""


_OWN, _ALIKE = "since each rank uses it with its own data", "since all ranks compute the same from it"


def advice(change: Change, names: Sequence[str]) -> str:
    """Where to change a program in this way, and what to do there."""
    line = ", called at ".join(change.lines[:2]) or "an unknown line"
    of_operation = f"{change.operation} at {line}" + (f", {change.number}" if change.number else "")
    match change.kind:
        case changes.ARGUMENTS:
            listed = ", ".join(names[i] for i in change.which)
            return f"{listed}: pass {'it' if len(change.which) == 1 else 'each'} through jaxmpi.replicate first, {_OWN}"
        case walking.REPLICATED:
            return f"{of_operation}:\n    pass its result through jaxmpi.replicate, {_OWN}"
        case walking.INVARIANT:
            return f"{of_operation}:\n    pass its result through jaxmpi.invariant, {_ALIKE}"
        case walking.LEFT_OUT:
            why = _ALIKE if change.operation == "replicate" else "since cotangents are not to be divided there"
            return f"{of_operation}:\n    leave it out, {why}"
        case walking.BARE:
            return f"{line}:\n    use what has not been passed through jaxmpi.replicate, {_ALIKE}"
    return f"{line}:\n    pass what is the same on all ranks through jaxmpi.replicate, {_OWN}"


def explained(repairs: Sequence[Sequence[Change]], names: Sequence[str]) -> list[str]:
    """The changes that make a gradient right: either one of several, or some together."""
    if not repairs:
        return ["No change of replicate and invariant that was tried, one or two at a time, makes it right."]
    together = len(repairs[0]) > 1
    what = "These changes together make" if together else "Each of these makes" if repairs[1:] else "This makes"
    listed = repairs[0] if together else [change for (change,) in repairs]
    return [f"{what} it right, as was tried:", *(f"  {advice(change, names)}" for change in listed)]
