"""Standard input goes from the launcher to rank 0 by the kernel alone, not by mpiexec; other ranks have an empty one.

Passed on by Open MPI 5 it would never end, and a long one come in part twice; under MPICH that of the other ranks would
never end; and in a loop of a shell mpiexec takes the input that is meant for the loop. What rank 0 gets from a terminal
is left to mpiexec, and so it is if ranks may be on other machines.
Nothing here imports jax, mpi4py or the package: child.py loads this file by its path.
"""

import contextlib
import os
import stat
from pathlib import Path

VARIABLE = "JAXMPI_INPUT"


def keep(here: bool) -> dict[str, str]:
    """In the launcher: the variable for the ranks. `here`: all are on this machine.

    A pipe or a file is kept by mpiexec, which takes the place of this process and gets an empty input instead.
    """
    null = os.open(os.devnull, os.O_RDONLY)
    try:
        kind = os.fstat(0).st_mode
        kept = os.dup(0) if stat.S_ISFIFO(kind) or stat.S_ISREG(kind) else null
        if not here or os.isatty(0) or stat.S_ISSOCK(kind) or not os.path.exists(f"/proc/self/fd/{kept}"):
            return {VARIABLE: ""}
    except OSError:  # it is closed
        kept = null
    os.dup2(null, 0)
    os.set_inheritable(kept, True)
    return {VARIABLE: f"/proc/{os.getpid()}/fd/{kept}"}


def take(rank: str | None) -> None:
    """In a rank, before it reads anything: rank 0 gets the launcher's input, from where that has been read to."""
    path = os.environ.pop(VARIABLE, None)
    if path is None or rank is None or (rank == "0" and not path):
        return
    with contextlib.suppress(OSError):
        file = os.open(path if rank == "0" else os.devnull, os.O_RDONLY)
        if stat.S_ISREG(os.fstat(file).st_mode):
            _, position, *_ = Path(path.replace("/fd/", "/fdinfo/")).read_text().split()  # the first line is `pos: 123`
            os.lseek(file, int(position), os.SEEK_SET)
        os.dup2(file, 0)
        os.close(file)
