"""Operators of the GPU backend, specified in plain torch; their Triton kernels are in `fastgen.kernels.triton`."""
