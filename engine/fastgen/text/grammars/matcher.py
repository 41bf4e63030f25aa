"""The state of one sequence in its grammar."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from typing import ClassVar

import llguidance

from fastgen.core.request import FinishReason
from fastgen.text.grammars.compiler import summary
from fastgen.text.grammars.limits import MASK_SECONDS, MOST_EXTRA_SECONDS, SLOW_SECONDS

log = logging.getLogger("fastgen.grammar")


class SharedLexer:
    """What the sequences of a grammar have in common: the library's lexer, whose states each of them adds to.

    Attributes:
        seconds: processor time that compiling took.
        last_seconds: processor time that the last mask took.
        has_failed: whether the lexer may have reached a limit. Then it fails for all further sequences, too.
        computing: held while a sequence computes. The library would wait for it with the interpreter's lock.
    """

    __slots__ = ("computing", "has_failed", "last_seconds", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.last_seconds = 0.0
        self.has_failed = False
        self.computing = threading.Lock()


class GrammarMatcher:
    """The state of one sequence in its grammar: a `fastgen.core.constraint.Constraint`.

    A complete match allows only end tokens; a match that can end or continue also allows them. If the library fails or
    takes seconds, for example because the grammar is too ambiguous, only this request ends, with an error. Accepted
    tokens are consumed with the next mask, in a thread with a large stack.

    Attributes:
        state: the library's state; None after an error, which frees its memory.
        lexer: what it has in common with other sequences of the grammar.
        seconds: processor time that the grammar and the masks took.
    """

    __slots__ = (
        "__weakref__", "_accepted", "_end_tokens", "_extra_seconds", "_words", "end", "is_pending", "lexer",
        "seconds", "state",
    )  # fmt: skip

    def __init__(self, state: llguidance.LLMatcher, lexer: SharedLexer, end_tokens: frozenset[int]) -> None:
        self.state: llguidance.LLMatcher | None = state
        self.lexer = lexer
        self.seconds = lexer.seconds
        self._end_tokens = end_tokens
        self._accepted: list[int] = []
        self._extra_seconds = 0.0
        self._words: bytes | None = None  # the next mask
        self.end: FinishReason | None = None
        self.is_pending = False

    @property
    def is_slow(self) -> bool:
        """Whether no step should wait for its next mask."""
        return self.lexer.last_seconds > SLOW_SECONDS

    @property
    def is_blocked(self) -> bool:
        """Whether another sequence of the grammar is computing a mask."""
        return self.lexer.computing.locked()

    @property
    def needs_mask(self) -> bool:
        """Whether the generation continues, its next mask is unknown, and no thread computes it."""
        return not self.is_pending and self._words is None and self.end is None

    def find_mask(self) -> None:
        """Compute the next mask. Another thread may do so while the constraint is pending."""
        state = self.state
        if state is not None:
            try:
                with self.lexer.computing:
                    fault = self._compute(state)
            except Exception as error:
                fault = f"{type(error).__name__}: {error}"
            if fault:
                self.give_up(fault)
        self.is_pending = False

    def _compute(self, state: llguidance.LLMatcher) -> str:
        """Find which tokens may follow; return what is wrong, if anything."""
        began = time.thread_time()
        state.consume_tokens(self._accepted)
        self._accepted = []
        self._words = state.compute_bitmask()
        seconds = self.lexer.last_seconds = time.thread_time() - began
        self.seconds += seconds
        self._extra_seconds += max(0.0, seconds - MASK_SECONDS)
        if state.is_error():
            self.lexer.has_failed = True
            return summary(state.get_error())
        if not self._words.strip(b"\0"):
            return "no token may follow"
        if self._extra_seconds > MOST_EXTRA_SECONDS:
            return "finding the tokens that may follow takes too long"
        return ""

    def give_up(self, fault: str) -> None:
        """End the generation with an error, and free its state."""
        log.error("a grammar could not be followed to its end: %s", fault)
        self.end = FinishReason.GRAMMAR
        self.state = None

    def fill_mask(self, mask: memoryview) -> None:
        """Write the mask of allowed next tokens; see `Constraint.fill_mask`."""
        allowed = mask.cast("B")
        if self.needs_mask:
            self.find_mask()
        if self.end is None and self._words is not None:
            # llguidance's rows may be one word longer than the vocabulary needs.
            allowed[:] = self._words[: len(allowed)]
            return
        allowed[:] = bytes(len(allowed))
        for token in self._end_tokens:
            allowed[token // 8] |= 1 << token % 8

    def accept(self, token: int) -> None:
        """Advance by a generated token."""
        if self.end is not None:
            return
        self._words = None
        if token in self._end_tokens:
            self.end = FinishReason.STOP
        else:
            self._accepted.append(token)


class TokenSet:
    """Constraint that allows the same tokens at every position.

    It implements `fastgen.core.constraint.Constraint` and never ends a generation.
    """

    __slots__ = ("_allowed",)
    end: ClassVar[FinishReason | None] = None
    is_pending: ClassVar[bool] = False

    def __init__(self, token_ids: Iterable[int]) -> None:
        bits = 0
        for token in token_ids:
            bits |= 1 << token
        self._allowed = bits

    def fill_mask(self, mask: memoryview) -> None:
        """Write the mask of allowed next tokens; see `Constraint.fill_mask`."""
        mask.cast("B")[:] = self._allowed.to_bytes(mask.nbytes, "little")

    def accept(self, token: int) -> None:
        """Advance by a generated token, which changes nothing."""
