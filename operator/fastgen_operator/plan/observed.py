"""What is observed of one FastGenDeployment, and the questions asked of it. All but `observe` is pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Protocol

from fastgen_operator.autoscale.decision import Decision
from fastgen_operator.digests import TEMPLATE_LABEL, template_digest
from fastgen_operator.kinds import DEPLOYMENT, FASTGEN, FETCH_SUFFIX, OWNER_LABEL, POD, REPLICA_SET, Key, Kind, Object
from fastgen_operator.pods import has_ended, is_terminating, name_of


@dataclass(frozen=True, slots=True)
class Observed:
    """The resource and its children as the API server gave them, at almost one moment.

    Attributes:
        resource: the FastGenDeployment.
        children: what bears the owner label, by kind and name; also what else was found under a name that is wanted.
        replica_sets, pods: what the Deployment made.
        fetch_pods: what the download's Jobs made.
        at: when it was seen; None where that does not matter.
        decision: the autoscaler's last; None without autoscaling, and until the first one since the operator's start.
        in_flight_tokens: by pod, tokens of requests that run or wait there, as last scraped; empty where nobody asked.
    """

    resource: Object
    children: Mapping[tuple[Kind, str], Object] = field(default_factory=dict)
    replica_sets: tuple[Object, ...] = ()
    pods: tuple[Object, ...] = ()
    fetch_pods: tuple[Object, ...] = ()
    at: datetime | None = None
    decision: Decision | None = None
    in_flight_tokens: Mapping[str, float] = field(default_factory=dict)

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
        """The child of that kind and name, which is the resource's own where not given; None where there is none."""
        return self.children.get((kind, name or self.key[1]))

    def with_child(self, kind: Kind, child: Object) -> Observed:
        """The observed with that child in it, just written or found."""
        return replace(self, children={**self.children, (kind, child["metadata"]["name"]): child})

    def with_decision(self, decision: Decision | None, in_flight_tokens: Mapping[str, float]) -> Observed:
        """The observed with what the autoscaler knows of it."""
        return replace(self, decision=decision, in_flight_tokens=in_flight_tokens)

    def without_child(self, kind: Kind, name: str) -> Observed:
        """The observed after that child was deleted."""
        return replace(self, children={key: child for key, child in self.children.items() if key != (kind, name)})


class Reader(Protocol):
    """Reads what is watched; what it gives is shared and never changed."""

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """The object, or None where there is none."""
        ...

    def owned(self, kind: Kind, key: Key) -> list[Object]:
        """The objects of that kind with the owner label of one resource."""
        ...


def observe(reader: Reader, key: Key, kinds: Iterable[Kind]) -> Observed | None:
    """Reads the resource and its children of those kinds; None where the resource is gone or on its way out.

    A resource being deleted needs nothing done: the garbage collector follows the owner references.
    """
    namespace, name = key
    resource = reader.get(FASTGEN, namespace, name)
    if resource is None or resource["metadata"].get("deletionTimestamp"):
        return None
    pods = reader.owned(POD, key)
    return Observed(
        resource=resource,
        children={(kind, child["metadata"]["name"]): child for kind in kinds for child in reader.owned(kind, key)},
        replica_sets=tuple(reader.owned(REPLICA_SET, key)),
        pods=tuple(pod for pod in pods if not _is_download(pod)),
        fetch_pods=tuple(pod for pod in pods if _is_download(pod)),
    )


def _is_download(pod: Object) -> bool:
    return str(pod["metadata"]["labels"][OWNER_LABEL]).endswith(FETCH_SUFFIX)


def pod_selector(name: str) -> str:
    """The label selector of a resource's pods, as in `kubectl get pods -l`."""
    return f"{OWNER_LABEL}={name}"


def is_controlled_by(child: Object, owner: Object) -> bool:
    """Whether the child's controller is exactly this owner, not an earlier one of the same name."""
    return any(
        reference.get("controller") and reference["uid"] == owner["metadata"]["uid"]
        for reference in child["metadata"].get("ownerReferences", ())
    )


def is_rollout_observed(deployment: Object) -> bool:
    """Whether the Deployment controller has seen the newest spec, so that its status is about that spec."""
    return bool(deployment.get("status", {}).get("observedGeneration", 0) >= deployment["metadata"]["generation"])


def is_paused(deployment: Object) -> bool:
    """Whether somebody has paused the Deployment, so that its controller rolls nothing out."""
    return bool(deployment["spec"].get("paused"))


def current_pods(observed: Observed) -> tuple[Object, ...]:
    """Pods of the Deployment's newest template that are there to stay, by name; none while that template is unknown.

    A pod that is being deleted, or was evicted and only keeps its record, is replaced by another one.
    """
    return _by_name(
        pod for pod in _pods_of(observed, current_template(observed)) if not is_terminating(pod) and not has_ended(pod)
    )


def failed_pods(observed: Observed) -> tuple[Object, ...]:
    """Records of pods of the newest template that will never run again, by name."""
    pods = _pods_of(observed, current_template(observed))
    return _by_name(pod for pod in pods if not is_terminating(pod) and has_ended(pod))


def older_pods(observed: Observed) -> tuple[Object, ...]:
    """Pods of earlier templates that are there to stay, by name; none while the newest template is unknown."""
    template = current_template(observed)
    if template is None:
        return ()
    current = {name_of(pod) for pod in _pods_of(observed, template)}
    return _by_name(
        pod for pod in observed.pods if name_of(pod) not in current and not is_terminating(pod) and not has_ended(pod)
    )


def current_template(observed: Observed) -> str | None:
    """The label `pod-template-hash` of the Deployment's newest template; None before its ReplicaSet is made."""
    deployment = observed.deployment
    if deployment is None or not is_rollout_observed(deployment):
        return None
    for replica_set in observed.replica_sets:
        # The templates are compared themselves: the revision of a paused Deployment stays that of an earlier one.
        if is_controlled_by(replica_set, deployment) and template_digest(replica_set) == template_digest(deployment):
            label: str | None = replica_set["metadata"].get("labels", {}).get(TEMPLATE_LABEL)
            return label
    return None


def _pods_of(observed: Observed, template: str | None) -> Iterable[Object]:
    labelled = (pod for pod in observed.pods if template is not None)
    return (pod for pod in labelled if pod["metadata"].get("labels", {}).get(TEMPLATE_LABEL) == template)


def _by_name(pods: Iterable[Object]) -> tuple[Object, ...]:
    """Always in one order, so that what is said of the first does not change from visit to visit."""
    return tuple(sorted(pods, key=name_of))
