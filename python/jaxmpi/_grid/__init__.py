"""The implementation of `jaxmpi.Grid`: blocks of arrays, and the cells around them that neighbours have."""
