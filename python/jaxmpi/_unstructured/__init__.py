"""`jaxmpi.IndexMap`: rows that have global indices, and copies of rows of other ranks."""
