"""The compiled grammars of an engine."""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import llguidance

from fastgen.core.constraint import Constraint
from fastgen.core.sampling_params import Grammar
from fastgen.text.grammars.allocations import allocated_bytes, return_free_pages
from fastgen.text.grammars.compiler import InvalidGrammar, compile_grammar, vocabulary_tables
from fastgen.text.grammars.large_stacks import large_stack_threads
from fastgen.text.grammars.limits import GRAMMARS_KEPT, MOST_BYTES, limits
from fastgen.text.grammars.masks import MaskThreads
from fastgen.text.grammars.matcher import GrammarMatcher, SharedLexer, TokenSet
from fastgen.text.tokenizer import Tokenizer

# Threads that compile: a large grammar does not hold up a small one.
_COMPILING_THREADS = 2


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A compiled grammar. Calling it returns the constraint of a new sequence."""

    begin: Callable[[], Constraint]
    lexer: SharedLexer

    def __call__(self) -> Constraint:
        return self.begin()


class CompiledGrammars:
    """Compiles the grammars of an engine in the background, keeps them, and computes the masks of their sequences.

    Grammars are compiled and followed in threads with large stacks. Only the thread that calls `compile` touches the
    cache. The first grammar needs tables of the whole vocabulary, which take half a second to build. Half of that holds
    the interpreter's lock, so `prepare` builds them before there are requests.

    Together, grammars and their sequences take at most `MOST_BYTES`. Beyond that, the cache is emptied and, if that is
    not enough, the sequence that took most processor time ends. This is checked before each computation of masks and
    when a sequence begins: memory grows only while the library computes.

    Args:
        load_tokenizer: called once, by `prepare` or for the first grammar, in a thread.
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
        self._masks = MaskThreads(num_threads)
        self._building = threading.Lock()
        self._built: llguidance.LLTokenizer | None = None
        self._kept: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()
        self._matchers: weakref.WeakSet[GrammarMatcher] = weakref.WeakSet()
        self._other_bytes = allocated_bytes()  # before there was a grammar

    def compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """Return the future of the compiled grammar: from the cache, or of a new compilation.

        It raises RequestError, with the reason, if the grammar cannot be enforced.
        """
        future = self._kept.pop(grammar, None)
        if future is None or (future.done() and (future.exception() is not None or future.result().lexer.has_failed)):
            future = self._threads.submit(self._compile, grammar)
        self._kept[grammar] = future
        if len(self._kept) > GRAMMARS_KEPT:
            self._kept.popitem(last=False)
        return future

    def prepare(self) -> None:
        """Build the tables in a thread, unless they have been built or the model has no end token."""
        if self._end_tokens:
            self._threads.submit(self._tables)

    def __call__(self, grammar: Grammar) -> Constraint:
        """Return a constraint in its initial state, after the grammar has been compiled.

        Raises:
            RequestError: if the grammar cannot be enforced, with the reason.
        """
        return self.compile(grammar).result()()

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        if grammar.kind == "tokens":
            return CompiledGrammar(partial(TokenSet, grammar.token_ids), SharedLexer(0.0))
        if not self._end_tokens:
            raise InvalidGrammar(grammar, "the model has no end-of-sequence token, so no match can end")
        tables, began = self._tables(), time.thread_time()
        matcher = compile_grammar(grammar, tables, limits())
        lexer = SharedLexer(time.thread_time() - began)
        return CompiledGrammar(partial(self._begin, matcher, lexer), lexer)

    def _begin(self, initial: llguidance.LLMatcher, lexer: SharedLexer) -> GrammarMatcher:
        matcher = GrammarMatcher(initial.deep_copy(), lexer, self._end_tokens)
        self._matchers.add(matcher)
        self._bound_memory()
        return matcher

    def _bound_memory(self) -> None:
        """If grammars take too much memory, empty the cache, and end a sequence if that is not enough."""
        if not self._matchers or allocated_bytes() - self._other_bytes <= MOST_BYTES:
            return
        self._kept.clear()
        unfinished = [each for each in self._matchers if each.end is None]
        if unfinished and allocated_bytes() - self._other_bytes > MOST_BYTES:
            max(unfinished, key=lambda each: each.seconds).give_up("all grammars together take too much memory")
        return_free_pages()

    def fill_masks(self, constraints: Sequence[Constraint], masks: memoryview) -> list[int]:
        """Write the masks of a step's constraints; return the indices of late ones. See `MaskThreads.fill`."""
        self._bound_memory()
        return self._masks.fill(constraints, masks)

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
