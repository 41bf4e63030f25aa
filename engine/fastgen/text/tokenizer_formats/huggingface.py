"""Build a tokenizer from a Hugging Face model folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from fastgen.config import ConfigError


def build(directory: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer that tokenizer.json defines completely.

    Raises:
        ConfigError: if the file is missing or cannot be read.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{directory}: has no tokenizer.json; save the tokenizer there with transformers")
    return read(tokenizers.Tokenizer.from_file, str(path), path)


def read(parse: Callable[[str], tokenizers.Tokenizer], given: str, name: object) -> tokenizers.Tokenizer:
    """Return what `parse` makes of a tokenizer.json called `name`.

    Raises:
        ConfigError: if it is not valid.
    """
    try:
        backend = parse(given)
    except Exception as error:  # tokenizers raises bare Exception
        raise ConfigError(f"{name}: not a valid tokenizer: {error}") from None
    # The file may request padding or truncation to a training length; prompts get neither.
    backend.no_padding()
    backend.no_truncation()
    return backend


def read_settings(directory: Path) -> Mapping[str, Any]:
    """Return tokenizer_config.json merged over special_tokens_map.json; empty if both are missing."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = directory / name
        if not path.is_file():
            continue
        try:
            settings |= json.loads(path.read_text())
        except ValueError as error:
            raise ConfigError(f"{path}: not valid JSON: {error}") from None
    return settings


def named_special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that templates use by name, such as `bos_token`."""
    names = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
    found = {name: settings[name] for name in names if settings.get(name)}
    return {name: token["content"] if isinstance(token, dict) else str(token) for name, token in found.items()}


def read_chat_templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name, from files or settings. The usual one is named `default`.

    As in transformers, chat_template.jinja replaces all templates of the settings.
    """
    templates = {path.stem: path.read_text() for path in (directory / "additional_chat_templates").glob("*.jinja")}
    path, setting = directory / "chat_template.jinja", settings.get("chat_template")
    if path.is_file():
        return templates | {"default": path.read_text()}
    if isinstance(setting, list):
        return {str(entry["name"]): str(entry["template"]) for entry in setting} | templates
    return templates if setting is None else {"default": str(setting)} | templates
