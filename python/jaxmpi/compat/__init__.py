"""Runs programs that were written for mpi4jax or JPI unchanged, on jaxmpi.

`install_as_mpi4jax()` or `install_as_jpi()`, called before the program imports the other package, puts a module with
that package's public functions in its place, for the whole process. `python -m jaxmpi.run --as mpi4jax ...` does it for
a program that knows nothing of jaxmpi. docs/migration.md says which line becomes which for a program that moves over.
"""

from jaxmpi.compat._install import install_as_jpi, install_as_mpi4jax

__all__ = ["install_as_jpi", "install_as_mpi4jax"]
