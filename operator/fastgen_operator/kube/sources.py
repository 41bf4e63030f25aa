"""State of the lists and watches, one of each for every kind and namespace. One that fails stops no other."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final, Literal

from fastgen_operator.kinds import DEPLOYMENT, FASTGEN, POD, REPLICA_SET, Kind

logger = logging.getLogger(__name__)

# What the number of replicas is counted from. A missing object of another kind is looked up before it is created.
ESSENTIAL: Final = (FASTGEN, DEPLOYMENT, REPLICA_SET, POD)

Reading = Literal["list", "watch"]
# A kind and a namespace that is listed and watched; None for all namespaces.
Source = tuple[Kind, str | None]


class Sources:
    """Remembers which sources have been listed, and which fail now; safe to use from several threads.

    Args:
        scopes: the namespaces with sources of their own; (None,) for all.
        show: called with a source, and whether it fails, when that or the error changes.
    """

    def __init__(self, scopes: Sequence[str | None], show: Callable[[Source, bool], object] = lambda *_: None) -> None:
        self._scopes = tuple(scopes)
        self._show = show
        self._lock = threading.Lock()
        self._listed: set[Source] = set()
        self._failures: dict[tuple[Source, Reading], str] = {}

    def succeeded(self, source: Source, reading: Reading) -> None:
        """Record a complete list, or a watch that delivers or stays open."""
        with self._lock:
            if reading == "list":
                self._listed.add(source)
            failed = self._failures.pop((source, reading), None) is not None
            healthy = not self._fails(source)
        if failed and healthy:
            self._show(source, False)
            logger.info("%s can be read again", describe(source))

    def failed(self, source: Source, reading: Reading, error: str) -> None:
        """Record a failed list or watch; logged once until the error changes."""
        with self._lock:
            before = self._failures.get((source, reading))
            self._failures[source, reading] = error
        if before != error:
            self._show(source, True)
            doing = "listing" if reading == "list" else "watching"
            logger.warning("%s %s: %s; the operator retries", doing, describe(source), error)

    def serves(self, namespace: str) -> bool:
        """Return whether enough was listed to reconcile resources of this namespace."""
        scope = self._scope(namespace)
        with self._lock:
            return all((kind, scope) in self._listed for kind in ESSENTIAL)

    def serves_any(self) -> bool:
        """Return whether enough was listed to reconcile resources of at least one scope."""
        with self._lock:
            return any(all((kind, scope) in self._listed for kind in ESSENTIAL) for scope in self._scopes)

    def is_stale(self, namespace: str) -> bool:
        """Return whether a kind that the replicas of this namespace are counted from cannot be read now."""
        scope = self._scope(namespace)
        with self._lock:
            return any(self._fails((kind, scope)) for kind in ESSENTIAL)

    def fails(self, kind: Kind, namespace: str) -> bool:
        """Return whether this kind cannot be read now in this namespace."""
        with self._lock:
            return self._fails((kind, self._scope(namespace)))

    def all_fail(self) -> bool:
        """Return whether lists fail now, including that of every source that was listed before."""
        with self._lock:
            failing = {source for source, reading in self._failures if reading == "list"}
            return bool(failing) and self._listed <= failing

    def first_failure(self) -> str:
        """Return a description of one failure; empty if there is none."""
        with self._lock:
            return next((f"{describe(source)}: {error}" for (source, _), error in self._failures.items()), "")

    def failures(self) -> dict[Source, str]:
        """Return the error of each source that fails now."""
        with self._lock:
            return {source: error for (source, _), error in self._failures.items()}

    def forget(self, kinds: Sequence[Kind]) -> None:
        """Drop the failures of kinds that are no longer read, such as those whose CRD was removed."""
        with self._lock:
            gone = {source for source, _ in self._failures if source[0] in kinds}
            self._failures = {key: error for key, error in self._failures.items() if key[0] not in gone}
        for source in gone:
            self._show(source, False)

    def _fails(self, source: Source) -> bool:
        return (source, "list") in self._failures or (source, "watch") in self._failures

    def _scope(self, namespace: str) -> str | None:
        return namespace if namespace in self._scopes else None


def describe(source: Source) -> str:
    """Return the name of a source in a message, such as `pods in namespace team`."""
    kind, scope = source
    return kind.plural if scope is None else f"{kind.plural} in namespace {scope}"
