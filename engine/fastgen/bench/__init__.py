"""Load for an engine or a server, and what came of it."""
