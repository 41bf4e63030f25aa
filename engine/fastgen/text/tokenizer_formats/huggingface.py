"""Build a tokenizer from a Hugging Face model folder."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from fastgen.model_files import field, read_json_object, read_text
from fastgen.settings import ConfigError
from fastgen.text.tokenizer_formats import prefix_space
from fastgen.text.tokenizer_formats.added_tokens import NAMES, TokenFiles, add_tokens
from fastgen.text.tokenizer_formats.library import check_encodes, one_line_errors

_FILE = "tokenizer.json"
# A prefix of tokens that continue a word, as in WordPiece. With BPE, tokenizers aborts where a token lacks it.
_PREFIX = re.compile(r'(?<!\\)"continuing_subword_prefix"\s*:\s*"[^"]')

# The normalizer of Unigram vocabularies. It begins with a size, which tokenizers allocates unchecked.
_CHARACTER_MAP = re.compile(r'"precompiled_charsmap"\s*:\s*"([^"]*)"')


def build(directory: Path, files: TokenFiles) -> tokenizers.Tokenizer:
    """Return the tokenizer of tokenizer.json with the tokens that the other files add.

    Raises:
        ConfigError: if tokenizer.json is missing, damaged or not supported, or contradicts the other files.
    """
    path = directory / _FILE
    if not path.is_file():
        raise ConfigError(f"{directory}: has no tokenizer.json; save the tokenizer there with transformers")
    backend = read(read_text(path), path)
    with one_line_errors(path):
        add_tokens(backend, files)
        backend.encode_special_tokens = files.settings.get("split_special_tokens") is True
        adds = files.settings.get("add_prefix_space")
        if isinstance(adds, bool) and prefix_space.applies(files.settings.get("tokenizer_class")):
            prefix_space.apply(backend, adds)
    check_encodes(backend, path)
    return backend


def read(text: str, name: object) -> tokenizers.Tokenizer:
    """Return the tokenizer of the text of a tokenizer.json called `name`.

    Raises:
        ConfigError: if it is not valid, or not supported.
    """
    if _PREFIX.search(text):
        raise ConfigError(f"{name}: its model has a continuing_subword_prefix, which is not supported")
    with one_line_errors(name):
        for found in _CHARACTER_MAP.finditer(text):
            content = base64.b64decode(found[1])
            if int.from_bytes(content[:4], "little") > len(content) - 4:
                raise ConfigError(f"{name}: its precompiled_charsmap is damaged; download the file again")
        backend = tokenizers.Tokenizer.from_str(text)
        _check_ids(backend, name)
    # The file may request padding or truncation to a training length; prompts get neither.
    backend.no_padding()
    backend.no_truncation()
    return backend


def _check_ids(backend: tokenizers.Tokenizer, name: object) -> None:
    """Reject a vocabulary in which two tokens have one id: the library would decode it to either, by chance."""
    tokens: dict[int, str] = {}
    for token, token_id in backend.get_vocab(with_added_tokens=False).items():
        other = tokens.setdefault(token_id, token)
        if other != token:
            first, second = sorted((other, token))
            raise ConfigError(
                f"{name}: its vocabulary gives the id {token_id} to {first!r} and {second!r}; download the file again"
            )


def named_special_tokens(files: TokenFiles) -> dict[str, str]:
    """Return the special tokens that templates use by name, such as `bos_token`."""
    return {name: files.named[name].content for name in NAMES if name in files.named}


def end_token_id(directory: Path) -> int | None:
    """Return the id of the tokenizer's `eos_token`; None if it has none, or there is no tokenizer.

    The tokenizer is built only if the files do not declare the id.

    Raises:
        ConfigError: if a file is damaged, or the tokenizer is built and not supported.
    """
    files = TokenFiles(directory)
    if "eos_token" not in files.named:
        return None
    content = files.named["eos_token"].content
    declared = next((token_id for token_id, token in files.declared.items() if token.content == content), None)
    if declared is not None or not (directory / _FILE).is_file():
        return declared
    found: int | None = build(directory, files).token_to_id(content)
    return found


def read_chat_templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return a model's chat templates by name: `default` is the one for ordinary requests.

    As in transformers, `default` is chat_template.jinja. Without that file, the templates are those of `settings`, the
    contents of tokenizer_config.json: one, which is `default`, or several with names. If there are none, `default` is
    that of chat_template.json, which older models have. Files in additional_chat_templates add templates, named after
    the files, or replace those of these names, except chat_template.jinja.

    Raises:
        ConfigError: if a template cannot be read.
    """
    folder = directory / "additional_chat_templates"
    templates = {path.stem: read_text(path) for path in folder.glob("*.jinja")}
    path, where = directory / "chat_template.jinja", directory / "tokenizer_config.json"
    setting = field(settings, "chat_template", (str, list), where)
    if path.is_file():
        return templates | {"default": read_text(path)}
    older = directory / "chat_template.json"
    if setting is None and older.is_file():
        where = older
        setting = field(read_json_object(where), "chat_template", (str, list), where)
    if not isinstance(setting, list):
        return templates if setting is None else {"default": setting} | templates
    for entry in setting:
        if not (isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("name", "template"))):
            raise ConfigError(f"{where}: each chat_template of the list must have the strings name and template")
    return {entry["name"]: entry["template"] for entry in setting} | templates
