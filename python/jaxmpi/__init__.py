"""MPI communication for JAX arrays, zero-copy, from inside jitted code."""

import sys as _sys
from importlib.metadata import version as _version

__version__ = _version("jaxmpi")

# `python -m jaxmpi.run` starts the processes that use MPI and must not be one of them, `python -m jaxmpi.info` reports
# what keeps the package from loading: for these two the package stays as empty as it can.
if not (_sys.argv[:1] == ["-m"] and {"jaxmpi.run", "jaxmpi.info"} & set(_sys.orig_argv[:4])):
    from jaxmpi import notoken
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
        recv,
        reduce,
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
    "gather",
    "has_cuda_support",
    "has_rocm_support",
    "has_sycl_support",
    "notoken",
    "recv",
    "reduce",
    "scan",
    "scatter",
    "send",
    "sendrecv",
]
