"""HTTP server for the engine: OpenAI's API, health and metrics. Never imports torch."""
