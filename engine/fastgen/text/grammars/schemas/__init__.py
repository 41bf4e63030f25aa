"""JSON schemas of requests: rewritten to what llguidance enforces exactly, or rejected, naming the keyword."""
