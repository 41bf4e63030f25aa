"""Checks whether a text matches a grammar, over a small vocabulary."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from fastgen.core.sampling_params import Grammar
from fastgen.text.chat_template import ChatTemplate
from fastgen.text.grammars.compiled import CompiledGrammars
from fastgen.text.tokenizer import Tokenizer
from fastgen.text.vocabulary import Vocabulary, byte_alphabet

END = 256


def byte_tokenizer(template: ChatTemplate | None, *special: str) -> Tokenizer:
    """Return a tokenizer of single bytes and some special tokens."""
    alphabet = sorted(byte_alphabet().values())
    backend = Backend(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("</s>", *special)])
    return Tokenizer(backend, Vocabulary(backend), template, None, END)


def matches(grammar: Grammar, tokenizer: Tokenizer, text: str) -> bool:
    """Return whether the grammar allows `text`, token by token, and an end after it."""
    constraint = CompiledGrammars(lambda: tokenizer, tokenizer.vocab_size, [END])(grammar)
    for token in [*tokenizer.encode(text, add_special_tokens=False), END]:
        mask = memoryview(bytearray(4 * ((tokenizer.vocab_size + 31) // 32))).cast("I")
        constraint.fill_mask(mask)
        if not mask[token // 32] >> token % 32 & 1:
            return False
        constraint.accept(token)
    return True
