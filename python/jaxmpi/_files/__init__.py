"""The implementation of `jaxmpi.io`: files with the state of a computation, which all ranks write and read."""
