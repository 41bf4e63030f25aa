"""Prompts that select the scripted engine's reply."""

from __future__ import annotations

from typing import Any

_REPLY = "<file_sep>"


def prompt_for(*replies: str) -> str:
    """Return a prompt whose reply is one of `replies`, chosen by the seed."""
    return _REPLY + _REPLY.join(replies) + _REPLY


def messages_for(*replies: str) -> list[Any]:
    """Return a conversation whose reply is one of `replies`, chosen by the seed."""
    return [{"role": "user", "content": prompt_for(*replies)}]
