"""What may come next in a generation that must match a grammar, as the core and the sampler see it."""

from __future__ import annotations

from typing import Protocol

from fastgen.core.request import FinishReason


class Constraint(Protocol):
    """The state of one generation within its grammar. It follows the generated tokens, whatever happens to the KV."""

    @property
    def end(self) -> FinishReason | None:
        """Why the generation is over, or None while it goes on.

        `stop` once a token has ended the match; `abort` where the generation cannot be followed any further. A match
        that is over outranks min_tokens and ignore_eos: nothing could follow it.
        """

    def fill_mask(self, mask: memoryview) -> None:
        """Writes which tokens may come next: bit i % 32 of word i // 32 of `mask` is set where token i may.

        `mask` is a writable row of ceil(vocabulary / 32) uint32 words. At least one bit is set.
        """

    def accept(self, token: int) -> None:
        """Takes note of a generated token, which the mask allowed."""
