"""JAX's private names, except those of differentiation; jaxprs; the array that orders calls."""
