"""The launcher behind `python -m jaxmpi.run`, and what it runs on each rank before the program.

It starts no MPI and imports neither jax nor mpi4py: the program must be the first to import them, so that it can
configure them.
"""
