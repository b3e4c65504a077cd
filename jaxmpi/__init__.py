"""MPI communication for JAX arrays, zero-copy, from inside jitted code."""

from importlib.metadata import version as _version

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
from jaxmpi._order import Token

__version__ = _version("jaxmpi")

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
