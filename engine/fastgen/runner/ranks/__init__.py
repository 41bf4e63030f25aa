"""Tensor parallelism: a model divided among the processes of a pod, its ranks.

Rank 0 runs in the engine process. It publishes each step in a ring in shared memory, and all ranks compute it together.
See docs/decisions/064-tensor-parallel-ranks.md.
"""
