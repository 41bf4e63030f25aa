"""Matrix products with float32 weights, int8 weights, and int8 weights times int8 activations (AVX512-VNNI)."""
