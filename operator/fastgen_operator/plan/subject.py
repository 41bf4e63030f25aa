"""Describe a fleet to the autoscaler. Pure."""

from __future__ import annotations

from fastgen_operator.api import Spec
from fastgen_operator.autoscale.policy import policy_of
from fastgen_operator.autoscale.rules.rate_limits import rate_limits_of
from fastgen_operator.autoscale.watchlist import Subject, TrialPods
from fastgen_operator.canary.canary import Canary
from fastgen_operator.plan.situation import Situation


def mode_of(spec: Spec) -> tuple[bool, bool]:
    """Return whether the autoscaler decides on the resource, and whether it only recommends."""
    decides = spec.autoscaling is not None
    return decides, decides and not spec.is_autoscaled


def subject_of(situation: Situation, scrape_seconds: float) -> Subject:
    """Return the fleet to measure and, with spec.autoscaling, to decide on.

    Args:
        scrape_seconds: interval between two scrapes of this fleet.
    """
    spec, observed = situation.spec, situation.observed
    is_autoscaled, is_dry_run = mode_of(spec)
    policy = policy_of(spec, situation.desired_replicas, scrape_seconds)
    policy = policy if situation.has_gateway else policy.awake
    if is_autoscaled and not is_dry_run and policy.min_replicas < situation.min_replicas:
        policy = policy.raised(situation.min_replicas, learned="none is removed while a new revision is tried")
    canary = situation.canary_before
    is_tried = canary is not None and canary.outcome is None
    return Subject(
        uid=observed.resource["metadata"]["uid"],
        policy=policy,
        is_dry_run=is_dry_run,
        floor=situation.timetable.floor,
        rate_limits=rate_limits_of(spec.autoscaling),
        model_name=spec.model.served_name or observed.key[1],
        replicas=situation.desired_replicas,
        pods=situation.pods,
        failures=situation.pod_failures,
        without_room=situation.pods_without_room,
        is_autoscaled=is_autoscaled,
        revision=observed.template or "",
        starts=situation.starts,
        loading=pod if (pod := situation.unready_pod) is not None and pod.is_loading else None,
        described=next((pod for pod in observed.current_pods if pod.is_ready), None),
        startup_deadline=float(spec.startup_deadline_seconds),
        trial=None if canary is None or not is_tried else _trial_of(canary, situation),
        stored=observed.resource.get("status", {}).get("autoscaling", {}).get("learning"),
    )


def _trial_of(canary: Canary, situation: Situation) -> TrialPods:
    """Return the pods of a canary on trial; nothing is measured until those of its step are ready."""
    pods = () if canary.measured_since is None else situation.observed.current_canary_pods(canary.revision)
    return TrialPods(canary.revision, canary.step_started, pods)
