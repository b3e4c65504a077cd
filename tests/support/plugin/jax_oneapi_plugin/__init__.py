"""Stands for JAX's plugin for Intel's devices, which no test needs."""
