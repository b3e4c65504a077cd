"""Communication by mpi4py outside of compiled programs: the watchdog reports a rank that waits in it."""

import contextlib
from collections.abc import Iterator

from mpi4py import MPI

import jaxmpi._core as _core
from jaxmpi._mpi.communicators import Communicator
from jaxmpi._mpi.library import handle_of
from jaxmpi._mpi.strings import text_of


@contextlib.contextmanager
def waiting(comm: Communicator | None, name: str) -> Iterator[None]:
    """A context in which the watchdog reports this rank, if it takes long, as waiting in `name` on this communicator;
    None: on COMM_WORLD, even if that has been given up.

    It is for code in which all ranks of the communicator communicate by mpi4py, to make a map for example. Operations
    of the package are not called in it. Names are kept for ever: pass one of a few, the name of the function for
    example.
    """
    number = comm.number if comm is not None else _core.communicator(handle_of(MPI.COMM_WORLD))[0]  # type: ignore[index]
    entered = _core.enter(number, text_of(name).number)
    try:
        yield
    finally:
        _core.leave(entered)
