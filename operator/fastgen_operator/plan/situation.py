"""A snapshot of one FastGenDeployment, from which its plan and status are computed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple

from fastgen_operator.api import Spec
from fastgen_operator.autoscale.decision import Decision
from fastgen_operator.autoscale.measure.capacity import ReplicaSpeeds
from fastgen_operator.autoscale.rehearsal.learning import Learning
from fastgen_operator.autoscale.rules.schedules import Timetable, timetable
from fastgen_operator.autoscale.scrape.served_model import ServedModel
from fastgen_operator.autoscale.supply import LoadingStage, PodSupply, StartTimes, supply_of
from fastgen_operator.canary.canary import Canary
from fastgen_operator.canary.outcomes import Evidence
from fastgen_operator.kinds import Object
from fastgen_operator.objects.model_cache import Job
from fastgen_operator.objects.pod import Pod, unschedulable_pods
from fastgen_operator.plan.observed import Observed
from fastgen_operator.plan.pod_failures import Failure, state_of, summary_of
from fastgen_operator.quantities import quantity


class NodeGPUs(NamedTuple):
    """The GPUs of a node.

    Attributes:
        free: what no pod requests.
        total: what pods may request.
    """

    free: int
    total: int


@dataclass(frozen=True)
class Situation:
    """What was read and measured. Everything else is derived from these values alone, when it is first needed.

    Attributes:
        observed: the resource and its children, as read from the API server.
        spec: the resource's typed spec.
        now: time of the observation, with a time zone.
        failures: what keeps pods without containers from starting, and Jobs from having pods, from their Events, by the
            name of the pod or Job.
        decision: the autoscaler's last decision; None without autoscaling, before the first one, and while objects that
            replicas are counted from cannot be read.
        speeds: capacity of the replicas; None before the first scrape.
        learning: what was learned from the recorded arrivals, as the status shows it; None if nothing was yet.
        in_flight_tokens: tokens of running and waiting requests by pod; empty while unknown.
        known_starts: starts of pods that were observed before.
        loading_stage: what the engine of a pod does while it loads; None while unknown.
        served_model: what a ready engine said that it serves; None if none was asked yet.
        nodes: all nodes of the cluster; None until they are needed, empty if the operator may not read them.
        best_node: the GPUs of the node that has the most free; None until they are needed, and if they are unknown.
        has_gateway: whether the operator can ask a gateway which deployments have requests.
        has_headroom_class: whether placeholder pods can be created.
        num_pickers: how many pods of the gateway can serve an InferencePool; None if none is created here.
        evidence: what was measured of a canary; None while nothing was.
        canary: what the plan has made of `canary_before`; None before the plan.
    """

    observed: Observed
    spec: Spec
    now: datetime
    failures: Mapping[str, Failure] = field(default_factory=dict)
    decision: Decision | None = None
    speeds: ReplicaSpeeds | None = None
    learning: Learning | None = None
    in_flight_tokens: Mapping[str, float] = field(default_factory=dict)
    known_starts: StartTimes = field(default_factory=StartTimes)
    loading_stage: LoadingStage | None = None
    served_model: ServedModel | None = None
    nodes: tuple[Object, ...] | None = None
    best_node: NodeGPUs | None = None
    has_gateway: bool = False
    has_headroom_class: bool = False
    num_pickers: int | None = None
    evidence: Evidence | None = None
    canary: Canary | None = None

    @cached_property
    def canary_before(self) -> Canary | None:
        """The new revision that is tried, or was rolled back last, as the status has it."""
        return Canary.from_status(self.observed.resource.get("status", {}).get("canary"))

    @cached_property
    def timetable(self) -> Timetable:
        """What spec.autoscaling.schedules say now."""
        return timetable(self.spec.autoscaling, self.now)

    @cached_property
    def min_replicas(self) -> int:
        """The lower bound of the autoscaler without schedules: at least 1 if nothing could hold requests.

        While a canary has a share of the requests, the others must be able to take it back, so none is removed.
        """
        bounds, canary, deployment = self.spec.autoscaling, self.canary_before, self.observed.deployment
        lowest = 1 if bounds is None else bounds.min_replicas
        if self.spec.is_autoscaled and deployment is not None and canary is not None and canary.has_pods:
            assert bounds is not None
            lowest = max(lowest, min(bounds.max_replicas, deployment.replicas or 0))
        return lowest if self.has_gateway else max(1, lowest)

    @cached_property
    def desired_replicas(self) -> int:
        """The number of replicas that the resource must have now.

        Without autoscaling, and in a dry run, it is the spec's. With autoscaling it is the autoscaler's decision or,
        until there is one, the Deployment's number (minReplicas without a Deployment), within the bounds of the spec
        and of the active schedules.
        """
        bounds = self.spec.autoscaling
        if bounds is None or not self.spec.is_autoscaled:
            return 1 if self.spec.replicas is None else self.spec.replicas
        if self.decision is not None:
            wanted = self.decision.replicas
        else:
            live = None if self.observed.deployment is None else self.observed.deployment.replicas
            wanted = self.min_replicas if live is None else live
        floor = self.timetable.floor
        lowest = self.min_replicas if floor is None else max(self.min_replicas, floor.replicas)
        return max(min(lowest, bounds.max_replicas), min(bounds.max_replicas, wanted))

    @cached_property
    def pods(self) -> tuple[Pod, ...]:
        """The pods of the Deployment that have not ended."""
        return tuple(pod for pod in self.observed.pods if not pod.has_ended)

    @cached_property
    def unready_pod(self) -> Pod | None:
        """The first pod of the current template that is not ready: conditions describe its state."""
        return next((pod for pod in self.observed.current_pods if not pod.is_ready), None)

    @cached_property
    def unready_state(self) -> str:
        """The state of `unready_pod`, in a sentence; empty without one."""
        if (pod := self.unready_pod) is None:
            return ""
        stage = self.loading_stage
        return state_of(pod, self.failures, stage.text if stage is not None and stage.is_of(pod) else "")

    @cached_property
    def model_status(self) -> dict[str, Any] | None:
        """`status.model`: what was said last, also before a restart of the operator; None if nothing was."""
        if self.served_model is not None:
            return self.served_model.said
        old: dict[str, Any] | None = self.observed.resource.get("status", {}).get("model")
        return old

    @cached_property
    def pods_without_room(self) -> int:
        """How many pods do not fit on the node of the volume; 0 while a terminating pod may make room there."""
        is_full = self.volume_nodes(self.pods) and not any(pod.is_terminating and pod.node for pod in self.pods)
        return len(unschedulable_pods(self.pods)) if is_full else 0

    @cached_property
    def pod_failures(self) -> dict[str, str]:
        """Why pods fail, by their names."""
        found = {pod.name: summary_of(pod, self.failures) for pod in self.pods}
        return {name: words for name, words in found.items() if words}

    @cached_property
    def starts(self) -> StartTimes:
        """The observed starts of pods."""
        return self.known_starts.learn(self.pods, float(self.spec.startup_deadline_seconds))

    @cached_property
    def supply(self) -> tuple[PodSupply, ...]:
        """Which pods serve, and which do not."""
        longest, time = float(self.spec.startup_deadline_seconds), self.now.timestamp()
        failures = self.pod_failures
        return tuple(supply_of(pod, failures.get(pod.name, ""), self.starts, longest, time) for pod in self.pods)

    def volume_nodes(self, pods: Iterable[Pod]) -> tuple[str, ...]:
        """Return the nodes whose pods hold the ReadWriteOnce volume: normally one, none if pods may run on any."""
        if not self.spec.runs_on_one_node:
            return ()
        return tuple(sorted({pod.node for pod in pods if pod.node and not pod.has_ended}))

    @cached_property
    def claim_size(self) -> str:
        """The volume size to request: the spec's, or the live claim's if that is larger; empty without both."""
        wanted = "" if self.spec.cache is None else self.spec.cache.size
        live = "" if self.observed.claim is None else self.observed.claim.size
        return live if (quantity(live) or 0) > (quantity(wanted) or 0) else wanted

    @cached_property
    def is_cached(self) -> bool:
        """Whether the spec's model is in the present volume."""
        claim = self.observed.claim
        return claim is not None and self.cached_model == claim.record(self.spec.model.address)

    @cached_property
    def cached_model(self) -> str | None:
        """The uid of the present claim and the folder of the model downloaded to it last.

        None if there is no claim or no such model, or without spec.cache.preload.

        A Job may be removed as soon as it is complete, by its TTL or by a cleaner, so the claim and the status remember
        it.
        """
        if (claim := self.observed.claim) is None or not self.spec.is_preloaded:
            return None
        if (job := self.complete_job) is not None:
            return job.record
        remembered = (claim.cached_record, self.observed.resource.get("status", {}).get("cachedModel"))
        return next((each for each in remembered if each and each.startswith(claim.record(""))), None)

    @cached_property
    def complete_job(self) -> Job | None:
        """The completed Job that downloaded the spec's model into the present volume, or None."""
        if (claim := self.observed.claim) is None:
            return None
        wanted = claim.record(self.spec.model.address)
        return next((job for job in self.observed.jobs if job.is_complete and job.record == wanted), None)
