"""The desired state of one FastGenDeployment: what its children are built from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from fastgen_operator.api import PodTemplate, Spec
from fastgen_operator.children.platform import Platform
from fastgen_operator.kinds import FASTGEN, Kind, Object
from fastgen_operator.labels_and_annotations import (
    CANARY_LABEL_SUFFIX,
    FETCH_SUFFIX,
    HEADROOM_LABEL_SUFFIX,
    OPERATOR_NAME,
    OWNER_LABEL,
    QUEUE_LABEL,
)

MANAGED_BY: Final = "app.kubernetes.io/managed-by"
_QUEUE_LABELS: Final = (QUEUE_LABEL, "kueue.x-k8s.io/priority-class")


@dataclass(frozen=True, kw_only=True)
class Desired:
    """The desired state of the children, computed once before any of them is built.

    Attributes:
        replicas: number of replicas.
        max_unavailable: maximum number of them that may be unavailable during a rollout.
        claim_size: size of the volume; empty without spec.cache.
        cached_model: the record of the model in the volume (`Claim.record`), for an annotation; None if there is none.
        queue: labels from which Kueue takes queue and priority. It reads them on Deployments and Jobs, and on pods
            whose owners it does not manage.
    """

    name: str
    namespace: str
    uid: str
    spec: Spec
    platform: Platform
    replicas: int
    max_unavailable: int
    claim_size: str = ""
    cached_model: str | None = None
    queue: Mapping[str, str] = field(default_factory=dict)

    @property
    def image(self) -> str:
        """The engine's image."""
        return self.spec.engine.image or self.platform.engine_image

    @property
    def selector(self) -> dict[str, str]:
        """Labels that select the pods. They never change: a Deployment's selector is immutable."""
        return {OWNER_LABEL: self.name}

    @property
    def canary_selector(self) -> dict[str, str]:
        """Labels that select the pods of the canary. They do not match `selector`."""
        return {OWNER_LABEL: f"{self.name}{CANARY_LABEL_SUFFIX}"}

    @property
    def headroom_selector(self) -> dict[str, str]:
        """Labels that select the placeholder pods. They do not match `selector`."""
        return {OWNER_LABEL: f"{self.name}{HEADROOM_LABEL_SUFFIX}"}

    @property
    def fetch_selector(self) -> dict[str, str]:
        """Labels that select the pods of the download Jobs. They do not match `selector`."""
        return {OWNER_LABEL: f"{self.name}{FETCH_SUFFIX}"}

    @property
    def labels(self) -> dict[str, str]:
        """Labels of every child, and of the pods."""
        return {
            "app.kubernetes.io/name": "fastgen-engine",
            "app.kubernetes.io/instance": self.name,
            MANAGED_BY: OPERATOR_NAME,
            **self.selector,
        }

    @property
    def owner_reference(self) -> dict[str, Any]:
        """The reference that makes the resource the controller of a child."""
        return {
            "apiVersion": FASTGEN.api_version,
            "kind": FASTGEN.name,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }

    def child(self, kind: Kind, built: Object) -> Object:
        """Return a builder's manifest completed with what all children have.

        These are kind, namespace, labels, the owner reference, and the resource's name unless the builder set another.
        """
        metadata = built.get("metadata", {})
        return {
            **built,
            "apiVersion": kind.api_version,
            "kind": kind.name,
            "metadata": {
                "name": self.name,
                "namespace": self.namespace,
                "ownerReferences": [self.owner_reference],
                **metadata,
                "labels": {**metadata.get("labels", {}), **self.labels},
            },
        }


def queue_labels(resource: Object, spec: Spec) -> dict[str, str]:
    """Return the labels for Kueue: those of the resource, overridden by those of spec.podTemplate."""
    given = {**resource["metadata"].get("labels", {}), **(spec.pod_template or PodTemplate()).metadata.labels}
    return {name: given[name] for name in _QUEUE_LABELS if name in given}
