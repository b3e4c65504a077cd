"""The C core, bound to the MPI library that mpi4py has loaded, with handlers registered with XLA."""

import ctypes
import os
import secrets
from dataclasses import dataclass
from typing import Any, cast

import jax

import jaxmpi._core as _core
from jaxmpi._jax import internals, runtime_token
from jaxmpi._mpi import call_sites
from jaxmpi._mpi.settings import SETTINGS, hide_from_children

try:
    import mpi4py
    from mpi4py import MPI

    from jaxmpi._mpi import devices
except (ImportError, RuntimeError) as error:
    from jaxmpi._mpi import import_errors

    raise ImportError(
        import_errors.text(error, os.environ, import_errors.installed(), import_errors.packages())
    ) from error


@dataclass(frozen=True)
class Datatype:
    """A row of dtype.def: XLA's code, bytes per element, and the kind, which decides on the possible reductions."""

    name: str
    code: int
    itemsize: int
    kind: str


Pairs = list[tuple[str, str]]


@dataclass(frozen=True)
class Operation:
    """An operation of ops.def: buffers with their roles, attributes with their kinds, and the name that users know."""

    row: str
    buffers: Pairs
    attributes: Pairs
    shown: str
    function: int
    """The number of the function where several functions call the operation of this row."""

    def roles(self, written: bool, count: int) -> list[str]:
        """Return the roles of `count` operands or results: `mpi` or `host`, by their user."""
        named = [role for _, role in self.buffers if ("write" in role) == written]
        lists = [role for role in named if role.endswith("_each")]
        each = count - len(named) + len(lists)
        repeated = [role for role in named for _ in range(each if role in lists else 1)]
        return ["host" if role.startswith("host") else "mpi" for role in repeated]


@dataclass(frozen=True)
class Library:
    """The MPI library in use: the ABI, which selects the copy of the core, the description, and the file."""

    abi: str
    version: str
    path: str


def handle_of(x: MPI.Comm | MPI.Op | MPI.Datatype) -> int:
    """Return the MPI handle as a signed 64-bit number, whatever its type in this ABI."""
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


LIBRARY: Library
"""The library. `bind` sets this and DEVICES."""
DEVICES: devices.Choice
DATATYPES: dict[str, Datatype] = {
    name: Datatype(name, code, itemsize, kind) for name, (code, itemsize, _, kind) in _core.datatypes().items()
}
FAILURES: dict[str, int] = {"failed": 0, "pending": 0, "revoked": 0}
"""MPI's classes of errors that report the death of a process, as settings of the core. `bind` sets them in a job that
goes on without a process (`python -m jaxmpi.run --survive`). They are 0 in other jobs, where the MPI calls may hang."""
CONSTANTS: dict[str, Any] = {}
"""Constants that C and Python share. `bind` sets them, because tags depend on the MPI library."""
OPERATIONS: dict[str, Operation] = {name: Operation(*row) for name, row in _core.operations().items()}
OWN_OPERATIONS: dict[str, dict[str, int]] = {}
"""The reductions of each dtype that are ours and not MPI's: their numbers. `bind` sets them."""


def stable_key(comm: str) -> str:
    """Return the stable key, for the core's registry, of a communicator that every run has.

    It includes the rank, because a program is compiled for one rank, and the library, because programs contain the
    library's numbers for ranks and tags.
    """
    world = MPI.COMM_WORLD
    spare = f", {SETTINGS.spares} spare" if SETTINGS.spares else ""
    return f"{comm}, rank {world.rank} of {world.size}{spare}, {LIBRARY.abi}, tags to {world.Get_attr(MPI.TAG_UB)}"


_FT = 12
"""Open MPI's attribute of a communicator that points to a flag: whether the job goes on without a process (MPI_FT)."""


def _tolerates_failures() -> bool:
    """Return whether this job was started so that MPI goes on without a process."""
    if LIBRARY.abi != "openmpi" or not hasattr(MPI.Comm, "Shrink"):
        return False
    try:
        address: Any = MPI.COMM_WORLD.Get_attr(_FT)
    except MPI.Exception:
        return False
    return isinstance(address, int) and address != 0 and ctypes.c_int.from_address(address).value != 0


def bind() -> None:
    """Bind the core to the MPI library and to XLA, and start the watchdog. Once in a process, before any operation.

    Raises RuntimeError if the package cannot be used in MPI's current state, or if the core does not fit the library.
    """
    global LIBRARY, DEVICES
    _check_state()
    internals.distrust_cached_programs()
    LIBRARY = Library(*_core.load(MPI.__file__, secrets.randbits(64)))
    survives = _tolerates_failures()
    DEVICES = devices.choose(SETTINGS, os.environ, internals.platforms(), survives)
    _core.configure(
        aware=DEVICES.aware,
        transport=DEVICES.transport,
        flags_asked=DEVICES.flags_asked,
    )
    # In the same order in every run, so that a cached program finds them under the same numbers.
    of_self = _core.communicator(handle_of(MPI.COMM_SELF), stable_key("COMM_SELF"))
    assert of_self is not None
    of_world = _core.communicator(handle_of(MPI.COMM_WORLD), stable_key("COMM_WORLD"))
    assert of_world is not None
    _core.reserve(stable_key("default"))
    if survives:
        FAILURES.update(failed=MPI.ERR_PROC_FAILED, pending=MPI.ERR_PROC_FAILED_PENDING, revoked=MPI.ERR_REVOKED)
    _core.configure(
        rank=MPI.COMM_WORLD.Get_rank(),
        serialize=MPI.Query_thread() < MPI.THREAD_MULTIPLE,
        self=of_self[0],
        world=of_world[0],
        most_tag=cast(int, MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)),
        ends_on_error=SETTINGS.error_ends_job,
        **FAILURES,
    )
    CONSTANTS.update(_core.constants())
    action = CONSTANTS["ACTIONS"].index(SETTINGS.timeout_action)
    _core.watch(SETTINGS.timeout, action, call_sites.of_main_thread, call_sites.PACKAGES)
    for name, (code, _, mpi_name, _) in _core.datatypes().items():
        _core.set_datatype(code, handle_of(getattr(MPI, mpi_name)))
        OWN_OPERATIONS[name] = _core.own_operations(name)
    for platform, handlers in _core.handlers().items():
        if DEVICES.drivers.get(platform) is not None:  # why arrays there cannot be communicated
            continue
        for name, capsule in handlers.items():
            stages = {"instantiate": capsule, "execute": capsule}
            jax.ffi.register_ffi_target(f"jaxmpi_{name}", stages, platform=platform)
    hide_from_children(os.environ)
    _core.configure(log=SETTINGS.log)


def wait_for_computations() -> None:
    """Wait for running computations of all threads."""
    runtime_token.wait_for_all_threads()
    jax.effects_barrier()


def release() -> None:
    """End the background work of the core."""
    _core.release()


def raise_failure() -> None:
    """Raise RuntimeError if an operation has failed and this has not been reported yet."""
    if (failure := _core.take_failure()) is not None:
        raise RuntimeError(f"an operation has failed: {failure}")


def finalize_if_others_are_late() -> None:
    """Finalize MPI while Python lives: MPI_Finalize calls functions of Python for ranks that are late."""
    by_mpi4py = mpi4py.rc.initialize if mpi4py.rc.finalize is None else mpi4py.rc.finalize
    if by_mpi4py and not MPI.Is_finalized() and _core.finish_requests() > 0:
        MPI.Finalize()
