"""Disables kopf's storage of object state, for which it copies each object twice per event.

Only change handlers read that state. The operator's handlers take raw events.
"""

from __future__ import annotations

from typing import Any, cast

import kopf


class NoDiffs(kopf.DiffBaseStorage):
    """Stores no essence of any object."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        """Return an empty essence."""
        return cast(kopf.BodyEssence, {})

    def fetch(self, **_: Any) -> None:
        """Return nothing."""

    def store(self, **_: Any) -> None:
        """Do nothing."""


class NoProgress(kopf.ProgressStorage):
    """Stores no progress of any handler."""

    def fetch(self, **_: Any) -> None:
        """Return nothing."""

    def store(self, **_: Any) -> None:
        """Do nothing."""

    def purge(self, **_: Any) -> None:
        """Do nothing."""

    def touch(self, **_: Any) -> None:
        """Do nothing."""

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        """Return the essence unchanged: it contains no progress."""
        return essence
