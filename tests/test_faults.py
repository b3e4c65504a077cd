"""Faults of programs, one rank's each: the job ends, says why, and leaves nothing running."""

import textwrap
import time

import pytest

from launch import launch

pytestmark = [pytest.mark.launches, pytest.mark.seconds(120)]

SECONDS = 60
"""Within which a job with a fault has ended; most do in 3."""

BEGIN = textwrap.dedent("""
    import os, subprocess, sys, threading, time
    import jax, jax.numpy as jnp
    from mpi4py import MPI
    from jaxmpi import notoken
    rank = MPI.COMM_WORLD.rank
    x = jnp.ones(3)
    add = jax.jit(lambda x: notoken.allreduce(x, MPI.SUM))
    add(x).block_until_ready()
    print("rank", rank, "begins")
""")

WAIT = """
add(x).block_until_ready()
print("not reached")
"""


def program_of(tmp_path, *parts):
    program = tmp_path / "program.py"
    program.write_text("\n".join(parts))
    return program


CAUGHT_BY_NOBODY = {
    "exception": ("raise KeyError('this')", "KeyError: 'this'"),
    "exception in jit": ("jax.jit(lambda x: 1 / 0)(x)", "ZeroDivisionError"),
    "exception in a callback": (
        "jax.block_until_ready(jax.pure_callback(lambda x: 1 / 0, x, x))",
        "ZeroDivisionError",
    ),
    "exception whose text raises": (
        "class Odd(Exception):\n    def __str__(self): raise ValueError\nraise Odd",
        "uncaught exception on rank 1",
    ),
    "exception after stdout is closed": ("sys.stdout.close(); raise KeyError('this')", "KeyError: 'this'"),
    "exception without stdout": ("sys.stdout = None; raise KeyError('this')", "KeyError: 'this'"),
    "exception after 1 is closed": ("print('x', end=''); os.close(1); raise KeyError('this')", "KeyError: 'this'"),
    "exception without stderr": ("sys.stderr = None; raise KeyError('this')", "KeyError: 'this'"),
    "exception after stderr is closed": ("sys.stderr.close(); raise KeyError('this')", "KeyError: 'this'"),
    "exception after 2 is closed": ("os.close(2); raise KeyError('this')", ""),
    "exception in a thread": (
        "t = threading.Thread(target=lambda: 1 / 0, name='worker'); t.start(); time.sleep(99)",
        "on rank 1 in thread worker",
    ),
    "interrupt": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "exit with a text": ("sys.exit('no input')", "no input"),
    "exit with 3": ("sys.exit(3)", ""),
    "exit with 256": ("sys.exit(256)", ""),
    "exit with more than an int": ("sys.exit(1 << 40)", ""),
    "exit at once with 0": ("os._exit(0)", "rank 1 calls os._exit(0) without MPI.Finalize()"),
    "exit at once with 7": ("os._exit(7)", "rank 1 calls os._exit(7) without MPI.Finalize()"),
    "killed": ("os.kill(os.getpid(), 9)", ""),
    "terminated": ("os.kill(os.getpid(), 15)", ""),
    "segmentation fault": ("import ctypes; ctypes.string_at(0)", ""),
}
"""What rank 1 does while rank 0 waits for it, and what is to be told."""


@pytest.mark.parametrize("fault", CAUGHT_BY_NOBODY)
def test_fault_of_one_rank(fault, tmp_path):
    does, told = CAUGHT_BY_NOBODY[fault]
    program = program_of(tmp_path, BEGIN, "if rank == 1:", textwrap.indent(does, "    "), WAIT)
    done = launch(2, program, check=False, timeout=SECONDS)
    assert done.returncode != 0
    assert told in done.stderr
    assert "rank 1 begins" in done.stdout
    assert "not reached" not in done.stdout


def test_exception_after_finalize(tmp_path):
    """It is told, and not lost behind a message of MPI."""
    program = program_of(tmp_path, BEGIN, "MPI.Finalize()", "if rank == 1: raise KeyError('this')")
    done = launch(2, program, check=False, timeout=SECONDS)
    assert done.returncode != 0
    assert "KeyError: 'this'" in done.stderr
    assert "MPI_ABORT" not in done.stderr


FORKED = {
    "ends": ("pass", 0, ""),
    "raises": ("raise KeyError('this')", 1, "in a process that a rank has forked"),
    "exits": ("sys.exit(5)", 5, ""),
    "exits at once": ("os._exit(6)", 6, ""),
}


@pytest.mark.parametrize("does", FORKED)
def test_forked_process(does, tmp_path):
    """What it does ends that process alone."""
    what, status, told = FORKED[does]
    fork = f"""
    if rank == 1:
        child = os.fork()
        if child == 0:
            {what}
            sys.exit()
        print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print("sum", float(add(x)[0]))
    """
    done = launch(2, program_of(tmp_path, BEGIN, textwrap.dedent(fork)), timeout=SECONDS)
    assert f"status {status}\n" in done.stdout
    assert done.stdout.count("sum 2.0") == 2
    assert told in done.stderr


INTERRUPTED = {
    "Python": "while True: time.sleep(0.01)",
    "a compiled loop": "jax.block_until_ready(halved_for_ever(x))",
    "an operation": "add(x) if rank == 1 else time.sleep(1000)",
    "an operation on both": "notoken.recv(x, rank)",
    "an operation of another thread": "t = threading.Thread(target=lambda: notoken.recv(x, rank)); t.start(); t.join()",
}


@pytest.mark.parametrize("dispatch", ["true", "false"], ids=["asynchronous", "synchronous"])
@pytest.mark.parametrize("within", INTERRUPTED)
def test_interrupt(within, dispatch, tmp_path):
    """Ctrl-C ends a job, whatever its ranks do. A computation that is dispatched synchronously lets no Python run."""
    loop = """
        halved_for_ever = jax.jit(
            lambda x: jax.lax.while_loop(lambda v: v[0] > -1, lambda v: abs(notoken.allreduce(v, MPI.SUM)) / 2, x)
        )
        add(x)
        print("ready", flush=True)
    """
    program = program_of(tmp_path, BEGIN, textwrap.dedent(loop), INTERRUPTED[within])
    begin = time.monotonic()
    done = launch(
        2, program, check=False, timeout=SECONDS, interrupt_at="ready", JAX_CPU_ENABLE_ASYNC_DISPATCH=dispatch
    )
    assert done.returncode != 0
    assert time.monotonic() - begin < 30
