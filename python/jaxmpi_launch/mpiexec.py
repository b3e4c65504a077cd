"""The mpiexec of this environment: which MPI it is of, where it places ranks, and what its ranks inherit."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

PASSED = ("JAX", "XLA_", "PJRT_", "OMP_", "PYTHON", "MPI4", "UCX_", "FI_")
"""Beginnings of names of variables that ranks on other machines get, too."""


def usable_cpus() -> set[int]:
    """Return the numbers of the hardware threads that this process may use; all where the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def physical_cores() -> int:
    """Return how many cores this process may use; hardware threads of one core count once."""
    cores: set[tuple[str, ...]] = set()
    for cpu in usable_cpus():
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            cores.add(((topology / "physical_package_id").read_text(), (topology / "core_id").read_text()))
        except OSError:
            cores.add((str(cpu),))
    return len(cores)


def find_mpiexec() -> str | None:
    """Return the mpiexec beside the MPI in this environment, else the one on PATH."""
    beside = Path(sys.prefix) / "bin" / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def flavour(mpiexec: str) -> str:
    """Return 'openmpi', 'hydra' (MPICH and its family) or 'other'. End this process if mpiexec cannot be started."""
    try:
        said = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        sys.exit(f"jaxmpi.run: {mpiexec} cannot be started: {error}")
    text = said.stdout + said.stderr
    if any(name in text for name in ("Open MPI", "OpenRTE", "open-mpi.org")) or "prte" in text.lower():
        return "openmpi"
    return "hydra" if "HYDRA" in text or "Intel(R) MPI" in text else "other"


def placement(kind: str, share: int, forwarded: list[str]) -> list[str]:
    """Return options of mpiexec that bind each rank to `share` cores, or let ranks share cores if that is 0."""
    if kind == "openmpi":
        exports = [word for name in forwarded for word in ("-x", name)]
        if share == 0:
            return ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", *exports]
        return ["--map-by", f"slot:PE={share}", "--bind-to", "core", *exports]
    if kind == "hydra":
        return ["-bind-to", f"core:{share}" if share else "none"]
    return []


def exports(kind: str, given: list[str], names: Iterable[str]) -> list[str]:
    """Return options that pass variables to ranks of other machines, too, except variables in the `given` options.

    Hydra passes all variables, Open MPI its own.
    """
    if kind != "openmpi":
        return []
    named = {word.partition("=")[0] for word in given}
    wanted = sorted(name for name in names if name.startswith(PASSED) and name not in named)
    return [word for name in wanted for word in ("-x", name)]


def settings(share: int, present: Mapping[str, str]) -> dict[str, str]:
    """Return variables for ranks with `share` cores each (0: less than one), except variables that `present` sets."""
    threads = max(1, share)
    wanted = {"OMP_NUM_THREADS": str(threads), "PJRT_NPROC": str(threads)}
    if share == 0:
        wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"
    if os.geteuid() == 0:
        wanted.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    return {name: value for name, value in wanted.items() if name not in present}


_LISTS_MACHINES = re.compile(r"(NODE_?|HOST_?|host)(FILE|file)$")
"""The variables of schedulers and MPI libraries that name a file with a machine in each line: PBS_NODEFILE,
PE_HOSTFILE, LSB_DJOB_HOSTFILE, HYDRA_HOST_FILE, PRTE_MCA_prte_default_hostfile."""


def names_other_machines(present: Mapping[str, str]) -> bool:
    """Return whether variables may make mpiexec start ranks on other machines."""
    names = present.get("LSB_HOSTS", "").split()
    for variable in filter(_LISTS_MACHINES.search, present):
        with contextlib.suppress(OSError, ValueError):
            path = Path(present[variable])
            lines = path.read_text().splitlines() if path.is_file() else []
            names += [word[0] for line in lines if (word := re.findall(r"^\s*([^\s#:]+)", line))]
    here = {"localhost", "127.0.0.1", socket.gethostname().partition(".")[0]}
    others = {name if re.fullmatch(r"[0-9.]+", name) else name.partition(".")[0] for name in names} - here
    return bool(others) or present.get("SLURM_NNODES", "1") not in ("", "1")


def check_scheduler(present: Mapping[str, str], ranks: int, placed: bool) -> None:
    """End this process if Slurm has started several launchers, or there is no srun. Warn if other machines of the job
    would be left out."""
    if ranks > 1 and present.get("SLURM_STEP_NUM_TASKS", "1") not in ("", "1"):
        tasks = present["SLURM_STEP_NUM_TASKS"]
        sys.exit(
            f"jaxmpi.run: srun has started {tasks} of this launcher, each of which would start {ranks} ranks: start "
            "the program by srun itself, or the launcher without srun"
        )
    if not placed and "SLURM_JOB_ID" in present and shutil.which("srun") is None:
        sys.exit(
            "jaxmpi.run: this is a job of Slurm, but there is no srun, by which mpiexec starts ranks. Hide the job, in "
            "bash by 'unset ${!SLURM_@}': all ranks then start on this machine"
        )
    nodes = present.get("SLURM_NNODES", "1")
    if not placed and nodes not in ("", "1"):
        print(
            f"jaxmpi.run: this is a job of Slurm on {nodes} machines: say how many ranks each has, by --ranks-per-node "
            "and --mpiexec-args, or their shares of the cores are wrong",
            file=sys.stderr,
        )


SHARED_BYTES = 4 << 20
"""The shared memory that each rank needs: about what Open MPI takes. MPICH takes less."""


def warn_of_little_memory(ranks: int, folder: str = "/dev/shm") -> None:
    """Warn of little shared memory, as in containers: an MPI library that fills it ends without a reason."""
    try:
        state = os.statvfs(folder)
    except OSError:
        return
    free = state.f_bavail * state.f_frsize
    if free < ranks * SHARED_BYTES:
        print(
            f"jaxmpi.run: {folder} has {free / (1 << 20):.0f} MiB free, which may be too little for {ranks} ranks: MPI "
            "then fails, for example with a bus error. Give a container more, as with --shm-size=1g",
            file=sys.stderr,
        )
