"""Whether all ranks see one folder: a path may be another folder on each host, such as one in /tmp."""

import contextlib
import secrets
import socket
import time
from pathlib import Path

from mpi4py import MPI

from jaxmpi._mpi import agreement

_SECONDS = 5.0
"""How long a rank looks for what another one has written: file systems of several hosts may be late."""


def check(comm: MPI.Intracomm, operation: str, folder: Path) -> None:
    """Raises OSError on all ranks unless each of them sees the folder that rank 0 sees. All ranks call it."""
    sign, host = agreement.on_root(comm, operation, lambda: (_leave(folder), socket.gethostname()))
    try:
        agreement.on_all(comm, operation, lambda: _find(operation, folder / sign, host))
    finally:
        if comm.rank == 0:
            with contextlib.suppress(OSError):
                (folder / sign).unlink()


def _leave(folder: Path) -> str:
    sign = f".{secrets.token_hex(8)}.shared"
    (folder / sign).touch()
    return sign


def _find(operation: str, sign: Path, host: str) -> None:
    end = time.monotonic() + _SECONDS
    while not sign.exists():
        if time.monotonic() > end:
            raise OSError(
                f"{operation}: {sign.parent} on {socket.gethostname()} is not the folder that rank 0 has on {host}: "
                "pass a path in a file system that all ranks share."
            )
        time.sleep(0.05)
