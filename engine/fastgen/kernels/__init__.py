"""Kernels for operations that libraries lack: `cpu` in numba, `gpu` as torch operators with kernels in `triton`.

`reference` holds readable twins in plain torch. Tests compare the kernels with them, and operators run some of them on
CPUs.
"""
