"""Scheduling of tokens and KV blocks. Pure and deterministic Python: no torch, no I/O, no clock."""
