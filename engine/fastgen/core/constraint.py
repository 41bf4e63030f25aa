"""Interfaces between the engine and grammars."""

from __future__ import annotations

from collections import abc
from typing import Protocol

from fastgen.core.request import FinishReason, Grammar


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


class Grammars(Protocol):
    """Creates constraints, and computes the masks of a step."""

    def __call__(self, grammar: Grammar, /) -> Constraint:
        """Return a constraint in its initial state.

        Raises:
            RequestError: if the grammar cannot be enforced, with the reason.
        """

    def fill_masks(self, constraints: abc.Sequence[Constraint], masks: memoryview) -> None:
        """Fill the masks of several constraints. Equivalent to `Constraint.fill_mask` for each.

        `masks` is a writable array of uint32 words: the row of the first constraint, then that of the next.
        """
