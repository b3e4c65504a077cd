"""Standard input goes from the launcher to rank 0 by the kernel alone, not by mpiexec; other ranks have an empty one.

When Open MPI 5 passes it on, it never ends, and part of a long one comes twice. Under MPICH the input of the other
ranks never ends. Rank 0 gets the launcher's own descriptor by a socket in the job's folder: opened again by a path it
would be refused where it belongs to another user, as under sudo, and a file would be read from its beginning.
mpiexec passes on what comes from a terminal, and all input when ranks may be on other machines.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator

from jaxmpi_launch.folder import Folder

VARIABLE = "JAXMPI_INPUT"
"""The variable for the ranks: `socket`, or empty if mpiexec passes the input on."""
_SECONDS = 60.0


@contextlib.contextmanager
def _path(folder: Folder) -> Iterator[str]:
    """The socket's path by a descriptor of the folder: an address cannot have more than about a hundred characters."""
    descriptor = os.open(folder.path, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{descriptor}/input"
    finally:
        os.close(descriptor)


def offer(folder: Folder | None, here: bool) -> socket.socket | None:
    """Return a socket that listens; None if mpiexec passes the input on. `here`: all ranks are on this machine."""
    if os.isatty(0) or not here or folder is None:
        return None
    listening = socket.socket(socket.AF_UNIX)
    try:
        with _path(folder) as path:
            listening.bind(path)
        listening.listen()
        return listening
    except OSError:  # a place that has no sockets
        listening.close()
        return None


def give(listening: socket.socket) -> None:
    """Give the launcher's standard input to the rank that has connected."""
    with contextlib.suppress(OSError), listening.accept()[0] as connection:
        socket.send_fds(connection, [b"0"], [0])


def take(rank: str | None, folder: Folder | None) -> None:
    """Take the launcher's standard input, on a rank that has not read anything yet."""
    value = os.environ.pop(VARIABLE, None)
    if value is None or rank is None or (rank == "0" and not value):
        return
    file = os.open(os.devnull, os.O_RDONLY)
    if rank == "0":
        try:
            file = _received(folder)
        except (OSError, IndexError) as error:
            print(f"jaxmpi.run: standard input is empty, because the launcher gives none: {error}", file=sys.stderr)
    os.dup2(file, 0)
    if file != 0:
        os.close(file)


def _received(folder: Folder | None) -> int:
    if folder is None:
        raise OSError("this rank does not see the launcher's folder")
    with _path(folder) as path, socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_SECONDS)
        connection.connect(path)
        return socket.recv_fds(connection, 1, 1)[1][0]
