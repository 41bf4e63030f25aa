"""Rewrites JSON schemas of requests to what llguidance enforces exactly, or rejects them and names the keyword."""
