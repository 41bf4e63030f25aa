"""Where API keys come from, for those who check them and those who send them: a file, and the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

ENVIRONMENT_VARIABLE = "FASTGEN_API_KEY"


def keys_of_environment(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The keys of `FASTGEN_API_KEY`, parted by commas or line ends."""
    return _present(re.split(r"[,\n]", environment.get(ENVIRONMENT_VARIABLE, "")))


def keys_of_file(path: Path) -> list[str]:
    """The keys of a file, one a line; lines that begin with # are none.

    Raises:
        OSError, ValueError: when it cannot be read, or is no text.
    """
    return _present(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))


def own_key() -> str | None:
    """The key that a program sends: the environment's first one."""
    return next(iter(keys_of_environment()), None)


def _present(keys: Iterable[str]) -> list[str]:
    return [key for key in map(str.strip, keys) if key]
