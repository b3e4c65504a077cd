"""This rank's timeline, JAXMPI_TRACE: its file, and what is needed to put it beside those of other ranks.

The file is an array of events, in the format of Chrome and Perfetto, one in a line: of the operations by
csrc/core/timeline.c; here of the rank and of its communicators. `python -m jaxmpi.trace` reads it.
"""

import json
import os
import socket
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mpi4py import MPI

import jaxmpi._core as _core

_FOLDER = os.environ.get("JAXMPI_TRACE", "")
ON = _FOLDER != ""
"""Whether this rank writes a timeline."""


def _limit() -> int:
    """The most bytes of a rank's file."""
    given = os.environ.get("JAXMPI_TRACE_MEGABYTES", "") or "200"
    if not given.isdecimal() or int(given) == 0:
        raise ValueError(f"jaxmpi: JAXMPI_TRACE_MEGABYTES={given}: a whole number above 0 is needed")
    return int(given) * 1_000_000


def _note(name: str, arguments: dict[str, Any]) -> None:
    _core.note_in_timeline(json.dumps({"name": name, "ph": "M", "pid": MPI.COMM_WORLD.rank, "args": arguments}) + ",\n")


def _clock() -> str:
    """The clock of the times in the file: ranks with the same one have comparable times."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def begin(library: str) -> None:
    """Opens the file, if one is asked for. Raises OSError if it cannot be written."""
    if not ON:
        return
    world = MPI.COMM_WORLD
    try:
        Path(_FOLDER).mkdir(parents=True, exist_ok=True)
        _core.open_timeline(str(Path(_FOLDER) / f"{world.rank:05d}.json"), _limit())
    except OSError as error:
        raise OSError(f"jaxmpi: JAXMPI_TRACE={_FOLDER}: no timeline can be written there: {error}") from None
    _note("process_name", {"name": f"rank {world.rank} on {socket.gethostname()}"})
    of_rank = {"rank": world.rank, "size": world.size, "host": socket.gethostname(), "program": sys.argv}
    of_clock = {"clock": _clock(), "monotonic": time.monotonic_ns() / 1000, "realtime": time.time_ns() / 1000}
    _note("jaxmpi", {**of_rank, **of_clock, "versions": [version("jaxmpi"), version("jax"), library]})


def communicator(number: int, comm: MPI.Comm, name: str) -> None:
    """Tells which ranks of COMM_WORLD a communicator has; null for all of them, in order."""
    if not ON:
        return
    group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    ranks = group.Translate_ranks(list(range(group.Get_size())), world)
    group.Free()
    world.Free()
    everybody = list(ranks) == list(range(MPI.COMM_WORLD.size))
    _note("jaxmpi_communicator", {"number": number, "name": name, "ranks": None if everybody else list(ranks)})
