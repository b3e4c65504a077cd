"""The choice of one of the machine's accelerators for a rank: `python -m jaxmpi.run --devices rank`.

When Python runs this file as a script, it prints how many devices the process sees.
"""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LAUNCHERS = (
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # Hydra: MPICH, Intel MPI
    ("PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),
    ("FLUX_TASK_LOCAL_ID", None),
    ("SLURM_LOCALID", "SLURM_TASKS_PER_NODE"),
)
"""The variables with the local rank and the number of local ranks, for each launcher. The schedulers come last, because
a launcher inside a job of a scheduler inherits the variables of the scheduler."""

JAX_NAMES = {"CUDA": "cuda", "ROCM": "rocm", "ONEAPI": "oneapi"}
"""JAX's names of the platforms, by XLA's names."""
PLACED = ("CUDA", "ROCM", "ONEAPI")
"""The platforms whose devices ranks take."""
decided = False
"""Whether `take` has decided on the devices of this rank."""

_NARROWED = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "ZE_AFFINITY_MASK",
)
"""The variables by which a scheduler or a user leaves a process some devices of the machine."""
_CHOSEN_BY_INTEL = ("ONEAPI_DEVICE_SELECTOR", "I_MPI_OFFLOAD", "I_MPI_OFFLOAD_PIN")
_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def local_rank(environment: Mapping[str, str]) -> tuple[int, int | None] | None:
    """Return the number of this rank on the machine, and how many ranks run there; None if no variable says it."""
    for rank_name, size_name in LAUNCHERS:
        rank = _number(environment.get(rank_name))
        if rank is not None:
            return rank, _number(environment.get(size_name)) if size_name is not None else None
    return None


def has_plugin(platform: str) -> bool:
    """Return whether JAX can have a platform. Many machines have Intel's devices beside others: for those JAX needs a
    package."""
    return platform != "ONEAPI" or importlib.util.find_spec("jax_oneapi_plugin") is not None


def allows(jax_platforms: str, platform: str) -> bool:
    """Return whether JAX may use a platform, by JAX_PLATFORMS. If that is empty it may use all that it can have."""
    is_named = not jax_platforms or not {JAX_NAMES[platform], "gpu"}.isdisjoint(jax_platforms.split(","))
    return is_named and has_plugin(platform)


def undecided(environment: Mapping[str, str]) -> list[str]:
    """Return the platforms that JAX may use and on which the user has not chosen a device."""
    jax_platforms = environment.get("JAX_PLATFORMS", "")
    return [
        platform
        for platform in PLACED
        if not environment.get(f"JAX_{platform}_VISIBLE_DEVICES")
        and allows(jax_platforms, platform)
        # The driver that is asked does not know what SYCL has chosen, nor what Intel MPI chooses at MPI_Init.
        and not (platform == "ONEAPI" and any(environment.get(name, "0") != "0" for name in _CHOSEN_BY_INTEL))
    ]


def assign(counts: Mapping[str, int], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that give this rank a device, and a share of the memory if ranks share the device.

    `counts`: the number of devices of each platform.
    """
    local = local_rank(environment)
    if local is None:
        return {}
    rank, size = local
    chosen = {}
    sharing = 1
    for platform in undecided(environment):
        count = counts.get(platform, 0)
        if count > 1:
            chosen[f"JAX_{platform}_VISIBLE_DEVICES"] = str(rank % count)
        # A single device may belong to this rank alone, if a scheduler has left it one of several.
        is_shared = count > 1 or (count == 1 and not any(environment.get(name) for name in _NARROWED))
        if is_shared and size is not None:
            sharing = max(sharing, len(range(rank % count, size, count)))
    preallocates = environment.get("XLA_PYTHON_CLIENT_PREALLOCATE") not in ("false", "False", "0")
    fraction = environment.get(_FRACTION) or environment.get("XLA_CLIENT_MEM_FRACTION")
    if sharing > 1 and preallocates and not fraction:
        chosen[_FRACTION] = f"{max(75 // sharing, 1) / 100:.2f}"  # of the 75 % that XLA takes for one process
    return chosen


def core_file() -> str:
    """Return the path of the core, which an editable install keeps elsewhere; empty: there is none. Import nothing."""
    name, package = "jaxmpi._core", [str(Path(__file__).parents[1] / "jaxmpi")]
    specs = (finder.find_spec(name, package) for finder in sys.meta_path)
    return next((spec.origin or "" for spec in specs if spec is not None), "")


def _ask_drivers(path: str, platforms: Sequence[str]) -> dict[str, int]:
    """Ask the core, at this path, how many devices of each platform this process may use."""
    spec = importlib.util.spec_from_file_location("jaxmpi._core", path)
    if spec is None or spec.loader is None:
        return {}
    core = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(core)
    return {platform: core.device_count(platform) for platform in platforms}


def device_counts(platforms: Sequence[str]) -> dict[str, int]:
    """Return how many devices of each of these platforms this rank may use; empty if the drivers cannot be asked.

    A separate process asks. If this process loaded a driver, jaxmpi would later believe that the MPI library uses the
    driver, and processes that the program forks could not use the driver.
    """
    command = [sys.executable, "-S", __file__, core_file(), *platforms]
    try:
        answer = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60, check=True)
        return json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}


def take(config: Any, may_assign: bool = True) -> None:
    """Choose a device for this rank, and pass the choice to JAX's `config`: JAX does not read these variables."""
    global decided
    decided = True
    if may_assign and local_rank(os.environ) is not None and (platforms := undecided(os.environ)):
        os.environ.update(assign(device_counts(platforms), os.environ))
    for platform in PLACED:
        if value := os.environ.get(f"JAX_{platform}_VISIBLE_DEVICES"):
            with contextlib.suppress(AttributeError):  # a JAX that does not know the platform
                config.update(f"jax_{JAX_NAMES[platform]}_visible_devices", value)


if __name__ == "__main__":
    print(json.dumps(_ask_drivers(sys.argv[1], sys.argv[2:])))
