"""What all ranks must know before they go on: an error of one of them is an error of all."""

import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar, cast

import numpy as np
from mpi4py import MPI

from jaxmpi._mpi import failures

T = TypeVar("T")
Facts = Sequence[tuple[str, str]]
"""What ranks compare: of each fact what it is, and a text."""
_BITS = 2**64 - 1
_KINDS = (TypeError, ValueError, ImportError, OSError)
"""The types of errors that other ranks raise as well, of OSError also Python's own more special ones."""


def capture(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return what `work` returns, or what it raises."""
    try:
        return work(), None
    except Exception as error:
        return None, error


def sums(comm: MPI.Intracomm, operation: str, failure: Exception | None, *numbers: int) -> list[int]:
    """Return the sums of numbers over all ranks, modulo 2^64: one small reduction.

    Raises an exception on all ranks if any has a failure: its own there, and on the others one of the same type, with
    the number of the first rank that has one.
    """
    sums = np.array([failure is not None, *numbers], np.uint64)
    with failures.confirmed(comm):
        comm.Allreduce(MPI.IN_PLACE, sums, MPI.SUM)
    if sums[0]:
        _fail(comm, operation, failure)
    return [int(number) for number in sums[1:]]


def gather_objects(comm: MPI.Intracomm, value: T) -> list[T]:
    """Return what each rank tells, any object, on all of them.

    Raises MPI.Exception if a rank has died. Not by mpi4py's allgather: MPI_Allgatherv of Open MPI drops the error of
    its own broadcast, and what it then has not written would be unpickled before anybody asks for a death.
    """
    with failures.confirmed(comm):
        found = comm.bcast(comm.gather(value))
    return cast(list[T], found)


def run_on_all(comm: MPI.Intracomm, operation: str, work: Callable[[], T]) -> T:
    """Return what `work` returns on this rank. An error of one rank is raised on all, as by `sums`."""
    found, failure = capture(work)
    sums(comm, operation, failure)
    return cast(T, found)


def on_root(comm: MPI.Intracomm, operation: str, work: Callable[[], T], root: int = 0) -> T:
    """Return what `work` returns on the root, which alone calls it, on all ranks: one broadcast. All raise its
    error."""
    found, failure = capture(work) if comm.rank == root else (None, None)
    failed, found = of_rank(comm, (failure is not None, found), root)
    if failed:
        _fail(comm, operation, failure)
    return cast(T, found)


def on_root_with_all(
    comm: MPI.Intracomm, operation: str, value: T, failure: Exception | None, work: Callable[[list[T]], None]
) -> None:
    """Let root call `work` with what each rank has, any object: one gather and one broadcast. All raise root's error.
    Where a rank has a failure, root does not call it, and all raise that."""
    with failures.confirmed(comm):
        listed = comm.gather((failure is not None, value))
    failed = False
    if listed is not None:
        failed = any(its for its, _ in listed)
        if not failed:
            _, failure = capture(lambda: work([its for _, its in listed]))
    if of_rank(comm, failed or failure is not None):
        _fail(comm, operation, failure)


def of_rank(comm: MPI.Intracomm, value: T, root: int = 0) -> T:
    """Return what the root has, any object, on all ranks. Raise MPI.Exception if a rank has died."""
    with failures.confirmed(comm):
        return cast(T, comm.bcast(value, root))


def check_equal(
    comm: MPI.Intracomm,
    operation: str,
    work: Callable[[], tuple[T, Facts]],
    differs: Callable[[str, str, str], str],
) -> T:
    """Return the first of what `work` returns on this rank; the second are facts that all ranks must have alike.

    An error of one rank is raised on all. So is a ValueError if a rank has other facts than rank 0, whose text there is
    `differs(what, mine, of rank 0)`. It is one small reduction where all is well: the facts themselves travel where
    their digests differ.
    """
    found, failure = capture(work)
    facts = found[1] if found else []
    digest = int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=8).digest(), "little")
    bits = np.array([failure is not None, digest, digest ^ _BITS], np.uint64)
    with failures.confirmed(comm):
        comm.Allreduce(MPI.IN_PLACE, bits, MPI.BOR)
    if bits[0]:
        _fail(comm, operation, failure)
    if bits[1] & bits[2]:  # a bit that some have, and others have not
        _compare(comm, operation, facts, differs)
    assert found is not None
    return found[0]


def _compare(comm: MPI.Intracomm, operation: str, facts: Facts, differs: Callable[[str, str, str], str]) -> None:
    failure = None
    for mine, root in itertools.zip_longest(facts, of_rank(comm, facts), fillvalue=("", "")):
        if mine != root and failure is None:
            what = mine[0] or root[0]
            failure = ValueError(f"{operation}: {differs(what, mine[1], root[1])}")
    sums(comm, operation, failure)


def _fail(comm: MPI.Intracomm, operation: str, failure: Exception | None) -> NoReturn:
    kind: Any = next((kind for kind in _KINDS if isinstance(failure, kind)), RuntimeError)
    if kind is OSError and type(failure).__module__ == "builtins":  # such as BlockingIOError
        kind = type(failure)
    all_failures = gather_objects(comm, None if failure is None else (kind, str(failure)))
    if failure is not None:
        raise failure
    rank, (kind, text) = next((rank, its) for rank, its in enumerate(all_failures) if its is not None)
    raise kind(f"{operation}: on rank {rank}: {text.removeprefix(f'{operation}: ')}")
