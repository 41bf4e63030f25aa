"""Structured output: token masks of grammars, computed by llguidance.

The server process checks a grammar and rejects an invalid one; the engine process enforces it.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from typing import ClassVar

import llguidance

from fastgen.core.constraint import Constraint, NewConstraint
from fastgen.core.request import FinishReason, Grammar, RequestError
from fastgen.text.tokenizer import Tokenizer

log = logging.getLogger("fastgen.grammar")

# White space between JSON tokens. Without a bound, a small model may emit it forever.
JSON_SPACE = r"[ \t\n\r]{0,20}"
# Compiled grammars to cache: the requests of one application share a few.
GRAMMARS_KEPT = 64
# Threads that compile: a large grammar does not hold up a small one.
_COMPILING_THREADS = 2
# Most bytes of a grammar's text. Together with `_LIMITS` it bounds the time to compile it; see `docs/decisions/022`.
MOST_GRAMMAR_BYTES = 1 << 16
_LIMITS = llguidance.LLParserLimits(verbose_errors=False, max_grammar_size=100_000, max_lexer_states=100_000)

# Name of each kind of grammar in messages, and the request field that holds it.
_NAMES = {
    "json_schema": ("the JSON schema", "response_format"),
    "json_object": ("the JSON object", "response_format"),
    "regex": ("the regular expression", "guided_regex"),
    "lark": ("the grammar", "guided_grammar"),
}


def escaped(text: str) -> str:
    """Return a text in a regular expression between slashes, as Lark grammars have them."""
    return "".join(f"\\{c}" if c in ".|()[]{}*+?^$/\\" else c for c in text)


class GrammarFactory:
    """Create the constraints of one engine, and compute their masks.

    Implements `fastgen.core.constraint.Grammars`. The first grammar needs tables of the whole vocabulary. Building them
    takes half a second. Half of that holds the interpreter's lock, in two pieces, so `prepare` builds them before there
    are requests.

    Grammars are compiled in threads. Only the thread that calls `compile` touches the cache.

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
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(_COMPILING_THREADS, "grammar")
        self._building = threading.Lock()
        self._kept: OrderedDict[Grammar, Future[NewConstraint]] = OrderedDict()

    def compile(self, grammar: Grammar) -> Future[NewConstraint]:
        """Return the compiled grammar, or the one that is being compiled; see `Grammars.compile`."""
        if not self._end_tokens and grammar.kind != "tokens":
            raise _refusal(grammar, "the model has no end-of-sequence token, so no match can end")
        compiled = self._kept.pop(grammar, None)
        if compiled is None or (compiled.done() and compiled.exception() is not None):
            compiled = self._threads.submit(self._compile, grammar)
        self._kept[grammar] = compiled
        if len(self._kept) > GRAMMARS_KEPT:
            self._kept.popitem(last=False)
        return compiled

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
        return partial(_start, _compile(grammar, self._tables()), self._end_tokens)

    def _tables(self) -> llguidance.LLTokenizer:
        with self._building:
            return self._tokenizer

    def fill_masks(self, constraints: Sequence[Constraint], masks: memoryview) -> None:
        """Write the masks of several constraints in parallel, without the GIL; see `Grammars.fill_masks`."""
        own = [constraint for constraint in constraints if isinstance(constraint, GrammarConstraint | TokenSet)]
        assert len(own) == len(constraints), "a constraint is not of this factory"
        matched = [(row, constraint) for row, constraint in enumerate(own) if isinstance(constraint, GrammarConstraint)]
        parallel = self._num_threads > 1 and len(matched) > 1
        if parallel:
            matchers = [(constraint.matcher, row) for row, constraint in matched]
            start = ctypes.addressof(ctypes.c_char.from_buffer(masks))
            self._executor.unsafe_compute_mask_ptr(matchers, start, masks.nbytes // len(own), len(own))
        width = len(masks) // len(own)
        for row, constraint in enumerate(own):
            if not parallel or isinstance(constraint, TokenSet) or constraint.matcher.is_error():
                constraint.fill_mask(masks[row * width : (row + 1) * width])

    @cached_property
    def _executor(self) -> llguidance.LLExecutor:
        return llguidance.LLExecutor(self._num_threads)

    @cached_property
    def _tokenizer(self) -> llguidance.LLTokenizer:
        tokenizer = self._load_tokenizer()
        size = self._vocabulary_size
        tokens = [tokenizer.vocabulary.token_bytes(token) for token in range(size)]
        special = [token for token in sorted(tokenizer.special_token_ids) if token < size]

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        return _describe(tokens, special, sorted(self._end_tokens), encode)


def _start(matcher: llguidance.LLMatcher, end_tokens: frozenset[int]) -> GrammarConstraint:
    return GrammarConstraint(matcher.deep_copy(), end_tokens)


class GrammarConstraint:
    """The state of one generation in its grammar: a `fastgen.core.constraint.Constraint`.

    A complete match allows only end tokens; a match that can end or continue also allows them. If the library fails,
    for example because the grammar is too ambiguous, only this request is aborted.
    """

    __slots__ = ("_end_tokens", "end", "matcher")

    def __init__(self, matcher: llguidance.LLMatcher, end_tokens: frozenset[int]) -> None:
        self.matcher = matcher
        self._end_tokens = end_tokens
        self.end: FinishReason | None = None

    def fill_mask(self, mask: memoryview) -> None:
        """Write the mask of allowed next tokens; see `Constraint.fill_mask`."""
        allowed = mask.cast("B")
        words = self.matcher.compute_bitmask()
        if not self.matcher.is_error():
            # llguidance's rows may be one word longer than the vocabulary needs.
            allowed[:] = words[: len(allowed)]
            return
        self._give_up()
        allowed[:] = bytes(len(allowed))
        for token in self._end_tokens:
            allowed[token // 8] |= 1 << token % 8

    def accept(self, token: int) -> None:
        """Advance by a generated token."""
        if self.end is not None:
            return
        if not self.matcher.consume_token(token):
            self._give_up()
        elif token in self._end_tokens:
            self.end = FinishReason.STOP

    def _give_up(self) -> None:
        log.error("a grammar could not be followed to its end: %s", _summary(self.matcher.get_error()))
        self.end = FinishReason.ABORT


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


def check_grammar(grammar: Grammar, tokenizer: Tokenizer) -> None:
    """Check a grammar without building tables for the whole vocabulary; takes milliseconds.

    The library releases the GIL, so large grammars can be checked in a thread.

    Raises:
        RequestError: if the grammar is invalid, with the reason.
    """
    if grammar.kind == "tokens":
        return  # the engine checks the ids against the model's vocabulary
    num_bytes = len(grammar.text.encode(errors="surrogatepass"))
    if num_bytes > MOST_GRAMMAR_BYTES:
        raise _refusal(grammar, f"it has {num_bytes} bytes, and at most {MOST_GRAMMAR_BYTES} are accepted; shorten it")
    # All single bytes, and the special tokens, which a Lark grammar can name.
    special = [tokenizer.vocabulary.token_bytes(token) for token in sorted(tokenizer.special_token_ids)]
    tokens = [*(bytes([byte]) for byte in range(256)), b"<|end of match|>", *special]
    _compile(grammar, _describe(tokens, list(range(256, len(tokens))), [256], lambda text: list(text.encode())))


def _compile(grammar: Grammar, tokenizer: llguidance.LLTokenizer) -> llguidance.LLMatcher:
    matcher = llguidance.LLMatcher(tokenizer, _serialised(grammar), log_level=0, limits=_LIMITS)
    fault = matcher.get_error()
    if not fault:
        # Some errors only show at the first token, for example a grammar that matches nothing.
        probe = matcher.deep_copy()
        some = any(probe.compute_bitmask())
        fault = "" if some and not probe.is_error() else "nothing can match it"
    if fault:
        raise _refusal(grammar, _summary(fault))
    return matcher


def _serialised(grammar: Grammar) -> str:
    """Serialize the grammar for llguidance."""
    try:
        grammar.text.encode()
    except UnicodeEncodeError:
        raise _refusal(grammar, "it contains a lone surrogate, which is not a character") from None
    if grammar.kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "lark":
        return llguidance.LLMatcher.grammar_from_lark(grammar.text)
    schema = grammar.text if grammar.kind == "json_schema" else '{"type": "object"}'
    try:
        # With defaults, llguidance parses the text here instead of pasting it.
        return llguidance.LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": JSON_SPACE})
    except ValueError as error:
        raise _refusal(grammar, str(error)) from None


def _describe(
    tokens: list[bytes], special: list[int], end_tokens: list[int], encode: Callable[[str], list[int]]
) -> llguidance.LLTokenizer:
    """Describe a vocabulary for llguidance.

    If only one text can follow, llguidance encodes it and allows only these tokens. `encode` may add a space before the
    first word and parses special tokens in text; in these cases the longest matching tokens are used instead.
    """
    marks = frozenset(special)
    text_tokens = {spelling: token for token, spelling in enumerate(tokens) if spelling and token not in marks}
    longest = max(map(len, text_tokens))

    def encode_exactly(text: bytes) -> list[int]:
        ids = encode(text.decode(errors="replace"))
        if b"".join(tokens[token] for token in ids) == text and marks.isdisjoint(ids):
            return ids
        return _encode_greedily(text, text_tokens, longest)

    wrapper = llguidance.TokenizerWrapper(_Vocabulary(tokens, special, end_tokens[0], encode_exactly))
    # In two calls, because each holds the interpreter's lock: other threads run in between.
    trie = llguidance.LLTokenizer(wrapper, eos_token=end_tokens, slices=[])
    return trie.with_slices(llguidance.LLTokenizer.general_slices())


def _encode_greedily(text: bytes, tokens: Mapping[bytes, int], longest: int) -> list[int]:
    """Encode `text` greedily with the longest matching `tokens`, of at most `longest` bytes."""
    ids, start = [], 0
    while start < len(text):
        pieces = (text[start : start + length] for length in range(min(longest, len(text) - start), 0, -1))
        piece = next((piece for piece in pieces if piece in tokens), None)
        if piece is None:
            break
        ids.append(tokens[piece])
        start += len(piece)
    return ids


class _Vocabulary:
    """The tokenizer attributes that llguidance reads."""

    def __init__(
        self, tokens: list[bytes], special: list[int], end_token: int, encode: Callable[[bytes], list[int]]
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = end_token
        self.bos_token_id = None
        self._encode = encode

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text)


def _summary(fault: str) -> str:
    """Return the first line of llguidance's message, which may continue with a drawing."""
    lines = [line.strip() for line in fault.splitlines() if line.strip()]
    said = next((line for line in lines if line.startswith("error: ")), lines[0] if lines else "unknown fault")
    return said.removeprefix("error: ")[:300]


def _refusal(grammar: Grammar, fault: str) -> RequestError:
    name, param = _NAMES[grammar.kind]
    return RequestError(f"{name} cannot be used: {fault}", param)
