"""Text to token ids and back, for GGUF files and Hugging Face folders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from fastgen.text.chat_template import ChatTemplate
from fastgen.text.control_tokens import ControlTokens
from fastgen.text.tokenizer_formats import gguf, huggingface
from fastgen.text.tokenizer_formats.added_tokens import TokenFiles
from fastgen.text.tokenizer_formats.gguf_vocabulary import GGUFVocabulary
from fastgen.text.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """Encodes prompts and decodes generations. Thread-safe.

    Attributes:
        backend: tokenizer of the tokenizers library.
        vocabulary: bytes of each token.
        chat_template: the model's chat template, or None.
        bos_token_id, eos_token_id: tokens at the beginning and end of a text; None if the model has none.
    """

    backend: tokenizers.Tokenizer = field(repr=False)
    vocabulary: Vocabulary
    chat_template: ChatTemplate | None
    bos_token_id: int | None
    eos_token_id: int | None

    @classmethod
    def load(cls, source: Mapping[str, Any] | Path) -> Tokenizer:
        """Build the tokenizer of a model.

        Args:
            source: a GGUF file's `tokenizer.*` metadata; or a folder with tokenizer.json, and optionally the files
                that transformers reads beside it, such as tokenizer_config.json and chat_template.jinja.

        Raises:
            ConfigError: if the tokenizer is missing, damaged or not supported, or a chat template is not valid Jinja.
        """
        if isinstance(source, Path):
            files = TokenFiles(source)
            special = huggingface.named_special_tokens(files)
            templates = huggingface.read_chat_templates(source, files.settings)
            backend, spelled = huggingface.build(source, files), {}
        else:
            tokens = GGUFVocabulary.of(source)
            backend, spelled = gguf.build(source, tokens), gguf.spelled(source, tokens)
            special, templates = gguf.named_special_tokens(tokens), gguf.chat_templates(source)

        def id_of(name: str) -> int | None:
            return backend.token_to_id(special[name]) if name in special else None

        return cls(
            backend=backend,
            vocabulary=Vocabulary(backend, spelled),
            chat_template=ChatTemplate.named(templates, special),
            bos_token_id=id_of("bos_token"),
            eos_token_id=id_of("eos_token"),
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the embedding may have more rows."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids of special tokens."""
        return self.vocabulary.special_ids

    def added_ids_of(self, tokens: Iterable[str]) -> frozenset[int]:
        """Return the ids of the added tokens of the vocabulary among `tokens`."""
        added = self.vocabulary.added_tokens
        return frozenset(added[token] for token in tokens if token in added)

    def control_tokens(self, literal_text: str, kept: Iterable[str] = ()) -> ControlTokens:
        """Return the special tokens, and the added tokens in `literal_text`, which a template or a program writes.

        `kept` are marks that keep their meaning in an assistant's messages.
        """
        added = self.backend.get_added_tokens_decoder().items()
        spellings = {
            number: token.content
            for number, token in added
            if token.special or (token.content in literal_text and not token.content.isspace())
        }
        return ControlTokens(spellings, kept)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of `text`; special tokens written in it are recognized.

        `add_special_tokens` adds the model's tokens around a text, for example BOS. A rendered chat template already
        contains them.
        """
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_unlocked(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Encode several texts like `encode`, with the interpreter lock released."""
        # tokenizers releases the interpreter lock only in batches. A batch of several texts would use all cores, which
        # belong to the engine, so each batch has one text.
        return [self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids for text in texts]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; invalid UTF-8 becomes U+FFFD."""
        hidden = self.special_token_ids if skip_special_tokens else frozenset[int]()
        text = b"".join(self.vocabulary.token_bytes(i) for i in token_ids if i not in hidden).decode(errors="replace")
        # Some tokenizers add a space before the first word.
        return text.removeprefix(" ") if self.vocabulary.drops_first_space else text
