"""A check that all ranks see one folder. A path may lead to another folder on each host, for example in /tmp."""

import contextlib
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from mpi4py import MPI

from jaxmpi._mpi import agreement

_SECONDS = 5.0
"""How long a rank looks for the file of another one, because file systems of several hosts may be late."""


@dataclass(frozen=True)
class Sign:
    """A file of rank 0 in a folder, which the other ranks look for."""

    file: Path
    host: str


def leave(folder: Path) -> Sign:
    """Leave a sign in a folder, on rank 0, which has locked it. Remove the signs of jobs that died."""
    for old in folder.glob(".*.shared"):
        old.unlink()
    file = folder / f".{secrets.token_hex(8)}.shared"
    file.touch()
    return Sign(file, socket.gethostname())


def check(comm: MPI.Intracomm, operation: str, sign: Sign) -> None:
    """Raise OSError on all ranks unless each of them sees the sign of rank 0. Remove the sign. All ranks call it."""
    try:
        agreement.run_on_all(comm, operation, lambda: _find(operation, sign))
    finally:
        if comm.rank == 0:
            with contextlib.suppress(OSError):
                sign.file.unlink()


def _find(operation: str, sign: Sign) -> None:
    end = time.monotonic() + _SECONDS
    while not sign.file.exists():
        if time.monotonic() > end:
            raise OSError(
                f"{operation}: {sign.file.parent} on {socket.gethostname()} is not the folder that rank 0 has on "
                f"{sign.host}: pass a path in a file system that all ranks share."
            )
        time.sleep(0.05)
