"""Triton kernels of the operators of `fastgen.kernels.gpu.sampling`."""
