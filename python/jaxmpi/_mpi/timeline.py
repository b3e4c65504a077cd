"""This rank's timeline, JAXMPI_TRACE: the file, and facts that align it with the timelines of other ranks.

The file is an array of events, in the format of Chrome and Perfetto, one in a line. csrc/observe/timeline.c writes the
events of operations; this module writes the events of the rank and of the communicators. `python -m jaxmpi.trace` reads
the file.

Several jobs may write into one folder. A file is named after the job, and never replaces a file.
"""

import hashlib
import json
import os
import secrets
import socket
import stat
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import jaxmpi._core as _core
from jaxmpi._mpi import groups
from jaxmpi._mpi.settings import SETTINGS
from jaxmpi_launch.folder import machine

_MOST_BYTES = 200_000_000
"""The size of one rank's timeline, about a million operations."""
ON = SETTINGS.trace != ""
"""Whether this rank writes a timeline."""


def _clock() -> str:
    """Return the clock of the times in the file: ranks with the same clock have comparable times."""
    return machine() or socket.gethostname()


_LAUNCHED = SETTINGS.launched or f"child of {os.getppid()} of {_clock()}"
"""A text that ranks of one job share without communication, at least ranks on one machine. It is for the files of jobs
in which some ranks never import the package, or that end before they have."""


def _note(name: str, arguments: dict[str, Any]) -> None:
    _core.note_in_timeline(json.dumps({"name": name, "ph": "M", "pid": MPI.COMM_WORLD.rank, "args": arguments}) + ",\n")


def new_job() -> int:
    """Return a number for a job that no other job has: the time in seconds, and random bits."""
    return int(time.time()) << 30 | secrets.randbits(30)


def _name(job: int) -> str:
    """Return a name like 20261231-235959-0123abcd: the time in UTC, and the random bits."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(job >> 30))}-{job & ((1 << 30) - 1):08x}"


def _new_file(name: str) -> int:
    """Return the descriptor of a new file in the folder. Others may know the folder: raise OSError if they could put
    another file in the place of ours. An open folder is the same wherever the path leads a moment later."""
    folder = os.open(SETTINGS.trace, os.O_RDONLY | os.O_DIRECTORY)
    try:
        status = os.fstat(folder)
        if status.st_uid not in (os.geteuid(), 0):
            raise OSError("it belongs to another user")
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            raise OSError("everyone may replace files in it (chmod o-w, or +t)")
        return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644, dir_fd=folder)
    finally:
        os.close(folder)


def begin(library: str, job: int | None) -> None:
    """Open the file, if there is to be one. `job`: a number that all ranks share, by `new_job`; None if it is not known
    yet. Raise OSError if the file cannot be written."""
    if not ON:
        return
    world, name = MPI.COMM_WORLD, None if job is None else _name(job)
    try:
        Path(SETTINGS.trace).mkdir(0o775, parents=True, exist_ok=True)  # else an umask of 0 lets everyone write there
        _core.open_timeline(_new_file(f"{name or _name(new_job())}.{world.rank:05d}.json"), _MOST_BYTES)
    except OSError as error:
        raise OSError(
            f"jaxmpi: JAXMPI_TRACE={SETTINGS.trace}: no timeline can be written there: {error.strerror or error}. "
            "Name a folder of your own; it is made if it is not there"
        ) from None
    _note("process_name", {"name": f"rank {world.rank} on {socket.gethostname()}"})
    of_job = {"job": name, "launched": _LAUNCHED}
    of_rank = {"rank": world.rank, "size": world.size, "host": socket.gethostname(), "program": sys.argv}
    of_clock = {"clock": _clock(), "monotonic": time.monotonic_ns() / 1000, "realtime": time.time_ns() / 1000}
    versions = [version("jaxmpi"), version("jax"), library]
    _note("jaxmpi", {**of_job, **of_rank, **of_clock, "versions": versions})


def communicator(number: int, comm: MPI.Comm, name: str) -> None:
    """Write the ranks of COMM_WORLD that a communicator has; nothing for all ranks in order. The first rank lists them,
    the others write a hash of the list: the length of all lists together would grow as the square of the job."""
    if not ON:
        return
    ranks = np.array(groups.ranks_within(comm, MPI.COMM_WORLD), "<i4")
    described: dict[str, Any] = {"number": number, "name": name}
    if not np.array_equal(ranks, np.arange(MPI.COMM_WORLD.size)):
        described["members"] = hashlib.sha256(ranks.tobytes()).hexdigest()[:16]
        if comm.rank == 0:
            described["ranks"] = ranks.tolist()
    _note("jaxmpi_communicator", described)
