"""In-process API: `LLM`."""
