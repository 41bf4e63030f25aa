"""Record Kubernetes Events about resources.

Repetitions are counted on one Event, and the rate is limited.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from fastgen_operator.kinds import Key, Object
from fastgen_operator.kube.client import KubeClient
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.reconcile.backoff import is_within
from fastgen_operator.status.status import Notice

logger = logging.getLogger(__name__)

# A notice that repeats within this time is counted on its last Event.
WINDOW: Final = timedelta(minutes=10)
# Token bucket of new Events per resource, with the limits of client-go's EventSourceObjectSpamFilter.
BURST: Final = 25
REFILL: Final = timedelta(minutes=5)
_REMEMBERED: Final = 64
_MESSAGE_LIMIT: Final = 1000


@dataclass(slots=True)
class _Recorded:
    name: str
    count: int
    last: datetime


@dataclass(slots=True)
class _History:
    """The Events recorded about one resource."""

    recorded: OrderedDict[Notice, _Recorded] = field(default_factory=OrderedDict)
    tokens: float = BURST
    filled: datetime | None = None

    def take(self, now: datetime) -> bool:
        """Take a token for a new Event; return whether there was one."""
        if self.filled is not None:
            # The clock may have been set back.
            self.tokens = min(BURST, self.tokens + max(timedelta(), now - self.filled) / REFILL)
        self.filled = now
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True


@dataclass(slots=True)
class Recorder:
    """Records Events. No locks: one thread at a time reconciles a resource."""

    client: KubeClient
    _histories: dict[Key, _History] = field(default_factory=dict)

    def record(self, resource: Object, notice: Notice, now: datetime) -> None:
        """Record the notice. Never raises KubeError: no state depends on an Event."""
        metadata = resource["metadata"]
        history = self._histories.setdefault((metadata["namespace"], metadata["name"]), _History())
        try:
            self._record(history, resource, notice, now)
        except KubeError as error:
            history.recorded.pop(notice, None)
            level = logging.DEBUG if error.is_namespace_leaving else logging.WARNING
            logger.log(level, "%s: recording an Event: %s", metadata["name"], error)

    def forget(self, key: Key) -> None:
        """Drop the state of a deleted resource."""
        self._histories.pop(key, None)

    def _record(self, history: _History, resource: Object, notice: Notice, now: datetime) -> None:
        recorded = history.recorded.get(notice)
        if recorded is not None and is_within(WINDOW, recorded.last, now):
            self.client.count_event(resource, recorded.name, recorded.count + 1, now.isoformat())
            recorded.count, recorded.last = recorded.count + 1, now
            return
        if not history.take(now):
            logger.debug("%s: Event dropped by the rate limit: %s", resource["metadata"]["name"], notice.message)
            return
        event = {
            "type": notice.type,
            "reason": notice.reason,
            "message": notice.message[:_MESSAGE_LIMIT],
            "firstTimestamp": now.isoformat(),
            "lastTimestamp": now.isoformat(),
        }
        history.recorded[notice] = _Recorded(self.client.create_event(resource, event), 1, now)
        history.recorded.move_to_end(notice)
        if len(history.recorded) > _REMEMBERED:
            history.recorded.popitem(last=False)
