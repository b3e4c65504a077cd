"""Runs programs written for mpi4jax or JPI on jaxmpi, unchanged.

`install_as_mpi4jax()` or `install_as_jpi()` replaces the other package, for the whole process, by a module with the
same public functions. Call it before the program imports the other package. `python -m jaxmpi.run --as mpi4jax ...`
does this for a program that does not mention jaxmpi. docs/migration.md says how to change a program line by line.
"""

from jaxmpi.compat._install import install_as_jpi, install_as_mpi4jax

__all__ = ["install_as_jpi", "install_as_mpi4jax"]
