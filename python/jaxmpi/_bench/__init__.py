"""The parts of `python -m jaxmpi.bench`: the operations, the method of measurement and the output."""
