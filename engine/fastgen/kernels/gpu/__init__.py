"""Operators of the GPU backend.

Each has a Triton kernel in `fastgen.kernels.triton` and a readable twin in torch.
"""
