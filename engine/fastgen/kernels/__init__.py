"""The parts of a forward pass that no library call does well: paged attention and the element-wise steps.

`reference` is the readable twin in plain torch; `elementwise`, `decode` and `int8` are numba kernels for CPUs, `chunk`
is torch's own attention over gathered pages. Tests hold them equal.
"""
