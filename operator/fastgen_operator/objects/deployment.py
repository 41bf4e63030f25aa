"""The Deployment of the engine pods, and a digest of its pod template. Pure."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final

from fastgen_operator.kinds import Object
from fastgen_operator.labels_and_annotations import REVISION_ANNOTATION, TEMPLATE_LABEL
from fastgen_operator.objects.stored import Stored, applied_fingerprint, fingerprint

TEMPLATE_DIGEST: Final = "templateDigest"


class Deployment(Stored):
    """The Deployment of the engine pods."""

    @cached_property
    def replicas(self) -> int | None:
        """Desired number of pods; None if the object has none."""
        return self.spec.get("replicas")

    @cached_property
    def template(self) -> Object:
        """Its pod template, as it can be applied again."""
        template = self.spec["template"]
        metadata = {name: value for name, value in template["metadata"].items() if name != "creationTimestamp"}
        return {"metadata": metadata, "spec": template["spec"]}

    @cached_property
    def revision(self) -> str:
        """Hash of the pod template that it has by the spec, before the API server added its defaults."""
        held = self.annotations.get(REVISION_ANNOTATION)
        return held or applied_fingerprint(self.obj).rpartition("-")[2]

    @cached_property
    def max_unavailable(self) -> int | str | None:
        """Maximum number or percentage of pods that may be unavailable during a rollout; None if unset."""
        update: dict[str, Any] = self.spec.get("strategy", {}).get("rollingUpdate", {})
        return update.get("maxUnavailable")

    @cached_property
    def is_observed(self) -> bool:
        """Whether its status reflects its newest spec."""
        return bool(self.status.get("observedGeneration", 0) >= self.metadata["generation"])

    @cached_property
    def is_paused(self) -> bool:
        """Whether its rollouts are paused."""
        return bool(self.spec.get("paused"))

    @cached_property
    def present(self) -> int:
        """How many pods it has."""
        return int(self.status.get("replicas", 0))

    @cached_property
    def updated(self) -> int:
        """How many of its pods have the newest template."""
        return int(self.status.get("updatedReplicas", 0))


def template_digest(workload: Object) -> str:
    """Return a hash of a workload's pod template, equal for a Deployment and the ReplicaSet of its newest template.

    The cache stores this digest in place of a ReplicaSet's template.
    """
    spec = workload["spec"]
    if TEMPLATE_DIGEST in spec:
        return str(spec[TEMPLATE_DIGEST])
    metadata = {name: value for name, value in spec["template"].get("metadata", {}).items() if value is not None}
    # The Deployment controller adds this label to the ReplicaSet's template only.
    labels = {name: value for name, value in metadata.get("labels", {}).items() if name != TEMPLATE_LABEL}
    return fingerprint({**spec["template"], "metadata": {**metadata, "labels": labels}})
