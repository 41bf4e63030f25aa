"""Interfaces between the engine and grammars."""

from __future__ import annotations

from collections import abc
from concurrent.futures import Future
from typing import Protocol

from fastgen.core.request import FinishReason, Grammar


class Constraint(Protocol):
    """State of one generation within its grammar. Preempting the sequence does not change it."""

    @property
    def end(self) -> FinishReason | None:
        """Why the generation is over, or None while it continues.

        `stop` when a token completed the match, `grammar` if it cannot be followed. A completed match overrides
        min_tokens and ignore_eos, because no token could follow.
        """

    @property
    def is_pending(self) -> bool:
        """Whether its next mask is being computed. Until then, its sequence waits."""

    def fill_mask(self, mask: memoryview) -> None:
        """Write the allowed next tokens: bit i % 32 of word i // 32 of `mask` is set if token i is allowed.

        `mask` is a writable row of ceil(vocabulary / 32) uint32 words. At least one bit is set.
        """

    def accept(self, token: int) -> None:
        """Advance by a generated token, which the mask allowed."""


# Returns a constraint of a compiled grammar in its initial state.
NewConstraint = abc.Callable[[], Constraint]


class Grammars(Protocol):
    """Compiles grammars in the background, and computes the masks of a step."""

    def compile(self, grammar: Grammar) -> Future[NewConstraint]:
        """Return the compiled grammar, at once if it was used before.

        The future raises RequestError, with the reason, if the grammar cannot be enforced.
        """

    def prepare(self) -> None:
        """Build in the background what the first grammar needs."""

    def fill_masks(self, constraints: abc.Sequence[Constraint], masks: memoryview) -> list[int]:
        """Fill the masks of several constraints, like `Constraint.fill_mask`, but only wait a short time.

        `masks` is a writable array of uint32 words: the row of the first constraint, then that of the next.

        Returns:
            The constraints whose masks are not known in time. Their rows are unchanged.
        """
