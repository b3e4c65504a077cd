"""A clone of a communicator, for what its ranks tell each other outside of compiled programs.

Neither messages of the program nor operations that are still under way can be met there.
"""

import functools
from typing import Any, cast

import jax
from mpi4py import MPI


def clone_of(comm: MPI.Comm) -> MPI.Intracomm:
    """The clone of a communicator. All of its ranks call this; the first call makes it, and it is freed with the
    communicator."""
    jax.effects_barrier()  # collectives of the communicator that are under way have been called before this one
    clone = comm.Get_attr(_attribute())
    if clone is None:
        clone = MPI.Intracomm(comm).Dup()
        clone.Set_name("a clone of jaxmpi")
        comm.Set_attr(_attribute(), clone)
    return cast(MPI.Intracomm, clone)


def clone_if_made(comm: MPI.Comm) -> MPI.Intracomm | None:
    """The clone of a communicator, if there is one."""
    return cast("MPI.Intracomm | None", comm.Get_attr(_attribute()))


@functools.cache
def _attribute() -> int:
    return MPI.Comm.Create_keyval(delete_fn=_free)


def _free(comm: MPI.Comm, attribute: int, clone: Any) -> None:
    clone.Free()
