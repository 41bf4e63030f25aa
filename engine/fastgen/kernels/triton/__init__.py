"""Triton kernels. Only `fastgen.kernels.gpu` imports them, and only where they run: importing Triton takes a second."""
