"""`jaxmpi.io`: states of a computation in files that all ranks write and read."""
