"""Periods and backoffs.

Whether a period has passed, and the backoff between restores of a child that another writer changes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from fastgen_operator.kinds import Key, Kind

# Restores without a wait: a manual edit, or a tool that applies an old manifest.
FREE_RESTORES: Final = 5
WINDOW: Final = timedelta(hours=1)
FIRST_WAIT: Final = timedelta(seconds=10)
LONGEST_WAIT: Final = timedelta(minutes=5)


def is_within(period: timedelta, since: datetime, now: datetime) -> bool:
    """Return whether less than `period` has passed.

    A clock that was set back, as at the start of a node, ends it.
    """
    return timedelta() <= now - since < period


@dataclass(slots=True)
class Contention:
    """Remembers when children were restored, to delay the next restore.

    No locks: one thread at a time reconciles a resource.
    """

    _restores: dict[Key, dict[tuple[Kind, str], deque[datetime]]] = field(default_factory=dict)

    def note(self, key: Key, kind: Kind, name: str, at: datetime) -> None:
        """Record a restore of a child."""
        children = self._restores.setdefault(key, {})
        children.setdefault((kind, name), deque(maxlen=16)).append(at)

    def recent(self, key: Key, kind: Kind, name: str, at: datetime) -> int:
        """Return the number of restores of a child within `WINDOW`."""
        restores = self._restores.get(key, {}).get((kind, name), ())
        return sum(at - time < WINDOW for time in restores)

    def is_held(self, key: Key, kind: Kind, name: str, at: datetime) -> bool:
        """Return whether the next restore has to wait; the wait doubles with every restore."""
        beyond = self.recent(key, kind, name, at) - FREE_RESTORES
        if beyond < 0:
            return False
        last = self._restores[key][kind, name][-1]
        wait: timedelta = min(LONGEST_WAIT, FIRST_WAIT * 2**beyond)
        return is_within(wait, last, at)

    def forget(self, key: Key) -> None:
        """Drop the state of a deleted resource."""
        self._restores.pop(key, None)
