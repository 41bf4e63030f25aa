"""The engine in the caller's own process: `LLM` and its outputs."""
