"""An object of the API server, and functions that read fields which all kinds share. Pure."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from fastgen_operator.kinds import Object
from fastgen_operator.labels_and_annotations import APPLIED_ANNOTATION

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


def version_of(obj: Object) -> int:
    """Return the object's resource version."""
    return int(obj["metadata"]["resourceVersion"])


def fingerprint(value: Any) -> str:
    """Return a short hash of a JSON value, independent of the order of its fields."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def has_same_spec(before: Object, live: Object) -> bool:
    """Return whether two versions of an object have the same spec and the same fingerprint of the operator.

    The status and other metadata may differ. False for kinds without a generation.
    """

    def basis(obj: Object) -> tuple[str, int, str]:
        # API servers count generations from 1, and not for all kinds.
        return obj["metadata"]["uid"], obj["metadata"].get("generation", 0), applied_fingerprint(obj)

    return basis(before) == basis(live) and basis(live)[1] > 0


def applied_fingerprint(obj: Object) -> str:
    """Return the annotation with the fingerprint of the manifest applied last; empty if there is none."""
    return str((obj["metadata"].get("annotations") or {}).get(APPLIED_ANNOTATION, ""))
