"""Status fields that the API server drops, because the cluster's CRD is older than this operator."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from fastgen_operator.reconcile.backoff import is_within

# After this time the fields are tried again: the CRD may have been upgraded.
TRUST: Final = timedelta(minutes=10)

# A path in the status; items of lists have no part of their own.
Path = tuple[str, ...]


@dataclass(slots=True)
class DroppedFields:
    """What the API server dropped from the statuses of all resources; safe to use from several threads."""

    _paths: frozenset[Path] = frozenset()
    _since: datetime | None = None
    _said: frozenset[Path] = frozenset()
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def kept(self, status: dict[str, Any], now: datetime) -> dict[str, Any]:
        """Return the part of a status that the API server stores."""
        with self._lock:
            if self._since is None or not is_within(TRUST, self._since, now):
                self._paths = frozenset()
            return _without(status, self._paths, ()) if self._paths else status

    def learn(self, sent: dict[str, Any], stored: dict[str, Any], now: datetime) -> list[str]:
        """Compare a status with what was stored of it; return the names of dropped fields not returned before.

        A field that the API server stores is no longer left out: the CRD has been upgraded. If it were left out, it
        would be one more difference, and one more write, at each resync.
        """
        found = frozenset(_missing(sent, stored, ()))
        with self._lock:
            self._paths = found | frozenset(path for path in self._paths if not _holds(stored, path))
            if not found:
                return []
            self._since = now
            new = found - self._said
            self._said |= found
        return sorted(f"status.{'.'.join(path)}" for path in new)


def _missing(sent: Any, stored: Any, path: Path) -> Iterator[Path]:
    if isinstance(sent, dict) and isinstance(stored, dict):
        for name, value in sent.items():
            if name not in stored:
                yield (*path, name)
            else:
                yield from _missing(value, stored[name], (*path, name))
    elif isinstance(sent, list) and isinstance(stored, list):
        for item, kept in zip(sent, stored, strict=False):
            yield from _missing(item, kept, path)


def _holds(value: Any, path: Path) -> bool:
    """Return whether a path of the status has a value."""
    if isinstance(value, list):
        return any(_holds(item, path) for item in value)
    return not path or (isinstance(value, dict) and path[0] in value and _holds(value[path[0]], path[1:]))


def _without(value: Any, paths: frozenset[Path], here: Path) -> Any:
    if isinstance(value, list):
        return [_without(item, paths, here) for item in value]
    if not isinstance(value, dict):
        return value
    return {name: _without(field, paths, (*here, name)) for name, field in value.items() if (*here, name) not in paths}
