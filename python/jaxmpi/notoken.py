"""The operations without tokens: each returns its result alone; `send` and `barrier` return None.

Same arguments as in `jaxmpi`, without `token`; program order is kept all the same.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from jaxmpi._operations import nonblocking, operations

Function = TypeVar("Function", bound=Callable[..., Any])


def _without_token(function: Function) -> Function:
    """The function with a clear error for those who pass a token. Editors find its docstring by the type `Function`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "token" in kwargs:
            raise TypeError(f"jaxmpi.notoken.{function.__name__} takes no token: order needs none. Drop the argument.")
        return function(*args, **kwargs)

    call.__module__ = __name__
    return cast(Function, call)


allgather = _without_token(operations.allgather)
allgatherv = _without_token(operations.allgatherv)
allreduce = _without_token(operations.allreduce)
alltoall = _without_token(operations.alltoall)
alltoallv = _without_token(operations.alltoallv)
barrier = _without_token(operations.barrier)
bcast = _without_token(operations.bcast)
exscan = _without_token(operations.exscan)
gather = _without_token(operations.gather)
gatherv = _without_token(operations.gatherv)
has_cuda_support = operations.has_cuda_support
has_rocm_support = operations.has_rocm_support
has_sycl_support = operations.has_sycl_support
invariant = operations.invariant
neighbor_allgather = _without_token(operations.neighbor_allgather)
neighbor_alltoall = _without_token(operations.neighbor_alltoall)
recv = _without_token(operations.recv)
reduce = _without_token(operations.reduce)
reduce_scatter = _without_token(operations.reduce_scatter)
replicate = operations.replicate
scan = _without_token(operations.scan)
scatter = _without_token(operations.scatter)
scatterv = _without_token(operations.scatterv)
send = _without_token(operations.send)
sendrecv = _without_token(operations.sendrecv)
static = operations.static
Request = nonblocking.Request
iallreduce = _without_token(nonblocking.iallreduce)
ialltoall = _without_token(nonblocking.ialltoall)
ibarrier = _without_token(nonblocking.ibarrier)
ibcast = _without_token(nonblocking.ibcast)
irecv = _without_token(nonblocking.irecv)
isend = _without_token(nonblocking.isend)
wait = _without_token(nonblocking.wait)
waitall = _without_token(nonblocking.waitall)

__all__ = [
    "Request",
    "allgather",
    "allgatherv",
    "allreduce",
    "alltoall",
    "alltoallv",
    "barrier",
    "bcast",
    "exscan",
    "gather",
    "gatherv",
    "has_cuda_support",
    "has_rocm_support",
    "has_sycl_support",
    "iallreduce",
    "ialltoall",
    "ibarrier",
    "ibcast",
    "invariant",
    "irecv",
    "isend",
    "neighbor_allgather",
    "neighbor_alltoall",
    "recv",
    "reduce",
    "reduce_scatter",
    "replicate",
    "scan",
    "scatter",
    "scatterv",
    "send",
    "sendrecv",
    "static",
    "wait",
    "waitall",
]
