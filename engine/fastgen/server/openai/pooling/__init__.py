"""Endpoints that pool prompts instead of generating: embeddings, scores, rankings."""
