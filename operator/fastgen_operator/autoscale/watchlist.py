"""What the visits tell the autoscaler about the fleets, and what it has decided about them.

The visits write and read from threads of their own while the autoscaler's loop does the same: all values are frozen,
and each is put in its place whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from fastgen_operator.api import Spec
from fastgen_operator.autoscale.decision import Decision
from fastgen_operator.autoscale.observation import Fleet, Sample
from fastgen_operator.autoscale.policy import Policy
from fastgen_operator.autoscale.recommend import State
from fastgen_operator.kinds import Key, Object
from fastgen_operator.plan.observed import Observed
from fastgen_operator.plan.replicas import wanted_replicas
from fastgen_operator.pods import has_ended, is_ready, name_of


@dataclass(frozen=True, slots=True)
class PodView:
    """What the autoscaler needs to know of a pod; times in seconds since 1970."""

    name: str
    address: str | None
    created: float
    ready_since: float | None
    terminating: bool


@dataclass(frozen=True, slots=True)
class Subject:
    """A fleet that is to be sized, as the last visit found it."""

    uid: str
    policy: Policy
    model_name: str
    wanted: int
    pods: tuple[PodView, ...]

    def fleet(self, samples: Mapping[str, Sample], time: float) -> Fleet:
        """The fleet at a time in seconds since 1970, with the newest usable sample of each pod."""
        staying = [pod for pod in self.pods if not pod.terminating]
        ready = [pod for pod in staying if pod.ready_since is not None]
        # The least of them: a pod that waited for a node, or was not ready for a while, did not start all that time.
        starts = [pod.ready_since - pod.created for pod in ready if pod.ready_since is not None]
        return Fleet(
            wanted=self.wanted,
            ready=frozenset(pod.name for pod in ready),
            samples=samples,
            pending_ages=tuple(max(0.0, time - pod.created) for pod in staying if pod.ready_since is None),
            terminating=len(self.pods) - len(staying),
            start_seconds=min(starts, default=None),
        )


@dataclass(slots=True)
class Record:
    """What the autoscaler remembers of one fleet.

    Attributes:
        samples: the newest usable sample of each ready pod.
        state, decision: of the last recommendation.
        shown: the reason that was counted last.
    """

    uid: str
    samples: dict[str, Sample] = field(default_factory=dict)
    state: State = field(default_factory=State)
    decision: Decision | None = None
    shown: str = ""


class Watchlist:
    """The fleets to size, by resource. `scrape_seconds`: how often they are looked at."""

    def __init__(self, scrape_seconds: float) -> None:
        self.scrape_seconds = scrape_seconds
        self._subjects: dict[Key, Subject] = {}
        self._records: dict[Key, Record] = {}

    def look_up(self, spec: Spec, observed: Observed) -> Observed:
        """Takes note of the fleet as this visit finds it; returns the observed with what was decided about it."""
        subject = subject_of(spec, observed, self.scrape_seconds)
        if subject is None:
            self.forget(observed.key)
            return observed
        self._subjects[observed.key] = subject
        record = self._records.get(observed.key)
        if record is None or record.uid != subject.uid:
            return observed
        in_flight = {pod: sample.kv_tokens + sample.backlog_tokens for pod, sample in record.samples.items()}
        return observed.with_decision(record.decision, in_flight)

    def forget(self, key: Key) -> None:
        """The resource is gone, or is not to be sized any more; harmless where it never was."""
        self._subjects.pop(key, None)
        self._records.pop(key, None)

    def subjects(self) -> list[tuple[Key, Subject]]:
        """All fleets to size."""
        return list(self._subjects.items())

    def record(self, key: Key, uid: str) -> Record | None:
        """What is remembered of that very resource; None where it was forgotten meanwhile."""
        if key not in self._subjects:
            return None
        found = self._records.get(key)
        if found is None or found.uid != uid:
            found = self._records[key] = Record(uid)
        return found


def subject_of(spec: Spec, observed: Observed, scrape_seconds: float) -> Subject | None:
    """The fleet of a resource; None where its spec says itself how many replicas there are to be."""
    policy = policy_of(spec, scrape_seconds)
    if policy is None:
        return None
    return Subject(
        uid=observed.resource["metadata"]["uid"],
        policy=policy,
        model_name=spec.model.served_name or observed.key[1],
        wanted=wanted_replicas(spec, observed),
        pods=tuple(_view(pod) for pod in observed.pods if not has_ended(pod)),
    )


def policy_of(spec: Spec, scrape_seconds: float) -> Policy | None:
    """The policy that a spec asks for; None where it asks for none."""
    asked = spec.autoscaling
    if asked is None:
        return None
    return Policy(
        min_replicas=asked.min_replicas,
        max_replicas=asked.max_replicas,
        first_token_seconds=asked.targets.time_to_first_token_milliseconds / 1000,
        inter_token_seconds=asked.targets.inter_token_latency_milliseconds / 1000,
        utilization=asked.targets.utilization_percent / 100,
        up_window=asked.scale_up.stabilization_seconds,
        down_window=asked.scale_down.stabilization_seconds,
        max_step=asked.scale_down.max_step_percent / 100,
        max_sequences=spec.engine.max_sequences or 256,
        scrape_seconds=scrape_seconds,
    )


def _view(pod: Object) -> PodView:
    metadata: dict[str, Any] = pod["metadata"]
    conditions = {condition["type"]: condition for condition in pod.get("status", {}).get("conditions", ())}
    return PodView(
        name=name_of(pod),
        address=pod.get("status", {}).get("podIP"),
        created=_seconds(metadata["creationTimestamp"]),
        ready_since=_seconds(conditions["Ready"]["lastTransitionTime"]) if is_ready(pod) else None,
        terminating="deletionTimestamp" in metadata,
    )


def _seconds(time: str) -> float:
    """Seconds since 1970 of an RFC 3339 time."""
    return datetime.fromisoformat(time).timestamp()
