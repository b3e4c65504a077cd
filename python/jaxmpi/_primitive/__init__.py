"""How an operation becomes a JAX primitive with all its rules, and the checks of its arguments."""
