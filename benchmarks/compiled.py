"""C programs that take part in benchmarks, in the processes of the job."""

import ctypes
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from mpi4py import MPI

COMM = MPI.COMM_WORLD
CFLAGS = ("-O3", "-march=native")


def compile_c(name: str) -> ctypes.CDLL:
    """The functions of this file beside, compiled by rank 0 with the mpicc of the MPI in use. Raises ImportError on
    all ranks if it cannot be compiled."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(COMM.bcast(folder)) / f"{name}.so"
        error = None
        if COMM.rank == 0:
            mpicc = shutil.which("mpicc", path=Path(sys.prefix) / "bin") or shutil.which("mpicc") or "mpicc"
            source = Path(__file__).with_name(name)
            command = [mpicc, *CFLAGS, "-shared", "-fPIC", "-o", str(library), str(source)]
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
