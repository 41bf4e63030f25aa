"""Sampling in torch: logits to scores, scores to tokens, and log-probabilities.

The operators are those of the GPU's sampler. The CPU's sampler calls the functions that their twins consist of.
"""
