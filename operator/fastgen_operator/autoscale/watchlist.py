"""The fleets that reconciles register with the autoscaler, and the decisions that they read back.

Reconciles run in other threads than the autoscaler's loop. Values are frozen and replaced as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from fastgen_operator.api import Spec
from fastgen_operator.autoscale.decision import Decision
from fastgen_operator.autoscale.observation import Fleet, Sample
from fastgen_operator.autoscale.policy import DEFAULT_INTER_TOKEN_SECONDS, Policy
from fastgen_operator.autoscale.recommend import State
from fastgen_operator.children.colocation import pods_without_room
from fastgen_operator.kinds import Key, Object
from fastgen_operator.pods import has_ended, is_ready, name_of


@dataclass(frozen=True, slots=True)
class PodView:
    """One pod of a fleet; times in seconds since 1970."""

    name: str
    address: str | None
    created: float
    ready_since: float | None
    terminating: bool
    has_room: bool = True


@dataclass(frozen=True, slots=True)
class Subject:
    """A fleet to size, as observed by the last reconcile."""

    uid: str
    policy: Policy
    model_name: str
    replicas: int
    pods: tuple[PodView, ...]

    def fleet(self, samples: Mapping[str, Sample], time: float) -> Fleet:
        """Return the fleet at a time in seconds since 1970, with the newest usable sample of each pod."""
        staying = [pod for pod in self.pods if not pod.terminating]
        ready = [pod for pod in staying if pod.ready_since is not None]
        # The minimum: other pods may have waited for a node, or become ready a second time.
        starts = [pod.ready_since - pod.created for pod in ready if pod.ready_since is not None]
        return Fleet(
            replicas=self.replicas,
            ready=frozenset(pod.name for pod in ready),
            samples=samples,
            pending_ages=tuple(
                max(0.0, time - pod.created) for pod in staying if pod.ready_since is None and pod.has_room
            ),
            without_room=sum(not pod.has_room for pod in staying),
            terminating=len(self.pods) - len(staying),
            start_seconds=min(starts, default=None),
        )


@dataclass(slots=True)
class Record:
    """What the autoscaler remembers of one fleet.

    Attributes:
        samples: the newest usable sample of each ready pod.
        state, decision: of the last recommendation.
        shown: the reason counted last.
    """

    uid: str
    samples: dict[str, Sample] = field(default_factory=dict)
    state: State = field(default_factory=State)
    decision: Decision | None = None
    shown: str = ""

    @property
    def in_flight_tokens(self) -> dict[str, float]:
        """Tokens of running and waiting requests, by pod."""
        return {pod: sample.in_flight_tokens for pod, sample in self.samples.items()}


class Watchlist:
    """The fleets to size, by resource, and what is remembered of each.

    Args:
        scrape_seconds: interval between two scrapes of a fleet.
    """

    def __init__(self, scrape_seconds: float) -> None:
        self.scrape_seconds = scrape_seconds
        self._subjects: dict[Key, Subject] = {}
        self._records: dict[Key, Record] = {}

    def register(self, key: Key, subject: Subject) -> None:
        """Add a fleet, or replace its last observation."""
        self._subjects[key] = subject

    def forget(self, key: Key) -> None:
        """Remove a fleet: the resource is gone, or has no autoscaling. Does nothing for an unknown fleet."""
        self._subjects.pop(key, None)
        self._records.pop(key, None)

    def subjects(self) -> list[tuple[Key, Subject]]:
        """Return all fleets to size."""
        return list(self._subjects.items())

    def lookup(self, key: Key, uid: str) -> Record | None:
        """Return what is remembered of the resource with that uid, or None."""
        found = self._records.get(key)
        return found if found is not None and found.uid == uid else None

    def open_record(self, key: Key, uid: str) -> Record | None:
        """Return the record of a resource, a new one if needed; None if the resource was forgotten meanwhile."""
        if key not in self._subjects:
            return None
        found = self.lookup(key, uid)
        if found is None:
            found = self._records[key] = Record(uid)
        return found


def subject_of(
    spec: Spec, resource: Object, pods: Iterable[Object], replicas: int, scrape_seconds: float
) -> Subject | None:
    """Return the fleet to size; None without spec.autoscaling. `replicas` are the current ones of the Deployment."""
    policy = policy_of(spec, scrape_seconds)
    if policy is None:
        return None
    pods = [pod for pod in pods if not has_ended(pod)]
    without_room = {name_of(pod) for pod in pods_without_room(spec, pods)}
    return Subject(
        uid=resource["metadata"]["uid"],
        policy=policy,
        model_name=spec.model.served_name or resource["metadata"]["name"],
        replicas=replicas,
        pods=tuple(_view(pod, has_room=name_of(pod) not in without_room) for pod in pods),
    )


def policy_of(spec: Spec, scrape_seconds: float) -> Policy | None:
    """Return the policy of a spec; None without spec.autoscaling."""
    autoscaling = spec.autoscaling
    if autoscaling is None:
        return None
    target = autoscaling.targets.inter_token_latency_milliseconds or spec.engine.inter_token_target
    return Policy(
        min_replicas=autoscaling.min_replicas,
        max_replicas=autoscaling.max_replicas,
        first_token_seconds=autoscaling.targets.time_to_first_token_milliseconds / 1000,
        inter_token_seconds=target / 1000 if isinstance(target, int) else DEFAULT_INTER_TOKEN_SECONDS,
        utilization=autoscaling.targets.utilization_percent / 100,
        up_window=autoscaling.scale_up.stabilization_seconds,
        down_window=autoscaling.scale_down.stabilization_seconds,
        max_step=autoscaling.scale_down.max_step_percent / 100,
        max_sequences=spec.engine.max_sequences or 256,
        scrape_seconds=scrape_seconds,
    )


def _view(pod: Object, *, has_room: bool) -> PodView:
    metadata: dict[str, Any] = pod["metadata"]
    conditions = {condition["type"]: condition for condition in pod.get("status", {}).get("conditions", ())}
    return PodView(
        name=name_of(pod),
        address=pod.get("status", {}).get("podIP"),
        created=_seconds(metadata["creationTimestamp"]),
        ready_since=_seconds(conditions["Ready"]["lastTransitionTime"]) if is_ready(pod) else None,
        terminating="deletionTimestamp" in metadata,
        has_room=has_room,
    )


def _seconds(time: str) -> float:
    """Convert an RFC 3339 time to seconds since 1970."""
    return datetime.fromisoformat(time).timestamp()
