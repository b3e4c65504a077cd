"""What ranks do together outside of compiled programs, by mpi4py: a rank that waits in it is reported."""

import contextlib
from collections.abc import Iterator

import jaxmpi._core as _core
from jaxmpi._mpi.communicators import Communicator
from jaxmpi._mpi.texts import text_of


@contextlib.contextmanager
def waiting(comm: Communicator, name: str) -> Iterator[None]:
    """Within it the watchdog reports this rank, if it takes long, as waiting in `name` on this communicator.

    It is for what all ranks of the communicator do together by mpi4py, such as to make a map. Operations of the package
    are not called within it. Names are kept for ever: pass one of a few, such as that of the function.
    """
    entered = _core.enter(comm.number, text_of(name).number)
    try:
        yield
    finally:
        _core.leave(entered)
