"""Attention kernels over the paged KV cache, for decodes and for prompt chunks."""
