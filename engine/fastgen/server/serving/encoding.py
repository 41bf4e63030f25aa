"""Encode client text without blocking the event loop.

Text that cannot fit is rejected before it is encoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from fastgen.core.request_error import RequestError
from fastgen.text.guarded_encoding import GuardedEncoder
from fastgen.text.tokenizer import Tokenizer
from fastgen.text.vocabulary import Spelling

# Encoding this many characters takes about as long as handing them to a thread.
_INLINE_CHARACTERS = 4096
# Encoding this many characters takes a few dozen milliseconds.
_LONG_CHARACTERS = 1 << 16
# Encoding occupies cores that belong to the engine and the event loop, so it gets two threads however many requests
# arrive. One is for long texts, which others do not wait for.
_SHORT, _LONG = ThreadPoolExecutor(1, "encode"), ThreadPoolExecutor(1, "encode-long")
# A normalizer may shrink the text: a composed character takes down to a third of the bytes of the decomposed one.
_NORMALIZER_FACTOR = 4


class PromptSizeLimit:
    """Upper bound on the bytes of a prompt: those of the longest token, times the model's length in tokens.

    It is four times as high if a normalizer may shrink the text. Encoding ten megabytes would occupy a core for half a
    minute, so longer text is rejected without encoding it.
    """

    def __init__(self, tokenizer: Tokenizer, max_model_length: int) -> None:
        tokens = tokenizer.backend.get_vocab(with_added_tokens=True)
        is_byte_level = tokenizer.vocabulary.spelling is Spelling.BYTE_LEVEL  # each character stands for one byte
        longest = max(len(token) if is_byte_level else len(token.encode()) for token in tokens)
        factor = 1 if tokenizer.backend.normalizer is None else _NORMALIZER_FACTOR
        self._max_model_length = max_model_length
        self._max_bytes = max_model_length * longest * factor

    def check(self, text: str, param: str) -> None:
        """Raise RequestError for `param` if the text is too long for the model."""
        if len(text) <= self._max_bytes // 4:  # UTF-8 takes at most four bytes per character
            return
        num_bytes = len(text.encode(errors="surrogatepass"))
        if num_bytes > self._max_bytes:
            raise RequestError(
                f"{param}: {num_bytes} bytes of text cannot fit in the model's {self._max_model_length} tokens; "
                "shorten it",
                param,
            )


async def encode(tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
    """Return the token ids of each text.

    Texts with `_INLINE_CHARACTERS` or more in all are encoded in a thread, in groups of at most `_LONG_CHARACTERS`, so
    that requests take turns. A longer text is a group of its own, in a second thread. A cancellation takes effect after
    the current group.
    """
    if sum(map(len, texts)) < _INLINE_CHARACTERS:
        return [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]
    loop, encoded = asyncio.get_running_loop(), list[list[int]]()
    for group in _groups(texts):
        thread = _LONG if sum(map(len, group)) > _LONG_CHARACTERS else _SHORT
        encode_group = partial(tokenizer.encode_unlocked, group, add_special_tokens=add_special_tokens)
        encoded += await loop.run_in_executor(thread, encode_group)
    return encoded


def _groups(texts: Sequence[str]) -> Iterator[list[str]]:
    """Divide texts into groups of at most `_LONG_CHARACTERS`, unless a text is longer."""
    group, size = list[str](), 0
    for text in texts:
        if group and size + len(text) > _LONG_CHARACTERS:
            yield group
            group, size = [], 0
        group.append(text)
        size += len(text)
    yield group


async def encode_rendered(
    tokenizer: Tokenizer, guarded: GuardedEncoder | None, rendered: str, param: str, *, add_special_tokens: bool
) -> list[int]:
    """Return the token ids of a prompt that a template or the server has written around text of field `param`.

    Args:
        tokenizer: the model's.
        guarded: encodes a prompt in which client text is marked; None if clients may write special tokens.
        rendered: the prompt.
        param: the field.
        add_special_tokens: whether to add the model's tokens around a text, such as BOS.

    Raises:
        RequestError: with `guarded`, if text of the client would become a special token, or spells more special tokens
            than the model takes tokens.
    """
    if guarded is None:
        (tokens,) = await encode(tokenizer, [rendered], add_special_tokens=add_special_tokens)
        return tokens
    encode_marked = partial(guarded.encode, rendered, add_special_tokens=add_special_tokens)
    try:
        if len(rendered) < _INLINE_CHARACTERS:
            return encode_marked()
        thread = _LONG if len(rendered) > _LONG_CHARACTERS else _SHORT
        return await asyncio.get_running_loop().run_in_executor(thread, encode_marked)
    except ValueError as error:
        raise RequestError(f"{param}: {error}", param) from None


async def encode_bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that spell these words.

    Each word is spelled at the start of a text, after a space and directly after other characters.
    """
    if not words:
        return ()
    # Some tokenizers prepend a space to every text. Behind a line break, the word is encoded without it.
    spellings = ["\n", *(text for word in words for text in (word, f" {word}", f"\n{word}"))]
    line_break, *encoded = await encode(tokenizer, spellings, add_special_tokens=False)
    length = len(line_break)
    sequences = [tokens[length:] if tokens[:length] == line_break else tokens for tokens in encoded]
    return tuple(dict.fromkeys(tuple(tokens) for tokens in sequences if tokens))
