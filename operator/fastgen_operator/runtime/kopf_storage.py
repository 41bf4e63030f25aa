"""kopf's memory of objects, switched off: it copies each object of each event twice to see what has changed.

Only handlers of changes read it. Ours take raw events, and the cache knows better what is new.
"""

from __future__ import annotations

from typing import Any, cast

import kopf


class NoDiffs(kopf.DiffBaseStorage):
    """No object has an essence, and none was seen before."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        """Nothing of the object."""
        return cast(kopf.BodyEssence, {})

    def fetch(self, **_: Any) -> None:
        """Nothing is known of earlier."""

    def store(self, **_: Any) -> None:
        """Nothing is written down."""


class NoProgress(kopf.ProgressStorage):
    """No handler leaves a trace: a raw event is handled once."""

    def fetch(self, **_: Any) -> None:
        """Nothing is known of earlier."""

    def store(self, **_: Any) -> None:
        """Nothing is written down."""

    def purge(self, **_: Any) -> None:
        """Nothing was written down."""

    def touch(self, **_: Any) -> None:
        """Nothing is written down."""

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        """The essence as it is: nothing of ours is in it."""
        return essence
