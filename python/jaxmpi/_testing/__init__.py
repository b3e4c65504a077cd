"""What `jaxmpi.testing` is made of: the function of all ranks, its derivatives by three ways, and what explains that
they differ."""
