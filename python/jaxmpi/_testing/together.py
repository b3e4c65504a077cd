"""Communication between the ranks beside the operations of a program."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from jaxmpi._mpi import communicators

T = TypeVar("T")


class Ranks:
    """The ranks of a communicator, which do everything together. An error of one rank is an error of all."""

    def __init__(self, comm: MPI.Comm | None, operation: str) -> None:
        self.communicator = communicators.resolve(comm, operation)
        self.rank, self.size = self.communicator.rank, self.communicator.size
        self._comm: Any = communicators.default_mpi() if comm is None else comm
        self._operation = operation

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, on all ranks."""
        jax.effects_barrier()  # mpi4py's calls do not wait for pending operations
        return self._comm.allgather(value)

    def together(self, what: str, work: Callable[[], T]) -> T:
        """Return the result of `work` on this rank.

        Raise the exception of `work`. If `work` raised only on other ranks, raise a RuntimeError that names one.
        """
        failure: Exception | None = None
        try:
            result = work()
            jax.effects_barrier()
        except Exception as error:
            failure = error
        texts = self._comm.allgather(failure and f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        if (text := next(filter(None, texts), None)) is not None:
            raise RuntimeError(f"{self._operation}: rank {texts.index(text)} could not {what}. It raised {text}")
        return result

    def difference(self, x: Any) -> str | None:
        """Describe how the arrays of the ranks differ by more than rounding, or return None. The same on all ranks."""
        if isinstance(x, jax.ShapeDtypeStruct):
            x = np.zeros(x.shape, x.dtype)
        if jnp.issubdtype(jax.typeof(x).dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        x = np.asarray(x)
        types = self.gather((x.shape, x.dtype))
        if (other := _first(kind != types[0] for kind in types)) is not None:
            (shape, dtype), (other_shape, other_dtype) = types[0], types[other]
            return f"{dtype} of shape {shape} on rank 0, {other_dtype} of shape {other_shape} on rank {other}"
        first = self._comm.bcast(x)
        places = np.argwhere(_differ(x, first))
        at = tuple(places[0].tolist()) if len(places) else None
        differences = self._comm.allgather(None if at is None else (at, x[at]))
        if (other := _first(difference is not None for difference in differences)) is None:
            return None
        at, value = differences[other]
        where = f" at index {', '.join(map(str, at))}" if at else ""
        return f"{number(first[at])} on rank 0, {number(value)} on rank {other}{where}"


def number(x: Any) -> str:
    return f"{x:.4g}" if np.issubdtype(np.asarray(x).dtype, np.number) else str(x)


def _first(truths: Any) -> int | None:
    """Return the position of the first true value."""
    return next((i for i, truth in enumerate(truths) if truth), None)


def _differ(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return where two arrays differ by more than rounding, relative to the largest number."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x != y
    eps = float(jnp.finfo(x.dtype).eps)
    wide = np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64
    x, y = x.astype(wide), y.astype(wide)
    finite = np.isfinite(x) & np.isfinite(y)
    scale = np.max(np.abs(y), where=finite, initial=0)
    close = np.abs(np.where(finite, x - y, 0)) <= 100 * eps * scale
    return ~((finite & close) | (x == y) | (np.isnan(x) & np.isnan(y)))
