"""The link between the API processes and the engine process: messages and client, without torch."""
