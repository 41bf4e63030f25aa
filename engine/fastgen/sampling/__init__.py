"""Sampling: masks, penalties, top-k/top-p, random numbers and logprobs."""
