"""What was observed of one FastGenDeployment, and facts derived from it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from fastgen_operator.api import Spec
from fastgen_operator.api.autoscaling import Autoscaling
from fastgen_operator.autoscale.decision import Decision
from fastgen_operator.autoscale.measure.capacity import ReplicaSpeeds
from fastgen_operator.autoscale.rules.schedules import Timetable
from fastgen_operator.autoscale.supply import PodSupply
from fastgen_operator.kinds import DEPLOYMENT, OWNER_LABEL, Key, Kind, Object
from fastgen_operator.objects import TEMPLATE_LABEL, is_controlled_by, is_terminating, name_of, template_digest
from fastgen_operator.plan.pod_failures import Failure
from fastgen_operator.plan.rewritten import RewrittenField
from fastgen_operator.pods import has_ended


@dataclass(frozen=True, slots=True)
class Observed:
    """The resource and its children as the API server gave them, at almost one moment.

    Attributes:
        resource: the FastGenDeployment.
        children: objects with the owner label, by kind and name, and other objects that have a child's name.
        replica_sets, pods: made for the Deployment.
        fetch_pods: made for the download Jobs.
        nodes: all nodes of the cluster; None until they are needed, empty if the operator may not read them.
        at: time of the observation; None if it is not needed.
        decision: the autoscaler's last decision; None without autoscaling, and before the first one.
        timetable: what spec.autoscaling.schedules say at the time of the observation.
        pod_failures: what keeps pods without containers from starting, and Jobs from having pods, from their Events,
            by the name of the pod or Job.
        rewritten: fields of the Deployment that admission changed or added.
        speeds: capacity of the replicas; None before the first scrape.
        supply: which pods serve, and which do not; empty until it is derived from the pods.
        in_flight_tokens: tokens of running and waiting requests by pod; empty while unknown.
        desired_replicas: see `settle_replicas`.
    """

    resource: Object
    children: Mapping[tuple[Kind, str], Object] = field(default_factory=dict)
    replica_sets: tuple[Object, ...] = ()
    pods: tuple[Object, ...] = ()
    fetch_pods: tuple[Object, ...] = ()
    nodes: tuple[Object, ...] | None = None
    at: datetime | None = None
    decision: Decision | None = None
    timetable: Timetable = field(default_factory=Timetable)
    pod_failures: Mapping[str, Failure] = field(default_factory=dict)
    rewritten: tuple[RewrittenField, ...] = ()
    speeds: ReplicaSpeeds | None = None
    supply: tuple[PodSupply, ...] = ()
    in_flight_tokens: Mapping[str, float] = field(default_factory=dict)
    desired_replicas: int = 1

    @property
    def key(self) -> Key:
        """Namespace and name."""
        return self.resource["metadata"]["namespace"], self.resource["metadata"]["name"]

    @property
    def generation(self) -> int:
        """The generation of the spec."""
        return int(self.resource["metadata"]["generation"])

    @property
    def deployment(self) -> Object | None:
        """The Deployment, or None."""
        return self.child(DEPLOYMENT)

    def child(self, kind: Kind, name: str | None = None) -> Object | None:
        """Return the child of that kind and name (default: the resource's name), or None."""
        return self.children.get((kind, name or self.key[1]))

    def with_child(self, kind: Kind, child: Object) -> Observed:
        """Return a copy with that child, which was just written or found."""
        return replace(self, children={**self.children, (kind, child["metadata"]["name"]): child})

    def without_child(self, kind: Kind, name: str) -> Observed:
        """Return a copy without that child."""
        return replace(self, children={key: child for key, child in self.children.items() if key != (kind, name)})


def settle_replicas(spec: Spec, observed: Observed) -> Observed:
    """Return `observed` with the number of replicas that the resource must have now.

    Without autoscaling, and in a dry run, it is the spec's. With autoscaling it is the autoscaler's decision or, until
    there is one, the Deployment's number, within the bounds of the spec and of the active schedules.
    """
    bounds = spec.autoscaling
    if bounds is None or not spec.is_autoscaled:
        return replace(observed, desired_replicas=1 if spec.replicas is None else spec.replicas)
    if observed.decision is not None:
        wanted = observed.decision.replicas
    else:
        wanted = (observed.deployment or {}).get("spec", {}).get("replicas", bounds.min_replicas)
    return replace(observed, desired_replicas=max(lowest_replicas(bounds, observed), min(bounds.max_replicas, wanted)))


def lowest_replicas(autoscaling: Autoscaling, observed: Observed) -> int:
    """Return the lower bound that applies now: minReplicas, or that of an active schedule, within the upper bound."""
    floor = observed.timetable.floor
    lowest = autoscaling.min_replicas if floor is None else max(autoscaling.min_replicas, floor.replicas)
    return min(lowest, autoscaling.max_replicas)


def pod_selector(name: str) -> str:
    """Return the label selector of a resource's pods, as in `kubectl get pods -l`."""
    return f"{OWNER_LABEL}={name}"


def is_rollout_observed(deployment: Object) -> bool:
    """Return whether the Deployment's status is about its newest spec."""
    return bool(deployment.get("status", {}).get("observedGeneration", 0) >= deployment["metadata"]["generation"])


def is_paused(deployment: Object) -> bool:
    """Return whether the Deployment is paused: its controller rolls nothing out."""
    return bool(deployment["spec"].get("paused"))


def current_pods(observed: Observed) -> tuple[Object, ...]:
    """Return the pods of the Deployment's newest template, by name; none while that template is unknown.

    Pods that are being deleted or have ended are left out: the ReplicaSet controller replaces them.
    """
    return _by_name(
        pod for pod in _pods_of(observed, current_template(observed)) if not is_terminating(pod) and not has_ended(pod)
    )


def failed_pods(observed: Observed) -> tuple[Object, ...]:
    """Return the ended pods of the newest template, by name."""
    pods = _pods_of(observed, current_template(observed))
    return _by_name(pod for pod in pods if not is_terminating(pod) and has_ended(pod))


def older_pods(observed: Observed) -> tuple[Object, ...]:
    """Return the pods of earlier templates, by name; none while the newest template is unknown."""
    template = current_template(observed)
    if template is None:
        return ()
    current = {name_of(pod) for pod in _pods_of(observed, template)}
    return _by_name(
        pod for pod in observed.pods if name_of(pod) not in current and not is_terminating(pod) and not has_ended(pod)
    )


def current_template(observed: Observed) -> str | None:
    """Return the label `pod-template-hash` of the Deployment's newest template; None before its ReplicaSet exists."""
    deployment = observed.deployment
    if deployment is None or not is_rollout_observed(deployment):
        return None
    for replica_set in observed.replica_sets:
        # Not by revision: a paused Deployment keeps the revision of an earlier template.
        if is_controlled_by(replica_set, deployment) and template_digest(replica_set) == template_digest(deployment):
            label: str | None = replica_set["metadata"].get("labels", {}).get(TEMPLATE_LABEL)
            return label
    return None


def _pods_of(observed: Observed, template: str | None) -> Iterable[Object]:
    labelled = (pod for pod in observed.pods if template is not None)
    return (pod for pod in labelled if pod["metadata"].get("labels", {}).get(TEMPLATE_LABEL) == template)


def _by_name(pods: Iterable[Object]) -> tuple[Object, ...]:
    """In a stable order, so that messages about the first pod do not change between reconciles."""
    return tuple(sorted(pods, key=name_of))
