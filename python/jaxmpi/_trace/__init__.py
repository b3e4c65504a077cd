"""What `python -m jaxmpi.trace` makes of the timelines of all ranks."""
