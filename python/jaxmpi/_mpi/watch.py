"""What ranks do together outside of compiled programs, by mpi4py: a rank that waits in it is reported."""

import contextlib
from collections.abc import Iterator

from mpi4py import MPI

import jaxmpi._core as _core
from jaxmpi._mpi.communicators import Communicator
from jaxmpi._mpi.library import handle_of
from jaxmpi._mpi.strings import text_of


@contextlib.contextmanager
def waiting(comm: Communicator | None, name: str) -> Iterator[None]:
    """Within it the watchdog reports this rank, if it takes long, as waiting in `name` on this communicator; None: on
    COMM_WORLD, also where that has been given up.

    It is for what all ranks of the communicator do together by mpi4py, such as to make a map. Operations of the package
    are not called within it. Names are kept for ever: pass one of a few, such as that of the function.
    """
    number = comm.number if comm is not None else _core.communicator(handle_of(MPI.COMM_WORLD))[0]  # type: ignore[index]
    entered = _core.enter(number, text_of(name).number)
    try:
        yield
    finally:
        _core.leave(entered)
