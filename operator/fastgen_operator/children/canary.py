"""The children of a canary: pods of a new revision, which only the gateway can reach by their Service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fastgen_operator.children.deployment import build_deployment
from fastgen_operator.children.desired import Desired
from fastgen_operator.children.service import build_pod_monitor, build_service
from fastgen_operator.kinds import DEPLOYMENT, POD_MONITOR, SERVICE, Kind, Object
from fastgen_operator.labels_and_annotations import CANARY_SUFFIX, REVISION_ANNOTATION


@dataclass(frozen=True, slots=True)
class CanaryPods:
    """The pods of a canary.

    Attributes:
        template: the pod template of the spec.
        revision: its hash.
        replicas: how many there are.
    """

    template: Object
    revision: str
    replicas: int


def build_canary(desired: Desired, pods: CanaryPods) -> list[tuple[Kind, Object]]:
    """Build Service, Deployment and PodMonitor of the canary. Its NetworkPolicy is with the others."""
    name = f"{desired.name}{CANARY_SUFFIX}"
    selector = desired.canary_selector
    deployment = build_deployment(desired, _relabelled(pods.template, desired))
    spec = {**deployment["spec"], "replicas": pods.replicas, "selector": {"matchLabels": selector}}
    annotations = {REVISION_ANNOTATION: pods.revision}
    monitor = build_pod_monitor(desired, selector)
    return [
        (SERVICE, {**build_service(selector), "metadata": {"name": name}}),
        (DEPLOYMENT, {"metadata": {**deployment["metadata"], "name": name, "annotations": annotations}, "spec": spec}),
        (POD_MONITOR, {**monitor, "metadata": {**monitor["metadata"], "name": name}}),
    ]


_SPREAD: Final = "topologySpreadConstraints"


def _relabelled(template: Object, desired: Desired) -> Object:
    """Return the template with the labels of the canary, where the pods' own labels are those of the Deployment."""
    metadata, pod = template["metadata"], template["spec"]
    labels = {**metadata["labels"], **desired.canary_selector}
    own, others = {"matchLabels": desired.selector}, {"labelSelector": {"matchLabels": desired.canary_selector}}
    spread = [each | others if each.get("labelSelector") == own else each for each in pod.get(_SPREAD, ())]
    return {"metadata": {**metadata, "labels": labels}, "spec": {**pod, **({_SPREAD: spread} if spread else {})}}
