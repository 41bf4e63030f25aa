"""CPU kernels for operations that libraries lack.

These are paged attention, fused element-wise operations and matrix products. `reference` holds their readable twins in
plain torch; tests compare the two.
"""
