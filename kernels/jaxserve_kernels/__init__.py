"""Kernels of jaxserve: one folder per operation, each with its plain-JAX reference."""
