"""Reduce a pod to what the autoscaler's supply model reads. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from fastgen_operator.autoscale.supply import PodView
from fastgen_operator.kinds import Object
from fastgen_operator.objects import TEMPLATE_LABEL, name_of
from fastgen_operator.plan.pod_failures import Failure, failure_of
from fastgen_operator.pods import ENGINE_CONTAINER, container_of, is_ready, is_silent, node_of, pod_condition


def view_of(pod: Object, failures: Mapping[str, Failure], *, has_room: bool = True) -> PodView:
    """Return what the supply model reads of a pod; `failures` are those that pods' Events name."""
    metadata: dict[str, Any] = pod["metadata"]
    ready, scheduled = pod_condition(pod, "Ready"), pod_condition(pod, "PodScheduled")
    serves, refused = is_ready(pod), scheduled.get("status") == "False"
    failure = failure_of(pod) or failures.get(name_of(pod))
    engine = container_of(pod, ENGINE_CONTAINER)
    running, ended = engine.running or {}, engine.ended or {}
    return PodView(
        name=name_of(pod),
        address=pod.get("status", {}).get("podIP"),
        revision=metadata.get("labels", {}).get(TEMPLATE_LABEL, ""),
        scheduled_at=_time_of(scheduled) if node_of(pod) else None,
        started_at=_seconds(running.get("startedAt")),
        ended_at=None if running else _seconds(ended.get("finishedAt")),
        restarted=bool(engine.restarts),
        ready_since=_time_of(ready) if serves else None,
        unready_since=None if serves else _time_of(ready),
        # Not only Unschedulable: a pod with scheduling gates waits for a quota.
        unschedulable=str(scheduled.get("message") or scheduled.get("reason", "")) if refused else "",
        failure="" if serves or failure is None else f"{failure.reason}: {failure.message}",
        has_room=has_room,
        is_silent=is_silent(pod),
        gone_by=_seconds(metadata.get("deletionTimestamp")),
    )


def _time_of(condition: dict[str, Any]) -> float | None:
    return _seconds(condition.get("lastTransitionTime"))


def _seconds(time: str | None) -> float | None:
    """Convert an RFC 3339 time to seconds since 1970."""
    return None if not time else datetime.fromisoformat(time).timestamp()
