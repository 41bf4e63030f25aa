"""Scheduling of tokens and KV blocks: pure Python, deterministic, no torch, no clock of its own."""
