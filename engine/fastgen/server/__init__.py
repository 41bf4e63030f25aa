"""The HTTP face of the engine: OpenAI's protocol, health, metrics. Never imports torch."""
