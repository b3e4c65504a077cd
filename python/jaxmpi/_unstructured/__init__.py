"""The implementation of `jaxmpi.IndexMap`: rows with global indices, and copies of rows of other ranks."""
