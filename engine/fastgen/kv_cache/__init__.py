"""Paged KV cache tensors, their size, prefaulting and swapping."""
