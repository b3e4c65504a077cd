"""What MPI reports about the death of ranks (ULFM)."""

import contextlib
from collections.abc import Iterator

from mpi4py import MPI

from jaxmpi._mpi.library import FAILURES


def classes() -> set[int]:
    """Return the classes of errors by which MPI reports a death; none in a job that does not go on after one."""
    return {code for code in FAILURES.values() if code}


def dead(comm: MPI.Comm) -> tuple[int, ...]:
    """Return the ranks of a communicator that are known to have died."""
    try:
        failed, group = comm.Get_failed(), comm.Get_group()
        ranks = MPI.Group.Translate_ranks(failed, None, group)
        failed.Free()
        group.Free()
        return tuple(sorted(ranks))
    except (MPI.Exception, NotImplementedError):
        return ()


def is_broken(comm: MPI.Comm) -> bool:
    """Return whether a communicator is revoked, or a rank of it has died. Collectives of Open MPI then fail with other
    classes, too."""
    return bool(FAILURES["failed"]) and (bool(comm.Is_revoked()) or bool(dead(comm)))


@contextlib.contextmanager
def confirmed(comm: MPI.Comm) -> Iterator[None]:
    """A context around collectives of mpi4py. Its end raises an MPI.Exception for a death if a rank has died by then.

    Some functions of MPI drop the error of functions that they call inside, and return without a result, or have
    another error. The core asks the same after its own collectives: `call_confirm_result` in csrc/core/failure.h.
    """
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    if is_broken(comm):
        raise MPI.Exception(FAILURES["revoked" if comm.Is_revoked() else "failed"]) from error
    if error is not None:
        raise error
