"""What `python -m jaxmpi.bench` measures, how, and how it is shown."""
