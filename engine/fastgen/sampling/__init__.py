"""Logits to tokens: masks, penalties, top-k/top-p, random numbers, logprobs."""
