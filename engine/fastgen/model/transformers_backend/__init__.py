"""Decoders without a native implementation, run by transformers over the paged KV cache."""
