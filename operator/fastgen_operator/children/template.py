"""The pod template: the generated pod with spec.podTemplate merged over it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from fastgen_operator.api import PodTemplate, Spec
from fastgen_operator.children.colocation import ColocationError, colocate
from fastgen_operator.children.desired import Desired
from fastgen_operator.children.pod import build_pod
from fastgen_operator.children.pod_security import broken_rules
from fastgen_operator.children.strategic_merge import MergeError, strategic_merge
from fastgen_operator.kinds import Object
from fastgen_operator.labels_and_annotations import MODEL_ANNOTATION
from fastgen_operator.objects.container import ENGINE_CONTAINER

_PATH: Final = "spec.podTemplate.spec"
# How the API server names a field of a Deployment's pod template in a rejection, with or without a leading dot.
_TEMPLATE_FIELD: Final = re.compile(r"\.?\bspec\.template\.(spec|metadata|labels|annotations)\b(\S*?)(?=:?(?:\s|$))")
# Fields of a container that the spec has fields of its own for: the engine's, and those of the download.
_OF_CONTAINERS: Final = re.compile(r"\.(containers|initContainers)\[0\]\.(image|resources)\b(\S*)")
_SOURCES: Final = {
    ("containers", "image"): ("engine", "image"),
    ("containers", "resources"): ("resources",),
    ("initContainers", "image"): ("engine", "image"),
    ("initContainers", "resources"): ("model", "download", "resources"),
}


class TemplateRefused(ValueError):
    """spec.podTemplate or the affinity cannot be used; the message names the field and the remedy."""


def build_template(desired: Desired) -> Object:
    """Build the pod template.

    Raises:
        TemplateRefused: spec.podTemplate cannot be merged, changes a field that the operator relies on, or violates the
            restricted Pod Security Standard although the settings require it; or the affinity excludes co-location.
    """
    built, wanted = build_pod(desired), desired.spec.pod_template or PodTemplate()
    try:
        pod = strategic_merge(built["spec"], wanted.spec or {}, _PATH)
    except MergeError as error:
        raise TemplateRefused(str(error)) from error
    _check_engine(built["spec"], pod)
    if desired.spec.runs_on_one_node:
        # After the merge: a patch replaces whole lists of affinity terms.
        pod = _colocated(desired.name, pod, wanted)
    labels, annotations = built["metadata"]["labels"], built["metadata"]["annotations"]
    # The operator's annotation of the model wins: it identifies what a pod serves.
    served = {name: value for name, value in annotations.items() if name == MODEL_ANNOTATION}
    metadata = {
        "labels": {**labels, **wanted.metadata.labels, **desired.queue},
        "annotations": {**annotations, **wanted.metadata.annotations, **served},
    }
    template = {"metadata": metadata, "spec": pod}
    if desired.platform.pods.pod_template == "restricted":
        _check_standard(template)
    return template


def explain_refusal(refusal: str, spec: Spec) -> str | None:
    """Return why the API server rejected a Deployment, naming the resource's field, not the Deployment's.

    None if no field of the resource is the cause.

    Args:
        refusal: the API server's message.
    """
    if (field := _TEMPLATE_FIELD.search(refusal)) is None:
        return None
    part, rest = field.groups()
    places = _places(rest, spec) if part == "spec" else []
    if not places and spec.pod_template is not None:
        places = [f"spec.podTemplate.{part}{rest}"]
    if not places:
        return None
    words = f"{' or '.join(places)}{refusal[field.end() :]}"
    return f"{words}: correct or remove the field; the pods stay unchanged"


def _places(path: str, spec: Spec) -> list[str]:
    """Return the fields of the resource that a field of the pod's spec may come from, of those that are set.

    Args:
        path: path in the pod's spec, such as `.tolerations[0].operator`; empty for all of it.
    """
    name = path.removeprefix(".").partition(".")[0].partition("[")[0]
    patch = (spec.pod_template or PodTemplate()).spec or {}
    found = [f"{_PATH}{path}"] if name in patch else []
    sources: list[tuple[tuple[str, ...], str]] = [(("scheduling", name), path.removeprefix(f".{name}"))]
    if (of_container := _OF_CONTAINERS.match(path)) is not None:
        kind, field, rest = of_container.groups()
        sources.append((_SOURCES[kind, field], rest))
    given = spec.model_dump(by_alias=True, exclude_defaults=True)
    return found + [f"spec.{'.'.join(names)}{rest}" for names, rest in sources if _has(given, names)]


def _has(fields: Object, names: Sequence[str]) -> bool:
    """Return whether the field at this path is set."""
    first, *rest = names
    return first in fields and (not rest or _has(fields[first] or {}, rest))


def _colocated(name: str, pod: Object, patch: PodTemplate) -> Object:
    try:
        return colocate(name, pod)
    except ColocationError as error:
        place = _PATH if "affinity" in (patch.spec or {}) else "spec.scheduling"
        raise TemplateRefused(f"{place}.{error}") from error


def _check_standard(template: Object) -> None:
    try:
        broken = broken_rules(template)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        # A value of a type that the API server would reject, too.
        raise TemplateRefused(f"spec.podTemplate: a value has the wrong type ({error}): correct it") from error
    if broken:
        raise TemplateRefused(
            f"spec.podTemplate: violates the restricted Pod Security Standard: {'; '.join(broken)}: correct "
            "this, or ask an administrator to allow it with podTemplate: any in the values of the operator's chart"
        )


def _check_engine(built: Object, merged: Object) -> None:
    before, after = _engine(built), _engine(merged)
    if before is None or after is None:
        raise TemplateRefused(
            f"{_PATH}.containers: the container {ENGINE_CONTAINER} must not be removed: keep it, and add others"
        )
    for field in ("command", "args"):
        if after.get(field) != before.get(field):
            raise TemplateRefused(
                f"{_PATH}.containers[{ENGINE_CONTAINER}].{field}: must not be set: use spec.engine.extraArgs instead"
            )
    if not all(port in after.get("ports", ()) for port in before["ports"]):
        raise TemplateRefused(
            f"{_PATH}.containers[{ENGINE_CONTAINER}].ports: the port http must not change, because the Service and the "
            "probes use it: only add other ports"
        )


def _engine(pod: Object) -> dict[str, Any] | None:
    return next((item for item in pod.get("containers", ()) if item["name"] == ENGINE_CONTAINER), None)
