"""Events about kinds that cannot be read."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastgen_operator.kinds import JOB, LEASE, POD, Object
from fastgen_operator.kube.sources import Sources
from fastgen_operator.reconcile.events import Recorder
from fastgen_operator.runtime.stale_events import StaleEvents

NOW = datetime(2026, 1, 1, tzinfo=UTC)
HELD: Object = {
    "apiVersion": LEASE.api_version,
    "kind": LEASE.name,
    "metadata": {"namespace": "system", "name": "fastgen-operator", "uid": "1"},
}


class Events:
    """What is recorded, and on what."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def create_event(self, about: Object, event: Object) -> str:
        assert about is HELD
        self.said.append(f"{event['type']} {event['reason']}: {event['message']}")
        return str(len(self.said))

    def count_event(self, about: Object, name: str, count: int, time: str) -> None:
        assert about is HELD
        del time
        self.said.append(f"{name} x{count}")


class Reported:
    """A leader's events about the pods of one namespace and the Jobs of another."""

    def __init__(self) -> None:
        events: Any = Events()
        self.said: list[str] = events.said
        self.sources = Sources(("one", "two"))
        self.lease: Object | None = HELD
        self.events = StaleEvents(self.sources, Recorder(events), lambda: self.lease, lambda: NOW)

    def resync(self) -> list[str]:
        self.said.clear()
        self.events.record()
        return list(self.said)


def test_a_kind_that_still_fails_at_the_next_resync_is_reported_once_until_it_can_be_read() -> None:
    reported = Reported()
    assert reported.resync() == []
    reported.sources.failed((POD, "one"), "watch", "no right")
    reported.sources.failed((JOB, "two"), "list", "no webhook")
    assert reported.resync() == [], "it may be a moment"
    reported.sources.succeeded((JOB, "two"), "list")
    stale = "Warning KindStale: pods in namespace one cannot be read: no right; the operator retries"
    assert reported.resync() == [stale]
    assert reported.resync() == []
    reported.sources.succeeded((POD, "one"), "watch")
    assert reported.resync() == ["Normal KindRead: pods in namespace one can be read again"]
    assert reported.resync() == []
    reported.sources.failed((POD, "one"), "watch", "no right")
    reported.resync()
    assert reported.resync() == ["1 x2"], "a repetition is counted"


def test_only_the_leader_reports_what_fails() -> None:
    reported = Reported()
    reported.lease = None
    reported.sources.failed((POD, "one"), "list", "no right")
    assert [reported.resync() for _ in range(3)] == [[], [], []]
    reported.lease = HELD
    assert len(reported.resync()) == 1
