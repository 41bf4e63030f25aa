"""Structured output: constraints of generations, and their token masks.

Implements the interfaces of `fastgen.core.constraint`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import ClassVar

import llguidance

from fastgen.core.constraint import Constraint, NewConstraint
from fastgen.core.request import FinishReason, Grammar
from fastgen.text.grammar import (
    GRAMMARS_KEPT,
    InvalidGrammar,
    compile_grammar,
    limits,
    summary,
    vocabulary_tables,
)
from fastgen.text.large_stacks import large_stack_threads
from fastgen.text.tokenizer import Tokenizer

log = logging.getLogger("fastgen.grammar")

# Threads that compile: a large grammar does not hold up a small one.
_COMPILING_THREADS = 2


# Processor time that a mask may take, with the token before it; and the time beyond it that all masks of one generation
# may take. All other generations wait meanwhile.
_MASK_SECONDS = 0.05
_MOST_EXTRA_SECONDS = 1.0


class GrammarFactory:
    """Creates the constraints of one engine, and computes their masks: a `fastgen.core.constraint.Grammars`.

    Grammars are compiled and followed in threads with large stacks. Only the thread that calls `compile` touches the
    cache. The first grammar needs tables of the whole vocabulary, which take half a second to build. Half of that holds
    the interpreter's lock, so `prepare` builds them before there are requests.

    Args:
        load_tokenizer: called once, at the first grammar, in a thread.
        vocabulary_size: number of columns of the logits, which may exceed the number of tokens.
        end_tokens: the model's end-of-sequence tokens.
        num_threads: threads that compute the masks of a step.
    """

    def __init__(
        self,
        load_tokenizer: Callable[[], Tokenizer],
        vocabulary_size: int,
        end_tokens: Iterable[int],
        *,
        num_threads: int = 1,
    ) -> None:
        self._load_tokenizer = load_tokenizer
        self._vocabulary_size = vocabulary_size
        self._end_tokens = frozenset(end_tokens)
        self._threads = large_stack_threads(_COMPILING_THREADS, "grammar")
        self._mask_threads = large_stack_threads(num_threads, "mask")
        self._num_mask_threads = num_threads
        self._building = threading.Lock()
        self._built: llguidance.LLTokenizer | None = None
        self._kept: OrderedDict[Grammar, Future[NewConstraint]] = OrderedDict()

    def compile(self, grammar: Grammar) -> Future[NewConstraint]:
        """Return the compiled grammar, or the one that is being compiled; see `Grammars.compile`."""
        if not self._end_tokens and grammar.kind != "tokens":
            raise InvalidGrammar(grammar, "the model has no end-of-sequence token, so no match can end")
        future = self._kept.pop(grammar, None)
        if future is None or (future.done() and future.exception() is not None):
            future = self._threads.submit(self._compile, grammar)
        self._kept[grammar] = future
        if len(self._kept) > GRAMMARS_KEPT:
            self._kept.popitem(last=False)
        return future

    def prepare(self) -> None:
        """Build the tables in a thread, unless they have been built."""
        if self._end_tokens:
            self._threads.submit(self._tables)

    def __call__(self, grammar: Grammar) -> Constraint:
        """Return a constraint in its initial state, after the grammar has been compiled.

        Raises:
            RequestError: if the grammar cannot be enforced, with the reason.
        """
        return self.compile(grammar).result()()

    def _compile(self, grammar: Grammar) -> NewConstraint:
        if grammar.kind == "tokens":
            return partial(TokenSet, grammar.token_ids)
        matcher = compile_grammar(grammar, self._tables(), limits())
        return lambda: GrammarConstraint(matcher.deep_copy(), self._end_tokens)

    def fill_masks(self, constraints: Sequence[Constraint], masks: memoryview) -> None:
        """Write the masks of several constraints in parallel, without the GIL; see `Grammars.fill_masks`."""
        width = len(masks) // len(constraints)
        rows = [(constraint, masks[row * width : (row + 1) * width]) for row, constraint in enumerate(constraints)]
        # Each thread takes every n-th row. The library releases the GIL while it computes.
        shares = [rows[first :: self._num_mask_threads] for first in range(min(len(rows), self._num_mask_threads))]
        for filling in [self._mask_threads.submit(_fill, share) for share in shares]:
            filling.result()

    def _tables(self) -> llguidance.LLTokenizer:
        """Return the tables of the vocabulary, which the first call builds."""
        with self._building:
            if self._built is None:
                tokenizer, size = self._load_tokenizer(), self._vocabulary_size
                tokens = [tokenizer.vocabulary.token_bytes(token) for token in range(size)]
                special = [token for token in sorted(tokenizer.special_token_ids) if token < size]
                encode = partial(tokenizer.encode, add_special_tokens=False)
                self._built = vocabulary_tables(tokens, special, sorted(self._end_tokens), encode)
            return self._built


def _fill(rows: Sequence[tuple[Constraint, memoryview]]) -> None:
    for constraint, mask in rows:
        constraint.fill_mask(mask)


class GrammarConstraint:
    """The state of one generation in its grammar: a `fastgen.core.constraint.Constraint`.

    A complete match allows only end tokens; a match that can end or continue also allows them. If the library fails or
    takes seconds, for example because the grammar is too ambiguous, only this request is aborted. Accepted tokens are
    consumed with the next mask, in a thread with a large stack.
    """

    __slots__ = ("_accepted", "_end_tokens", "_extra_seconds", "end", "matcher")

    def __init__(self, matcher: llguidance.LLMatcher, end_tokens: frozenset[int]) -> None:
        self.matcher = matcher
        self._end_tokens = end_tokens
        self._accepted: list[int] = []
        self._extra_seconds = 0.0
        self.end: FinishReason | None = None

    def fill_mask(self, mask: memoryview) -> None:
        """Write the mask of allowed next tokens; see `Constraint.fill_mask`."""
        allowed = mask.cast("B")
        fault = "" if self.end is None else "it has ended"
        if not fault:
            began = time.thread_time()
            self.matcher.consume_tokens(self._accepted)
            self._accepted = []
            words = self.matcher.compute_bitmask()
            self._extra_seconds += max(0.0, time.thread_time() - began - _MASK_SECONDS)
            if self.matcher.is_error():
                fault = summary(self.matcher.get_error())
            elif self._extra_seconds > _MOST_EXTRA_SECONDS:
                fault = "finding the tokens that may follow takes too long"
        if not fault:
            # llguidance's rows may be one word longer than the vocabulary needs.
            allowed[:] = words[: len(allowed)]
            return
        if self.end is None:
            log.error("a grammar could not be followed to its end: %s", fault)
            self.end = FinishReason.ABORT
        allowed[:] = bytes(len(allowed))
        for token in self._end_tokens:
            allowed[token // 8] |= 1 << token % 8

    def accept(self, token: int) -> None:
        """Advance by a generated token."""
        if self.end is not None:
            return
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
