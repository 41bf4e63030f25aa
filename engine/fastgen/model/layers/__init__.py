"""The decoder and its layers, on CPU kernels or torch operations."""
