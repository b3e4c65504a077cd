"""The operations: their mathematics, and the functions that users call."""
