"""Checks that the watches deliver events: a watch has to report every change that a list shows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from fastgen_operator.kinds import Kind, Object
from fastgen_operator.objects.stored import version_of


class Watches:
    """Compares the versions delivered by watches with those of lists; safe to use from several threads.

    A watch with a dead connection is as silent as one of a quiet cluster: only a list tells them apart. Objects are
    identified by uid, versions compared as integers.

    Args:
        clock: monotonic seconds.
        kinds: the watched kinds; lists of other kinds are ignored.
        scopes: the watched namespaces, each with watches of its own; (None,) for all.
        patience: seconds from now within which each watch opens.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        kinds: Iterable[Kind],
        scopes: Sequence[str | None] = (None,),
        patience: float = 0.0,
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._watches = {(kind, scope): _Watch(clock() + patience) for kind in kinds for scope in scopes}

    def delivered(self, kind: Kind, obj: Object, event: str | None) -> None:
        """Record an event of a watch; its type is None in kopf's initial list."""
        uid, version, now = uid_of(obj), version_of(obj), self._clock()
        with self._lock:
            watch = self._watches.get((kind, obj["metadata"].get("namespace"))) or self._watches[kind, None]
            watch.delivered_at = now
            if event == "DELETED":
                watch.forget(uid)
            else:
                watch.see(uid, version)

    def opened(self, kind: Kind, scope: str | None, versions: Mapping[str, int]) -> None:
        """Record the list from whose version on a watch reports every change."""
        now = self._clock()
        with self._lock:
            if (kind, scope) in self._watches:
                self._watches[kind, scope] = _Watch(now, versions)

    def failed(self, kind: Kind, scope: str | None) -> None:
        """Record that a watch cannot be opened: it is retried, and a restart would not help."""
        with self._lock:
            if (kind, scope) in self._watches:
                self._watches[kind, scope].delivered_at = self._clock()

    def listed(self, kind: Kind, scope: str | None, versions: Mapping[str, int]) -> None:
        """Record a list: the version of every object of that kind and namespace (None for all), by uid."""
        now = self._clock()
        with self._lock:
            if (kind, scope) in self._watches:
                self._watches[kind, scope].compare(versions, now)

    def behind(self) -> float:
        """Return the longest time in which a watch delivered nothing, although a list shows new versions; else 0.

        A watch that lags behind but delivers events makes progress.
        """
        with self._lock:
            silent = [watch.silent_since() for watch in self._watches.values() if watch.missing]
        return max(0.0, self._clock() - min(silent)) if silent else 0.0


class _Watch:
    """The delivered versions of one watch, and the missing ones with the time of the list that showed them."""

    def __init__(self, delivered_at: float, seen: Mapping[str, int] | None = None) -> None:
        self.missing: dict[str, tuple[int, float]] = {}
        self.delivered_at = delivered_at
        self._seen: dict[str, int] = dict(seen or {})
        self._absent: set[str] = set()

    def silent_since(self) -> float:
        return max(self.delivered_at, min(since for _, since in self.missing.values()))

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
        # Absent from two lists without a watch event. Absent from one, it may have been created after the list.
        absent = self._seen.keys() - versions.keys()
        for uid in absent & self._absent:
            del self._seen[uid]
        self._absent = absent


def uid_of(obj: Object) -> str:
    """Return the object's uid, which differs from that of a later object of the same name."""
    return str(obj["metadata"]["uid"])
