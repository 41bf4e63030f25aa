"""The decoder and its layers, on CPU kernels, GPU operators or torch operations."""
