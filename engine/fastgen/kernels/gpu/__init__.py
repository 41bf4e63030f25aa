"""Operators of the GPU backend: each has a Triton kernel in `fastgen.kernels.triton` and a readable twin in torch."""
