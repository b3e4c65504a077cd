"""Communicators and reductions that can be hashed: `jaxmpi.static` makes them of those of mpi4py.

JAX hashes and compares what is static: static arguments, fields of pytrees. mpi4py's objects have no hash, and compare
by the handle, which MPI gives to another communicator once the first has been freed. These here are mpi4py's all the
same, of subclasses of its classes, so everything that takes those takes them.
"""

from typing import Any

import jax
from mpi4py import MPI


class Static:
    """What the subclasses add. They compare by `lifetime`, of which there is one object for each communicator or
    reduction, never again for another one. A pytree without leaves, so that it may also be part of any argument."""

    lifetime: Any
    original: Any
    """The object of mpi4py that it was made of."""

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
        """Free the original, which so knows it too."""
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
    """Return a static one with this lifetime, of the class that `x` has in mpi4py."""
    kind: Any = next((made for made in CLASSES if isinstance(x, made.__mro__[2])), _Intracomm)
    made = kind(x)
    made.lifetime, made.original = lifetime, x
    return made
