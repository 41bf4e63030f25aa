"""JSON schemas of requests: rewritten to what llguidance enforces exactly, or refused by the name of the keyword."""
