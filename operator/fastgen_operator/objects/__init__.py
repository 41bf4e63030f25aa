"""Objects of the API server as types: each fact is read from an object once. Pure."""
