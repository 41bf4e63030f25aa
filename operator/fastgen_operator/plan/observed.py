"""What was read of one FastGenDeployment and its children, and facts derived from it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from fastgen_operator.kinds import CLAIM, DEPLOYMENT, JOB, Key, Kind, Object
from fastgen_operator.labels_and_annotations import (
    CANARY_SUFFIX,
    HEADROOM_SUFFIX,
    OWNER_LABEL,
    REVISION_ANNOTATION,
    TEMPLATE_LABEL,
)
from fastgen_operator.objects.deployment import Deployment, template_digest
from fastgen_operator.objects.model_cache import Claim, Job
from fastgen_operator.objects.pod import Pod, by_name
from fastgen_operator.objects.stored import Stored, is_terminating, name_of


@dataclass(frozen=True)
class Observed:
    """The resource and its children as the API server gave them, at almost one moment.

    Attributes:
        resource: the FastGenDeployment.
        children: objects with the owner label, by kind and name, and other objects that have a child's name.
        replica_sets, pods: made for the Deployment.
        fetch_pods: made for the download Jobs.
        canary_pods: made for the Deployment of the canary.
        name_holder: the FastGenDeployment to which the gateway routes requests for the model name of this one; None if
            the gateway does not route to this one.
    """

    resource: Object
    children: Mapping[tuple[Kind, str], Object] = field(default_factory=dict)
    replica_sets: tuple[Object, ...] = ()
    pods: tuple[Pod, ...] = ()
    fetch_pods: tuple[Pod, ...] = ()
    canary_pods: tuple[Pod, ...] = ()
    name_holder: Key | None = None

    @property
    def key(self) -> Key:
        """Namespace and name."""
        return self.resource["metadata"]["namespace"], self.resource["metadata"]["name"]

    @property
    def generation(self) -> int:
        """The generation of the spec."""
        return int(self.resource["metadata"]["generation"])

    @cached_property
    def deployment(self) -> Deployment | None:
        """The Deployment with the resource's name, or None. Another object may own it: see `owns`."""
        found = self.child(DEPLOYMENT)
        return None if found is None else Deployment(found)

    @cached_property
    def claim(self) -> Claim | None:
        """The claim, or None if it is missing, being deleted, or owned by another object."""
        found = self.child(CLAIM)
        return Claim(found) if found is not None and self.owns(found) and not is_terminating(found) else None

    @cached_property
    def jobs(self) -> tuple[Job, ...]:
        """The resource's own download Jobs that are not being deleted."""
        jobs = (child for (kind, _), child in self.children.items() if kind == JOB and self.owns(child))
        return tuple(Job(job) for job in jobs if not is_terminating(job))

    @cached_property
    def template(self) -> str | None:
        """The label `pod-template-hash` of the Deployment's newest template.

        None until the Deployment controller has observed that template and created its ReplicaSet.
        """
        return None if self.deployment is None else self._template_of(self.deployment)

    @cached_property
    def canary(self) -> Deployment | None:
        """The Deployment of the canary, or None if it is missing, being deleted, or owned by another object."""
        return self._own_deployment(CANARY_SUFFIX)

    @cached_property
    def headroom(self) -> Deployment | None:
        """The Deployment of the placeholder pods, or None as for `canary`."""
        return self._own_deployment(HEADROOM_SUFFIX)

    def current_canary_pods(self, revision: str) -> tuple[Pod, ...]:
        """Return the pods of the canary of a revision that have not ended and are not being deleted, by name."""
        if (canary := self.canary) is None or canary.annotations.get(REVISION_ANNOTATION) != revision:
            return ()
        template = self._template_of(canary)
        found = (pod for pod in self.canary_pods if pod.revision == template)
        return by_name(pod for pod in found if not pod.is_terminating and not pod.has_ended)

    @property
    def is_rolled_out(self) -> bool:
        """Whether all pods of the Deployment exist with its template, and its rollout has completed.

        A paused Deployment does not report the latter.
        """
        deployment = self.deployment
        if deployment is None or self.template is None:
            return False
        if not deployment.present == deployment.updated == deployment.replicas:
            return False
        return deployment.condition("Progressing").get("reason") == "NewReplicaSetAvailable" or deployment.is_paused

    def _own_deployment(self, suffix: str) -> Deployment | None:
        found = self.child(DEPLOYMENT, f"{self.key[1]}{suffix}")
        return Deployment(found) if found is not None and self.owns(found) and not is_terminating(found) else None

    def _template_of(self, deployment: Deployment) -> str | None:
        if not deployment.is_observed:
            return None
        digest = template_digest(deployment.obj)
        for replica_set in map(Stored, self.replica_sets):
            # Not by revision: a paused Deployment keeps the revision of an earlier template.
            if replica_set.controller == deployment.uid and template_digest(replica_set.obj) == digest:
                return replica_set.labels.get(TEMPLATE_LABEL)
        return None

    @cached_property
    def current_pods(self) -> tuple[Pod, ...]:
        """The pods of the Deployment's newest template, by name; none while that template is unknown.

        Pods that are being deleted or have ended are left out: the ReplicaSet controller replaces them.
        """
        return by_name(pod for pod in self._of_template if not pod.has_ended)

    @cached_property
    def failed_pods(self) -> tuple[Pod, ...]:
        """The ended pods of the newest template that are not being deleted, by name."""
        return by_name(pod for pod in self._of_template if pod.has_ended)

    @cached_property
    def older_pods(self) -> tuple[Pod, ...]:
        """The pods of earlier templates, by name; none while the newest template is unknown.

        Pods that are being deleted or have ended are left out.
        """
        if self.template is None:
            return ()
        others = (pod for pod in self.pods if pod.revision != self.template)
        return by_name(pod for pod in others if not pod.is_terminating and not pod.has_ended)

    def pods_of(self, job: Job) -> tuple[Pod, ...]:
        """Return the pods of a download Job."""
        return tuple(pod for pod in self.fetch_pods if pod.controller == job.uid)

    def child(self, kind: Kind, name: str | None = None) -> Object | None:
        """Return the child of that kind and name (default: the resource's name), or None."""
        return self.children.get((kind, name or self.key[1]))

    def owns(self, child: Object) -> bool:
        """Return whether the child's controller is this resource, not an earlier one of the same name."""
        return bool(Stored(child).controller == self.resource["metadata"]["uid"])

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
