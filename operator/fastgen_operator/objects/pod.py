"""A pod. Plan, status and autoscaler read a pod's object only here. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, Final

from fastgen_operator.labels_and_annotations import (
    CANARY_LABEL_SUFFIX,
    FETCH_SUFFIX,
    HEADROOM_LABEL_SUFFIX,
    MODEL_ANNOTATION,
    OWNER_LABEL,
    QUEUE_LABEL,
    TEMPLATE_LABEL,
)
from fastgen_operator.objects.container import ENGINE_CONTAINER, Container, containers_of, image_volumes_of
from fastgen_operator.objects.stored import Stored

# Time after the end of a pod's grace period in which its node reports its end.
_OVERDUE: Final = timedelta(seconds=60)
_KUEUE: Final = "kueue.x-k8s.io/"


class Pod(Stored):
    """A pod."""

    @cached_property
    def gone_by(self) -> str:
        """End of the grace period, in RFC 3339; empty if the pod is not being deleted."""
        return str(self.metadata.get("deletionTimestamp") or "")

    @cached_property
    def revision(self) -> str:
        """Hash of its template; empty without one."""
        return str(self.labels.get(TEMPLATE_LABEL) or "")

    @cached_property
    def is_download(self) -> bool:
        """Whether it downloads the model to the volume, and serves nothing."""
        return self.labels.get(OWNER_LABEL, "").endswith(FETCH_SUFFIX)

    @cached_property
    def is_canary(self) -> bool:
        """Whether it serves a new revision that is tried on a share of the requests."""
        return self.labels.get(OWNER_LABEL, "").endswith(CANARY_LABEL_SUFFIX)

    @cached_property
    def is_placeholder(self) -> bool:
        """Whether it only holds room for a replica, and serves nothing."""
        return self.labels.get(OWNER_LABEL, "").endswith(HEADROOM_LABEL_SUFFIX)

    @cached_property
    def model(self) -> str | None:
        """The folder of the model that it serves from a volume, or None."""
        return self.annotations.get(MODEL_ANNOTATION)

    @cached_property
    def node(self) -> str:
        """The name of its node; empty if it is not bound."""
        return str(self.spec.get("nodeName") or "")

    @cached_property
    def address(self) -> str | None:
        """Its IP address, or None."""
        address: str | None = self.status.get("podIP")
        return address

    @cached_property
    def containers(self) -> tuple[Container, ...]:
        """The reported containers, init containers first: while one fails, no later container has started."""
        return tuple(containers_of(self.spec, self.status))

    @cached_property
    def image_volumes(self) -> tuple[tuple[str, str], ...]:
        """The names and images of its image volumes."""
        return image_volumes_of(self.spec)

    @cached_property
    def engine(self) -> Container:
        """The engine's container; an empty one if the kubelet has not reported it."""
        return self.container(ENGINE_CONTAINER)

    @cached_property
    def is_ready(self) -> bool:
        """Whether its condition Ready is True."""
        return self.condition("Ready").get("status") == "True"

    @cached_property
    def has_ended(self) -> bool:
        """Whether it never runs again: evicted, rejected by its node, or completed."""
        return self.phase in ("Failed", "Succeeded")

    @cached_property
    def phase(self) -> str:
        """Its phase; empty if unknown."""
        return str(self.status.get("phase") or "")

    @cached_property
    def reason(self) -> str:
        """Why it is in its phase, in a word; empty if unknown."""
        return str(self.status.get("reason") or "")

    @cached_property
    def end(self) -> str:
        """Why it has ended, in a sentence."""
        return f"pod {self.name}: {self.reason or 'failed'}: {self.status.get('message', 'no reason given')}"

    @cached_property
    def is_scheduled(self) -> bool:
        """Whether it is bound to a node."""
        return bool(self.node) or self.condition("PodScheduled").get("status") == "True"

    @cached_property
    def is_silent(self) -> bool:
        """Whether its node does not respond: its containers were last reported ready, but the pod is not Ready.

        A pod that is not Ready because of a readiness gate does not count.
        """
        return self._has_ready_containers and not self.is_ready and not self._waits_for_readiness_gate

    @cached_property
    def readiness_gate(self) -> str | None:
        """Which readiness gates keep it from being ready, and the remedy; None unless they alone do."""
        if not (self._has_ready_containers and self._waits_for_readiness_gate):
            return None
        gates = [str(gate["conditionType"]) for gate in self.spec.get("readinessGates", ())]
        missing = [gate for gate in gates if self.condition(gate).get("status") != "True"]
        names = " and ".join(missing or gates) or "of another controller"
        return f"waits for the readiness gate {names}: see the controller that sets this condition of the pod"

    @cached_property
    def is_starting(self) -> bool:
        """Whether it waits for the scheduler, or its containers start for the first time.

        No container, apart from init containers and sidecars, has passed its startup probe, ended or restarted; or all
        have started, and the pod waits for the first time for a readiness gate. False if the pod has ended, or if it
        gets no node for now (`pending`).
        """
        if self.has_ended or self.pending is not None:
            return False
        running = [each for each in self.containers if each.role in ("engine", "container")]
        if any(each.restarts or each.is_terminated for each in running):
            return False
        if self.readiness_gate is not None and self.started_at is not None:
            # The condition Ready has not changed since before the engine started.
            return (self.unready_since or 0.0) <= self.started_at
        return not any(each.has_started for each in running)

    @cached_property
    def is_loading(self) -> bool:
        """Whether the engine runs and has not passed its startup probe."""
        return self.engine.is_running and not self.engine.has_started

    @cached_property
    def has_started(self) -> bool:
        """Whether the engine runs and has passed its startup probe; it may be unready now."""
        return self.engine.has_started and self.engine.is_running

    @cached_property
    def scheduled_at(self) -> float | None:
        """When it was bound to its node, in seconds since 1970; None without a node, or if unknown."""
        return _changed_at(self.condition("PodScheduled")) if self.node else None

    @cached_property
    def started_at(self) -> float | None:
        """When the engine's container started, in seconds since 1970; None if it does not run, or if unknown."""
        return _seconds(self.engine.running_since)

    @cached_property
    def ended_at(self) -> float | None:
        """When the engine's container ended last, in seconds since 1970.

        None if it runs, never ended, or the time is unknown.
        """
        ended = None if self.engine.is_running else self.engine.ended
        return None if ended is None else _seconds(ended.finished)

    @cached_property
    def ready_since(self) -> float | None:
        """When it became ready, in seconds since 1970; None if it is not."""
        return _changed_at(self.condition("Ready")) if self.is_ready else None

    @cached_property
    def unready_since(self) -> float | None:
        """Since when its condition Ready is not True, in seconds since 1970; None if True or missing."""
        return None if self.is_ready else _changed_at(self.condition("Ready"))

    @cached_property
    def gone_at(self) -> float | None:
        """The time `gone_by` in seconds since 1970; None if it is not being deleted."""
        return _seconds(self.gone_by)

    @cached_property
    def no_node(self) -> str:
        """Why it has no node, according to the scheduler or because of a scheduling gate.

        Empty if it has a node, or the scheduler has not handled it yet.
        """
        condition = self.condition("PodScheduled")
        refused = condition.get("status") == "False"
        return str(condition.get("message") or condition.get("reason", "")) if refused else ""

    @cached_property
    def unschedulable(self) -> str | None:
        """The scheduler's message if it found no node, or could not bind the pod to one; else None.

        Other schedulers have other reasons for that than kube-scheduler (Unschedulable, SchedulerError).
        """
        return None if self._is_gated else self.no_node or None

    @cached_property
    def gate(self) -> str | None:
        """Which scheduling gate holds it back, and the remedy; None if no scheduling gate does."""
        if not self._is_gated:
            return None
        gates = [str(gate["name"]) for gate in self.spec.get("schedulingGates", ())]
        message = f"held by the scheduling gate {' and '.join(gates) or 'of another controller'}"
        if any(gate.startswith(_KUEUE) for gate in gates):
            return f"{message}: {queue_message(self)}"
        return f"{message}: see the controller that added it"

    @property
    def pending(self) -> str | None:
        """Why it has no node and gets none for now (the scheduler's message, or its gates), else None."""
        return self.unschedulable or self.gate

    def container(self, name: str) -> Container:
        """Return the container of that name; an empty one if the kubelet has not reported it."""
        return next((each for each in self.containers if each.name == name), Container())

    def is_overdue(self, at: datetime) -> bool:
        """Return whether the pod exists long after the end of its grace period: it has probably lost its node."""
        return self.is_terminating and at - datetime.fromisoformat(self.gone_by) > _OVERDUE

    def termination_message(self, at: datetime) -> str:
        """Say what a terminating pod holds, and, if it is overdue, how to end it."""
        place = f"pod {self.name} on node {self.node}"
        if not self.is_overdue(at):
            return f"{place} still holds its resources: it terminates by {self.gone_by}"
        return (
            f"{place} should have terminated by {self.gone_by}: if the node has failed, run kubectl taint node "
            f"{self.node} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute to release its pods and volumes"
        )

    @property
    def _has_ready_containers(self) -> bool:
        return bool(self.condition("ContainersReady").get("status") == "True")

    @property
    def _waits_for_readiness_gate(self) -> bool:
        return bool(self.condition("Ready").get("reason") == "ReadinessGatesNotReady")

    @property
    def _is_gated(self) -> bool:
        condition = self.condition("PodScheduled")
        return (condition.get("status"), condition.get("reason")) == ("False", "SchedulingGated")


def unschedulable_pods(pods: Iterable[Pod]) -> tuple[Pod, ...]:
    """Return the pods that the scheduler could not bind to a node, without those that are being deleted."""
    return tuple(pod for pod in pods if pod.unschedulable is not None and not pod.is_terminating)


def by_name(pods: Iterable[Pod]) -> tuple[Pod, ...]:
    """Return the pods in a stable order, so that messages about the first one do not change between reconciles."""
    return tuple(sorted(pods, key=lambda pod: pod.name))


def queue_message(workload: Stored) -> str:
    """Say that a pod or Job waits for Kueue."""
    queue = workload.labels.get(QUEUE_LABEL)
    if queue is None:
        return f"Kueue holds it, but it names no queue: set the label {QUEUE_LABEL}, or ask who added the gate"
    return f"Kueue has not admitted it to the queue {queue}: see kubectl describe workloads"


def _changed_at(condition: Mapping[str, Any]) -> float | None:
    return _seconds(condition.get("lastTransitionTime"))


def _seconds(time: str | None) -> float | None:
    """Convert an RFC 3339 time to seconds since 1970."""
    return None if not time else datetime.fromisoformat(time).timestamp()
