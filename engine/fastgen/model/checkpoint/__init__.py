"""Tensors of safetensors and GGUF checkpoints under one set of names."""
