"""The tokens that the files of a Hugging Face folder add to tokenizer.json, with their properties.

The rules are those of transformers' AutoTokenizer (`TokenizersBackend`, read in version 5.23), which vLLM uses too:
`added_tokens_decoder` of tokenizer_config.json counts alone if it is there, and otherwise special_tokens_map.json and
added_tokens.json do. Special tokens that have names (`eos_token`) or are listed (`additional_special_tokens`) are added
last. A new token gets the next free id, whatever id a file gives it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from fastgen.model_files import field, optional_json_object
from fastgen.settings import ConfigError
from fastgen.text.tokenizer_formats.library import one_line_errors

log = logging.getLogger("fastgen.text")

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


class TokenFiles:
    """What the files of a folder say about added and special tokens.

    Attributes:
        settings: tokenizer_config.json, updated by special_tokens_map.json if it has no `added_tokens_decoder`.
        named: special tokens by name, such as `eos_token`, those of `NAMES` first.
        listed: further special tokens.
        declared: tokens by id, in the order of ids.
        is_complete: whether `declared` replaces the properties in tokenizer.json.

    Raises:
        ConfigError: if a file is damaged.
    """

    def __init__(self, directory: Path) -> None:
        self._where = directory / "tokenizer_config.json"
        with one_line_errors(self._where):  # a lone surrogate is no text
            self._read(directory)

    def _read(self, directory: Path) -> None:
        self.settings = optional_json_object(self._where)
        decoder = field(self.settings, "added_tokens_decoder", dict, self._where)
        self.is_complete = decoder is not None
        listed = self.settings.get("extra_special_tokens") or self.settings.get("additional_special_tokens") or []
        special = listed
        if not self.is_complete:
            mapped = optional_json_object(directory / "special_tokens_map.json")
            self.settings = self.settings | mapped
            listed = mapped.get("extra_special_tokens") or listed or mapped.get("additional_special_tokens") or []
        named = {name: value for name, value in self.settings.items() if name.endswith("_token")}
        if isinstance(listed, dict):
            named, listed = named | listed, []
        if not isinstance(listed, list):
            raise ConfigError(
                f"{self._where}: additional_special_tokens (or extra_special_tokens) must be a list or object of tokens"
            )
        order = [*NAMES, *(name for name in named if name not in NAMES)]
        self.named = {name: self._token(name, named[name]) for name in order if _is_token(named.get(name))}
        each = "each of additional_special_tokens (or extra_special_tokens)"
        self.listed = [self._token(each, token) for token in listed]
        if decoder is not None:
            self.declared = self._declared_tokens(decoder)
        else:
            self.declared = self._legacy_tokens(directory / "added_tokens.json", special)

    def _declared_tokens(self, decoder: Mapping[str, Any]) -> dict[int, AddedToken]:
        if not all(key.isascii() and key.isdigit() for key in decoder):
            raise ConfigError(f"{self._where}: added_tokens_decoder must have token ids as keys")
        tokens = {int(key): self._token(f"added_tokens_decoder {key}", value) for key, value in decoder.items()}
        return dict(sorted(tokens.items()))

    def _legacy_tokens(self, path: Path, listed: Any) -> dict[int, AddedToken]:
        special = {token.content for token in self.named.values()}
        special |= {token for token in listed if isinstance(token, str)}
        tokens = {}
        for content, token_id in optional_json_object(path).items():
            if type(token_id) is not int or token_id < 0:
                raise ConfigError(f"{path}: the id of {content!r} must be an integer, at least 0")
            is_special = content in special
            tokens[token_id] = AddedToken(content, normalized=not is_special, special=is_special)
        return dict(sorted(tokens.items()))

    def _token(self, name: str, value: Any) -> AddedToken:
        """Return a token that a file spells as a string or as an object."""
        if isinstance(value, str):
            return AddedToken(value, normalized=False, special=True)
        if not isinstance(value, Mapping) or not isinstance(value.get("content"), str):
            raise ConfigError(f'{self._where}: {name} must be a string, or an object whose "content" is a string')
        flags = {flag: value[flag] for flag in _FLAGS if flag in value}
        if not all(isinstance(flag, bool) for flag in flags.values()):
            raise ConfigError(f"{self._where}: {name}: {', '.join(flags)} must be true or false")
        if not name.startswith("added_tokens_decoder"):
            flags["special"] = True
        return AddedToken(value["content"], **flags)


def add_tokens(backend: tokenizers.Tokenizer, files: TokenFiles) -> None:
    """Add the tokens that the files declare, and apply the properties that differ from tokenizer.json's.

    Raises:
        ConfigError: if the files give the end token another id than the vocabulary.
    """
    present = backend.get_added_tokens_decoder()
    declared = files.declared if files.is_complete else dict(sorted({**files.declared, **present}.items()))
    names = {token.content for token in files.named.values()}
    contents = {token.content for token in (*present.values(), *declared.values())}
    added = list(declared.values())
    for token in (*files.named.values(), *files.listed):
        if token.content not in contents:
            contents.add(token.content)
            added.append(token)
    for token in added:
        token.special = token.special or token.content in names
    backend.add_tokens([token for token in added if token.content])
    _check_ids(backend, files)


def _check_ids(backend: tokenizers.Tokenizer, files: TokenFiles) -> None:
    end = files.named.get("eos_token")
    for token_id, token in files.declared.items():
        found = backend.token_to_id(token.content)
        if found == token_id:
            continue
        contradiction = f"the tokenizer's files give {token.content!r} the id {token_id}, and the vocabulary {found}"
        if end is not None and token.content == end.content:
            raise ConfigError(f"eos_token: {contradiction}; save the tokenizer again with transformers")
        log.warning("%s, which is used, as in transformers", contradiction)


def _is_token(value: object) -> bool:
    """Return whether a setting whose name ends with `_token` is a token, unlike `add_bos_token`."""
    return value is not None and not isinstance(value, bool) and value != ""
