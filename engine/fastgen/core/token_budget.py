"""The one measure of a pass: forward tokens."""

from __future__ import annotations


class TokenBudget:
    """What is left of one pass's token budget while the pass is being filled.

    DeepSpeed-FastGen (Holmes et al., 2024), section 3: a pass's latency follows the number of tokens in it, hardly how
    they are grouped into sequences. So one number bounds the pass, and decodes and prompt chunks draw on it alike.
    """

    __slots__ = ("left", "size")

    def __init__(self, size: int) -> None:
        assert size >= 1
        self.size = size
        self.left = size

    def take(self, num_tokens: int) -> None:
        """Spends tokens. Spending more than is left is a defect of the scheduler."""
        assert 1 <= num_tokens <= self.left, f"{num_tokens} tokens wanted, {self.left} of {self.size} left"
        self.left -= num_tokens

    def bound(self, most: int) -> None:
        """Leaves at most `most` tokens."""
        assert most >= 1
        self.left = min(self.left, most)
