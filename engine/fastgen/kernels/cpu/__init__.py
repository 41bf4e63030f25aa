"""Numba kernels for CPUs: attention, matrix products, element-wise steps."""
