"""MPI communication for JAX arrays, zero-copy, from inside jitted code."""

import importlib as _importlib
import re as _re
import sys as _sys
import typing as _typing
from importlib.metadata import version as _version

__version__ = _version("jaxmpi")


def _module_to_run() -> str:
    """Return NAME while `python -m NAME` imports the package of this module, otherwise an empty string."""
    if _sys.argv[:1] != ["-m"]:
        return ""
    words = iter(_sys.orig_argv[1:])
    for word in words:
        if word in ("-W", "-X", "--check-hash-based-pycs"):
            next(words, None)
        elif match := _re.fullmatch(r"-[a-zA-Z]*?m(.*)", word):
            return match[1] or next(words, "")
    return ""


# `python -m jaxmpi.run` starts the processes that use MPI and must not be one of them. `python -m jaxmpi.info` reports
# why the package cannot be loaded. `python -m jaxmpi.trace` reads files. For these three nothing is imported here.
if _module_to_run() not in ("jaxmpi.run", "jaxmpi.info", "jaxmpi.trace"):
    from jaxmpi import _start

    _start.start()

    # isort: split
    from jaxmpi._mpi.survival import get_default, set_default
    from jaxmpi._operations.by_counts import allgatherv, alltoallv, gatherv, reduce_scatter, scatterv
    from jaxmpi._operations.collectives import allgather, alltoall, barrier, bcast, gather, scatter
    from jaxmpi._operations.messages import recv, send, sendrecv
    from jaxmpi._operations.neighbors import neighbor_allgather, neighbor_alltoall
    from jaxmpi._operations.nonblocking import iallreduce, ialltoall, ibarrier, ibcast, irecv, isend
    from jaxmpi._operations.reductions import allreduce, exscan, reduce, scan
    from jaxmpi._operations.replication import invariant, replicate
    from jaxmpi._operations.requests import Request, wait, waitall
    from jaxmpi._operations.support import has_cuda_support, has_rocm_support, has_sycl_support, static
    from jaxmpi._primitive.jit import jit

    if _typing.TYPE_CHECKING:
        from jaxmpi import bench as bench
        from jaxmpi import collectives as collectives
        from jaxmpi import compat, fft, io
        from jaxmpi import info as info
        from jaxmpi import run as run
        from jaxmpi import sharded as sharded
        from jaxmpi import survive as survive
        from jaxmpi import testing as testing
        from jaxmpi import tokens as tokens
        from jaxmpi import trace as trace
        from jaxmpi._grid.grid import Grid
        from jaxmpi._grid.redistribute import iredistribute, redistribute
        from jaxmpi._unstructured.index_map import IndexMap
        from jaxmpi._unstructured.migration import migrate
    else:
        _LATER = {
            "Grid": "_grid.grid",
            "IndexMap": "_unstructured.index_map",
            "iredistribute": "_grid.redistribute",
            "migrate": "_unstructured.migration",
            "redistribute": "_grid.redistribute",
        }
        """Names that not every program uses, with modules. `__getattr__` imports a module when a program first uses a
        name, as it does for the public modules. This makes the import of the package a third shorter."""
        _MODULES = (
            "bench",
            "collectives",
            "compat",
            "fft",
            "info",
            "io",
            "run",
            "sharded",
            "survive",
            "testing",
            "tokens",
            "trace",
        )

        def __getattr__(name: str) -> _typing.Any:
            if name not in _LATER and name not in _MODULES:
                raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
            module = _importlib.import_module(f"{__name__}.{_LATER.get(name, name)}")
            value = globals()[name] = getattr(module, name) if name in _LATER else module
            return value

        def __dir__() -> list[str]:
            return sorted({*globals(), *_LATER, *_MODULES})

    __all__ = [
        "Grid",
        "IndexMap",
        "Request",
        "allgather",
        "allgatherv",
        "allreduce",
        "alltoall",
        "alltoallv",
        "barrier",
        "bcast",
        "compat",
        "exscan",
        "fft",
        "gather",
        "gatherv",
        "get_default",
        "has_cuda_support",
        "has_rocm_support",
        "has_sycl_support",
        "iallreduce",
        "ialltoall",
        "ibarrier",
        "ibcast",
        "invariant",
        "io",
        "irecv",
        "iredistribute",
        "isend",
        "jit",
        "migrate",
        "neighbor_allgather",
        "neighbor_alltoall",
        "recv",
        "redistribute",
        "reduce",
        "reduce_scatter",
        "replicate",
        "scan",
        "scatter",
        "scatterv",
        "send",
        "sendrecv",
        "set_default",
        "static",
        "wait",
        "waitall",
    ]
