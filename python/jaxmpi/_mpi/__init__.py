"""The C core bound to the MPI library, and what programs refer to: communicators, plans, tags, devices, call sites."""
