"""Kernels for operations that libraries lack: `cpu` in numba, `gpu` as torch operators with kernels in `triton`.

`reference` holds readable twins in plain torch, which tests compare the kernels with.
"""
