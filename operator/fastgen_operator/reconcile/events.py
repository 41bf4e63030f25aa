"""Record Kubernetes Events: repetitions are counted on one Event, and the rate is limited."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from fastgen_operator.kinds import Object
from fastgen_operator.kube.client import KubeClient
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.reconcile.backoff import is_within
from fastgen_operator.status.conditions.condition import shortened
from fastgen_operator.status.status import Notice

logger = logging.getLogger(__name__)

# A notice that repeats within this time is counted on its last Event.
EVENT_WINDOW: Final = timedelta(minutes=10)
# Token bucket of new Events per object, with the limits of client-go's EventSourceObjectSpamFilter.
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
class Recorder:
    """Records Events about one object."""

    client: KubeClient
    _recorded: OrderedDict[Notice, _Recorded] = field(default_factory=OrderedDict)
    _tokens: float = BURST
    _filled: datetime | None = None

    def record(self, about: Object, notice: Notice, now: datetime) -> None:
        """Record the notice. Never raises KubeError: no state depends on an Event."""
        try:
            self._record(about, notice, now)
        except KubeError as error:
            self._recorded.pop(notice, None)
            level = logging.DEBUG if error.is_namespace_leaving else logging.WARNING
            logger.log(level, "%s: recording an Event: %s", about["metadata"]["name"], error)

    def _record(self, about: Object, notice: Notice, now: datetime) -> None:
        recorded = self._recorded.get(notice)
        if recorded is not None and is_within(EVENT_WINDOW, recorded.last, now):
            self.client.count_event(about, recorded.name, recorded.count + 1, now.isoformat())
            recorded.count, recorded.last = recorded.count + 1, now
            return
        if not self._take_token(now):
            logger.debug("%s: Event dropped by the rate limit: %s", about["metadata"]["name"], notice.message)
            return
        event = {
            "type": notice.type,
            "reason": notice.reason,
            "message": shortened(notice.message, _MESSAGE_LIMIT),
            "firstTimestamp": now.isoformat(),
            "lastTimestamp": now.isoformat(),
        }
        self._recorded[notice] = _Recorded(self.client.create_event(about, event), 1, now)
        self._recorded.move_to_end(notice)
        if len(self._recorded) > _REMEMBERED:
            self._recorded.popitem(last=False)

    def _take_token(self, now: datetime) -> bool:
        """Take a token for a new Event; return whether there was one."""
        # The clock may have been set back.
        passed = timedelta() if self._filled is None else max(timedelta(), now - self._filled)
        self._tokens, self._filled = min(BURST, self._tokens + passed / REFILL), now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
