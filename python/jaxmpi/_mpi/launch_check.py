"""What to say if a launcher has started several processes, each of which MPI takes for the only one: it and the MPI
library do not know each other, and results would be those of one rank, without an error."""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS")
"""The variables in which launchers tell how many they have started. The first that is set counts: it is that of the
launcher of an MPI library, which may itself have been started by srun."""

_NUMBERS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""The variables in which they tell each process its number."""

_OF_MPIEXEC = ("OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS")
"""Variables that srun does not set."""

_BY_SRUN = {"openmpi": "--mpi=pmix", "mpich": "--mpi=pmi2"}
"""The option by which srun and a library of this ABI know each other."""

_MPIEXECS = {"openmpi": ("mpiexec.openmpi",), "mpich": ("mpiexec.mpich", "mpiexec.hydra")}
"""Their names where a system has several."""

_KINDS = {"openmpi": "openmpi", "mpich": "hydra"}
"""What `run.flavour` says of the mpiexec of a library of this ABI."""


def start_by(count: int | str, abi: str, path: str, prefix: str = sys.prefix) -> str:
    """Return the command that starts so many ranks by the mpiexec of the library in the file `path`."""
    command = f"python -m jaxmpi.run -n {count}"
    beside = str(Path(path).parents[1] / "bin" / "mpiexec")
    if beside == str(Path(prefix, "bin/mpiexec")) and shutil.which(beside):
        return command  # the launcher uses it
    found = (name for name in (beside, *_MPIEXECS.get(abi, ())) if shutil.which(name))
    return f"{command} --mpiexec {next(found, '/path/to/its/mpiexec')}"


def of_another(mpiexec: str, kind: str, abi: str, path: str) -> str:
    """Return the message if this mpiexec, of which `run.flavour` says `kind`, is not the library's; else empty."""
    if kind == "other" or kind == _KINDS.get(abi, kind):
        return ""
    return (
        f"mpiexec, {mpiexec}, belongs to another MPI than mpi4py uses, {path}. Start ranks by "
        f"'{start_by('N', abi, path)}'."
    )


def text(size: int, abi: str, path: str, environment: Mapping[str, str]) -> str:
    """Return the message; empty if MPI sees what the launcher has started. `size`: that of COMM_WORLD; `path`: the
    library."""
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
    """Say it on stderr, in the first of these processes."""
    from mpi4py import MPI

    from jaxmpi._mpi.library import LIBRARY
    from jaxmpi._mpi.settings import SETTINGS

    if SETTINGS.started_by_rank:  # it is alone rightly
        return
    number = next((os.environ[name] for name in _NUMBERS if name in os.environ), "0")
    if number == "0" and (said := text(MPI.COMM_WORLD.size, LIBRARY.abi, LIBRARY.path, os.environ)):
        print(f"jaxmpi: {said}", file=sys.stderr, flush=True)
