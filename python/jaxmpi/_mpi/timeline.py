"""This rank's timeline, JAXMPI_TRACE: its file, and what is needed to put it beside those of other ranks.

The file is an array of events, in the format of Chrome and Perfetto, one in a line: of the operations by
csrc/observe/timeline.c; here of the rank and of its communicators. `python -m jaxmpi.trace` reads it.

Several jobs may write into one folder. A file is named after its job, and never one that was there before.
"""

import hashlib
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import jaxmpi._core as _core
from jaxmpi._mpi import groups
from jaxmpi._mpi.settings import SETTINGS

_MOST_BYTES = 200_000_000
"""The size of one rank's timeline, about a million operations."""
ON = SETTINGS.trace != ""
"""Whether this rank writes a timeline."""


def _clock() -> str:
    """The clock of the times in the file: ranks with the same one have comparable times."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


_LAUNCHED = SETTINGS.launched or f"child of {os.getppid()} of {_clock()}"
"""What ranks of one job have in common without asking each other, those on one machine at least: for the files of jobs
of which some ranks never import the package, or that end before they have."""

_job: Callable[[], int | None] | None = None
"""Finds out which job this is, until the file tells."""


def _note(name: str, arguments: dict[str, Any]) -> None:
    _core.note_in_timeline(json.dumps({"name": name, "ph": "M", "pid": MPI.COMM_WORLD.rank, "args": arguments}) + ",\n")


def new_job() -> int:
    """A number for a job, which no other one has: the time in seconds, and random bits."""
    return int(time.time()) << 30 | secrets.randbits(30)


def _name(job: int) -> str:
    """20261231-235959-0123abcd: the time in UTC, and the random bits."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(job >> 30))}-{job & ((1 << 30) - 1):08x}"


def begin(library: str, job: Callable[[], int | None]) -> None:
    """Opens the file, if one is asked for. `job` returns a number that all ranks have, by `new_job`, or None as long as
    that is not known. Raises OSError if the file cannot be written."""
    global _job
    if not ON:
        return
    world, agreed = MPI.COMM_WORLD, job()
    name = None if agreed is None else _name(agreed)
    try:
        Path(SETTINGS.trace).mkdir(0o775, parents=True, exist_ok=True)  # else an umask of 0 lets everyone write there
        _core.open_timeline(SETTINGS.trace, f"{name or _name(new_job())}.{world.rank:05d}.json", _MOST_BYTES)
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
    _job = job if name is None else None


def _tell_job() -> None:
    """Writes the job's name into the file of a rank that imported the package long before others."""
    global _job
    if _job is not None and (agreed := _job()) is not None:
        _note("jaxmpi_job", {"job": _name(agreed)})
        _job = None


def communicator(number: int, comm: MPI.Comm, name: str) -> None:
    """Tells which ranks of COMM_WORLD a communicator has; nothing: all, in order. Its first rank lists them, the
    others tell a hash of the list: together all lists would be as long as the square of the job."""
    if not ON:
        return
    _tell_job()
    ranks = np.array(groups.ranks_within(comm, MPI.COMM_WORLD), "<i4")
    told: dict[str, Any] = {"number": number, "name": name}
    if not np.array_equal(ranks, np.arange(MPI.COMM_WORLD.size)):
        told["members"] = hashlib.sha256(ranks.tobytes()).hexdigest()[:16]
        if comm.rank == 0:
            told["ranks"] = ranks.tolist()
    _note("jaxmpi_communicator", told)


def end() -> None:
    """Writes the rest, and ends the file, if there is one."""
    try:
        if ON:
            _tell_job()
    finally:
        _core.close_timeline()
