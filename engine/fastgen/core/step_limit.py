"""The tokens that a step may have after steps ran out of memory."""

from __future__ import annotations

# The limit doubles after this many steps that had enough memory. A lasting shortage costs one failed step in so many.
STEPS_PER_GROWTH = 32


class StepLimit:
    """Limit of a step's tokens, lowered when steps run out of memory.

    It halves when a step runs out of memory and doubles after a while, between one token and the token budget. A step
    of n tokens is retried at most log2(n) times: the last retry has one token, of one sequence.

    Attributes:
        tokens: most tokens of a step now, and most sequences in it.
    """

    def __init__(self, token_budget: int) -> None:
        self.tokens = token_budget
        self._token_budget = token_budget
        self._num_steps = 0

    def shrink(self, num_tokens: int) -> None:
        """Record that a step of `num_tokens` tokens ran out of memory."""
        self.tokens = max(1, num_tokens // 2)
        self._num_steps = 0

    def record(self) -> None:
        """Record that a step had enough memory."""
        if self.tokens == self._token_budget:
            return
        self._num_steps += 1
        if self._num_steps == STEPS_PER_GROWTH:
            self.tokens = min(self._token_budget, 2 * self.tokens)
            self._num_steps = 0
