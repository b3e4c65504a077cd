"""Standard input goes from the launcher to rank 0 by the kernel alone, not by mpiexec; other ranks have an empty one.

Passed on by Open MPI 5 it would never end, and a long one come in part twice; under MPICH that of the other ranks would
never end; and in a loop of a shell mpiexec takes the input that is meant for the loop. Rank 0 gets the launcher's own
descriptor, by a socket in the job's folder: opened again by a path it would be refused where it belongs to another
user, as under sudo, and a file be read from its beginning. What rank 0 gets from a terminal is left to mpiexec, and so
it is if ranks may be on other machines.
Nothing here imports jax, mpi4py or the package: child.py loads this file by its path.
"""

import contextlib
import os
import sys
from typing import Any

VARIABLE = "JAXMPI_INPUT"
"""The variable for the ranks: `socket`, or empty if mpiexec passes the input on."""

_NAME = "input"
_SECONDS = 60.0


def offer(folder: Any, here: bool) -> tuple[str, Any]:
    """Opens a socket in the launcher: returns the variable's value, and the socket that listens, in a folder of
    private.py's or None.

    `here`: all ranks are on this machine."""
    if os.isatty(0) or not here or folder is None:
        return "", None
    import socket

    listening = None
    try:
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(_path(folder))
        listening.listen()
        return "socket", listening
    except OSError:  # a place that has no sockets
        if listening is not None:
            listening.close()
        return "", None


def give(listening: Any) -> None:
    """Gives the launcher's standard input to the rank that has connected: only its own user can, by the folder's
    mode."""
    import socket

    with contextlib.suppress(OSError):
        connection, _ = listening.accept()
        with connection:
            socket.send_fds(connection, [b"0"], [0])


def take(rank: str | None, folder: Any) -> None:
    """Takes the launcher's standard input, on a rank that has not read anything yet."""
    value = os.environ.pop(VARIABLE, None)
    if value is None or rank is None or (rank == "0" and not value):
        return
    file = os.open(os.devnull, os.O_RDONLY)
    if rank == "0":
        import socket

        try:
            if folder is None:
                raise OSError("this rank does not see the launcher's folder")
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(_SECONDS)
                connection.connect(_path(folder))
                os.close(file)
                file = socket.recv_fds(connection, 1, 1)[1][0]
        except (OSError, IndexError) as error:
            print(f"jaxmpi.run: standard input is empty, for the launcher gives none: {error}", file=sys.stderr)
            file = os.open(os.devnull, os.O_RDONLY)
    os.dup2(file, 0)
    if file != 0:
        os.close(file)


def _path(folder: Any) -> str:
    """The socket's, by way of a descriptor: a path of more than some hundred characters cannot be an address."""
    return f"/proc/self/fd/{folder.descriptor}/{_NAME}"
