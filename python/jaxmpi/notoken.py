"""The operations without tokens: each returns its result alone; `send` and `barrier` return None.

Same arguments as in `jaxmpi`, without `token`; program order is kept all the same.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from jaxmpi._operations import (
    by_counts,
    collectives,
    messages,
    neighbors,
    nonblocking,
    reductions,
    replication,
    requests,
    support,
)

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


allgather = _without_token(collectives.allgather)
allgatherv = _without_token(by_counts.allgatherv)
allreduce = _without_token(reductions.allreduce)
alltoall = _without_token(collectives.alltoall)
alltoallv = _without_token(by_counts.alltoallv)
barrier = _without_token(collectives.barrier)
bcast = _without_token(collectives.bcast)
exscan = _without_token(reductions.exscan)
gather = _without_token(collectives.gather)
gatherv = _without_token(by_counts.gatherv)
has_cuda_support = support.has_cuda_support
has_rocm_support = support.has_rocm_support
has_sycl_support = support.has_sycl_support
invariant = replication.invariant
neighbor_allgather = _without_token(neighbors.neighbor_allgather)
neighbor_alltoall = _without_token(neighbors.neighbor_alltoall)
recv = _without_token(messages.recv)
reduce = _without_token(reductions.reduce)
reduce_scatter = _without_token(by_counts.reduce_scatter)
replicate = replication.replicate
scan = _without_token(reductions.scan)
scatter = _without_token(collectives.scatter)
scatterv = _without_token(by_counts.scatterv)
send = _without_token(messages.send)
sendrecv = _without_token(messages.sendrecv)
static = support.static
Request = requests.Request
iallreduce = _without_token(nonblocking.iallreduce)
ialltoall = _without_token(nonblocking.ialltoall)
ibarrier = _without_token(nonblocking.ibarrier)
ibcast = _without_token(nonblocking.ibcast)
irecv = _without_token(nonblocking.irecv)
isend = _without_token(nonblocking.isend)
wait = _without_token(requests.wait)
waitall = _without_token(requests.waitall)

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
