"""Interface between the engine and a grammar's state."""

from __future__ import annotations

from typing import Protocol

from fastgen.core.request import FinishReason


class Constraint(Protocol):
    """State of one generation within its grammar. Preempting the sequence does not change it."""

    @property
    def end(self) -> FinishReason | None:
        """Why the generation is over, or None while it continues.

        `stop` when a token completed the match, `abort` if the grammar cannot be followed any further. A completed
        match overrides min_tokens and ignore_eos, because no token could follow.
        """

    def fill_mask(self, mask: memoryview) -> None:
        """Write the allowed next tokens: bit i % 32 of word i // 32 of `mask` is set if token i is allowed.

        `mask` is a writable row of ceil(vocabulary / 32) uint32 words. At least one bit is set.
        """

    def accept(self, token: int) -> None:
        """Advance by a generated token, which the mask allowed."""
