"""Prompts that make the scripted engine say something."""

from __future__ import annotations

from typing import Any

_SPEAK = "<file_sep>"


def speak(*texts: str) -> str:
    """A prompt that is answered with `texts`: one of several, as the seed falls."""
    return _SPEAK + _SPEAK.join(texts) + _SPEAK


def asking(*texts: str) -> list[Any]:
    """A conversation that is answered with `texts`."""
    return [{"role": "user", "content": speak(*texts)}]
