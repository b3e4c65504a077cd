"""Which suites run where: on how many ranks, over which transport, on which device. `make` calls this file.

    python tests/suites.py all --brief
    python tests/suites.py ranks errors jit --ranks 3

A plan is a function that yields commands. Each is printed as one could type it, has a time limit, and the first that
fails is the last. This file needs the standard library alone; what it starts needs the environment that it runs in.
"""

import argparse
import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parent

NOT_EACH_TIME = (
    "faults launcher injected sharded_jobs two_hosts run_devices device nccl grid_examples grid_jobs files_jobs "
    "slurm files_examples sharded_examples particles unstructured_examples benchmarks soak trace recipes "
    "types docs"
)
"""What `make test` leaves out: how jobs end, several hosts, Slurm, long programs, timelines, benchmarks.
`make lint` runs types, `make docs` docs."""
OF_FAULTS = "faults launcher injected"
BY_RANKS = (
    "adjoint fuzz check neighbors operations by_counts order grid redistribute replica fft ghosts index_map migration"
)
"""What depends most on how many ranks there are: with `--brief` the others are run on two ranks alone."""
ON_EVERY_TRANSPORT = "device operations errors dtypes order"
ON_DEVICES = (
    f"{ON_EVERY_TRANSPORT} jit transformations large grid redistribute neighbors ghosts migration bench by_counts ends "
    "leaves"
)
OVER_TCP = "tcp operations errors order jit adjoint"
BY_TCP = {
    "openmpi": {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,tcp"},
    "mpich": {"MPIR_CVAR_NOLOCAL": "1", "MPIR_CVAR_CH4_NETMOD": "ucx", "UCX_TLS": "self,tcp"},
}
"""Variables by which the MPI libraries leave out shared memory."""


class Command(NamedTuple):
    words: list[str]
    environment: dict[str, str]


def path(suite: str) -> str:
    """The file of a suite, which is named without folder, `test_` and `.py`."""
    found = [str(file.relative_to(TESTS.parent)) for file in TESTS.glob(f"*/test_{suite}.py")]
    if len(found) != 1:
        raise SystemExit(f"there is no suite {suite}: tests/*/test_{suite}.py")
    return found[0]


def pytest(suites: str, options, *more: str, ranks: int = 0, collectives: str = "", **environment: str) -> Command:
    """pytest on `suites` (none: all), by the launcher on `ranks` ranks or, on none, in several processes at once.

    `collectives` carries JAX's own sharded programs.
    """
    words = [sys.executable]
    if ranks:
        words += ["-m", "jaxmpi.run", *(["--collectives", collectives] if collectives else []), "-n", str(ranks)]
    words += ["-m", "pytest", "--color=no", *([] if ranks else ["-n", options.workers])]
    words += [*(["--brief"] if options.brief else []), *more, *map(path, suites.split())]
    return Command(words, environment)


def each_time(options) -> Iterator[Command]:
    options.brief = True
    left_out = [f"--ignore={path(suite)}" for suite in NOT_EACH_TIME.split()]
    yield pytest("", options, *left_out, "-m", "alone")
    yield pytest("", options, *left_out, "-m", "not alone", ranks=2)


def everywhere(options) -> Iterator[Command]:
    yield pytest("", options)
    yield pytest("", options, ranks=2)
    yield pytest(BY_RANKS if options.brief else "", options, ranks=4)
    # Optimized code that is dispatched synchronously.
    other = {"JAXMPI_TEST_SYNCHRONOUS": "1", "JAXMPI_TEST_OPTIMIZED": "1"}
    yield pytest("order jit", options, ranks=2, **other)


def on_ranks(options) -> Iterator[Command]:
    for ranks in options.ranks:
        yield pytest(options.suites, options, ranks=ranks)


def faults(options) -> Iterator[Command]:
    yield pytest(OF_FAULTS, options, "--durations=0", "--durations-min=1")


def fault_times(options) -> Iterator[Command]:
    """Those that tell how long a job with a fault takes to end, one after the other."""
    options.workers = "0"
    suites = "faults launcher two_hosts trace"
    tests = {test for suite in suites.split() for test in noting((TESTS.parent / path(suite)).read_text())}
    yield pytest(suites, options, "-k", " or ".join(sorted(tests)))


def noting(source: str) -> Iterator[str]:
    """The tests in a source text that write a time for tests/programs/errors_page.py."""
    for test in source.split("\ndef ")[1:]:
        if "errors_page.note(" in test:
            yield test.partition("(")[0]


def random_faults(options) -> Iterator[Command]:
    yield pytest("injected", options, "-k", "test_random", JAXMPI_TEST_FAULTS=str(options.count))


def clients(options) -> Iterator[Command]:
    options.brief = False
    yield pytest("clients", options, ranks=2, JAXMPI_TEST_CLIENTS="1")
    for ranks in (1, 2, 4):
        yield pytest("docs", options, "-k", "training or sampling", ranks=ranks)


def packaging(options) -> Iterator[Command]:
    """One after the other: most of them compile."""
    options.workers = "0"
    yield pytest("packaging recipes", options, JAXMPI_TEST_PACKAGING="1")


def sharded(options) -> Iterator[Command]:
    for ranks in options.ranks:
        yield pytest("sharded sharded_layouts", options, ranks=ranks, collectives="mpi")
    if options.mpi == "openmpi":  # it is the same with every MPI
        yield pytest("sharded", options, ranks=2, collectives="gloo")


def layouts(options) -> Iterator[Command]:
    for ranks in options.ranks:
        yield pytest("sharded_layouts", options, ranks=ranks, collectives="mpi", JAXMPI_TEST_LAYOUTS="all")


def over_tcp(options) -> Iterator[Command]:
    variables = {"JAXMPI_TEST_TCP": "1", **BY_TCP[options.mpi]}
    yield pytest("", options, ranks=2, **variables)
    yield pytest(OVER_TCP, options, ranks=4, **variables)


def hosts(options) -> Iterator[Command]:
    options.workers = "0"
    yield pytest("two_hosts", options)


def slurm(options) -> Iterator[Command]:
    options.workers = "0"
    yield pytest("slurm", options)


def device(options) -> Iterator[Command]:
    """All suites on the two transports that are chosen most and with NCCL, fewer on the other two.

    With `--brief` on 2 ranks alone, but for the tests of one rank.
    """

    def on(transport: str, suites: str, *more: str, ranks: int = 2) -> Command:
        simulated = {"JAXMPI_TEST_DEVICE": transport} if transport else {}
        return pytest(suites, options, *more, ranks=ranks, JAXMPI_FAKE_DRIVERS=options.fakes, **simulated)

    # Intel's, where there is a compiler for C++
    intels = ["sycl"] if (Path(options.fakes) / "libsycl.so.9").exists() else []
    yield on("", "run_devices", ranks=0)
    if options.brief:
        yield on("callback", ON_EVERY_TRANSPORT, "-m", "alone", ranks=0)
        yield on("callback", f"{ON_EVERY_TRANSPORT} grid redistribute", "-m", "not alone")
        for transport in ("aware", "flags", "wait", *intels):
            yield on(transport, "device operations order", "-m", "not alone")
        yield on("nccl", "nccl", ranks=0)
        yield on("nccl", "operations leaves redistribute", "-m", "not alone")
        yield on("mixed", "neighbors redistribute", "-m", "not alone")
        return
    for transport in ("callback", "aware", *intels):
        yield on(transport, ON_EVERY_TRANSPORT, ranks=0)
        yield on(transport, ON_DEVICES)
    yield on("callback", "device order operations", ranks=4)
    yield on("nccl", f"{ON_EVERY_TRANSPORT} nccl", ranks=0)
    yield on("nccl", f"{ON_DEVICES} adjoint nonblocking index_map fft fuzz")
    for transport in ("nccl", "mixed"):
        yield on(transport, "operations order leaves grid redistribute ghosts neighbors adjoint", ranks=4)
    for transport in ("flags", "wait"):
        yield on(transport, "device operations")


def gpu(options) -> Iterator[Command]:
    """On the transport that is chosen there, and on the one on which every operation raises its own error.

    First with NCCL, in some minutes: the ranks may share one device (tests/conftest.py sets NCCL_HOSTID).
    """
    by_nccl = {"JAX_PLATFORMS": f"{options.gpu},cpu", "JAXMPI_DEVICE_TRANSPORT": "nccl"}
    yield pytest("operations order leaves redistribute", options, ranks=2, **by_nccl)
    for ranks in (1, 2, 4):
        yield pytest(f"{ON_DEVICES} adjoint gpu", options, ranks=ranks, JAX_PLATFORMS=f"{options.gpu},cpu")
    variables = {"JAX_PLATFORMS": f"{options.gpu},cpu", "JAXMPI_DEVICE_TRANSPORT": "wait"}
    yield pytest(f"{ON_DEVICES} gpu", options, ranks=2, **variables)


def sycl(options) -> Iterator[Command]:
    """Intel's runtime with a device that it has everywhere, the CPU; `--fakes` is the folder of it."""
    icd = f"{options.fakes}/libintelocl.so"
    variables = {
        "JAXMPI_FAKE_DRIVERS": options.fakes,
        "JAXMPI_TEST_DRIVER": "libreal_sycl.so",
        "OCL_ICD_FILENAMES": icd,
    }
    suites = "operations order leaves dtypes by_counts grid redistribute index_map migration"
    suites = f"{suites} ghosts nonblocking adjoint"
    for ranks in (2, 1, 4):
        yield pytest(suites, options, "-m", "not alone", ranks=ranks, JAXMPI_TEST_DEVICE="sycl", **variables)


def compiled(options) -> Iterator[Command]:
    """XLA's compiler for a GPU, without one; `--fakes` is the folder of a driver, `--gpu` JAX's platform."""
    variables = {
        "JAXMPI_TEST_COMPILED": options.gpu,
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "LD_LIBRARY_PATH": options.fakes,
    }
    yield pytest("compiled", options, ranks=2, **variables)


PLANS = {
    "each-time": each_time,
    "all": everywhere,
    "ranks": on_ranks,
    "faults": faults,
    "fault-times": fault_times,
    "random-faults": random_faults,
    "clients": clients,
    "packaging": packaging,
    "sharded": sharded,
    "layouts": layouts,
    "tcp": over_tcp,
    "hosts": hosts,
    "slurm": slurm,
    "device": device,
    "gpu": gpu,
    "compiled": compiled,
    "sycl": sycl,
}


def run(command: Command, limit: int, durations: str = "") -> int:
    """The exit status of a command. It gets SIGTERM at its limit, or with this process, and a minute to end. The tests
    write how long they take to a folder in `durations`, one for each command."""
    words = ["timeout", "--kill-after=60", str(limit), *command.words]
    environment = {**os.environ, **command.environment}
    if durations:
        folder = Path(durations).absolute() / hashlib.blake2b(repr(command).encode(), digest_size=6).hexdigest()
        shutil.rmtree(folder, ignore_errors=True)
        environment["JAXMPI_TEST_DURATIONS"] = str(folder)
    with subprocess.Popen(words, env=environment) as process:
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            raise


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plan", choices=PLANS)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help="by name: errors is tests/*/test_errors.py")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="numbers of ranks, one after the other")
    parser.add_argument("--brief", action="store_true", help="as pytest's option of tests/conftest.py")
    parser.add_argument("--workers", default="auto", help="how many processes of one rank at once")
    parser.add_argument("--limit", type=int, default=1800, metavar="SECONDS", help="of each command")
    parser.add_argument("--mpi", choices=BY_TCP, default="openmpi", help="of this environment")
    parser.add_argument("--fakes", default="", metavar="FOLDER", help="of the simulated devices' drivers")
    parser.add_argument("--gpu", default="cuda", help="JAX's name of the platform")
    parser.add_argument("--count", type=int, default=100, help="how many random programs")
    parser.add_argument("--durations", default="", metavar="FOLDER", help="where tests write how long they take")
    parser.add_argument("--dry-run", action="store_true", help="print the commands alone")
    options = parser.parse_args()
    options.suites = " ".join(options.suites)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    for command in PLANS[options.plan](options):
        variables = [f"{name}={shlex.quote(value)}" for name, value in command.environment.items()]
        print(*variables, shlex.join([os.path.relpath(command.words[0]), *command.words[1:]]), flush=True)
        if not options.dry_run and (status := run(command, options.limit, options.durations)) != 0:
            print(f"not done after {options.limit} s" if status == 124 else f"exit status {status}", flush=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
