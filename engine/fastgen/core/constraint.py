"""Interface of the grammar that a sequence must match, as the engine and the scheduler use it."""

from __future__ import annotations

from typing import Protocol

from fastgen.core.request import FinishReason


class Constraint(Protocol):
    """State of one sequence in its grammar; see `fastgen.text.grammars`.

    Preempting the sequence does not change it.
    """

    @property
    def end(self) -> FinishReason | None:
        """Why the generation is over, or None while it continues.

        `stop` when an end token completed the match, `grammar` if the grammar could not be followed to its end. A
        completed match overrides min_tokens and ignore_eos, because no token could follow.
        """

    @property
    def is_pending(self) -> bool:
        """Whether its next mask is being computed. Meanwhile its sequence waits."""

    def fill_mask(self, mask: memoryview) -> None:
        """Write the allowed next tokens: bit i % 32 of word i // 32 of `mask` is set if token i is allowed.

        `mask` is a writable row of ceil(vocabulary / 32) uint32 words. At least one bit is set.
        """

    def accept(self, token: int) -> None:
        """Advance by a generated token, which the mask allowed."""
