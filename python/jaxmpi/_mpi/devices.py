"""The choice of the transport that takes arrays from a device's memory to MPI, made once, at import, by detection.

The package loads the library of a driver that is installed, and needs no SDK. It opens no device before JAX does.
"""

import importlib.util
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
from mpi4py import MPI

import jaxmpi._core as _core
from jaxmpi._mpi.settings import Settings
from jaxmpi_launch.accelerators import JAX_NAMES, allows, has_plugin

_MPICH_KINDS = {"CUDA": 0, "ONEAPI": 1, "ROCM": 2}  # MPIX_GPU_SUPPORT_CUDA, _ZE, _HIP
_DRIVERS = {"CUDA": "cuda", "ROCM": "rocm", "ONEAPI": "ze"}
"""The names of drivers in the functions by which MPI libraries tell what memory they reach; ze: Level Zero."""
_KINDS = {"CUDA": "cuda", "ROCM": "rocm", "ONEAPI": "level_zero"}
"""The kinds of memory in mpi_memory_alloc_kinds."""

CHUNK = 4 << 20
"""The bytes of a chunk on the default communicator: see docs/gpu.md."""


NCCL_REFUSALS = (
    "",
    "a rank has no driver for NVIDIA's or AMD's devices that JAX may use, or drivers for both",
    "a rank cannot load the library",
    "MPI reads the memory of devices itself (JAXMPI_DEVICE_MPI=off leaves that out)",
    "the job goes on without a rank that has died",
    "MPI is below MPI_THREAD_MULTIPLE",
    "not all ranks have set JAXMPI_DEVICE_TRANSPORT=nccl",
)
"""The reasons why NCCL carries nothing, by number; 0: no reason. Ranks agree on the largest number."""


@dataclass(frozen=True)
class Nccl:
    """Whether this rank can use NCCL, or RCCL."""

    refusal: int = len(NCCL_REFUSALS) - 1
    """A number of NCCL_REFUSALS."""
    version: int = 0
    """The version, 22809 for 2.28.9; 0: the library has not been loaded."""
    why: str = ""
    """Details of the refusal on this rank."""
    rccl: bool = False
    """Whether the library is RCCL."""

    @property
    def library(self) -> int:
        """A number for the library and the version; NCCL carries nothing if the ranks have different numbers."""
        return 2 * self.version + self.rccl

    @property
    def asked(self) -> bool:
        """Whether the user has asked for NCCL on this rank."""
        return self.refusal < len(NCCL_REFUSALS) - 1


@dataclass(frozen=True)
class Choice:
    """How arrays of devices reach MPI."""

    drivers: Mapping[str, str | None]
    """The platforms, each with None or the reason why arrays there cannot be communicated."""
    aware: bool
    """Whether MPI gets the device's pointers."""
    transport: str
    """The way in which the core calls MPI for staged arrays: callback, flags or wait (csrc/core/runtime.h). Some arrays
    are staged even if MPI is aware."""
    because: str
    """The evidence, and the reason for the choice."""
    chunk: int = 0
    """The chunk size that this rank asks for, in bytes; 0: it needs no chunks."""
    everywhere: bool = False
    """Whether this rank asks for chunks on all communicators, because the user has set the size."""
    flags_asked: bool = False
    """Whether the user has asked for the transport flags. Then a call on a device without flags raises an error."""
    nccl: Nccl = Nccl()
    """Whether this rank can leave collectives to NCCL. NCCL carries them if all ranks can: see communicators.py."""

    @property
    def platforms(self) -> list[str]:
        """The device platforms whose arrays can be communicated, by XLA's names."""
        return [platform for platform, why_not in self.drivers.items() if why_not is None]

    @property
    def communicated(self) -> list[str]:
        """The CPU and `platforms`, by the names of JAX."""
        return ["cpu", *(JAX_NAMES[platform] for platform in self.platforms)]

    def why_not(self, platforms: Sequence[str]) -> list[str]:
        """Return the reasons why arrays of these platforms, by JAX's names, cannot be communicated."""
        return [why for name, why in self.drivers.items() if JAX_NAMES[name] in platforms and why is not None]


def detected(platform: str, version: str, environment: Mapping[str, str]) -> tuple[bool, str]:
    """Return whether the MPI library can access the memory of a platform's devices, and the evidence for it."""
    name = _DRIVERS[platform]
    if "CRAY MPICH" in version:
        value = environment.get("MPICH_GPU_SUPPORT_ENABLED", "0")
        return value == "1", f"MPICH_GPU_SUPPORT_ENABLED is {value}"
    if "MVAPICH" in version:
        names = [f"{prefix}_USE_{name.upper()}" for prefix in ("MVP", "MV2")]
        on = [variable for variable in names if environment.get(variable) == "1"]
        return bool(on), f"{on[0]} is 1" if on else f"neither {names[0]} nor {names[1]} is 1"
    if version.startswith("Intel(R) MPI"):
        value, mode = environment.get("I_MPI_OFFLOAD", "0"), environment.get("I_MPI_OFFLOAD_MODE", "")
        reached = "CUDA" if mode == "cuda" else "ONEAPI"  # it never reaches AMD's devices
        evidence = f"I_MPI_OFFLOAD is {value}{f', I_MPI_OFFLOAD_MODE is {mode}' if mode else ''}"
        # Before 2021.14 the value 1 leaves the loading of Level Zero to the program, which loads it later.
        release = re.search(r"2021\.(\d+)", version)
        least = 2 if release is not None and int(release[1]) < 14 else 1
        return platform == reached and value.isdecimal() and int(value) >= least, evidence
    if (answer := _core.ask_mpi("MPIX_GPU_query_support", _MPICH_KINDS[platform])) is not None:
        if answer and environment.get("MPIR_CVAR_ENABLE_GPU", "1") == "0":
            return False, "MPIR_CVAR_ENABLE_GPU is 0"
        return answer, f"MPIX_GPU_query_support says {'yes' if answer else 'no'} to {name}"
    function = f"MPIX_Query_{name}_support"
    if (answer := _core.ask_mpi(function)) is not None:
        return answer, f"{function} says {'yes' if answer else 'no'}"
    info = MPI.COMM_WORLD.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds") or ""
    info.Free()
    if kinds:
        listed = any(kind.strip().partition(":")[0] == _KINDS[platform] for kind in kinds.split(","))
        return listed, f"mpi_memory_alloc_kinds is {kinds}"
    return False, "the library has no way to ask for it"


def _switch(settings: Settings, platforms: list[str]) -> tuple[bool | None, str]:
    """Return whether the user hands device memory to MPI (None: no choice), and the variable that says so."""
    applies = {"MPI4JAX_USE_CUDA_MPI": "CUDA" in platforms, "MPI4JAX_USE_SYCL_MPI": "ONEAPI" in platforms}
    for name, value in settings.device_mpi.items():
        if applies.get(name, True):
            return value == "on", f"{name}={value}"
    return None, ""


def _transport(wish: str, takes_calls: bool, aware: bool, calls_driver: bool, survives: bool) -> tuple[str, str]:
    """Return the way in which the core calls MPI for staged arrays, and the reason for it.

    `takes_calls`: streams of the devices take calls of MPI. `calls_driver`: the MPI library may call the driver.
    `survives`: the job goes on after a death. Then an operation that loses the result by the death must itself raise.
    """
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return "wait", "MPI is below MPI_THREAD_MULTIPLE"
    if not takes_calls and wish != "flags":  # which raises
        return "wait", "streams of Intel's devices take no calls of MPI"
    if wish != "auto":
        return wish, f"JAXMPI_DEVICE_TRANSPORT={wish}"
    if calls_driver or aware:
        # `flags` could deadlock: the stream waits for MPI, another thread waits for the stream inside the driver, and
        # MPI calls the driver, where it waits for that thread.
        return "wait", "the MPI library may call the driver"
    if survives:
        return "wait", "the job survives a death, which each operation reports itself"
    # Not `flags`, which has only run on simulated devices.
    return "callback", "the MPI library does not call the driver"


def _libraries(platform: str) -> list[str]:
    """Return the names under which to look for NCCL, first the library that JAX's packages have installed."""
    if platform == "ROCM":
        return ["librccl.so.1"]
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    paths = [os.path.join(folder, "nccl", "lib", "libnccl.so.2") for folder in folders]
    return [*filter(os.path.exists, paths), "libnccl.so.2"]


def _first_device(platform: str) -> int:
    """Return the driver's number of the first device that JAX uses: the launcher, or the user, may have chosen some."""
    visible = jax.config.read(f"jax_{JAX_NAMES[platform]}_visible_devices")
    first = visible.split(",")[0].strip()
    return int(first) if first.isdecimal() else 0


def _nccl(platforms: Sequence[str], aware: bool, survives: bool) -> Nccl:
    """Load NCCL for the platform of this rank, unless there is a reason not to use it."""
    served = [platform for platform in platforms if platform in ("CUDA", "ROCM")]
    if len(served) != 1:
        return Nccl(1)
    platform = served[0]
    for refusal, holds in ((3, aware), (4, survives), (5, MPI.Query_thread() < MPI.THREAD_MULTIPLE)):
        if holds:
            return Nccl(refusal)
    device, reasons = _first_device(platform), []
    for path in _libraries(platform):
        answer = _core.open_nccl(platform, device, path)
        if isinstance(answer, int):
            return Nccl(0, answer, rccl=platform == "ROCM")
        reasons.append(answer)
    return Nccl(2, why="; ".join(reasons))


def _deciding(platforms: list[str], jax_platforms: str) -> list[str]:
    """Return which of the `platforms`, each with a driver, decide on the transport.

    JAX may use them, and if there are several, each has a device. Return all `platforms` if none decides.
    """
    allowed = [platform for platform in platforms if allows(jax_platforms, platform)]
    if len(allowed) > 1:  # otherwise ask no driver, because that takes time
        allowed = [platform for platform in allowed if _core.device_count(platform) > 0]
    return allowed or platforms


def choose(
    settings: Settings, environment: Mapping[str, str], jax_platforms: str | None, survives: bool = False
) -> Choice:
    """Load the installed drivers and decide.

    `environment`: the variables of MPI libraries. `jax_platforms`: the platforms that JAX may use; None: all.
    `survives`: the job goes on after the death of a rank.

    Warn, once per job, if the user makes an MPI library take device pointers and the library is not known to accept
    them. ValueError: the user asks for flags, and a driver does not have them.
    """
    # If a driver has been loaded before, by the MPI library or otherwise, MPI may ask it about every pointer.
    was_loaded = _core.driver_loaded()
    drivers = _core.drivers()
    if drivers.get("ONEAPI", "") is None and not has_plugin("ONEAPI"):
        drivers["ONEAPI"] = "JAX's plugin for Intel's devices, jax-oneapi-plugin, is not installed"
    platforms = [platform for platform, why_not in drivers.items() if why_not is None]
    forced, variable = _switch(settings, platforms)
    version = MPI.Get_library_version()
    deciding = _deciding(platforms, jax_platforms or "")
    answers = {platform: detected(platform, version, environment) for platform in deciding}
    is_known = bool(platforms) and all(answer for answer, _ in answers.values())
    evidence = "; ".join(text for _, text in answers.values())
    aware = is_known if forced is None else forced and bool(platforms)
    calls_driver = was_loaded or any(answer for answer, _ in answers.values())
    by_nccl = settings.device_transport == "nccl"
    takes_calls = deciding != ["ONEAPI"]
    wish = "auto" if by_nccl else settings.device_transport
    transport, why = _transport(wish, takes_calls, aware, calls_driver, survives)
    used = any(allows(jax_platforms or "", platform) for platform in platforms)
    flags = _core.flags() if transport == "flags" and used else dict.fromkeys(deciding, True)
    if without := [platform for platform in deciding if not flags.get(platform)]:
        raise ValueError(
            f"JAXMPI_DEVICE_TRANSPORT=flags: the driver of {' and '.join(without)} has no functions by which streams "
            f"write values to memory and wait for them: {'' if 'ONEAPI' in without else 'install a newer one, or '}"
            "leave the variable out"
        )
    if aware and not is_known and used and MPI.COMM_WORLD.rank == 0:
        warnings.warn(
            f"jaxmpi: {variable} hands the memory of devices to an MPI library that is not known to reach it "
            f"({evidence}): the program will crash if it does not. Leave the variable out to have the arrays copied.",
            RuntimeWarning,
            stacklevel=2,
        )
    if "ONEAPI" in deciding and used and "Open MPI" in version and MPI.COMM_WORLD.rank == 0:
        warnings.warn(
            "jaxmpi: JAX's plugin for Intel's devices loads an MPI library with MPICH's ABI, and this job runs with "
            "Open MPI: two MPI libraries in one process may disturb each other. Use MPICH, Intel MPI or Cray MPICH.",
            RuntimeWarning,
            stacklevel=2,
        )
    size = settings.device_chunk
    chunk = size if size is not None else CHUNK if used and not aware else 0
    asked = settings.device_transport == "flags"
    nccl = _nccl(deciding if used else [], aware, survives) if by_nccl else Nccl()
    if platforms:
        because = f"{evidence}{f', but {variable}' if forced is not None and forced != is_known else ''}; {why}"
    else:
        because = "no driver"
    return Choice(drivers, aware, transport, because, chunk, size is not None, asked, nccl)


def count(platform: str) -> int:
    """Return the number of devices of a platform that this process and JAX may use."""
    return _core.device_count(platform) if has_plugin(platform) else 0
