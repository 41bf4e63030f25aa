"""Reduce a pod to what the autoscaler's supply model reads. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from fastgen_operator.autoscale.supply import PodView
from fastgen_operator.plan.pod_failures import Failure, failure_of
from fastgen_operator.pods import Pod


def view_of(pod: Pod, failures: Mapping[str, Failure], *, has_room: bool = True) -> PodView:
    """Return what the supply model reads of a pod; `failures` are those that pods' Events name."""
    ready, scheduled = pod.condition("Ready"), pod.condition("PodScheduled")
    serves, refused = pod.is_ready, scheduled.get("status") == "False"
    failure = failure_of(pod) or failures.get(pod.name)
    engine = pod.engine
    return PodView(
        name=pod.name,
        address=pod.address,
        revision=pod.revision,
        scheduled_at=_time_of(scheduled) if pod.node else None,
        started_at=_seconds(engine.running_since),
        ended_at=None if engine.running_since or engine.ended is None else _seconds(engine.ended.finished),
        restarted=bool(engine.restarts),
        ready_since=_time_of(ready) if serves else None,
        unready_since=None if serves else _time_of(ready),
        # Not only Unschedulable: a pod with scheduling gates waits for a quota.
        unschedulable=str(scheduled.get("message") or scheduled.get("reason", "")) if refused else "",
        failure="" if serves or failure is None else f"{failure.reason}: {failure.message}",
        has_room=has_room,
        is_silent=pod.is_silent,
        gone_by=_seconds(pod.gone_by),
    )


def _time_of(condition: dict[str, Any]) -> float | None:
    return _seconds(condition.get("lastTransitionTime"))


def _seconds(time: str | None) -> float | None:
    """Convert an RFC 3339 time to seconds since 1970."""
    return None if not time else datetime.fromisoformat(time).timestamp()
