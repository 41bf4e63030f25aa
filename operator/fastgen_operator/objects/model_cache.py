"""The model cache: the Job that downloads a model, and the PersistentVolumeClaim that it fills. Pure."""

from __future__ import annotations

from functools import cached_property

from fastgen_operator.labels_and_annotations import (
    CACHED_ANNOTATION,
    CLAIM_ANNOTATION,
    DOWNLOADED_ANNOTATION,
    FETCH_ANNOTATION,
    MODEL_ANNOTATION,
    QUEUE_LABEL,
)
from fastgen_operator.objects.stored import Stored


class Job(Stored):
    """A Job that downloads a model to the volume."""

    @cached_property
    def is_complete(self) -> bool:
        """Whether the download succeeded."""
        return self.condition("Complete").get("status") == "True" or DOWNLOADED_ANNOTATION in self.annotations

    @cached_property
    def failure(self) -> str | None:
        """Why it has ended without success, for example by a deadline that admission added; None if it has not."""
        condition = self.condition("Failed")
        if self.is_complete or condition.get("status") != "True":
            return None
        return f"{condition.get('reason') or 'Failed'}: {condition.get('message') or 'no reason given'}"

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
        """Hash of the download, without the nodes that it may run on; None if an earlier version created the Job."""
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
    def capacity(self) -> str:
        """The size of its volume, smaller than `size` until an expansion ends; empty without a volume."""
        return str(self.status.get("capacity", {}).get("storage", ""))

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
