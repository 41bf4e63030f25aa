"""What the API server said of one FastGenDeployment, and facts derived from it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from fastgen_operator.kinds import CLAIM, DEPLOYMENT, DOWNLOADED_ANNOTATION, JOB, OWNER_LABEL, Key, Kind, Object
from fastgen_operator.objects import (
    TEMPLATE_LABEL,
    annotations_of,
    condition_of,
    is_controlled_by,
    is_terminating,
    name_of,
    template_digest,
)
from fastgen_operator.pods import Pod, by_name


@dataclass(frozen=True)
class Observed:
    """The resource and its children as the API server gave them, at almost one moment.

    Attributes:
        resource: the FastGenDeployment.
        children: objects with the owner label, by kind and name, and other objects that have a child's name.
        replica_sets, pods: made for the Deployment.
        fetch_pods: made for the download Jobs.
    """

    resource: Object
    children: Mapping[tuple[Kind, str], Object] = field(default_factory=dict)
    replica_sets: tuple[Object, ...] = ()
    pods: tuple[Pod, ...] = ()
    fetch_pods: tuple[Pod, ...] = ()

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

    @property
    def claim(self) -> Object | None:
        """The claim, or None if it is missing, being deleted, or owned by another object."""
        claim = self.child(CLAIM)
        return claim if claim is not None and self.owns(claim) and not is_terminating(claim) else None

    @property
    def jobs(self) -> list[Object]:
        """The resource's own download Jobs that are not being deleted."""
        return [
            child
            for (kind, _), child in self.children.items()
            if kind == JOB and self.owns(child) and not is_terminating(child)
        ]

    @cached_property
    def template(self) -> str | None:
        """The label `pod-template-hash` of the Deployment's newest template; None before its ReplicaSet exists."""
        deployment = self.deployment
        if deployment is None or not is_rollout_observed(deployment):
            return None
        digest = template_digest(deployment)
        for replica_set in self.replica_sets:
            # Not by revision: a paused Deployment keeps the revision of an earlier template.
            if is_controlled_by(replica_set, deployment) and template_digest(replica_set) == digest:
                label: str | None = replica_set["metadata"].get("labels", {}).get(TEMPLATE_LABEL)
                return label
        return None

    @cached_property
    def current_pods(self) -> tuple[Pod, ...]:
        """The pods of the Deployment's newest template, by name; none while that template is unknown.

        Pods that are being deleted or have ended are left out: the ReplicaSet controller replaces them.
        """
        return by_name(pod for pod in self._of_template if not pod.has_ended)

    @cached_property
    def failed_pods(self) -> tuple[Pod, ...]:
        """The ended pods of the newest template, by name."""
        return by_name(pod for pod in self._of_template if pod.has_ended)

    @cached_property
    def older_pods(self) -> tuple[Pod, ...]:
        """The pods of earlier templates, by name; none while the newest template is unknown."""
        if self.template is None:
            return ()
        others = (pod for pod in self.pods if pod.revision != self.template)
        return by_name(pod for pod in others if not pod.is_terminating and not pod.has_ended)

    def child(self, kind: Kind, name: str | None = None) -> Object | None:
        """Return the child of that kind and name (default: the resource's name), or None."""
        return self.children.get((kind, name or self.key[1]))

    def owns(self, child: Object) -> bool:
        """Return whether the child's controller is this resource, not an earlier one of the same name."""
        return is_controlled_by(child, self.resource)

    def with_child(self, kind: Kind, child: Object) -> Observed:
        """Return a copy with that child, which was just written or found."""
        return replace(self, children={**self.children, (kind, name_of(child)): child})

    def without_child(self, kind: Kind, name: str) -> Observed:
        """Return a copy without that child."""
        return replace(self, children={key: child for key, child in self.children.items() if key != (kind, name)})

    @property
    def _of_template(self) -> Iterable[Pod]:
        """The pods of the newest template that are not being deleted."""
        if self.template is None:
            return ()
        return (pod for pod in self.pods if pod.revision == self.template and not pod.is_terminating)


def pod_selector(name: str) -> str:
    """Return the label selector of a resource's pods, as in `kubectl get pods -l`."""
    return f"{OWNER_LABEL}={name}"


def is_rollout_observed(deployment: Object) -> bool:
    """Return whether the Deployment's status is about its newest spec."""
    return bool(deployment.get("status", {}).get("observedGeneration", 0) >= deployment["metadata"]["generation"])


def is_paused(deployment: Object) -> bool:
    """Return whether the Deployment is paused: its controller rolls nothing out."""
    return bool(deployment["spec"].get("paused"))


def is_complete(job: Object) -> bool:
    """Return whether the download succeeded."""
    return has_condition(job, "Complete") or DOWNLOADED_ANNOTATION in annotations_of(job)


def has_condition(job: Object, kind: str) -> bool:
    """Return whether the Job's condition of this type is True."""
    return condition_of(job.get("status", {}), kind).get("status") == "True"
