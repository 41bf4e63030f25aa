from __future__ import annotations

from fastgen.kernels.cpu import environment

# Before anything imports torch: OpenMP and numba read their settings once.
environment.prepare()
