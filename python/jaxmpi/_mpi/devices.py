"""The choice of the transport that takes arrays from a device's memory to MPI: once, at import, by detection.

Only a driver's library is loaded, if it is installed: no SDK. No device is opened before JAX opens it.
"""

import importlib.util
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpi4py import MPI

import jaxmpi._core as _core
from jaxmpi._mpi.settings import Settings
from jaxmpi_launch.accelerators import JAX_NAMES, allows, has_plugin

_MPICH_KINDS = {"CUDA": 0, "ONEAPI": 1, "ROCM": 2}  # MPIX_GPU_SUPPORT_CUDA, _ZE, _HIP
_DRIVERS = {"CUDA": "cuda", "ROCM": "rocm", "ONEAPI": "ze"}
"""The names in functions of MPI libraries that tell whether they reach a driver's memory; ze: Level Zero."""
_KINDS = {"CUDA": "cuda", "ROCM": "rocm", "ONEAPI": "level_zero"}
"""The kinds of memory in mpi_memory_alloc_kinds."""

CHUNK = 4 << 20
"""Bytes of a chunk, for operations in chunks on the default communicator: see docs/gpu.md."""


NCCL_REFUSALS = (
    "",
    "a rank has no driver for NVIDIA's or AMD's devices that JAX may use, or drivers for both",
    "a rank cannot load the library",
    "MPI reads the memory of devices itself (JAXMPI_DEVICE_MPI=off leaves that out)",
    "the job goes on without a rank that has died",
    "MPI is below MPI_THREAD_MULTIPLE",
    "not all ranks have set JAXMPI_DEVICE_TRANSPORT=nccl",
)
"""The reasons why NCCL carries nothing, by number; 0: there is none. Ranks agree on the largest number."""


@dataclass(frozen=True)
class Nccl:
    """Whether this rank can use NCCL, or RCCL."""

    refusal: int = len(NCCL_REFUSALS) - 1
    """A number of NCCL_REFUSALS."""
    version: int = 0
    """22809 for 2.28.9; 0: it has not been loaded."""
    why: str = ""
    """More on the refusal, for this rank."""
    rccl: bool = False
    """Whether it is RCCL."""

    @property
    def library(self) -> int:
        """A number for the library and the version, which must be the same on all ranks."""
        return 2 * self.version + self.rccl

    @property
    def asked(self) -> bool:
        """Whether the user has asked for it on this rank."""
        return self.refusal < len(NCCL_REFUSALS) - 1


@dataclass(frozen=True)
class Choice:
    """A choice: how arrays of devices reach MPI."""

    drivers: Mapping[str, str | None]
    """The platforms, each with None or the reason why its arrays cannot be communicated."""
    aware: bool
    """Whether MPI gets the device's pointers."""
    transport: str
    """The way in which the core calls MPI for staged arrays: callback, flags or wait (csrc/core/runtime.h). With an
    aware MPI some arrays are still staged."""
    because: str
    """What was detected, and the reason for the choice."""
    chunk: int = 0
    """The chunk size that this rank asks for, in bytes; 0: it does not need chunks."""
    everywhere: bool = False
    """Whether it asks for chunks on all communicators: the user has set the size."""
    flags_asked: bool = False
    """Whether the user has asked for the transport flags: a device without flags then raises and takes no callback."""
    nccl: Nccl = Nccl()
    """Whether this rank can leave collectives to NCCL. All ranks must: see communicators.py."""

    @property
    def platforms(self) -> list[str]:
        """The device platforms whose arrays can be communicated, by XLA's names."""
        return [platform for platform, why_not in self.drivers.items() if why_not is None]

    @property
    def communicated(self) -> list[str]:
        """The CPU and `platforms`, by JAX's names."""
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
        reached = {"cuda": "CUDA"}.get(mode, "ONEAPI")  # of AMD's devices it knows nothing
        said = f"I_MPI_OFFLOAD is {value}{f', I_MPI_OFFLOAD_MODE is {mode}' if mode else ''}"
        # Before 2021.14 the value 1 leaves the loading of Level Zero to the program, which does so later.
        found = re.search(r"2021\.(\d+)", version)
        least = 2 if found is not None and int(found[1]) < 14 else 1
        return platform == reached and value.isdecimal() and int(value) >= least, said
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
    """Return the user's choice (on, off, or None) and the variable that makes it."""
    applies = {"MPI4JAX_USE_CUDA_MPI": "CUDA" in platforms, "MPI4JAX_USE_SYCL_MPI": "ONEAPI" in platforms}
    for name, value in settings.device_mpi.items():
        if applies.get(name, True):
            return value == "on", f"{name}={value}"
    return None, ""


def _transport(wish: str, takes_calls: bool, aware: bool, inspects: bool, survives: bool) -> tuple[str, str]:
    """Return the way in which the core calls MPI for staged arrays, and the reason for it.

    `takes_calls`: streams of the devices take calls of MPI. `survives`: the job goes on after a death. Then the
    operation that has no result because of it must raise.
    """
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return "wait", "MPI is below MPI_THREAD_MULTIPLE"
    if not takes_calls and wish != "flags":  # which raises
        return "wait", "streams of Intel's devices take no calls of MPI"
    if wish != "auto":
        return wish, f"JAXMPI_DEVICE_TRANSPORT={wish}"
    if inspects or aware:
        # `flags` could deadlock: the stream waits for MPI, another thread may wait for the stream inside the driver,
        # and MPI's call of the driver may wait for that thread.
        return "wait", "the MPI library may call the driver"
    if survives:
        return "wait", "the job survives a death, which each operation reports itself"
    # Not `flags`, which has only run on simulated devices.
    return "callback", "the MPI library does not call the driver"


def _libraries(platform: str) -> list[str]:
    """Return the names of NCCL for a platform: first the library that JAX's packages have installed."""
    if platform == "ROCM":
        return ["librccl.so.1"]
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    paths = [os.path.join(folder, "nccl", "lib", "libnccl.so.2") for folder in folders]
    return [*filter(os.path.exists, paths), "libnccl.so.2"]


def _nccl(platforms: Sequence[str], aware: bool, survives: bool) -> Nccl:
    """Load NCCL for the platform of this rank, unless there is a reason not to use it."""
    able = [platform for platform in platforms if platform in ("CUDA", "ROCM")]
    if len(able) != 1:
        return Nccl(1)
    for refusal, holds in ((3, aware), (4, survives), (5, MPI.Query_thread() < MPI.THREAD_MULTIPLE)):
        if holds:
            return Nccl(refusal)
    whys = []
    for path in _libraries(able[0]):
        answer = _core.open_nccl(able[0], path)
        if isinstance(answer, int):
            return Nccl(0, answer, rccl=able[0] == "ROCM")
        whys.append(answer)
    return Nccl(2, why="; ".join(whys))


def _that_count(platforms: list[str], jax_platforms: str) -> list[str]:
    """Return the platforms that decide: platforms with a driver that JAX may use and, if there are several drivers,
    that have a device. Return all platforms if there is none.
    """
    allowed = [platform for platform in platforms if allows(jax_platforms, platform)]
    if len(allowed) > 1:  # only then is a driver asked, because that takes time
        allowed = [platform for platform in allowed if _core.device_count(platform) > 0]
    return allowed or platforms


def choose(
    settings: Settings, environment: Mapping[str, str], jax_platforms: str | None, survives: bool = False
) -> Choice:
    """Load the installed drivers and decide.

    `environment`: for the variables of MPI libraries. `jax_platforms`: the platforms that JAX may use; None: all.
    `survives`: the job goes on after the death of a rank.

    Warns, once per job, if the user makes an MPI library take device pointers and the library is not known to accept
    them. ValueError: the user asks for flags, and a driver does not have them.
    """
    # If a driver has been loaded before, by the MPI library or otherwise, MPI may query it about every pointer.
    inspects = _core.driver_loaded()
    drivers = _core.drivers()
    if drivers.get("ONEAPI", "") is None and not has_plugin("ONEAPI"):
        drivers["ONEAPI"] = "JAX's plugin for Intel's devices, jax-oneapi-plugin, is not installed"
    platforms = [platform for platform, why_not in drivers.items() if why_not is None]
    forced, variable = _switch(settings, platforms)
    version = MPI.Get_library_version()
    counted = _that_count(platforms, jax_platforms or "")
    answers = {platform: detected(platform, version, environment) for platform in counted}
    able = bool(platforms) and all(answer for answer, _ in answers.values())
    said = "; ".join(text for _, text in answers.values())
    aware = able if forced is None else forced and bool(platforms)
    called = inspects or any(answer for answer, _ in answers.values())
    by_nccl = settings.device_transport == "nccl"
    takes_calls = counted != ["ONEAPI"]
    wish = "auto" if by_nccl else settings.device_transport
    transport, why = _transport(wish, takes_calls, aware, called, survives)
    used = any(allows(jax_platforms or "", platform) for platform in platforms)
    flags = _core.flags() if transport == "flags" and used else dict.fromkeys(counted, True)
    if without := [platform for platform in counted if not flags.get(platform)]:
        raise ValueError(
            f"JAXMPI_DEVICE_TRANSPORT=flags: the driver of {' and '.join(without)} has no functions by which streams "
            f"write values to memory and wait for them: {'' if 'ONEAPI' in without else 'install a newer one, or '}"
            "leave the variable out"
        )
    if aware and not able and used and MPI.COMM_WORLD.rank == 0:
        warnings.warn(
            f"jaxmpi: {variable} hands the memory of devices to an MPI library that is not known to reach it ({said}): "
            "the program will crash if it does not. Leave the variable out to have the arrays copied.",
            RuntimeWarning,
            stacklevel=2,
        )
    if "ONEAPI" in counted and used and "Open MPI" in version and MPI.COMM_WORLD.rank == 0:
        warnings.warn(
            "jaxmpi: JAX's plugin for Intel's devices loads an MPI library with MPICH's ABI, and this job runs with "
            "Open MPI: two MPI libraries in one process may disturb each other. Use MPICH, Intel MPI or Cray MPICH.",
            RuntimeWarning,
            stacklevel=2,
        )
    size = settings.device_chunk
    chunk = size if size is not None else CHUNK if used and not aware else 0
    asked = settings.device_transport == "flags"
    rest = (chunk, size is not None, asked, _nccl(counted if used else [], aware, survives) if by_nccl else Nccl())
    if not platforms:
        return Choice(drivers, False, transport, "no driver", *rest)
    because = f"{said}{f', but {variable}' if forced is not None and forced != able else ''}; {why}"
    return Choice(drivers, aware, transport, because, *rest)


def count(platform: str) -> int:
    """Return the number of devices of a platform that this process and JAX may use."""
    return _core.device_count(platform) if has_plugin(platform) else 0
