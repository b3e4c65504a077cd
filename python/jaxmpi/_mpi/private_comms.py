"""A clone of a communicator, on which the ranks communicate outside of compiled programs.

Messages there never match messages of the program, nor operations that are still under way. After a death it is revoked
together with the communicator.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
from mpi4py import MPI

from jaxmpi._mpi import failures
from jaxmpi._mpi.library import FAILURES

T = TypeVar("T")


def clone_of(comm: MPI.Comm) -> MPI.Intracomm:
    """Return the clone of a communicator. All ranks of it call this. The first call makes the clone, which is freed
    with the communicator."""
    jax.effects_barrier()  # collectives of the communicator that are under way have been called before this one
    clone = comm.Get_attr(_attribute())
    if clone is None:
        clone = _made(MPI.Intracomm(comm))
        clone.Set_name("a clone of jaxmpi")
        comm.Set_attr(_attribute(), clone)
    return cast(MPI.Intracomm, clone)


def _made(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Make a clone. Where the job goes on after a death, the ranks agree that all have it: Open MPI 5.0.11 crashes
    (segmentation fault) if a communicator is revoked while a rank is still making it."""
    if not FAILURES["failed"]:
        return comm.Dup()
    if (clone := on_all_living(comm, comm.Dup)) is None:
        raise MPI.Exception(FAILURES["failed"])
    return clone


def revoke(comm: MPI.Comm) -> None:
    """Make all operations of other ranks on a communicator, and on the clone of it, raise."""
    for revoked in (comm, clone_if_made(comm)):
        with contextlib.suppress(MPI.Exception):
            if revoked is not None:
                revoked.Revoke()


def agree(comm: MPI.Comm, done: bool) -> bool:
    """Return whether all ranks are done, and live. All living ranks return the same. `agreement` cannot promise this,
    because after a death a reduction may fail on some ranks alone."""
    if not done:
        revoke(comm)  # no rank waits in an operation for this one
    try:
        return bool(comm.Agree(int(done)))
    except MPI.Exception as error:
        if error.Get_error_class() not in failures.classes():
            raise
        return False


def on_all_living(comm: MPI.Comm, work: Callable[[], T]) -> T | None:
    """Return the result of `work`; None on all living ranks if it has failed on one, or a rank has died."""
    result = None
    with contextlib.suppress(MPI.Exception):
        result = work()
    return result if agree(comm, result is not None) else None


def clone_if_made(comm: MPI.Comm) -> MPI.Intracomm | None:
    return cast("MPI.Intracomm | None", comm.Get_attr(_attribute()))


@functools.cache
def _attribute() -> int:
    return MPI.Comm.Create_keyval(delete_fn=_free)


def _free(comm: MPI.Comm, attribute: int, clone: Any) -> None:
    clone.Free()
