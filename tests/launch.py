"""Starts programs on several ranks from a test that itself runs on one."""

import os
import subprocess
import sys

from jaxmpi import run

# What an MPI library leaves in the environment of its process; a child must not take itself for a part of that job.
_INHERITED = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "HYDRA_", "MPI_LOCAL", "JAX_ENABLE_X64")


def launch(ranks, *program, timeout=120, check=True, plain=False, **environment):
    """Runs a program through jaxmpi.run, or `plain` by mpiexec; returns the finished process with its output."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_INHERITED)}
    clean.update(JAX_PLATFORMS="cpu", **environment)
    command = [sys.executable, "-m", "jaxmpi.run", "-n", str(ranks), *map(str, program)]
    if plain:
        clean.update(run.settings(1, clean))
        command = [run.find_mpiexec(), "-n", str(ranks), sys.executable, *map(str, program)]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=timeout, check=False)
    if check and done.returncode != 0:
        raise AssertionError(f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done
