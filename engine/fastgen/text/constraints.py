"""Structured output: constraints of generations, and their token masks.

Implements the interfaces of `fastgen.core.constraint`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, cast

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
from fastgen.text.grammar_memory import MOST_BYTES, allocated_bytes, return_free_pages
from fastgen.text.large_stacks import large_stack_threads
from fastgen.text.tokenizer import Tokenizer

log = logging.getLogger("fastgen.grammar")

# Threads that compile: a large grammar does not hold up a small one.
_COMPILING_THREADS = 2


# Longest time that a step waits for masks. A sequence whose mask is not known then waits alone.
_WAIT_SECONDS = 0.03
# A grammar whose last mask took more processor time is slow: no step waits for its masks.
_SLOW_SECONDS = 0.02
# Threads for slow grammars, which yield to all others; and further ones for masks that turn out to be slow.
_SLOW_THREADS = 1
_SPARE_THREADS = 4
_YIELDING = 10
# Processor time that the masks of one generation may take beyond 0.05 s each.
_MASK_SECONDS = 0.05
_MOST_EXTRA_SECONDS = 2.0


class GrammarFactory:
    """Creates the constraints of one engine, and computes their masks: a `fastgen.core.constraint.Grammars`.

    Grammars are compiled and followed in threads with large stacks. Only the thread that calls `compile` touches the
    cache. The first grammar needs tables of the whole vocabulary, which take half a second to build. Half of that holds
    the interpreter's lock, so `prepare` builds them before there are requests.

    Together, grammars and their generations take at most `MOST_BYTES`. Beyond that, the cache is emptied, and the
    generation that took most processor time ends, then the next one: memory grows only while the library computes.

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
        self._mask_threads = large_stack_threads(num_threads + _SPARE_THREADS, "mask")
        self._slow_threads = large_stack_threads(_SLOW_THREADS, "slow-mask")
        self._num_mask_threads, self._num_all_threads = num_threads, num_threads + _SPARE_THREADS
        self._late: list[Future[None]] = []  # of earlier steps
        self._building = threading.Lock()
        self._built: llguidance.LLTokenizer | None = None
        self._kept: OrderedDict[Grammar, Future[_Compiled]] = OrderedDict()
        self._generations: weakref.WeakSet[GrammarConstraint] = weakref.WeakSet()
        self._other_bytes = 0  # allocated before there was a grammar

    def compile(self, grammar: Grammar) -> Future[NewConstraint]:
        """Return the compiled grammar, or the one that is being compiled; see `Grammars.compile`."""
        if grammar.kind == "tokens":
            tokens = Future[NewConstraint]()
            tokens.set_result(partial(TokenSet, grammar.token_ids))
            return tokens
        future = self._kept.pop(grammar, None)
        if future is None or (future.done() and (future.exception() is not None or future.result().shared.has_failed)):
            future = self._threads.submit(self._compile, grammar)
        self._kept[grammar] = future
        if len(self._kept) > GRAMMARS_KEPT:
            self._kept.popitem(last=False)
        return cast("Future[NewConstraint]", future)

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

    def _compile(self, grammar: Grammar) -> _Compiled:
        if not self._end_tokens:
            raise InvalidGrammar(grammar, "the model has no end-of-sequence token, so no match can end")
        tables, began = self._tables(), time.thread_time()
        matcher = compile_grammar(grammar, tables, limits())
        return _Compiled(matcher, _Shared(time.thread_time() - began), self._begin)

    def _begin(self, compiled: _Compiled) -> GrammarConstraint:
        constraint = GrammarConstraint(compiled.matcher.deep_copy(), compiled.shared, self._end_tokens)
        self._generations.add(constraint)
        self._bound_memory()
        return constraint

    def _bound_memory(self) -> None:
        """End a generation if grammars take too much memory."""
        if allocated_bytes() - self._other_bytes <= MOST_BYTES:
            return
        self._kept.clear()
        unfinished = [each for each in self._generations if each.end is None]
        if unfinished and allocated_bytes() - self._other_bytes > MOST_BYTES:
            max(unfinished, key=lambda each: each.seconds).give_up("all grammars together take too much memory")
        return_free_pages()

    def fill_masks(self, constraints: Sequence[Constraint], masks: memoryview) -> list[int]:
        """Write the masks of several constraints in parallel, without the GIL; see `Grammars.fill_masks`.

        Masks that take too long are finished in the background, for a later step. Those of a slow grammar are computed
        in a thread of their own from the beginning.
        """
        self._bound_memory()
        unknown = [each for each in constraints if isinstance(each, GrammarConstraint) and each.needs_mask]
        quick = []
        for each in unknown:
            if each.is_slow:
                each.is_pending = True
                self._slow_threads.submit(_find_slowly, weakref.ref(each))
            elif not each.is_blocked:
                quick.append(each)
        self._find(quick)
        width, late = len(masks) // len(constraints), []
        for row, constraint in enumerate(constraints):
            if constraint.is_pending or (isinstance(constraint, GrammarConstraint) and constraint.needs_mask):
                late.append(row)
            else:
                constraint.fill_mask(masks[row * width : (row + 1) * width])
        return late

    def _find(self, constraints: Sequence[GrammarConstraint]) -> None:
        """Compute masks, and wait for them a short time. Those that have not been begun by then are left out."""
        self._late = [finding for finding in self._late if not finding.done()]
        num_shares = min(len(constraints), self._num_mask_threads, self._num_all_threads - len(self._late))
        # Each thread takes every n-th constraint. The library releases the GIL while it computes.
        shares = [deque(constraints[first::num_shares]) for first in range(num_shares)]
        for constraint in constraints[: len(constraints) if shares else 0]:
            constraint.is_pending = True
        until = time.monotonic() + _WAIT_SECONDS
        for share, finding in [(share, self._mask_threads.submit(_find_all, share)) for share in shares]:
            try:
                finding.result(max(0.0, until - time.monotonic()))
            except TimeoutError:
                self._late.append(finding)
                for constraint in _drained(share):
                    constraint.is_pending = False

    def _tables(self) -> llguidance.LLTokenizer:
        """Return the tables of the vocabulary, which the first call builds."""
        with self._building:
            if self._built is None:
                tokenizer, size = self._load_tokenizer(), self._vocabulary_size
                tokens = [tokenizer.vocabulary.token_bytes(token) for token in range(size)]
                special = [token for token in sorted(tokenizer.special_token_ids) if token < size]
                encode = partial(tokenizer.encode, add_special_tokens=False)
                self._built = vocabulary_tables(tokens, special, sorted(self._end_tokens), encode)
                self._other_bytes = allocated_bytes()
            return self._built


def _drained(share: deque[GrammarConstraint]) -> Iterator[GrammarConstraint]:
    """Take constraints out of a share, which another thread may empty at the same time."""
    with suppress(IndexError):
        while True:
            yield share.popleft()


def _find_all(share: deque[GrammarConstraint]) -> None:
    for constraint in _drained(share):
        constraint.find_mask()


def _find_slowly(constraint: weakref.ref[GrammarConstraint]) -> None:
    """Compute a mask unless the request has ended meanwhile."""
    os.setpriority(os.PRIO_PROCESS, 0, _YIELDING)  # of this thread
    found = constraint()
    if found is not None:
        found.find_mask()


class _Shared:
    """What the generations of a grammar have in common: the library's lexer, whose states each of them adds to.

    Attributes:
        seconds: processor time that compiling took.
        last_seconds: processor time that the last mask took.
        has_failed: whether the lexer may have reached a limit. Then it fails for all further generations, too.
        computing: held while a generation computes. The library would wait for it with the interpreter's lock.
    """

    __slots__ = ("computing", "has_failed", "last_seconds", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.last_seconds = 0.0
        self.has_failed = False
        self.computing = threading.Lock()


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A compiled grammar. It begins a generation when it is called."""

    matcher: llguidance.LLMatcher  # in its initial state
    shared: _Shared
    begin: Callable[[_Compiled], GrammarConstraint]

    def __call__(self) -> GrammarConstraint:
        return self.begin(self)


class GrammarConstraint:
    """The state of one generation in its grammar: a `fastgen.core.constraint.Constraint`.

    A complete match allows only end tokens; a match that can end or continue also allows them. If the library fails or
    takes seconds, for example because the grammar is too ambiguous, only this request ends, with an error. Accepted
    tokens are consumed with the next mask, in a thread with a large stack.

    Attributes:
        matcher: the library's state; None after an error, which frees its memory.
        shared: what it has in common with other generations of the grammar.
        seconds: processor time that the grammar and the masks took.
    """

    __slots__ = (
        "__weakref__", "_accepted", "_end_tokens", "_extra_seconds", "_words", "end", "is_pending", "matcher",
        "seconds", "shared",
    )  # fmt: skip

    def __init__(self, matcher: llguidance.LLMatcher, shared: _Shared, end_tokens: frozenset[int]) -> None:
        self.matcher: llguidance.LLMatcher | None = matcher
        self.shared = shared
        self.seconds = shared.seconds
        self._end_tokens = end_tokens
        self._accepted: list[int] = []
        self._extra_seconds = 0.0
        self._words: bytes | None = None  # the next mask
        self.end: FinishReason | None = None
        self.is_pending = False

    @property
    def is_slow(self) -> bool:
        """Whether no step should wait for its next mask."""
        return self.shared.last_seconds > _SLOW_SECONDS

    @property
    def is_blocked(self) -> bool:
        """Whether another generation of the grammar computes its mask."""
        return self.shared.computing.locked()

    @property
    def needs_mask(self) -> bool:
        """Whether its next mask is unknown, and nobody computes it."""
        return not self.is_pending and self._words is None and self.end is None

    def find_mask(self) -> None:
        """Compute the next mask. Another thread may do so while the constraint is pending."""
        matcher = self.matcher
        if matcher is not None:
            try:
                with self.shared.computing:
                    fault = self._compute(matcher)
            except Exception as error:
                fault = f"{type(error).__name__}: {error}"
            if fault:
                self.give_up(fault)
        self.is_pending = False

    def _compute(self, matcher: llguidance.LLMatcher) -> str:
        """Find which tokens may follow; return what is wrong, if anything."""
        began = time.thread_time()
        matcher.consume_tokens(self._accepted)
        self._accepted = []
        self._words = matcher.compute_bitmask()
        seconds = self.shared.last_seconds = time.thread_time() - began
        self.seconds += seconds
        self._extra_seconds += max(0.0, seconds - _MASK_SECONDS)
        if matcher.is_error():
            self.shared.has_failed = True
            return summary(matcher.get_error())
        if not self._words.strip(b"\0"):
            return "no token may follow"
        if self._extra_seconds > _MOST_EXTRA_SECONDS:
            return "finding the tokens that may follow takes too long"
        return ""

    def give_up(self, fault: str) -> None:
        """End the generation with an error, and free its state."""
        log.error("a grammar could not be followed to its end: %s", fault)
        self.end = FinishReason.GRAMMAR
        self.matcher = None

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
