"""The parts of `python -m jaxmpi.trace`, which read and evaluate the timelines of all ranks."""
