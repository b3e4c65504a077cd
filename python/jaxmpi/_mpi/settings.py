"""The settings of this process: the package's variables of the environment, all of them read once, at import.

What the variables mean to users is in docs/running.md, docs/errors.md and docs/gpu.md. Variables that belong to the
launcher (python/jaxmpi_launch) or to an MPI library are read where they are used.
"""

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

ALL: Final = 1 << 62
"""How many collectives are compared with JAXMPI_CHECK=1."""

COMPARED: Final = 1000
"""How many collectives of each communicator are compared by default."""

ACTIONS: Final = ("report", "abort")
"""What may happen to an operation that waits for long; the first by default."""

_TRUE, _FALSE = ("1", "on", "true", "yes"), ("0", "off", "false", "no")

_OF_THE_RANK_ALONE = (
    "PMIX_NAMESPACE",
    "PMIX_RANK",
    "PMI_FD",
    "PMI_PORT",
    "JAXMPI_JOB_FOLDER",
    "JAXMPI_TRACE",
    "JAXMPI_SPARES",
)
_STARTED_BY_RANK = "JAXMPI_STARTED_BY_RANK"


@dataclass(frozen=True)
class Settings:
    """What the user has chosen, or the defaults."""

    compared: int
    """JAXMPI_CHECK: how many collectives of each communicator its ranks compare; 0: none, ALL: all."""
    log: bool
    """JAXMPI_DEBUG, MPI4JAX_DEBUG: each operation is logged."""
    error_ends_job: bool
    """JAXMPI_ON_ERROR: an operation that fails ends the job; otherwise it raises."""
    timeout: float
    """JAXMPI_TIMEOUT: after how many seconds an operation that waits is reported; 0: never."""
    timeout_action: str
    """JAXMPI_TIMEOUT_ACTION: what happens to it then, one of ACTIONS."""
    trace: str
    """JAXMPI_TRACE: the folder of the timeline; empty: there is none."""
    device_mpi: Mapping[str, str]
    """JAXMPI_DEVICE_MPI, MPI4JAX_USE_CUDA_MPI, MPI4JAX_USE_SYCL_MPI: those that are set and not `auto`, as "on" or
    "off": whether MPI is given the memory of devices."""
    device_transport: str
    """JAXMPI_DEVICE_TRANSPORT: auto, callback, flags, wait or nccl."""
    device_chunk: int | None
    """JAXMPI_DEVICE_CHUNK: bytes of a chunk; None: not set."""
    spares: int
    """JAXMPI_SPARES: how many ranks of the job, the last ones, are spare."""
    started_by_rank: bool
    """Whether a rank has started this process: it is none, and its environment says nothing of it."""
    launched: str
    """What the launcher has set for the ranks of this job alone; empty: nothing."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Settings":
        """Raises ValueError, which names the variable and what is possible, if one has a value that it cannot have."""
        read = _Reader(environment)
        return cls(
            compared=read.compared("JAXMPI_CHECK"),
            log=any([read.flag("JAXMPI_DEBUG"), read.flag("MPI4JAX_DEBUG")]),
            error_ends_job=read.choice("JAXMPI_ON_ERROR", "raise", "abort") == "abort",
            timeout=read.seconds("JAXMPI_TIMEOUT", 30.0),
            timeout_action=read.choice("JAXMPI_TIMEOUT_ACTION", *ACTIONS),
            trace=environment.get("JAXMPI_TRACE", ""),
            device_mpi=read.switches("JAXMPI_DEVICE_MPI", "MPI4JAX_USE_CUDA_MPI", "MPI4JAX_USE_SYCL_MPI"),
            device_transport=read.choice("JAXMPI_DEVICE_TRANSPORT", "auto", "callback", "flags", "wait", "nccl"),
            device_chunk=read.bytes("JAXMPI_DEVICE_CHUNK", 4096),
            spares=read.count("JAXMPI_SPARES"),
            started_by_rank=_STARTED_BY_RANK in environment,
            launched=environment.get("PMIX_NAMESPACE") or environment.get("JAXMPI_JOB_FOLDER") or "",
        )


def hide_from_children(environment: "os._Environ[str]") -> None:
    """Removes the variables by which a launcher knows this rank.

    A process that the program starts would take itself for this rank as it initializes MPI, and end or hang both;
    without the variables it is a job of one rank.
    """
    if any([environment.pop(name, None) is not None for name in _OF_THE_RANK_ALONE]):
        environment[_STARTED_BY_RANK] = "1"


def _is_of_multiprocessing() -> bool:
    """Whether this is a process of `multiprocessing`. Its environment may be that of before the rank's import: it is
    started by a server, as with `forkserver`, or the rank has not imported the package yet."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


class _Reader:
    """Reads variables of one environment. White space around a value and the case of its letters do not matter; an
    empty variable is one that is not set."""

    def __init__(self, environment: Mapping[str, str]):
        self._environment = environment

    def _given(self, variable: str) -> str:
        return self._environment.get(variable, "").strip().lower()

    def _wrong(self, variable: str, possible: str) -> ValueError:
        return ValueError(f"jaxmpi: {variable}={self._environment[variable]}: it is {possible}")

    def choice(self, variable: str, default: str, *others: str) -> str:
        given = self._given(variable) or default
        if given not in (default, *others):
            *some, last = (f"'{name}'" for name in (default, *others))
            raise self._wrong(variable, f"{', '.join(some)} or {last}")
        return given

    def flag(self, variable: str) -> bool:
        given = self._given(variable)
        if given and given not in _TRUE + _FALSE:
            raise self._wrong(variable, "1 or 0")
        return given in _TRUE

    def switches(self, *variables: str) -> dict[str, str]:
        found = {name: self._given(name) for name in variables if self._given(name) not in ("", "auto")}
        for name, given in found.items():
            if given not in _TRUE + _FALSE:
                raise self._wrong(name, "auto, on or off")
        return {name: "on" if given in _TRUE else "off" for name, given in found.items()}

    def _number(self, variable: str) -> int | None:
        """A whole number; None if the variable is not set, and -1 if it is something else."""
        given = self._given(variable)
        if not given:
            return None
        return int(given) if given.isascii() and given.isdecimal() and len(given) < 16 else -1

    def bytes(self, variable: str, least: int) -> int | None:
        size = self._number(variable)
        if size is not None and size < least and size != 0:
            raise self._wrong(variable, f"a number of bytes, 0 or at least {least}")
        return size

    def count(self, variable: str) -> int:
        number = self._number(variable) or 0
        if number < 0:
            raise self._wrong(variable, "a whole number, 0 or more")
        return number

    def seconds(self, variable: str, default: float) -> float:
        given = self._given(variable)
        try:
            seconds = float(given) if given else default
        except ValueError:
            seconds = -1
        if not 0 <= seconds < math.inf:
            raise self._wrong(variable, "a number of seconds, or 0 for no reports")
        return seconds

    def compared(self, variable: str) -> int:
        given, number = self._given(variable), self._number(variable)
        if given in ("", "auto"):
            return COMPARED
        if number is not None and number > 1:
            return number
        if given not in _TRUE + _FALSE:
            raise self._wrong(variable, "auto, 1 (all calls are compared), 0 (none), or a number of calls")
        return ALL if given in _TRUE else 0


if _is_of_multiprocessing():  # before MPI is initialized
    hide_from_children(os.environ)
SETTINGS: Final = Settings.from_environment(os.environ)
