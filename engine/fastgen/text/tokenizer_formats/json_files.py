"""JSON files of a model folder. An error names the file and what it should contain."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastgen.config import ConfigError


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is no file.

    Raises:
        ConfigError: if the file cannot be read or contains something else.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(value, ensure_ascii=False).encode()  # fails on half of a surrogate pair, which no text has
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: a JSON object is expected, not {_kind(value)}")
    return value


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        ConfigError: if it cannot be read as UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def field(settings: Mapping[str, Any], name: str, kind: type | tuple[type, ...], where: object) -> Any:
    """Return a field of a JSON object; None if it is missing or null.

    Raises:
        ConfigError: naming the field if it has another type.
    """
    value = settings.get(name)
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{where}: {name} is {_kind(value)}, which is not expected here; save the tokenizer again")
    return value


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")
