"""Periods, and the backoff between restores of a child that another writer changes."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Final

from fastgen_operator.kinds import Kind

# Restores without a wait: a manual edit, or a tool that applies an old manifest.
FREE_RESTORES: Final = 5
RESTORE_WINDOW: Final = timedelta(hours=1)
FIRST_WAIT: Final = timedelta(seconds=10)
LONGEST_WAIT: Final = timedelta(minutes=5)


def is_within(period: timedelta, since: datetime, now: datetime) -> bool:
    """Return whether less than `period` has passed; False if the clock was set back, as at the start of a node."""
    return timedelta() <= now - since < period


@dataclass(slots=True)
class Contention:
    """Remembers when children of one resource were restored, to delay the next restore."""

    _restores: defaultdict[tuple[Kind, str], deque[datetime]] = field(
        default_factory=partial(defaultdict, partial(deque, maxlen=16))
    )

    def note(self, kind: Kind, name: str, at: datetime) -> None:
        """Record a restore of a child."""
        self._restores[kind, name].append(at)

    def is_held(self, kind: Kind, name: str, at: datetime) -> bool:
        """Return whether the next restore has to wait.

        After `FREE_RESTORES` within `RESTORE_WINDOW`, the wait doubles with every further one, up to `LONGEST_WAIT`.
        """
        restores = self._restores[kind, name]
        beyond = sum(at - time < RESTORE_WINDOW for time in restores) - FREE_RESTORES
        if beyond < 0:
            return False
        wait: timedelta = min(LONGEST_WAIT, FIRST_WAIT * 2**beyond)
        return is_within(wait, restores[-1], at)
