"""/v1/responses: OpenAI's newer API for the same generations as chat completions. Nothing is stored."""
