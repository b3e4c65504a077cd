"""JAX's own sharded programs over MPI: how processes meet, which of them communicate, their communicators."""
