"""Faults of programs, one rank's each: the job ends, says why, and leaves nothing running."""

import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest

import jaxmpi._core as _core
from jaxmpi import _start
from jaxmpi._mpi import communicators, library
from jaxmpi._mpi.settings import Settings
from programs import errors_page
from support.launch import launch, outside_of_a_job, started, written
from support.rows import one_each_time

pytestmark = [pytest.mark.alone, pytest.mark.sampled, pytest.mark.seconds(120)]

SECONDS = 240
"""The limit of a job with a fault; most end in 3. What waits in them waits for much longer."""

BEGIN = textwrap.dedent("""
    import os, subprocess, sys, threading, time
    import jax, jax.numpy as jnp
    from mpi4py import MPI
    import jaxmpi
    rank = MPI.COMM_WORLD.rank
    x = jnp.ones(3)
    add = jax.jit(lambda x: jaxmpi.allreduce(x, MPI.SUM))
    for_ever = jax.jit(lambda x: jax.lax.while_loop(lambda v: v[0] > -1, lambda v: abs(jnp.sin(v)), x))
    halved_for_ever = jax.jit(
        lambda x: jax.lax.while_loop(lambda v: v[0] > -1, lambda v: abs(jaxmpi.allreduce(v, MPI.SUM)) / 2, x)
    )
    def at_rest(main=threading.main_thread().ident):  # returns when the main thread stays where it is
        place, looks = None, 0
        while looks < 10:
            time.sleep(0.03)
            frame = sys._current_frames()[main]
            looks, place = looks + 1 if place == (frame, frame.f_lasti) else 0, (frame, frame.f_lasti)
    def then(does, *arguments):
        threading.Thread(target=lambda: (at_rest(), does(*arguments)), daemon=True).start()
    MPI.COMM_WORLD.Barrier()  # a rank that starts late is none that waits for long
    add(x).block_until_ready()
    print("rank", rank, "begins")
""")

WAIT = """
add(x).block_until_ready()
print("not reached")
"""


SOON = "then(os.kill, os.getpid(), {}); "
"""Sends a signal to this rank when it is where the next statement takes it."""

CAUGHT_BY_NOBODY = {
    "exception": "raise KeyError('this')",
    "exception in jit": "jax.jit(lambda x: 1 / 0)(x)",
    "exception in a callback": "jax.block_until_ready(jax.pure_callback(lambda x: 1 / 0, x, x))",
    "exception whose text raises": "class Odd(Exception):\n    def __str__(self): raise ValueError\nraise Odd",
    "exception after stdout is closed": "sys.stdout.close(); raise KeyError('this')",
    "exception without stdout": "sys.stdout = None; raise KeyError('this')",
    "exception after 1 is closed": "print('x', end=''); os.close(1); raise KeyError('this')",
    "exception without stderr": "sys.stderr = None; raise KeyError('this')",
    "exception after stderr is closed": "sys.stderr.close(); raise KeyError('this')",
    "exception after 2 is closed": "os.close(2); raise KeyError('this')",
    "exception in a thread": "threading.Thread(target=lambda: 1 / 0, name='worker').start(); time.sleep(99)",
    "interrupt": "raise KeyboardInterrupt",
    "exit with a text": "sys.exit('no input')",
    "exit with 3": "sys.exit(3)",
    "exit with 256": "sys.exit(256)",
    "exit with more than an int": "sys.exit(1 << 40)",
    "exit at once with 0": "os._exit(0)",
    "exit at once with 7": "os._exit(7)",
    "exception in a callback of a loop": """
        def fails(i, x):
            if i == 1: raise ZeroDivisionError
            return x
        body = lambda i, x: jax.pure_callback(fails, x, i, x)
        jax.jit(lambda x: jax.lax.fori_loop(0, 3, body, x))(x).block_until_ready()
    """,
    "message too long": "print(jax.jit(lambda x: (jaxmpi.send(jnp.ones(5), 1), jaxmpi.recv(x, 1))[1])(x))",
    "killed": "os.kill(os.getpid(), 9)",
    "killed in an operation": SOON.format(9) + "jaxmpi.recv(x, 0)",
    "killed in a compiled loop": SOON.format(9) + "for_ever(x).block_until_ready()",
    "terminated": "os.kill(os.getpid(), 15)",
    "terminated in a compiled loop": SOON.format(15) + "for_ever(x).block_until_ready()",
    "hung up": "import signal; signal.signal(1, signal.SIG_DFL); os.kill(os.getpid(), 1)",
    "segmentation fault": "import ctypes; ctypes.string_at(0)",
}
"""What rank 1 does while rank 0 waits for it; the page has what is to be told."""


@pytest.mark.parametrize("fault", one_each_time(CAUGHT_BY_NOBODY, "exception", "killed in a compiled loop"))
def test_fault_of_one_rank(fault, tmp_path):
    told = errors_page.tables()[0][fault].strip("`")
    does = textwrap.indent(textwrap.dedent(CAUGHT_BY_NOBODY[fault]), "    ")
    program = written(tmp_path, BEGIN, f"if rank == 1:\n{does}", WAIT)
    begin = time.monotonic()
    done = launch(2, program, check=False, timeout=SECONDS)
    errors_page.note(fault, told, time.monotonic() - begin)
    assert done.returncode != 0
    assert told in done.stderr
    assert fault != "exception" or "runpy" not in done.stderr
    assert "rank 1 begins" in done.stdout
    assert "not reached" not in done.stdout


WHILE_OTHERS = {
    "compute in Python": ("while True: sum(range(100))", SOON.format(9) + "time.sleep(99)"),
    "compute in XLA": ("for_ever(x).block_until_ready()", "time.sleep(0.5); sys.exit('no input')"),
    "communicate in a loop": ("halved_for_ever(x).block_until_ready()", SOON.format(9) + "halved_for_ever(x)"),
    "never end": ("threading.Thread(target=time.sleep, args=(999,)).start()", "time.sleep(0.5); sys.exit('no input')"),
}
"""What ranks 0 and 2 do, and what rank 1 does."""


@pytest.mark.parametrize("what", one_each_time(WHILE_OTHERS, "never end"))
def test_fault_while_others(what, tmp_path):
    """The others wait for nobody: they are ended nevertheless."""
    others, does = WHILE_OTHERS[what]
    done = launch(3, written(tmp_path, BEGIN, f"if rank == 1:\n    {does}\n{others}"), check=False, timeout=SECONDS)
    assert done.returncode != 0
    assert "exit" not in does or "no input" in done.stderr


def test_page_has_all_faults():
    ends, goes_on = errors_page.tables()
    of_others = ("the launcher is", "mpiexec is", "a machine", "a trace folder")  # in other files of tests
    assert [case for case in ends if not case.startswith(of_others)] == list(CAUGHT_BY_NOBODY)
    assert sum(told == "" for told in ends.values()) < 20
    assert all(any(case.startswith(begin) for case in ends) for begin in of_others)
    assert goes_on == errors_page.GOES_ON


FORKED = {"pass": 0, "raise KeyError('this')": 1, "sys.exit(5)": 5, "os._exit(6)": 6}
"""What forked processes do, and their statuses."""


@pytest.mark.nightly
def test_processes_of_a_rank(tmp_path):
    """What they do ends them alone: forked ones, those of multiprocessing by each method, whose values and errors
    arrive, and those that import the package, which are jobs of their own."""
    does = f"""
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool
    import multiprocessing, warnings
    warnings.simplefilter("ignore")  # JAX about forks
    for what in {list(FORKED)} if rank == 1 else ():
        child = os.fork()
        if child == 0:
            exec(what)
            sys.exit()
        print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    for method in ("spawn", "forkserver", "fork") if rank == 1 else ():
        with ProcessPoolExecutor(1, multiprocessing.get_context(method)) as pool:
            print("square", pool.submit(pow, 7, 2).result())
            if method != "fork": print("child", pool.submit(of_one).result())
            try: pool.submit(int, "no").result()
            except ValueError: print("raised")
            try: pool.submit(os._exit, 3).result()
            except BrokenProcessPool: print("broken")
    if rank == 1:
        child = "import jaxmpi; from mpi4py import MPI; print('child', MPI.COMM_WORLD.size)"
        print(subprocess.run([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True, timeout=40).stdout)
    print("sum", float(add(x)[0]))
    """
    of_one = "def of_one():\n    import jaxmpi\n    from mpi4py import MPI\n    return MPI.COMM_WORLD.size\n"
    before = "from multiprocessing import forkserver\nforkserver.ensure_running()\n"  # it has the variables of the rank
    guarded = "if __name__ == '__main__':\n" + textwrap.indent(before + BEGIN + textwrap.dedent(does), "    ")
    done = launch(2, written(tmp_path, of_one, guarded), timeout=SECONDS)
    assert re.findall(r"status (\d)\n", done.stdout) == [str(status) for status in FORKED.values()]
    words = ("square 49", "raised", "broken", "child 1", "sum 2.0")
    assert [done.stdout.count(word) for word in words] == [3, 3, 3, 3, 2], done.stdout
    assert done.stderr.count("in a process that a rank has forked") == 1
    assert "another MPI" not in done.stderr


def test_each_step_of_the_end(monkeypatch):
    """A step is taken though the one before it has raised: others wait for what it does."""
    taken = []

    def failing(step):
        def fail():
            taken.append(step)
            raise RuntimeError(step)

        return fail

    steps = [
        (library, "wait_for_computations"),
        (library, "release"),
        (_core, "close_timeline"),
        (library, "raise_failure"),
        (communicators, "end"),
        (library, "finalize_if_others_are_late"),
    ]
    for module, name in steps:
        monkeypatch.setattr(module, name, failing(name))
    with pytest.raises(RuntimeError):
        _start._end()
    assert taken == [name for _, name in steps]


IN_A_CHILD = {
    "eager": "add(x)",
    "eager, not compiled before": "jaxmpi.bcast(x, 0)",
    "jit": "jitted(x)",
    "jaxmpi.jit": "ordered(x)",
    "start": "jaxmpi.isend(x, 1 - rank)",
    "wait": "jaxmpi.wait(received)",
    "alone": "jaxmpi.allreduce(x, MPI.SUM, comm=MPI.COMM_SELF)",
    "grid": "jaxmpi.Grid((size,)).exchange(x)",
    # JAX would wait for ever for the threads of its compiler.
    "grid made before, compiled here": "jaxmpi.jit(lambda x: (grid.exchange(x), x))(x)",
    "start, compiled here": "jax.jit(lambda x: (grid.finish(grid.start(x)), x))(x)",
    "map made before, compiled here": "jaxmpi.jit(lambda x: (mesh.exchange(x), x))(x)",
    "wait, compiled here": "jaxmpi.jit(lambda x: (jaxmpi.wait(received), x))(x)",
}


def test_operations_in_a_child_of_fork(tmp_path):
    """None communicates in its parent's place, and none waits for threads that the child does not have."""
    does = f"""
    import jaxmpi
    size = MPI.COMM_WORLD.size
    jitted, ordered = (way(lambda x: jaxmpi.allreduce(x, MPI.SUM)) for way in (jax.jit, jaxmpi.jit))
    for call in (add, jitted, ordered):
        jax.block_until_ready(call(x))
    received, sent = jaxmpi.irecv(x, 1 - rank), jaxmpi.isend(x + rank, 1 - rank)
    grid = jaxmpi.Grid((size,), (size,), periodic=True)
    mesh = jaxmpi.IndexMap(range(rank * x.size, (rank + 1) * x.size), [])
    MPI.COMM_WORLD.Barrier()
    if rank == 1 and (child := os.fork()) == 0:
        for name, call in {IN_A_CHILD!r}.items():
            try:
                jax.block_until_ready(eval(call))
            except RuntimeError as error:
                print(f"child: {{name}}:", "was forked by a rank and is none itself" in str(error), flush=True)
        os._exit(0)
    if rank == 1:
        os.waitpid(child, 0)
    print("sum", float(add(x)[0]), float(jaxmpi.waitall([received, sent])[0][0]) - rank)
    """
    program = written(tmp_path, BEGIN, does)
    done = launch(2, program, timeout=SECONDS)
    for name in IN_A_CHILD:
        assert f"child: {name}: True" in done.stdout, done.stdout
    assert sorted(line for line in done.stdout.splitlines() if "sum" in line) == ["sum 2.0 0.0", "sum 2.0 2.0"]
    errors_page.goes_on("a child of `fork` communicates")


CALLED_AT = "called at {program}:{line} (again)"
WAITING = {
    "eager": ("add(x)", ""),
    "eager message": (
        "jaxmpi.recv(x, 0, tag=7)",
        "in recv of 3 float32, source 0, tag 7, as rank 1 of 2 on the default",
    ),
    "jit": ("jax.block_until_ready(again(x))", CALLED_AT),
    "jaxmpi.jit": ("jax.block_until_ready(jaxmpi.jit(again)(x))", CALLED_AT),
    "loop": ("jax.block_until_ready(jax.lax.fori_loop(0, 3, lambda i, x: again(x), x))", "called at {program}:{line}"),
    "derivative": ("f = lambda x: (again(x) ** 3).sum()\nhere(f(x))\nhere(jax.jit(jax.grad(f))(x))", CALLED_AT),
    "thread": ("t = threading.Thread(target=lambda: here(add(x))); t.start(); t.join()", "Python is at {program}"),
    "named communicator": ("jaxmpi.allreduce(x, MPI.SUM, comm=named)", "as rank 1 of 2 on halo"),
}
"""What rank 1 does while rank 0 sleeps, and what is to be told of it besides the operation."""


@pytest.mark.parametrize("way", one_each_time(WAITING, "jit"))
def test_what_waits_is_reported(way, tmp_path):
    """And ends the job if that is asked for; with plain mpiexec, too."""
    does, told = WAITING[way]
    functions = """
        import jaxmpi
        named = MPI.COMM_WORLD.Dup()
        named.Set_name("halo")
        @jax.jit
        def again(x):
            return jaxmpi.allreduce(x, MPI.SUM)  # this line
        def here(y):
            y.block_until_ready()
    """
    both = "if rank == 0 and 'grad' in sys.argv[1]: again(x).block_until_ready()\nif rank == 0: time.sleep(1000)"
    program = written(tmp_path, BEGIN, functions, both, does)
    line = 1 + program.read_text().splitlines().index("    return jaxmpi.allreduce(x, MPI.SUM)  # this line")
    limits = {"JAXMPI_TIMEOUT": "1.5", "JAXMPI_TIMEOUT_ACTION": "abort"}
    done = launch(2, program, does, check=False, timeout=SECONDS, plain=way == "jit", **limits)
    assert done.returncode != 0
    assert "jaxmpi: rank 1 has been waiting for" in done.stderr
    assert told.format(program=program, line=line) in done.stderr
    assert "rank 0 has" not in done.stderr


IN_PYTHON = "rank 1: is in no operation; Python is at {program}:{line} (<module>)"
ELSEWHERE = {
    "late": ("time.sleep(1000)", IN_PYTHON),
    "in a call that keeps the interpreter": ("import ctypes; ctypes.PyDLL(None).sleep(1000)", IN_PYTHON),
    "in another operation, on a name of two lines": (
        "own = MPI.COMM_SELF.Dup(); own.Set_name('two\\nlines'); jaxmpi.recv(x, 0, comm=own)",
        "rank 1: waits in recv of 3 float32, source 0, any tag, on two lines;",
    ),
}
"""What rank 1 does while ranks 0 and 2 wait in a collective, and what the launcher's table says of it."""


@pytest.mark.parametrize("where", one_each_time(ELSEWHERE, "late"))
def test_table_of_ranks(where, tmp_path):
    """The launcher says of all ranks what they do, and leaves no file."""
    does, told = ELSEWHERE[where]
    program = written(tmp_path, BEGIN, f"if rank == 1: {does}", WAIT)
    line = program.read_text().splitlines().index(f"if rank == 1: {does}") + 1
    folder = tmp_path / "folder"
    folder.mkdir()
    limits = {"JAXMPI_TIMEOUT": "1", "JAXMPI_TIMEOUT_ACTION": "abort", "TMPDIR": str(folder)}
    done = launch(3, program, check=False, timeout=SECONDS, **limits)
    assert done.returncode != 0
    assert done.stderr.count("jaxmpi.run: what the ranks do:") >= 1, done.stderr
    table = done.stderr.partition("jaxmpi.run: what the ranks do:")[2]
    assert told.format(program=program, line=line) in table, done.stderr
    assert "ranks 0, 2: wait in allreduce of 3 float32, op SUM, on the default communicator; called at" in table
    end = time.monotonic() + 10  # the launcher's process for the table ends after it
    while list(folder.glob("jaxmpi-*")) and time.monotonic() < end:
        time.sleep(0.1)
    assert not list(folder.glob("jaxmpi-*"))


def test_rank_that_has_ended_is_told(tmp_path):
    """Before those that wait are late."""
    program = written(tmp_path, BEGIN, "if rank == 1: sys.exit()", WAIT)
    waits = "ranks 0, 2: wait in allreduce of 3 float32, op SUM, on the default communicator; called at"
    command = [sys.executable, "-m", "jaxmpi.run", "-n", "3", program]
    environment = outside_of_a_job() | {"JAX_PLATFORMS": "cpu", "JAXMPI_TIMEOUT": "1000"}
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with started(command, SECONDS, env=environment, text=True, **pipes) as process:
        for text in ("jaxmpi.run: what the ranks do:", waits, "rank 1: has ended"):
            while (line := process.stderr.readline()) and text not in line:
                assert "has been waiting" not in line
            assert text in line
        process.terminate()
        process.communicate()


def test_failure_before_mpi():
    """The other ranks wait in MPI_Init, of which MPICH's mpiexec does not know by itself."""
    first = "import os\nif (os.environ.get('PMIX_RANK') or os.environ['PMI_RANK']) == '1': raise KeyError('early')\n"
    done = launch(2, "-c", f"{first}from mpi4py import MPI\nprint('not reached')", check=False, timeout=SECONDS)
    assert done.returncode == 1
    assert "uncaught exception on rank 1:\n" in done.stderr
    assert "not reached" not in done.stdout


WRONG = {
    "JAXMPI_TIMEOUT": ("soon", "-1", "inf"),
    "JAXMPI_TIMEOUT_ACTION": ("raise",),
    "JAXMPI_ON_ERROR": ("report",),
    "JAXMPI_CHECK": ("maybe",),
    "JAXMPI_DEBUG": ("2",),
}


def test_wrong_settings():
    """The import raises it: test_programs.py."""
    for name, values in WRONG.items():
        for value in values:
            with pytest.raises(ValueError, match=f"^jaxmpi: {name}={value}: "):
                Settings.from_environment({name: value})


READY = """
add(x)
then(lambda: print("ready", flush=True))
"""

INTERRUPTED = {
    "Python": "while True: time.sleep(0.01)",
    "a compiled loop": "jax.block_until_ready(halved_for_ever(x))",
    "an operation": "add(x) if rank == 1 else time.sleep(1000)",
    "an operation on both": "jaxmpi.recv(x, rank)",
    "an operation of another thread": "t = threading.Thread(target=lambda: jaxmpi.recv(x, rank)); t.start(); t.join()",
}


@pytest.mark.parametrize("within", one_each_time(INTERRUPTED, "an operation of another thread"))
@pytest.mark.parametrize("asynchronous", [pytest.param(True, marks=pytest.mark.nightly), False])
def test_interrupt(within, asynchronous, tmp_path):
    """Ctrl-C ends a job, whatever its ranks do. A computation that is dispatched synchronously lets no Python run."""
    dispatch = f"import jax; jax.config.update('jax_cpu_enable_async_dispatch', {asynchronous})"
    program = written(tmp_path, dispatch, BEGIN, READY, INTERRUPTED[within])
    done = launch(2, program, check=False, timeout=SECONDS, interrupt_at="ready", said=2)
    assert done.returncode != 0


@pytest.mark.parametrize(
    ("by", "within"),
    [
        ("TERM", "a compiled loop"),
        pytest.param("TERM", "an operation", marks=pytest.mark.nightly),
        pytest.param("HUP", "Python", marks=pytest.mark.nightly),
    ],
)
def test_launcher_is_ended(by, within, tmp_path):
    """And with it all ranks, whatever they do. Open MPI's mpiexec says nothing, and ends with 1."""
    program = written(tmp_path, BEGIN, READY, INTERRUPTED[within])
    number = getattr(signal, f"SIG{by}")
    done = launch(2, program, check=False, timeout=SECONDS, interrupt_at="ready", said=2, by=number)
    assert done.returncode == 128 + number
    assert f"jaxmpi.run: ended by {number.name}" in done.stderr
