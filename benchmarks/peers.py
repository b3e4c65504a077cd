"""The peers of jaxmpi, which take part in the processes of the job if they can be loaded: C programs and packages."""

import ctypes
import importlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxmpi._bench.timing import COMM

CFLAGS = ("-O3", "-march=native")

MISSING: dict[str, str] = {}
"""Peer -> why it cannot take part."""


def compile_c(name: str) -> ctypes.CDLL:
    """Compile this file in this folder by the mpicc of the MPI in use, on rank 0. Return the functions.

    Raise ImportError on all ranks if it cannot be compiled.
    """
    with tempfile.TemporaryDirectory() as folder:
        library = Path(COMM.bcast(folder)) / f"{name}.so"
        error = None
        if COMM.rank == 0:
            mpicc = shutil.which("mpicc", path=Path(sys.prefix) / "bin") or shutil.which("mpicc") or "mpicc"
            source = Path(__file__).with_name(name)
            command = [mpicc, *CFLAGS, "-shared", "-fPIC", "-o", str(library), str(source), "-lm"]
            try:
                subprocess.run(command, check=True, capture_output=True, text=True)
            except (OSError, subprocess.CalledProcessError) as raised:
                error = f"{raised} {getattr(raised, 'stderr', '')}"
        error = COMM.bcast(error)
        if error:
            raise ImportError(error)
        loaded = ctypes.CDLL(str(library))
        COMM.Barrier()
    return loaded


def load(name: str, build: Callable[[], Any]) -> Any:
    """Return what `build` returns, or None if it fails on a rank. Then MISSING says why."""
    loaded, why = None, ""
    try:
        loaded = build()
    except Exception as error:  # whatever keeps a peer from loading
        why = f"{type(error).__name__}: {error}"
    for reason in COMM.allgather(why):
        if reason:
            MISSING[name] = reason
            return None
    return loaded


def load_package(name: str) -> Any:
    return load(name, lambda: importlib.import_module(name))
