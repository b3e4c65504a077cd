"""The parts of `jaxmpi.testing`: the function of all ranks, its derivatives by three methods, and the explanation of a
difference between them."""
