"""Texts that cannot be prompts, told by their size: encoding ten megabytes would take a core for half a minute."""

from __future__ import annotations

from fastgen.core.request import RequestError
from fastgen.text.tokenizer import Tokenizer
from fastgen.text.vocabulary import Spelling

# What comes before encoding may shrink a text: composed characters take up to a third of the bytes of decomposed ones.
_NORMALIZED = 4


class LongestText:
    """How many bytes of text a model could take at the very most: as many tokens as it holds, all of the longest kind.

    Args:
        tokenizer: the model's.
        max_model_length: tokens of prompt and generation together.
    """

    def __init__(self, tokenizer: Tokenizer, max_model_length: int) -> None:
        tokens = tokenizer.backend.get_vocab(with_added_tokens=True)
        is_bytes = tokenizer.vocabulary.spelling is Spelling.BYTE_LEVEL  # then each character stands for one
        longest = max(len(token) if is_bytes else len(token.encode()) for token in tokens)
        self._max_model_length = max_model_length
        self._most_bytes = max_model_length * longest * (1 if tokenizer.backend.normalizer is None else _NORMALIZED)

    def check(self, text: str, param: str) -> None:
        """Raises RequestError for a text that is longer than that."""
        if len(text) <= self._most_bytes // 4:  # a character has four bytes at most
            return
        num_bytes = len(text.encode(errors="surrogatepass"))
        if num_bytes > self._most_bytes:
            raise RequestError(
                f"{param}: {num_bytes} bytes of text are more than fit in the model's {self._max_model_length} tokens: "
                "send less",
                param,
            )
