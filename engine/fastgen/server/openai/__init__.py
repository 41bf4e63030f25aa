"""OpenAI's protocol: request fields, endpoints, responses."""
