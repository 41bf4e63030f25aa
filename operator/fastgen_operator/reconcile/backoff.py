"""Two writers of one child: restoring it again and again would only keep both of them busy."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from fastgen_operator.kinds import Key, Kind

# So many restores are made at once: a person who tries something, a tool that applies an old manifest.
FREE_RESTORES: Final = 5
WINDOW: Final = timedelta(hours=1)
FIRST_WAIT: Final = timedelta(seconds=10)
LONGEST_WAIT: Final = timedelta(minutes=5)


@dataclass(slots=True)
class Contention:
    """Remembers when children were restored. Nothing depends on it but when the next restore may be.

    One resource is visited by one thread at a time, so that nothing here is locked.
    """

    _restores: dict[Key, dict[tuple[Kind, str], deque[datetime]]] = field(default_factory=dict)

    def note(self, key: Key, kind: Kind, name: str, at: datetime) -> None:
        """A child was restored."""
        children = self._restores.setdefault(key, {})
        children.setdefault((kind, name), deque(maxlen=16)).append(at)

    def recent(self, key: Key, kind: Kind, name: str, at: datetime) -> int:
        """How often a child was restored lately."""
        restores = self._restores.get(key, {}).get((kind, name), ())
        return sum(at - time < WINDOW for time in restores)

    def is_held(self, key: Key, kind: Kind, name: str, at: datetime) -> bool:
        """Whether a child that differs is left as it is for now; the wait doubles with every restore."""
        beyond = self.recent(key, kind, name, at) - FREE_RESTORES
        if beyond < 0:
            return False
        last = self._restores[key][kind, name][-1]
        wait: timedelta = min(LONGEST_WAIT, FIRST_WAIT * 2**beyond)
        return at - last < wait

    def forget(self, key: Key) -> None:
        """The resource is gone."""
        self._restores.pop(key, None)
