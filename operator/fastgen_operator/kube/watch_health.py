"""Whether the watches deliver: what a list shows must have come over the watch before long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping

from fastgen_operator.kinds import Kind, Object


class Watches:
    """Compares the versions that the watches delivered with those of lists; safe to use from several threads.

    A watch whose connection is dead without being closed says nothing, as does one of a quiet cluster; only a list
    tells them apart. Versions are compared as the integers that Kubernetes makes them; objects are known by their uid.

    Args:
        clock: monotonic seconds.
        kinds: what is watched; lists of others say nothing.
    """

    def __init__(self, clock: Callable[[], float], kinds: Iterable[Kind]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._watches = {kind: _Watch() for kind in kinds}

    def delivered(self, kind: Kind, obj: Object, event: str | None) -> None:
        """An event of the watch: its type, None for those of kopf's own first list."""
        uid, version = uid_of(obj), version_of(obj)
        with self._lock:
            watch = self._watches[kind]
            if event == "DELETED":
                watch.forget(uid)
            else:
                watch.see(uid, version)

    def listed(self, kind: Kind, versions: Mapping[str, int]) -> None:
        """The version of every object of that kind, by uid, as the API server has them now."""
        now = self._clock()
        with self._lock:
            if kind in self._watches:
                self._watches[kind].compare(versions, now)

    def behind(self) -> float:
        """Seconds since a list first showed the oldest change that no watch has told of; 0 where there is none."""
        with self._lock:
            missing = [since for watch in self._watches.values() for _, since in watch.missing.values()]
        return self._clock() - min(missing) if missing else 0.0


class _Watch:
    """The watch of one kind: what it has shown, and what it still has to, with the time since when."""

    def __init__(self) -> None:
        self.missing: dict[str, tuple[int, float]] = {}
        self._seen: dict[str, int] = {}
        self._absent: set[str] = set()

    def see(self, uid: str, version: int) -> None:
        self._seen[uid] = max(version, self._seen.get(uid, 0))
        if uid in self.missing and self.missing[uid][0] <= version:
            del self.missing[uid]

    def forget(self, uid: str) -> None:
        self._seen.pop(uid, None)
        self.missing.pop(uid, None)

    def compare(self, versions: Mapping[str, int], now: float) -> None:
        for uid, version in versions.items():
            if version > self._seen.get(uid, 0):
                self.missing[uid] = version, self.missing.get(uid, (version, now))[1]
        for uid in self.missing.keys() - versions.keys():
            del self.missing[uid]
        # Gone twice, though no watch has said so. Once may be an object that was made after the list.
        absent = self._seen.keys() - versions.keys()
        for uid in absent & self._absent:
            del self._seen[uid]
        self._absent = absent


def uid_of(obj: Object) -> str:
    """The object's uid, which no later one of the same name shares."""
    return str(obj["metadata"]["uid"])


def version_of(obj: Object) -> int:
    """The object's resource version."""
    return int(obj["metadata"]["resourceVersion"])
