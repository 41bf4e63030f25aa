"""Remembers which resources need nothing, so that the resync of a large fleet costs little."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from operator import is_
from typing import Any, Final

from fastgen_operator.autoscale.watchlist import Record
from fastgen_operator.children import Platform
from fastgen_operator.kinds import Key
from fastgen_operator.plan.observed import Observed

# A remembered resource is reconciled again after this time, whatever has changed.
TRUST: Final = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that a reconcile reads, except the time.

    Attributes:
        objects: from the informer cache, which replaces an object when it changes: they are compared by identity.
        measured: what the status shows of the autoscaler's measurements and decision. Of the capacity, only whether it
            is known: another estimate of it alone reaches the status later.
    """

    platform: Platform
    objects: tuple[Any, ...]
    measured: tuple[Any, ...] | None

    def are(self, other: Inputs) -> bool:
        """Return whether a reconcile would read the same."""
        return (
            self.platform is other.platform
            and self.measured == other.measured
            and len(self.objects) == len(other.objects)
            and all(map(is_, self.objects, other.objects))
        )


def inputs_of(observed: Observed, platform: Platform, record: Record | None) -> Inputs:
    """Return the inputs of a reconcile, as observed in the cache and by the autoscaler's loop."""
    parts: Sequence[Any] = (*observed.replica_sets, *observed.pods, *observed.fetch_pods)
    objects = (observed.resource, *observed.children.values(), *parts)
    return Inputs(platform, objects, None if record is None else _measured(record))


def _measured(record: Record) -> tuple[Any, ...]:
    speeds = record.speeds
    return record.decision, record.told, record.states, speeds.stragglers, speeds.capacity is not None


@dataclass(slots=True)
class Settled:
    """The inputs of the last reconcile of each resource that had nothing to do, Ready and with all pods ready.

    Of such a resource neither a child nor the status depends on the time, except by its schedules. No locks: one thread
    at a time reconciles a resource.
    """

    _known: dict[Key, tuple[datetime, Inputs]] = field(default_factory=dict)

    def is_settled(self, key: Key, inputs: Inputs, now: datetime) -> bool:
        """Return whether a reconcile with these inputs has nothing to do."""
        until, known = self._known.get(key, (None, None))
        return until is not None and known is not None and now < until and inputs.are(known)

    def remember(self, key: Key, inputs: Inputs, now: datetime, due: datetime | None) -> None:
        """Record that a reconcile had nothing to do, and has nothing to do until `due`."""
        trusted = now + TRUST
        self._known[key] = trusted if due is None else min(trusted, due), inputs

    def forget(self, key: Key) -> None:
        """Drop a resource: its last reconcile had something to do, or it is gone."""
        self._known.pop(key, None)
