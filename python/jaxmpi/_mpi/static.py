"""Communicators and reductions with a hash: `jaxmpi.static` makes them from objects of mpi4py.

JAX hashes and compares static objects: static arguments, fields of pytrees. mpi4py's objects have no hash, and compare
by handle, which MPI reuses once a communicator has been freed. The objects here are instances of subclasses of mpi4py's
classes, so all code that takes mpi4py's objects takes them.
"""

from typing import Any

import jax
from mpi4py import MPI


class Static:
    """The attributes and methods that the subclasses add. They compare by `lifetime`: one object for each communicator
    or reduction, never reused for another one. A pytree without leaves, so that it may be part of any argument."""

    lifetime: Any
    original: Any
    """The object of mpi4py from which it was made."""

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Static):
            return self.lifetime is other.lifetime
        return self.lifetime.alive() and super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.lifetime)

    def __repr__(self) -> str:
        return f"jaxmpi.static({self.lifetime!r})"

    def __copy__(self) -> "Static":
        return self

    def __deepcopy__(self, memo: Any) -> "Static":
        return self

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} is of this process alone and cannot be pickled: make it anew from its communicator.")

    __reduce_ex__ = lambda self, protocol: self.__reduce__()  # noqa: E731

    def Free(self) -> None:
        """Free the original, so that the original is null, too."""
        self.original.Free()


class _Intracomm(Static, MPI.Intracomm): ...


class _Cartcomm(Static, MPI.Cartcomm): ...


class _Graphcomm(Static, MPI.Graphcomm): ...


class _Distgraphcomm(Static, MPI.Distgraphcomm): ...


class _Op(Static, MPI.Op): ...


CLASSES: tuple[Any, ...] = (_Cartcomm, _Distgraphcomm, _Graphcomm, _Intracomm, _Op)
for _class in CLASSES:
    jax.tree_util.register_pytree_node(_class, lambda x: ((), x), lambda x, _: x)


def make(x: MPI.Comm | MPI.Op, lifetime: Any) -> Any:
    """Return a static object with this lifetime, of the subclass of the class that `x` has in mpi4py."""
    kind: Any = next((subclass for subclass in CLASSES if isinstance(x, subclass.__mro__[2])), _Intracomm)
    result = kind(x)
    result.lifetime, result.original = lifetime, x
    return result
