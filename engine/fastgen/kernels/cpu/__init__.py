"""Numba kernels for CPUs: attention, matrix products and element-wise operations."""
