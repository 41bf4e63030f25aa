"""Operators of the GPU backend: each has a Triton kernel (`fastgen.kernels.triton`) and a readable twin in plain torch."""
