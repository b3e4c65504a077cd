"""The command line of `python -m jaxmpi.run -n 4 script.py [arguments]`.

It runs the mpiexec of this environment's MPI with settings for JAX programs. Each rank gets a share of the cores (and
is bound to it if there are enough), as many XLA threads, and an accelerator of its own if there are several. More ranks
than cores are allowed; they yield while they wait. Root may run it, as in a container. An uncaught exception on one
rank ends the whole job with its traceback. Variables that are set already (PJRT_NPROC, OMP_NUM_THREADS, ...) stay.
"""

import argparse
import ast
import os
import shlex
import shutil
import sys
import traceback
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxmpi_launch import mpiexec as mpi
from jaxmpi_launch import parent, stand_ins, versions, written_for
from jaxmpi_launch.sharded_state import COLLECTIVES

SPARES = "JAXMPI_SPARES"
"""The variable that tells the ranks how many of them are spare."""
SIGNALS = "OMPI_MCA_opal_signal"
"""The variable that names the signals for which Open MPI writes a stack. Writing it may hang for ever, if the rank was
allocating memory. In a job that goes on without the rank, the rank must die."""
OF_A_JOB = (*parent.VARIABLES, SPARES, "JAXMPI_STARTED_BY_RANK")
"""Variables of one job. A job that a rank starts must not inherit them."""


class _ShowVersion(argparse.Action):
    """Looks the version up only when it is asked for: each start would pay for it."""

    def __call__(self, parser: Any, *_: Any) -> None:
        print(f"jaxmpi {versions.shown('jaxmpi')}")
        parser.exit()


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
        choices=COLLECTIVES,
        help="run a program of JAX's own sharded arrays (shard_map, NamedSharding) over all ranks, one CPU device "
        "each: its collectives by this MPI, or by gloo",
    )
    parser.add_argument(
        "--survive",
        action="store_true",
        help="the death of a rank is an error of the others, jaxmpi.survive.ProcessFailed, and not the end of the job "
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
    """End this process if the program cannot be compiled: with one traceback, not one of each rank.

    Return the syntax tree of a script, or of the text of `-c`.
    """
    if kind == "-m" or (kind is None and (os.path.isdir(program) or zipfile.is_zipfile(program))):
        return None
    source, name = (program, "<string>") if kind == "-c" else (Path(program).read_bytes(), program)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a rank prints them
            compile(source, name, "exec")
            return ast.parse(source)
    except (SyntaxError, ValueError) as error:
        sys.exit("".join(traceback.format_exception_only(type(error), error)).rstrip())


def command(
    options: argparse.Namespace, mpiexec: str, kind: str, share: int, variables: Mapping[str, str], several: bool
) -> list[str]:
    """Return the words of mpiexec, its options and the child. `several`: ranks may run on other machines, too."""
    placed = options.mpiexec_args
    if placed is None:
        placed = mpi.placement(kind, share, sorted(variables))
    if several:
        placed = placed + mpi.exports(kind, placed, {*os.environ, *variables})
    script = os.path.join(".", options.program) if options.program.startswith("-") else options.program
    program = [script] if options.kind is None else [options.kind, options.program]
    replaced = [word for name in options.stand_in for word in ("--as", name)]
    collectives = ["--collectives", options.collectives] if options.collectives else []
    chosen = ["--devices", options.devices, *collectives, *replaced, *program, *options.arguments]
    survives = ["--survive"] if options.survive else []
    child = [sys.executable, "-m", "jaxmpi_launch.child", *survives, *chosen]
    tolerant = ["--with-ft", "ulfm"] if options.survive else []
    return [mpiexec, "-n", str(options.ranks + options.spare), *tolerant, *placed, *child]


def main(arguments: list[str] | None = None) -> int:
    """Run the job, and return its exit status. From the main thread it passes signals on to mpiexec meanwhile."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    mpiexec = options.mpiexec or mpi.find_mpiexec()
    if mpiexec is not None and shutil.which(mpiexec) is None:
        sys.exit(f"jaxmpi.run: --mpiexec: there is no program {mpiexec}")
    if mpiexec is None:
        from jaxmpi._mpi import import_errors

        sys.exit(f"jaxmpi.run: no mpiexec found: {import_errors.how_to_install(import_errors.packages())}")
    if (tree := check_syntax(options.kind, options.program)) is not None:
        written_for.check(options.stand_in, tree, options.program if options.kind is None else "<string>")
    ranks = options.ranks + options.spare
    mpi.check_scheduler(os.environ, ranks, options.mpiexec_args is not None)
    kind = mpi.flavour(mpiexec)
    # As many ranks as -n says compute at the same time: with spare ones they may not be bound to their shares.
    cores = mpi.physical_cores()
    share = cores // (options.ranks_per_node or options.ranks)
    bound = share if not options.spare or share * (options.ranks_per_node or ranks) <= cores else 0
    variables = mpi.settings(share, os.environ)
    if options.survive and SIGNALS not in os.environ:
        variables[SIGNALS] = ""
    if options.spare:
        variables[SPARES] = str(options.spare)
    several = options.mpiexec_args is not None or mpi.names_other_machines(os.environ)
    if options.dry_run:
        changed = [f"{name}={value}" for name, value in sorted(variables.items())]
        print(shlex.join(["env", *changed, *command(options, mpiexec, kind, bound, variables, several)]))
        return 0
    if options.mpiexec_args is None:
        mpi.warn_of_little_memory(ranks)
    job = parent.Job(ranks, several, options.survive, options.spare)
    variables.update(job.variables)
    words = command(options, mpiexec, kind, bound, variables, several)
    environment = {name: value for name, value in os.environ.items() if name not in OF_A_JOB}  # of one around it
    return job.run([shutil.which(mpiexec) or mpiexec, *words[1:]], {**environment, **variables})
