"""Structured output: what a grammar lets come next, token by token, by the library llguidance.

A grammar is checked in the server's process, where a bad one is answered with its fault, and followed in the engine's.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property

import llguidance

from fastgen.core.request import FinishReason, Grammar, RequestError
from fastgen.text.tokenizer import Tokenizer

log = logging.getLogger("fastgen.grammar")

# Between the parts of a JSON text. Unbounded, a small model may go on with white space for ever.
JSON_SPACE = r"[ \t\n\r]{0,20}"
# Compiled grammars that are kept: the requests of one application share a few.
_GRAMMARS_KEPT = 64

# What messages call each kind of grammar, and the field that clients give it in.
_NAMES = {
    "json_schema": ("the JSON schema", "response_format"),
    "json_object": ("the JSON object", "response_format"),
    "regex": ("the regular expression", "guided_regex"),
    "lark": ("the grammar", "guided_grammar"),
}


class GrammarFactory:
    """Makes the constraints of one engine.

    The first grammar pays for the tables of the whole vocabulary, about a second; engines without grammars never do.

    Args:
        load_tokenizer: called once, at the first grammar.
        vocabulary_size: of the model, whose logits may have more columns than the tokenizer has tokens.
        end_tokens: the model's end-of-sequence tokens.
    """

    def __init__(
        self, load_tokenizer: Callable[[], Tokenizer], vocabulary_size: int, end_tokens: Iterable[int]
    ) -> None:
        self._load_tokenizer = load_tokenizer
        self._vocabulary_size = vocabulary_size
        self._end_tokens = frozenset(end_tokens)
        self._kept: OrderedDict[Grammar, llguidance.LLMatcher] = OrderedDict()

    def __call__(self, grammar: Grammar) -> GrammarConstraint:
        """The state before the first token.

        Raises:
            RequestError: when the grammar cannot be followed; it names the fault.
        """
        if not self._end_tokens:
            raise _refusal(grammar, "the model names no end-of-sequence token, so that no match could end")
        matcher = self._kept.pop(grammar, None)
        if matcher is None:
            matcher = _compile(grammar, self._tokenizer)
        self._kept[grammar] = matcher
        if len(self._kept) > _GRAMMARS_KEPT:
            self._kept.popitem(last=False)
        return GrammarConstraint(matcher.deep_copy(), self._end_tokens)

    @cached_property
    def _tokenizer(self) -> llguidance.LLTokenizer:
        tokenizer = self._load_tokenizer()
        size = self._vocabulary_size
        tokens = [tokenizer.vocabulary.token_bytes(token) for token in range(size)]
        special = [token for token in sorted(tokenizer.special_token_ids) if token < size]

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        return _describe(tokens, special, sorted(self._end_tokens), encode)


class GrammarConstraint:
    """A generation within its grammar: a `fastgen.core.constraint.Constraint`.

    A match that is complete allows only the model's end tokens; one that may end here or go on allows them too. Where
    the library gives up (a grammar may turn out too ambiguous to follow), the one request ends as aborted.
    """

    __slots__ = ("_end_tokens", "_matcher", "end")

    def __init__(self, matcher: llguidance.LLMatcher, end_tokens: frozenset[int]) -> None:
        self._matcher = matcher
        self._end_tokens = end_tokens
        self.end: FinishReason | None = None

    def fill_mask(self, mask: memoryview) -> None:
        """Writes which tokens may come next, as `Constraint.fill_mask` says."""
        allowed = mask.cast("B")
        words = self._matcher.compute_bitmask()
        if not self._matcher.is_error():
            # The library's rows may be a word longer than the vocabulary needs.
            allowed[:] = words[: len(allowed)]
            return
        self._give_up()
        allowed[:] = bytes(len(allowed))
        for token in self._end_tokens:
            allowed[token // 8] |= 1 << token % 8

    def accept(self, token: int) -> None:
        """Takes note of a generated token."""
        if self.end is not None:
            return
        if not self._matcher.consume_token(token):
            self._give_up()
        elif token in self._end_tokens:
            self.end = FinishReason.STOP

    def _give_up(self) -> None:
        log.error("a grammar could not be followed to its end: %s", _summary(self._matcher.get_error()))
        self.end = FinishReason.ABORT


def check_grammar(grammar: Grammar, tokenizer: Tokenizer) -> None:
    """Checks that a grammar can be followed, without the tables of a whole vocabulary: takes milliseconds.

    The library lets go of Python's lock meanwhile: call it in a thread where the grammar is large.

    Raises:
        RequestError: it names the fault.
    """
    # Every single byte, and the special tokens, which a grammar in Lark's syntax may name.
    special = [tokenizer.vocabulary.token_bytes(token) for token in sorted(tokenizer.special_token_ids)]
    tokens = [*(bytes([byte]) for byte in range(256)), b"<|end of match|>", *special]
    _compile(grammar, _describe(tokens, list(range(256, len(tokens))), [256], lambda text: list(text.encode())))


def _compile(grammar: Grammar, tokenizer: llguidance.LLTokenizer) -> llguidance.LLMatcher:
    matcher = llguidance.LLMatcher(
        tokenizer, _serialised(grammar), log_level=0, limits=llguidance.LLParserLimits(verbose_errors=False)
    )
    fault = matcher.get_error()
    if not fault:
        # Some faults show at the first token only: a grammar that matches nothing.
        probe = matcher.deep_copy()
        some = any(probe.compute_bitmask())
        fault = "" if some and not probe.is_error() else "nothing can match it"
    if fault:
        raise _refusal(grammar, _summary(fault))
    return matcher


def _serialised(grammar: Grammar) -> str:
    """The grammar as llguidance reads it."""
    try:
        grammar.text.encode()
    except UnicodeEncodeError:
        raise _refusal(grammar, "it has half a surrogate pair, which is no character") from None
    if grammar.kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "lark":
        return llguidance.LLMatcher.grammar_from_lark(grammar.text)
    schema = grammar.text if grammar.kind == "json_schema" else '{"type": "object"}'
    try:
        # With defaults given, the text is parsed here, not pasted.
        return llguidance.LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": JSON_SPACE})
    except ValueError as error:
        raise _refusal(grammar, str(error)) from None


def _describe(
    tokens: list[bytes], special: list[int], end_tokens: list[int], encode: Callable[[str], list[int]]
) -> llguidance.LLTokenizer:
    """A vocabulary as llguidance wants to know it.

    Where only one text can follow, it asks for the tokens that the model is used to, and allows only these. `encode`
    may put a space before the first word, and it takes special tokens written out for such: then the longest tokens
    stand in.
    """
    marks = frozenset(special)
    text_tokens = {spelling: token for token, spelling in enumerate(tokens) if spelling and token not in marks}
    longest = max(map(len, text_tokens))

    def encode_exactly(text: bytes) -> list[int]:
        ids = encode(text.decode(errors="replace"))
        if b"".join(tokens[token] for token in ids) == text and marks.isdisjoint(ids):
            return ids
        return _encode_greedily(text, text_tokens, longest)

    return llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(_Vocabulary(tokens, special, end_tokens[0], encode_exactly)), eos_token=end_tokens
    )


def _encode_greedily(text: bytes, tokens: Mapping[bytes, int], longest: int) -> list[int]:
    """`text` in the longest of `tokens` that fit, as far as there are such; the longest of all has `longest` bytes."""
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
    """What llguidance's wrapper of a tokenizer reads."""

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
    """One line of the library's words, which may draw the place of the fault below them."""
    lines = [line.strip() for line in fault.splitlines() if line.strip()]
    said = next((line for line in lines if line.startswith("error: ")), lines[0] if lines else "unknown fault")
    return said.removeprefix("error: ")[:300]


def _refusal(grammar: Grammar, fault: str) -> RequestError:
    name, param = _NAMES[grammar.kind]
    return RequestError(f"{name} cannot be used: {fault}", param)
