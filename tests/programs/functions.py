"""Calls functions of a file in one job, one after the other, each with a communicator of its own:
python -m jaxmpi.run -n 2 tests/programs/functions.py checked differing messages

Each rank prints a line of JSON for each function: name, rank, and error, which is empty where the function returned.
If a function fails on one rank and another rank waits for it, the limit of the job ends all. Tests use support/jobs.py.
"""

import importlib
import json
import os
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # of what the tests share
os.environ.setdefault("JAX_PLATFORMS", "cpu")


def main(file, *names):
    module = importlib.import_module(file)
    from mpi4py import MPI

    for name in names:
        comm, error = MPI.COMM_WORLD.Dup(), ""
        try:
            getattr(module, name)(comm)
        except Exception:
            error = traceback.format_exc()
        line = json.dumps({"name": name, "rank": comm.rank, "error": error})
        os.write(1, f"{line}\n".encode())  # at once, so that lines of ranks do not mix
        MPI.COMM_WORLD.Barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
