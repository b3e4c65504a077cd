"""What `python -m jaxmpi.run` does beside mpiexec, and on each rank before the program. It uses no operations."""
