"""Describe a fleet to the autoscaler: its pods, reduced to what the supply model reads. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from fastgen_operator.api import Spec
from fastgen_operator.autoscale.policy import policy_of
from fastgen_operator.autoscale.rules.rate_limits import rate_limits_of
from fastgen_operator.autoscale.supply import PodView, StartTimes
from fastgen_operator.autoscale.watchlist import Subject
from fastgen_operator.children.colocation import pods_without_room
from fastgen_operator.kinds import Object
from fastgen_operator.objects import TEMPLATE_LABEL, name_of
from fastgen_operator.plan.observed import Observed, current_template
from fastgen_operator.plan.pod_failures import Failure, failure_of
from fastgen_operator.pods import ENGINE_CONTAINER, container_of, has_ended, is_ready, is_silent, node_of, pod_condition


def mode_of(spec: Spec) -> tuple[bool, bool]:
    """Return whether the autoscaler decides on the resource, and whether it only recommends."""
    decides = spec.autoscaling is not None
    return decides, decides and not spec.is_autoscaled


def subject_of(spec: Spec, observed: Observed, scrape_seconds: float, known: StartTimes) -> Subject:
    """Return the fleet to measure and, with spec.autoscaling, to decide on.

    Args:
        observed: with its desired replicas.
        scrape_seconds: interval between two scrapes of this fleet.
        known: the starts observed so far.
    """
    present = [pod for pod in observed.pods if not has_ended(pod)]
    without_room = {name_of(pod) for pod in pods_without_room(spec, present)}
    views = (view_of(pod, observed.pod_failures) for pod in present)
    pods = tuple(replace(view, has_room=view.name not in without_room) for view in views)
    deadline = float(spec.startup_deadline_seconds)
    is_autoscaled, is_dry_run = mode_of(spec)
    return Subject(
        uid=observed.resource["metadata"]["uid"],
        policy=policy_of(spec, observed.desired_replicas, scrape_seconds),
        is_dry_run=is_dry_run,
        floor=observed.timetable.floor,
        rate_limits=rate_limits_of(spec.autoscaling),
        model_name=spec.model.served_name or observed.resource["metadata"]["name"],
        replicas=observed.desired_replicas,
        pods=pods,
        is_autoscaled=is_autoscaled,
        revision=current_template(observed) or "",
        starts=known.learn(pods, deadline),
        startup_deadline=deadline,
    )


def view_of(pod: Object, failures: Mapping[str, Failure]) -> PodView:
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
        is_silent=is_silent(pod),
        gone_by=_seconds(metadata.get("deletionTimestamp")),
    )


def _time_of(condition: dict[str, Any]) -> float | None:
    return _seconds(condition.get("lastTransitionTime"))


def _seconds(time: str | None) -> float | None:
    """Convert an RFC 3339 time to seconds since 1970."""
    return None if not time else datetime.fromisoformat(time).timestamp()
