"""Operators of the device sampler: logits to scores, scores to tokens, and log-probabilities."""
