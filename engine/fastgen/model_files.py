"""Read files of a model's folder, which may be damaged or hostile.

An error names the file and what is wrong with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastgen.settings import ConfigError

# The largest are indexes of checkpoints with many experts, of a few megabytes, and tokenizers with their merges.
_MOST_BYTES = 64 << 20


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        ConfigError: if it cannot be read, is too long or not UTF-8.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        # What is cut, perhaps inside a character, is not decoded.
        text = content.decode("utf-8") if len(content) <= _MOST_BYTES else None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    if text is None:
        raise ConfigError(
            f"{path}: has more than {_MOST_BYTES >> 20} MiB, the limit for configuration and tokenizer files"
        )
    return text


def read_json(path: Path) -> Any:
    """Return the JSON value of a file.

    Raises:
        ConfigError: as `read_text`, or if it is not JSON or has a string that is not valid Unicode.
    """
    text = read_text(path)
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # fails on half of a surrogate pair, which no text has
    except ValueError as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error})") from None
    except RecursionError:
        raise ConfigError(f"{path}: cannot be read as JSON (it is nested too deeply)") from None
    return value


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file.

    Raises:
        ConfigError: if it cannot be read or holds another value.
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return value


def optional_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file as `read_json_object` does; empty if there is no file."""
    return read_json_object(path) if path.is_file() else {}


def field(settings: Mapping[str, Any], name: str, kind: type | tuple[type, ...], where: object) -> Any:
    """Return a field of a JSON object in a tokenizer's file `where`; None if it is missing or null.

    Raises:
        ConfigError: naming the field if it has another type.
    """
    value = settings.get(name)
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{where}: {name} is {_kind(value)}, which is not expected here; save the tokenizer again")
    return value


def is_inside(name: str) -> bool:
    """Return whether a path that a file of the folder names stays inside the folder."""
    path = Path(name)
    return not path.is_absolute() and ".." not in path.parts and "\0" not in name


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")
