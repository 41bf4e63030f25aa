"""What may come next in a generation that must match a grammar, as the core and the sampler see it."""

from __future__ import annotations

from typing import Protocol


class Constraint(Protocol):
    """The state of one generation within its grammar. It follows the generated tokens, whatever happens to the KV."""

    def fill_mask(self, mask: memoryview) -> None:
        """Writes which tokens may come next: bit i % 32 of word i // 32 of `mask` is set where token i may.

        `mask` is a writable row of ceil(vocabulary / 32) uint32 words.
        """

    def accept(self, token: int) -> None:
        """Takes note of a generated token, which the mask allowed."""
