"""Binds the C core to the MPI library that mpi4py has loaded, and registers the handlers with XLA. Once, at import."""

import atexit
import math
import os
import secrets
from dataclasses import dataclass
from typing import cast

import jax

import jaxmpi._core as _core
from jaxmpi._jax import internals, runtime_token
from jaxmpi._mpi import call_sites

try:
    import mpi4py
    from mpi4py import MPI

    from jaxmpi._mpi import devices, timeline
except (ImportError, RuntimeError) as error:
    from jaxmpi._mpi import absent

    raise ImportError(absent.text(error, os.environ, absent.installed(), absent.packages())) from error


@dataclass(frozen=True)
class Datatype:
    """A row of dtype.def: XLA's code, bytes per element, and the kind, on which the possible reductions depend."""

    name: str
    code: int
    itemsize: int
    kind: str


Pairs = list[tuple[str, str]]


@dataclass(frozen=True)
class Operation:
    """A row of ops.def: names of buffers with their roles, names of attributes with their kinds; the name that users
    know."""

    buffers: Pairs
    attributes: Pairs
    shown: str

    def roles(self, written: bool, count: int) -> list[str]:
        """The roles of `count` operands or results: `mpi` or `host`, by who uses them."""
        named = [role for _, role in self.buffers if ("write" in role) == written]
        lists = [role for role in named if role.endswith("_each")]
        each = count - len(named) + len(lists)
        repeated = [role for role in named for _ in range(each if role in lists else 1)]
        return ["host" if role.startswith("host") else "mpi" for role in repeated]


@dataclass(frozen=True)
class Library:
    """The MPI library in use: the copy of the core for its ABI, its own description, its file."""

    abi: str
    version: str
    path: str


def handle_of(x: MPI.Comm | MPI.Op | MPI.Datatype) -> int:
    """The MPI handle as a signed 64-bit number, whatever its type in this ABI."""
    handle = MPI._handleof(x)
    return handle - (1 << 64) if handle >= 1 << 63 else handle


def _check_state() -> None:
    if not MPI.Is_initialized():
        raise RuntimeError(
            "jaxmpi: MPI is not initialized (mpi4py.rc.initialize is False): call MPI.Init_thread() before importing"
        )
    if MPI.Is_finalized():
        raise RuntimeError("jaxmpi: MPI has been finalized already; import jaxmpi earlier")
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise RuntimeError(
            "jaxmpi: MPI was initialized below MPI_THREAD_SERIALIZED, but XLA calls it from threads of its own: leave "
            "mpi4py.rc.threads True and mpi4py.rc.thread_level 'multiple', or call MPI.Init_thread(MPI.THREAD_MULTIPLE)"
        )


def _meaning(comm: str, library: Library) -> str:
    """The meaning, for the core's registry, of a communicator that every run has.

    It includes the rank, since a program is compiled for one, and the library, since programs contain its numbers for
    ranks and tags.
    """
    world = MPI.COMM_WORLD
    return f"{comm}, rank {world.rank} of {world.size}, {library.abi}, tags to {world.Get_attr(MPI.TAG_UB)}"


_ACTIONS = ("report", "abort", "raise")
"""In the order of csrc/observe/watchdog.h."""

_OF_THE_RANK_ALONE = ("PMIX_NAMESPACE", "PMIX_RANK", "PMI_FD", "PMI_PORT", "JAXMPI_JOB_FOLDER", "JAXMPI_TRACE")
"""Variables by which a launcher knows a rank. A process that the program starts would take itself for that rank as
it initializes MPI, and end or hang both; without them it is a job of one rank."""


def _choice(variable: str, *possible: str) -> str:
    """What a variable of the environment chooses; the first, where it is not set."""
    given = os.environ.get(variable, "") or possible[0]
    if given not in possible:
        *others, last = (f"'{name}'" for name in possible)
        raise ValueError(f"jaxmpi: {variable}={given}: it is {', '.join(others)} or {last}")
    return given


ACTION = _choice("JAXMPI_TIMEOUT_ACTION", *_ACTIONS)
"""What happens to an operation that waits for long."""


def _watched_seconds() -> float:
    """After how many seconds an operation that waits is reported; 0: never."""
    given = os.environ.get("JAXMPI_TIMEOUT", "") or "30"
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1
    if not 0 <= seconds < math.inf:
        raise ValueError(f"jaxmpi: JAXMPI_TIMEOUT={given}: a number of seconds is needed, or 0 for no reports")
    return seconds


def flag(variable: str) -> bool:
    """Whether a variable of the environment switches something on."""
    given = os.environ.get(variable, "").strip().lower()
    if given in ("", "0", "off", "false", "no"):
        return False
    if given in ("1", "on", "true", "yes"):
        return True
    raise ValueError(f"jaxmpi: {variable}={os.environ[variable]}: it is 1 or 0")


ALL = 1 << 62
"""How many collectives are compared with JAXMPI_CHECK=1."""
_COMPARED = 1000
"""How many of each communicator are compared by default."""


def compared() -> int:
    """How many collectives of each communicator its ranks compare, by this rank's environment."""
    given = os.environ.get("JAXMPI_CHECK", "").strip().lower()
    if given in ("", "auto"):
        return _COMPARED
    if given.isdecimal() and int(given) > 1:
        return int(given)
    try:
        return ALL if flag("JAXMPI_CHECK") else 0
    except ValueError as error:
        raise ValueError(
            f"jaxmpi: JAXMPI_CHECK={given}: it is auto, 1 (all calls are compared), 0 (none), or a number of calls"
        ) from error


def _load() -> tuple[Library, dict[str, Datatype], devices.Choice]:
    _check_state()
    internals.distrust_cached_programs()
    library = Library(*_core.load(MPI.__file__, secrets.randbits(64)))
    choice = devices.choose(os.environ, internals.platforms())
    _core.configure(aware=choice.aware, transport=choice.transport, copy_bytes=choice.copy_bytes)
    # In the same order in every run, so that a cached program finds them under their numbers.
    of_self = _core.communicator(handle_of(MPI.COMM_SELF), _meaning("COMM_SELF", library))
    assert of_self is not None
    of_world = _core.communicator(handle_of(MPI.COMM_WORLD), _meaning("COMM_WORLD", library))
    assert of_world is not None
    _core.reserve(_meaning("default", library))
    _core.configure(
        rank=MPI.COMM_WORLD.Get_rank(),
        serialize=MPI.Query_thread() < MPI.THREAD_MULTIPLE,
        self=of_self[0],
        world=of_world[0],
        most_tag=cast(int, MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)),
        ends_on_error=_choice("JAXMPI_ON_ERROR", "raise", "abort") == "abort",
    )
    _core.watch(_watched_seconds(), _ACTIONS.index(ACTION), call_sites.of_main_thread, call_sites.PACKAGES)
    datatypes = {}
    for name, (code, itemsize, mpi_name, kind) in _core.datatypes().items():
        _core.set_datatype(code, handle_of(getattr(MPI, mpi_name)))
        datatypes[name] = Datatype(name, code, itemsize, kind)
    for platform, handlers in _core.handlers().items():
        for name, capsule in handlers.items():
            stages = {"instantiate": capsule, "execute": capsule}
            jax.ffi.register_ffi_target(f"jaxmpi_{name}", stages, platform=platform)
    for name in _OF_THE_RANK_ALONE:
        os.environ.pop(name, None)
    _core.configure(log=any([flag("JAXMPI_DEBUG"), flag("MPI4JAX_DEBUG")]))
    return library, datatypes, choice


LIBRARY, DATATYPES, DEVICES = _load()
CONSTANTS = _core.constants()
"""What C and Python must know alike."""
OPERATIONS: dict[str, Operation] = {name: Operation(*row) for name, row in _core.operations().items()}
OF_SHARDED_PROGRAMS = {"connect", "complete"}
"""Operations that only JAX's own sharded programs use, by way of csrc/sharded/."""
MEANING_OF_DEFAULT = _meaning("default", LIBRARY)
"""The meaning of the clone of COMM_WORLD, whose number is reserved."""
OWN_OPERATIONS: dict[str, dict[str, int]] = {name: _core.own_operations(name) for name in DATATYPES}
"""The reductions of each dtype that are ours and not MPI's: their numbers."""


def _finalizes() -> bool:
    """Whether mpi4py finalizes MPI, once Python has ended."""
    return bool(mpi4py.rc.initialize if mpi4py.rc.finalize is None else mpi4py.rc.finalize) and not MPI.Is_finalized()


@atexit.register
def _at_exit() -> None:
    """Runs before JAX releases its backends (exit handlers run last in, first out) and before MPI is finalized."""
    try:
        finish()
    finally:
        if _finalizes() and _core.finish_requests() > 0:
            MPI.Finalize()  # other ranks are late, and MPI calls functions of Python for them


def finish() -> None:
    """Waits for running computations, so that no message to a peer is lost when MPI is finalized. Raises RuntimeError
    if the failure of an operation has not been reported yet."""
    try:
        runtime_token.wait_for_all_threads()
        jax.effects_barrier()
    finally:
        _core.finish_comparisons()
        _core.finish_requests()
        _core.finish_devices()
        _core.stop_watch()
        timeline.end()
        if (failure := _core.take_failure()) is not None:
            raise RuntimeError(f"an operation has failed: {failure}")
