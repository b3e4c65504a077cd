"""What `python -m jaxmpi.run` runs on each rank before the program. It uses nothing of the operations."""
