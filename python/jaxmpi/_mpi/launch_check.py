"""A message if a launcher has started several processes, each of which MPI takes for the only one. Then the launcher
and the MPI library belong to different MPIs, and results would be results of one rank, without an error."""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS")
"""The variables in which launchers publish how many processes they have started. The first that is set counts: it is
set by the launcher of an MPI library, which srun may have started."""

_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""The variables in which launchers give each process its number."""

_OF_MPIEXEC = ("OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS")
"""Variables that srun does not set."""

_BY_SRUN = {"openmpi": "--mpi=pmix", "mpich": "--mpi=pmi2"}
"""The option by which srun works with a library of this ABI."""

_MPIEXECS = {"openmpi": ("mpiexec.openmpi",), "mpich": ("mpiexec.mpich", "mpiexec.hydra")}
"""The names of mpiexec where a system has several."""

_KINDS = {"openmpi": "openmpi", "mpich": "hydra"}
"""The value of `run.flavour` for the mpiexec of a library of this ABI."""


def start_by(count: int | str, abi: str, path: str, prefix: str = sys.prefix) -> str:
    """Return the command that starts `count` ranks by the mpiexec of the library in the file `path`."""
    command = f"python -m jaxmpi.run -n {count}"
    beside = str(Path(path).parents[1] / "bin" / "mpiexec")
    if beside == str(Path(prefix, "bin/mpiexec")) and shutil.which(beside):
        return command  # the launcher uses it
    mpiexecs = (name for name in (beside, *_MPIEXECS.get(abi, ())) if shutil.which(name))
    return f"{command} --mpiexec {next(mpiexecs, '/path/to/its/mpiexec')}"


def of_another(mpiexec: str, kind: str, abi: str, path: str) -> str:
    """Return a message if this mpiexec does not belong to the library; else empty. `kind`: from `run.flavour`."""
    if kind == "other" or kind == _KINDS.get(abi, kind):
        return ""
    return (
        f"mpiexec, {mpiexec}, belongs to another MPI than mpi4py uses, {path}. Start ranks by "
        f"'{start_by('N', abi, path)}'."
    )


def text(size: int, abi: str, path: str, environment: Mapping[str, str]) -> str:
    """Return the message; empty if MPI sees all processes that the launcher has started. `size`: of COMM_WORLD; `path`:
    of the library."""
    count = next((environment[name] for name in _SIZES if environment.get(name)), "1")
    if size > 1 or count == "1":
        return ""
    by_srun = "SLURM_STEP_NUM_TASKS" in environment and not any(name in environment for name in _OF_MPIEXEC)
    if by_srun:
        advice = (
            f"Start them by 'srun {_BY_SRUN.get(abi, '--mpi=pmix')}' (srun --mpi=list shows what there is), or in the "
            f"job by 'python -m jaxmpi.run -n {count}' without srun."
        )
    else:
        advice = f"It belongs to another MPI than mpi4py uses, {path}. Start them by '{start_by(count, abi, path)}'."
    return (
        f"{'srun' if by_srun else 'mpiexec'} has started {count} processes, but MPI sees each of them alone, as rank 0 "
        f"of 1: nothing is communicated between them. {advice}"
    )


def warn() -> None:
    """Print the message on stderr, in the first of these processes."""
    from mpi4py import MPI

    from jaxmpi._mpi.library import LIBRARY
    from jaxmpi._mpi.settings import SETTINGS

    if SETTINGS.started_by_rank:  # it is alone on purpose
        return
    number = next((os.environ[name] for name in _RANKS if name in os.environ), "0")
    if number == "0" and (said := text(MPI.COMM_WORLD.size, LIBRARY.abi, LIBRARY.path, os.environ)):
        print(f"jaxmpi: {said}", file=sys.stderr, flush=True)
