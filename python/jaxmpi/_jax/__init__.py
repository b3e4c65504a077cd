"""JAX's private names, except the names for differentiation; jaxprs; the array that orders calls."""
