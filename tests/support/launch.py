"""Starts programs on several ranks from a test that itself runs on one."""

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid

from jaxmpi_launch import mpiexec
from support import limits


def written(folder, *parts, name="program.py"):
    """A program of these parts, each without the indentation that all its lines have."""
    program = folder / name
    program.write_text("\n".join(map(textwrap.dedent, parts)))
    return program


# What an MPI library leaves in the environment of its process; a child must not take itself for a part of that job.
_INHERITED = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "HYDRA_", "MPI_LOCAL", "JAX_ENABLE_X64")

LATE_SECONDS = 30

# A job is told to end if the process that started it is killed, by the limit of a test above all.
_UNTIL_THE_TEST_ENDS = ("setpriv", "--pdeathsig", "TERM") if shutil.which("setpriv") else ()


def begin(command, seconds, **options):
    """A process that is killed after so many seconds, or with the process that tests: whoever waits for it, or reads
    what it writes, does so no longer."""
    process = subprocess.Popen([*_UNTIL_THE_TEST_ENDS, *map(str, command)], **options)
    limit = threading.Timer(seconds, process.kill)
    limit.daemon = True
    limit.start()
    return process


@contextlib.contextmanager
def started(command, seconds=60, **options):
    """Likewise, for as long as a block lasts: it is waited for, or killed if the block raises."""
    with begin(command, seconds, **options) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


@functools.cache
def is_openmpi():
    """Whether the MPI of this environment is."""
    return mpiexec.flavour(mpiexec.find_mpiexec() or "") == "openmpi"


def until(condition, seconds=60):
    """Waits for a condition; whether it has come."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def outside_of_a_job():
    """The variables of this process, without those of a rank."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_INHERITED)}


def launch(
    ranks,
    *program,
    timeout=240,
    check=True,
    plain=False,
    interrupt_at=None,
    said=1,
    by=signal.SIGINT,
    through=(),
    **environment,
):
    """Runs a program through jaxmpi.run, or `plain` by mpiexec, or on 0 ranks by Python alone.

    Returns the finished process with its output.

    `interrupt_at`: Ctrl-C is pressed as soon as the program has printed this `said` times, or the launcher gets the
    signal `by`.
    `through`: the words before the command, which run it elsewhere.

    A job that is not done in `timeout` seconds, or in the time that the test has, is an error; so is one that leaves
    processes behind. None of them is left running.
    """
    clean = outside_of_a_job() | {"JAX_PLATFORMS": "cpu", **environment}
    command = [sys.executable, "-m", "jaxmpi.run", "-n", str(ranks), *map(str, program)]
    if plain:
        clean.update(mpiexec.settings(1, clean))
        command = [mpiexec.find_mpiexec(), "-n", str(ranks), sys.executable, *map(str, program)]
    if ranks == 0:
        command = [sys.executable, *map(str, program)]
    command = [*through, *command]
    job = f"JAXMPI_TEST_JOB={uuid.uuid4()}"
    clean.update([job.split("=")])
    try:
        done = _run(command, clean, limits.within(timeout), interrupt_at, said, by)
    finally:
        left = end_what_is_left(job)
    assert not left, f"{command} has left processes running: {left}"
    if check and done.returncode != 0:
        raise AssertionError(f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done


def _run(command, environment, timeout, interrupt_at, said, by):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with started(command, timeout + LATE_SECONDS, env=environment, start_new_session=True, **pipes) as process:
        seen = ""
        if interrupt_at is not None:
            while seen.count(interrupt_at) < said and (line := process.stdout.readline()):
                seen += line
            process.send_signal(by)
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as late:
            print(seen, *(text.decode() for text in (late.stdout, late.stderr) if text), sep="\n")
            raise
    return subprocess.CompletedProcess(command, process.returncode, seen + output, errors)


def end_what_is_left(job):
    """Ends the processes with this variable that are there some seconds after a job; returns their command lines."""
    end = time.monotonic() + LATE_SECONDS
    while (left := limits.processes(job)) and limits.ended(left, end - time.monotonic()):
        pass
    for process in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return list(left.values())
