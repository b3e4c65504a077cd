"""MPI communication for JAX arrays, zero-copy, from inside jitted code."""

import re as _re
import sys as _sys
from importlib.metadata import version as _version

__version__ = _version("jaxmpi")


def _module_to_run() -> str:
    """NAME while `python -m NAME` imports the package that it is in, else nothing."""
    if _sys.argv[:1] != ["-m"]:
        return ""
    words = iter(_sys.orig_argv[1:])
    for word in words:
        if word in ("-W", "-X", "--check-hash-based-pycs"):
            next(words, None)
        elif match := _re.fullmatch(r"-[a-zA-Z]*?m(.*)", word):
            return match[1] or next(words, "")
    return ""


# `python -m jaxmpi.run` starts the processes that use MPI and must not be one of them, `python -m jaxmpi.info` reports
# what keeps the package from loading: for these two the package stays as empty as it can.
if _module_to_run() not in ("jaxmpi.run", "jaxmpi.info"):
    from jaxmpi import _native as _native  # the first, as it says what is wrong with mpi4py

    # isort: split
    from jaxmpi import _contract as _contract
    from jaxmpi import compat, notoken
    from jaxmpi._operations import (
        allgather,
        allreduce,
        alltoall,
        barrier,
        bcast,
        gather,
        has_cuda_support,
        has_rocm_support,
        has_sycl_support,
        invariant,
        recv,
        reduce,
        replicate,
        scan,
        scatter,
        send,
        sendrecv,
    )
    from jaxmpi._order import Token, jit

__all__ = [
    "Token",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "bcast",
    "compat",
    "gather",
    "has_cuda_support",
    "has_rocm_support",
    "has_sycl_support",
    "invariant",
    "jit",
    "notoken",
    "recv",
    "reduce",
    "replicate",
    "scan",
    "scatter",
    "send",
    "sendrecv",
]
