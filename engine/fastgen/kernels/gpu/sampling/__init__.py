"""Sampling in torch: logits to scores, scores to tokens, and log-probabilities.

The operators are those of the sampler on devices. The functions that their twins call are also the sampler of the CPU.
"""
