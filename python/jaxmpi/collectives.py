"""The older name of `jaxmpi.sharded`."""

from jaxmpi.sharded import install, why_not_mpi

__all__ = ["install", "why_not_mpi"]
