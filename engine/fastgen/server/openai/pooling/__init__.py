"""Endpoints that pool a prompt instead of continuing it: embeddings, scores, rankings."""
