"""Agreement of all ranks before they go on: an error of one of them is an error of all."""

import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar, cast

import numpy as np
from mpi4py import MPI

from jaxmpi._mpi import failures

T = TypeVar("T")
Facts = Sequence[tuple[str, str]]
"""The facts that ranks compare: a name and a text for each."""
_BITS = 2**64 - 1
_KINDS = (TypeError, ValueError, ImportError, OSError)
"""The types of errors that other ranks raise as well, for OSError also Python's subclasses. Most specific first."""


def capture(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return the result of `work`, or the exception that it raises."""
    try:
        return work(), None
    except Exception as error:
        return None, error


def sums(comm: MPI.Intracomm, operation: str, failure: Exception | None, *numbers: int) -> list[int]:
    """Return the sums of numbers over all ranks, modulo 2^64: one small reduction.

    Raises an exception on all ranks if any has a failure. That rank raises its failure. The others raise an exception
    of the same type, with the number of the first rank that has a failure.
    """
    sums = np.array([failure is not None, *numbers], np.uint64)
    with failures.confirmed(comm):
        comm.Allreduce(MPI.IN_PLACE, sums, MPI.SUM)
    if sums[0]:
        _fail(comm, operation, failure)
    return [int(number) for number in sums[1:]]


def gather_objects(comm: MPI.Intracomm, value: T) -> list[T]:
    """Return the object of each rank, on all ranks.

    Raises MPI.Exception if a rank has died. It does not use mpi4py's allgather: MPI_Allgatherv of Open MPI drops an
    error of the broadcast inside, and mpi4py would unpickle unwritten memory before anybody asks for a death.
    """
    with failures.confirmed(comm):
        result = comm.bcast(comm.gather(value))
    return cast(list[T], result)


def run_on_all(comm: MPI.Intracomm, operation: str, work: Callable[[], T]) -> T:
    """Return the result of `work` on this rank. An error of one rank is raised on all, as by `sums`."""
    result, failure = capture(work)
    sums(comm, operation, failure)
    return cast(T, result)


def on_root(comm: MPI.Intracomm, operation: str, work: Callable[[], T], root: int = 0) -> T:
    """Return on all ranks the result of `work`, which root alone calls: one broadcast. All ranks raise root's error."""
    result, failure = capture(work) if comm.rank == root else (None, None)
    failed, result = of_rank(comm, (failure is not None, result), root)
    if failed:
        _fail(comm, operation, failure)
    return cast(T, result)


def on_root_with_all(
    comm: MPI.Intracomm, operation: str, value: T, failure: Exception | None, work: Callable[[list[T]], None]
) -> None:
    """Let root call `work` with the list of all ranks' objects: one gather and one broadcast. All ranks raise root's
    error. If a rank has a failure, root does not call `work`, and all ranks raise that failure."""
    with failures.confirmed(comm):
        listed = comm.gather((failure is not None, value))
    failed = False
    if listed is not None:
        failed = any(has_failed for has_failed, _ in listed)
        if not failed:
            _, failure = capture(lambda: work([theirs for _, theirs in listed]))
    if of_rank(comm, failed or failure is not None):
        _fail(comm, operation, failure)


def of_rank(comm: MPI.Intracomm, value: T, root: int = 0) -> T:
    """Return root's object, on all ranks. Raise MPI.Exception if a rank has died."""
    with failures.confirmed(comm):
        return cast(T, comm.bcast(value, root))


def check_equal(
    comm: MPI.Intracomm,
    operation: str,
    work: Callable[[], tuple[T, Facts]],
    differs: Callable[[str, str, str], str],
) -> T:
    """Return the first item of the result of `work` on this rank. The second item is facts that all ranks must share.

    An error of one rank is raised on all. All ranks also raise a ValueError if a rank has other facts than rank 0. On
    that rank its text is `differs(name, mine, of rank 0)`. If all is well this is one small reduction: the facts
    themselves travel only if the digests differ.
    """
    result, failure = capture(work)
    facts = result[1] if result else []
    digest = int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=8).digest(), "little")
    bits = np.array([failure is not None, digest, digest ^ _BITS], np.uint64)
    with failures.confirmed(comm):
        comm.Allreduce(MPI.IN_PLACE, bits, MPI.BOR)
    if bits[0]:
        _fail(comm, operation, failure)
    if bits[1] & bits[2]:  # a bit that some ranks have set, and others have not
        _compare(comm, operation, facts, differs)
    assert result is not None
    return result[0]


def _compare(comm: MPI.Intracomm, operation: str, facts: Facts, differs: Callable[[str, str, str], str]) -> None:
    failure = None
    for mine, root in itertools.zip_longest(facts, of_rank(comm, facts), fillvalue=("", "")):
        if mine != root and failure is None:
            what = mine[0] or root[0]
            failure = ValueError(f"{operation}: {differs(what, mine[1], root[1])}")
    sums(comm, operation, failure)


def _fail(comm: MPI.Intracomm, operation: str, failure: Exception | None) -> NoReturn:
    kind: Any = next((kind for kind in _KINDS if isinstance(failure, kind)), RuntimeError)
    if kind is OSError and type(failure).__module__ == "builtins":  # BlockingIOError for example
        kind = type(failure)
    all_failures = gather_objects(comm, None if failure is None else (kind, str(failure)))
    if failure is not None:
        raise failure
    rank, (kind, text) = next((rank, theirs) for rank, theirs in enumerate(all_failures) if theirs is not None)
    raise kind(f"{operation}: on rank {rank}: {text.removeprefix(f'{operation}: ')}")
