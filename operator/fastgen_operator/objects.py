"""Kubernetes objects, and functions that read fields which all kinds share. Pods are in `pods.py`. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from fastgen_operator.kinds import (
    APPLIED_ANNOTATION,
    CACHED_ANNOTATION,
    CLAIM_ANNOTATION,
    DOWNLOADED_ANNOTATION,
    FETCH_ANNOTATION,
    FIELD_MANAGER,
    MODEL_ANNOTATION,
    QUEUE_LABEL,
    Object,
)

TEMPLATE_LABEL: Final = "pod-template-hash"
TEMPLATE_DIGEST: Final = "templateDigest"
# Why an object of the cache is only a stub, as text: see `kube/compact.py`.
FAULT: Final = "fault"


@dataclass(frozen=True)
class Stored:
    """An object of the API server. Each fact is read from it once, when it is first needed.

    Attributes:
        obj: the object, as far as the informer cache keeps it.
    """

    obj: Object

    @cached_property
    def name(self) -> str:
        return name_of(self.obj)

    @cached_property
    def namespace(self) -> str:
        return str(self.metadata["namespace"])

    @cached_property
    def uid(self) -> str:
        return str(self.metadata["uid"])

    @cached_property
    def created(self) -> str:
        """When it was created, in RFC 3339; empty if unknown."""
        return str(self.metadata.get("creationTimestamp") or "")

    @cached_property
    def labels(self) -> dict[str, str]:
        return self.metadata.get("labels") or {}

    @cached_property
    def annotations(self) -> dict[str, str]:
        return self.metadata.get("annotations") or {}

    @cached_property
    def controller(self) -> str | None:
        """The uid of its controller; None without one."""
        references = self.metadata.get("ownerReferences", ())
        return next((str(each["uid"]) for each in references if each.get("controller")), None)

    @cached_property
    def is_terminating(self) -> bool:
        """Whether it is being deleted. A pod may hold its node's GPUs until it is gone."""
        return is_terminating(self.obj)

    @property
    def metadata(self) -> dict[str, Any]:
        metadata: dict[str, Any] = self.obj["metadata"]
        return metadata

    @property
    def spec(self) -> dict[str, Any]:
        """Its spec; empty without one."""
        spec: dict[str, Any] = self.obj.get("spec", {})
        return spec

    @property
    def status(self) -> dict[str, Any]:
        """Its status; empty without one."""
        status: dict[str, Any] = self.obj.get("status", {})
        return status

    def condition(self, kind: str) -> dict[str, Any]:
        """Return the condition of that type; empty if there is none."""
        return condition_of(self.status, kind)


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
        """How many of them have the newest template."""
        return int(self.status.get("updatedReplicas", 0))


class Job(Stored):
    """A Job that downloads a model to the volume."""

    @cached_property
    def is_complete(self) -> bool:
        """Whether the download succeeded."""
        return self.condition("Complete").get("status") == "True" or DOWNLOADED_ANNOTATION in self.annotations

    @cached_property
    def is_suspended(self) -> bool:
        """Whether it is suspended: its controller starts no pod."""
        return self.condition("Suspended").get("status") == "True"

    @cached_property
    def is_queued(self) -> bool:
        """Whether it is in a queue of Kueue."""
        return QUEUE_LABEL in self.labels

    @cached_property
    def fetch(self) -> str | None:
        """The hash of its download, independent of the nodes it may run on; None for a Job of an earlier version."""
        return self.annotations.get(FETCH_ANNOTATION)

    @cached_property
    def record(self) -> str:
        """The uid of the claim that it fills, and the folder of the model: as in `Claim.record`."""
        return f"{self.annotations.get(CLAIM_ANNOTATION)}/{self.annotations.get(MODEL_ANNOTATION)}"


class Claim(Stored):
    """The PersistentVolumeClaim of the model's volume."""

    @cached_property
    def size(self) -> str:
        """The size that it requests."""
        return str(self.spec.get("resources", {}).get("requests", {}).get("storage", "0"))

    @cached_property
    def is_bound(self) -> bool:
        """Whether it has a volume."""
        return bool(self.spec.get("volumeName"))

    @cached_property
    def cached_record(self) -> str:
        """The annotation with the model that was downloaded last; empty without one."""
        return self.annotations.get(CACHED_ANNOTATION, "")

    def record(self, address: str) -> str:
        """Return the record of a model in this volume.

        With the uid: a claim that was restored from a backup has the annotation of another one, and perhaps no data.
        """
        return f"{self.uid}/{address}"


def name_of(obj: Object) -> str:
    """Return the object's name."""
    return str(obj["metadata"]["name"])


def is_terminating(obj: Object) -> bool:
    """Return whether the object is being deleted. A pod may hold its node's GPUs until it is gone."""
    return bool(obj["metadata"].get("deletionTimestamp"))


def condition_of(status: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the condition of that type in the status of any object; empty if there is none."""
    found: dict[str, Any] = next((each for each in status.get("conditions", ()) if each["type"] == kind), {})
    return found


def fingerprint(value: Any) -> str:
    """Return a short hash of a JSON value, independent of the order of its fields."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


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


def version_of(obj: Object) -> int:
    """Return the object's resource version."""
    return int(obj["metadata"]["resourceVersion"])


def has_same_spec(before: Object, live: Object) -> bool:
    """Return whether two versions of an object have the same spec and the same fingerprint of the operator.

    The status and other metadata may differ. False for kinds without a generation.
    """

    def basis(obj: Object) -> tuple[str, int, str]:
        # API servers count generations from 1, and not for all kinds.
        return obj["metadata"]["uid"], obj["metadata"].get("generation", 0), applied_fingerprint(obj)

    return basis(before) == basis(live) and basis(live)[1] > 0


def applied_entry(obj: Object) -> dict[str, Any] | None:
    """Return this operator's entry of `metadata.managedFields`, which server-side apply keeps, or None."""
    return next((dict(entry) for entry in obj["metadata"].get("managedFields") or () if is_applied_entry(entry)), None)


def is_applied_entry(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry of `metadata.managedFields` lists what this operator applied."""
    return entry.get("manager") == FIELD_MANAGER and entry.get("operation") == "Apply"


def foreign_entries(obj: Object) -> tuple[dict[str, Any], ...]:
    """Return the entries of `metadata.managedFields` of other managers that own a part of the spec.

    Entries of subresources, such as `scale`, are left out.
    """
    return tuple(
        entry
        for entry in obj["metadata"].get("managedFields") or ()
        if entry.get("manager") != FIELD_MANAGER
        and not entry.get("subresource")
        and "f:spec" in entry.get("fieldsV1", {})
    )


def applied_fingerprint(obj: Object) -> str:
    """Return the annotation with the fingerprint of the manifest applied last; empty if there is none."""
    return str((obj["metadata"].get("annotations") or {}).get(APPLIED_ANNOTATION, ""))


def foreign_managers(obj: Object) -> tuple[str, ...]:
    """Return the names of the managers in `foreign_entries`, sorted."""
    return tuple(sorted({str(entry["manager"]) for entry in foreign_entries(obj)}))
