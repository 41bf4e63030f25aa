"""Kubernetes Events about the resources: each thing once, what repeats itself counted, and never a flood."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, Literal, Protocol

from fastgen_operator.kinds import Key, Object
from fastgen_operator.kube.transport import KubeError

logger = logging.getLogger(__name__)

# What is said again within this time is counted on the Event that said it.
WINDOW: Final = timedelta(minutes=10)
# New Events of one resource: so many at once, then one in so long. As client-go's own filter.
BURST: Final = 25
REFILL: Final = timedelta(minutes=5)
_REMEMBERED: Final = 64
_MESSAGE_LIMIT: Final = 1000


@dataclass(frozen=True, slots=True)
class Notice:
    """A Kubernetes Event to be."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


class EventWriter(Protocol):
    """Writes Events; `kube.Kube` is the real one."""

    def create_event(self, resource: Object, event: dict[str, Any]) -> str:
        """Records an Event about the resource; returns the Event's name."""
        ...

    def count_event(self, resource: Object, name: str, count: int, time: str) -> None:
        """Says that what the Event of that name tells has happened so many times, the last at `time`."""
        ...


@dataclass(slots=True)
class _Told:
    name: str
    count: int
    last: datetime


@dataclass(slots=True)
class _Ledger:
    """What was said about one resource."""

    told: OrderedDict[Notice, _Told] = field(default_factory=OrderedDict)
    tokens: float = BURST
    filled: datetime | None = None

    def take(self, now: datetime) -> bool:
        """Whether one more Event may be made."""
        if self.filled is not None:
            self.tokens = min(BURST, self.tokens + (now - self.filled) / REFILL)
        self.filled = now
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True


@dataclass(slots=True)
class Recorder:
    """Records Events. A resource is visited by one thread at a time, so that nothing here is locked."""

    writer: EventWriter
    _ledgers: dict[Key, _Ledger] = field(default_factory=dict)

    def record(self, resource: Object, notice: Notice, now: datetime) -> None:
        """Records the notice. Never raises: an Event is a courtesy and no state depends on it."""
        metadata = resource["metadata"]
        ledger = self._ledgers.setdefault((metadata["namespace"], metadata["name"]), _Ledger())
        try:
            self._record(ledger, resource, notice, now)
        except KubeError as error:
            ledger.told.pop(notice, None)
            level = logging.DEBUG if error.is_namespace_leaving else logging.WARNING
            logger.log(level, "%s: recording an Event: %s", metadata["name"], error)

    def forget(self, key: Key) -> None:
        """The resource is gone."""
        self._ledgers.pop(key, None)

    def _record(self, ledger: _Ledger, resource: Object, notice: Notice, now: datetime) -> None:
        told = ledger.told.get(notice)
        if told is not None and now - told.last < WINDOW:
            self.writer.count_event(resource, told.name, told.count + 1, now.isoformat())
            told.count, told.last = told.count + 1, now
            return
        if not ledger.take(now):
            logger.debug("%s: one Event too many: %s", resource["metadata"]["name"], notice.message)
            return
        event = {
            "type": notice.type,
            "reason": notice.reason,
            "message": notice.message[:_MESSAGE_LIMIT],
            "firstTimestamp": now.isoformat(),
            "lastTimestamp": now.isoformat(),
        }
        ledger.told[notice] = _Told(self.writer.create_event(resource, event), 1, now)
        ledger.told.move_to_end(notice)
        if len(ledger.told) > _REMEMBERED:
            ledger.told.popitem(last=False)
