"""Agreement of all ranks before they go on: an error of one of them is an error of all.

It is for Python code in which all ranks take part: imports, settings, files, maps. The core compares the calls of a
program itself (csrc/execute/compare.h). After a death all functions raise MPI.Exception, but perhaps not on all ranks:
`private_comms.agree` has the same result on all living ranks.
"""

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
_KINDS = (TypeError, ValueError, ImportError, OSError)
"""The types of errors that other ranks raise as well, for OSError also Python's subclasses. Most specific first."""


def capture(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return the result of `work`, or the exception that it raises."""
    try:
        return work(), None
    except Exception as error:
        return None, error


def start_largest(comm: MPI.Intracomm, *numbers: int) -> tuple[np.ndarray, MPI.Request]:
    """Start to find the largest of each number over all ranks, where some ranks may never come. Return an array that
    has the results when the request is complete."""
    largest = np.array(numbers, np.int64)
    return largest, comm.Iallreduce(MPI.IN_PLACE, largest, MPI.MAX)


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


def of_rank(comm: MPI.Intracomm, value: T, root: int = 0) -> T:
    """Return root's object, on all ranks. Raise MPI.Exception if a rank has died."""
    with failures.confirmed(comm):
        return cast(T, comm.bcast(value, root))


def say_difference(what: str, mine: str, root: str) -> str:
    """Return the text for a fact that differs, with the text of the fact on this rank and on rank 0."""
    return f"{what} differs from rank 0: {mine[:200]} and {root[:200]}. Call it alike on all ranks."


def check_equal(
    comm: MPI.Intracomm,
    operation: str,
    work: Callable[[], tuple[T, Facts]],
    differs: Callable[[str, str, str], str] = say_difference,
) -> T:
    """Return the first item of the result of `work` on this rank. The second item is facts that all ranks must share.

    An error of one rank is raised on all. All ranks also raise a ValueError if a rank has other facts than rank 0. On
    that rank its text is `differs(name, mine, of rank 0)`. If all is well this is one small reduction: the facts
    themselves travel only if the digests differ.
    """
    result, failure = capture(work)
    facts = result[1] if result else []
    digest = int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=8).digest(), "little")
    (total,) = sums(comm, operation, failure, digest)
    if total != digest * comm.size % 2**64:  # if digests differ, the sum fits on no rank
        of_root = of_rank(comm, facts)
        run_on_all(comm, operation, lambda: _compare(operation, facts, of_root, differs))
    assert result is not None
    return result[0]


def _compare(operation: str, facts: Facts, of_root: Facts, differs: Callable[[str, str, str], str]) -> None:
    for mine, root in itertools.zip_longest(facts, of_root, fillvalue=("", "")):
        if mine != root:
            raise ValueError(f"{operation}: {differs(mine[0] or root[0], mine[1], root[1])}")


def _fail(comm: MPI.Intracomm, operation: str, failure: Exception | None) -> NoReturn:
    kind: Any = next((kind for kind in _KINDS if isinstance(failure, kind)), RuntimeError)
    if kind is OSError and type(failure).__module__ == "builtins":  # BlockingIOError for example
        kind = type(failure)
    all_failures = gather_objects(comm, None if failure is None else (kind, str(failure)))
    if failure is not None:
        raise failure
    rank, (kind, text) = next((rank, theirs) for rank, theirs in enumerate(all_failures) if theirs is not None)
    raise kind(f"{operation}: on rank {rank}: {text.removeprefix(f'{operation}: ')}")
