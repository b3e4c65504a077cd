"""A clone of a communicator, for what its ranks tell each other outside of compiled programs.

Neither messages of the program nor operations that are still under way can be met there. After a death it is revoked
with its communicator.
"""

import contextlib
import functools
from typing import Any, cast

import jax
from mpi4py import MPI

from jaxmpi._mpi import failures
from jaxmpi._mpi.library import FAILURES


def clone_of(comm: MPI.Comm) -> MPI.Intracomm:
    """Return the clone of a communicator. All of its ranks call this; the first call makes it, and it is freed with the
    communicator."""
    jax.effects_barrier()  # collectives of the communicator that are under way have been called before this one
    clone = comm.Get_attr(_attribute())
    if clone is None:
        clone = _made(MPI.Intracomm(comm))
        clone.Set_name("a clone of jaxmpi")
        comm.Set_attr(_attribute(), clone)
    return cast(MPI.Intracomm, clone)


def _made(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Where the job goes on after a death the ranks agree that all have the clone: the revocation of one that a rank is
    still making is a segmentation fault of Open MPI 5.0.11."""
    if not FAILURES["failed"]:
        return comm.Dup()
    clone = None
    with contextlib.suppress(MPI.Exception):
        clone = comm.Dup()
    if not agree(comm, clone is not None) or clone is None:
        raise MPI.Exception(FAILURES["failed"])
    return clone


def revoke(comm: MPI.Comm) -> None:
    """Let all operations of other ranks on a communicator, and on its clone, raise."""
    for its in (comm, clone_if_made(comm)):
        with contextlib.suppress(MPI.Exception):
            if its is not None:
                its.Revoke()


def agree(comm: MPI.Comm, done: bool) -> bool:
    """Return whether all ranks have done it, and live: the same on all that do."""
    if not done:
        revoke(comm)  # no rank waits in an operation for this one
    try:
        return bool(comm.Agree(int(done)))
    except MPI.Exception as error:
        if error.Get_error_class() not in failures.classes():
            raise
        return False


def clone_if_made(comm: MPI.Comm) -> MPI.Intracomm | None:
    """Return the clone of a communicator, if there is one."""
    return cast("MPI.Intracomm | None", comm.Get_attr(_attribute()))


@functools.cache
def _attribute() -> int:
    return MPI.Comm.Create_keyval(delete_fn=_free)


def _free(comm: MPI.Comm, attribute: int, clone: Any) -> None:
    clone.Free()
