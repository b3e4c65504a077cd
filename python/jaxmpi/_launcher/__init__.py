"""What `python -m jaxmpi.run` runs on each rank before the program. It does not use the operations."""
