"""Random programs on several ranks as a test, with a witness that computes all ranks in one process.

programs.py     a program as plain data, made from a seed, and printed
distributed.py  runs it on each rank, with the operations of jaxmpi and the structure of JAX
witness.py      computes all ranks' results at once, with neither
checks.py       transforms both alike, and compares
steps.py        other programs, of one operation in many dtypes, shapes and surroundings, which NumPy checks
"""
