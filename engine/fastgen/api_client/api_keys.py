"""API keys from a file or the environment, for servers and clients."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from fastgen.setting_fields import ConfigError

ENVIRONMENT_VARIABLE = "FASTGEN_API_KEY"


def keys_of_environment(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the keys of FASTGEN_API_KEY, separated by commas or newlines.

    Raises:
        ConfigError: a key cannot be sent in a header.
    """
    try:
        return _present(re.split(r"[,\n]", environment.get(ENVIRONMENT_VARIABLE, "")))
    except ValueError as error:
        raise ConfigError(f"{ENVIRONMENT_VARIABLE}: {error}") from None


def keys_of_file(path: Path) -> list[str]:
    """Return the keys of a file, one per line; lines that start with # are comments.

    Raises:
        OSError, ValueError: the file cannot be read or is not text, or a key cannot be sent in a header.
    """
    return _present(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))


def own_key() -> str | None:
    """Return the key that a client sends: the first of the environment, or None.

    Raises:
        ConfigError: a key cannot be sent in a header.
    """
    return next(iter(keys_of_environment()), None)


def _present(keys: Iterable[str]) -> list[str]:
    present = [key for key in map(str.strip, keys) if key]
    for number, key in enumerate(present, 1):
        # Clients differ in how they encode other characters, and most refuse to send them.
        if not (key.isascii() and key.isprintable()):
            raise ValueError(f"key {number} has a character other than printable ASCII; choose another key")
    return present
