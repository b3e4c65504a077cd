"""The parameters of operations: a frozen dataclass for each family.

To JAX they are one parameter, `call`. Equal parameters are one key of the compiled programs of eager calls, so each
object keeps the hash. What a dataclass does not have follows from the operands.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, Protocol, TypeVar

from jaxmpi._mpi.communicators import Communicator
from jaxmpi._mpi.plans import Plan
from jaxmpi._mpi.strings import Text
from jaxmpi._primitive.arguments import Reduction, Status
from jaxmpi._primitive.pytrees import ALONE, Leaf

TANGENT, COTANGENT, VALUE = "tangent", "cotangent", "value"
"""What an operation in a derivative communicates. VALUE: a tangent or cotangent whose operation is differentiated
again, and then counts as a value. The messages of derivatives have tags of their own, so that they never match messages
of the function itself: see `_mpi.tags`."""

Self = TypeVar("Self", bound="Common")
A = ParamSpec("A")
T = TypeVar("T")


@dataclass(frozen=True, eq=False, repr=False)
class Common:
    """The parameters that all operations have."""

    comm: Communicator
    derivative: str | None = field(default=None, kw_only=True)
    """TANGENT, COTANGENT or VALUE; None in the function itself."""
    batch: tuple[int, ...] = field(default=(), kw_only=True)
    """The sizes of the batches that `jax.vmap` has made of a started operation; empty for all other operations."""
    leaf: Leaf = field(default=ALONE, kw_only=True)
    """The place of an array of a pytree whose arrays are received one by one: see `pytrees`."""
    status: Status | None = field(default=None, kw_only=True)
    """Where the operation writes the status of the message that it receives."""
    _key: tuple[Any, ...] = field(init=False, compare=False)
    _hash: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        kind: Any = type(self)
        key = tuple(getattr(self, attribute.name) for attribute in _fields(kind))
        object.__setattr__(self, "_key", key)
        object.__setattr__(self, "_hash", hash((kind.__name__, key)))

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Common)
            and type(self) is type(other)
            and self._hash == other._hash
            and self._key == other._key
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join([repr(self.comm), *self.facts()])})"

    @property
    def on_root(self) -> bool:
        """Whether this rank is the root, if the operation has one."""
        return self.comm.rank == getattr(self, "root", None)

    def values(self) -> tuple[Any, ...]:
        return self._key

    def facts(self) -> list[str]:
        """Return `name=value` for all parameters that are not the default, except the communicator."""
        kind: Any = type(self)
        values = [(attribute, getattr(self, attribute.name)) for attribute in _fields(kind)[1:]]
        return [
            f"{attribute.name}={value!r}"
            for attribute, value in values
            if attribute.repr and value != attribute.default
        ]

    def in_derivative(self: Self) -> Self:
        """Return parameters for the operation itself where it is differentiated."""
        return self if self.derivative in (None, VALUE) else dataclasses.replace(self, derivative=VALUE)

    def linear(self: Self) -> Self:
        """Return parameters for the operation on tangents."""
        return dataclasses.replace(self, derivative=TANGENT, status=None)


@functools.cache
def _fields(kind: Any) -> "list[dataclasses.Field[Any]]":
    own = [attribute for attribute in dataclasses.fields(kind) if attribute.compare]
    return sorted(own, key=lambda attribute: attribute.kw_only is True)


def kept(kind: Callable[A, T]) -> Callable[A, T]:
    """Return a constructor of parameters, for eager calls, that makes one object of equal parameters: a lookup is
    faster than a new object."""
    cached: Any = functools.lru_cache(maxsize=4096)(kind)
    return cached


@dataclass(frozen=True, eq=False, repr=False)
class Rooted(Common):
    root: int
    in_place: bool = field(default=False, kw_only=True)
    """Whether results may alias the first operands, where the operation can work in place. `jit` sets it where it
    knows what is needed afterwards."""


@dataclass(frozen=True, eq=False, repr=False)
class Reducing(Common):
    op: Reduction
    in_place: bool = field(default=True, kw_only=True)
    """As in `Rooted`."""
    line: Text | None = field(default=None, kw_only=True, repr=False)
    """With JAXMPI_CHECK, for an allreduce: the text of the error if the cotangents of ranks differ, with the line of
    the user's program that called it."""


@dataclass(frozen=True, eq=False, repr=False)
class ReducingTo(Reducing):
    """A reduction whose result one rank gets."""

    root: int


@dataclass(frozen=True, eq=False, repr=False)
class Divided(Common):
    """A collective of an array that is divided among the ranks along the first axis."""

    rows: int
    """The number of rows of the result."""
    root: int | None = field(default=None, kw_only=True)
    op: Any = field(default=None, kw_only=True)
    """The `Reduction`, if there is one."""


@dataclass(frozen=True, eq=False, repr=False)
class Sending(Common):
    """A message that is sent. Ranks and tags that are known at run time only are TRACED: `envelope`."""

    dest: int
    tag: int


@dataclass(frozen=True, eq=False, repr=False)
class Receiving(Common):
    source: int
    tag: int


@dataclass(frozen=True, eq=False, repr=False)
class Exchanging(Common):
    """A message that is sent and one that is received."""

    source: int
    dest: int
    sendtag: int
    recvtag: int


class Pattern(Protocol):
    """A description of what travels where in an operation by a plan, for any number of arrays: `Neighbors`, `Halo`,
    `Redistribution`, `Ghosts`.

    It is hashable, and the same on all ranks except for numbers of ranks."""

    @property
    def aliases(self) -> bool:
        """Whether results take the place of the operands."""
        return False

    @property
    def why_not_differentiable(self) -> str:
        """A text: why no derivative can be taken. It is empty if one can be taken."""
        return ""

    def plan(self, rank: int, avals: tuple[Any, ...], per_array: tuple[Any, ...], adjoint: bool) -> Plan:
        """Return the plan of a rank. `per_array` has what the pattern needs to know about each array."""

    def results(self, avals: Sequence[Any], per_array: tuple[Any, ...], adjoint: bool) -> Sequence[Any]:
        """Return the types of the results from the types of the operands."""

    def batch(self, adjoint: bool) -> tuple[int, int]:
        """Return the position of the batch axis in operands, and in results."""

    def linear(self, per_array: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return `per_array` for the linear part of the operation."""
        return per_array

    def behind(self, place: Any, axes: int) -> Any:
        """Return `place` for an array that has `axes` more axes, behind the others."""
        return place


@dataclass(frozen=True, eq=False, repr=False)
class Planned(Common):
    pattern: Pattern
    per_array: tuple[Any, ...]
    adjoint: bool
    needed: bool = field(default=False, kw_only=True)
    """As in `Waiting`."""


@dataclass(frozen=True, eq=False, repr=False)
class Waiting(Common):
    started: tuple[Any, ...]
    """The operations that the requests stand for: `_operations.requests.Started`."""
    needed: bool = field(default=False, kw_only=True)
    """Whether a request of nothing is an error, as in reverse mode."""


@dataclass(frozen=True, eq=False, repr=False)
class Comparing(Common):
    """The parameters of an operation that raises an error if ranks differ."""

    text: Text
