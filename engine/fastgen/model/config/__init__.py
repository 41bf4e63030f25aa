"""Model architectures and families, read from config.json or GGUF metadata."""
