"""Which differences between the applied and the stored Deployment are those of an admission webhook, as a table."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from fastgen_operator.kinds import Object
from fastgen_operator.plan.rewritten_fields import rewritten_fields
from harness.everything import EVERYTHING
from harness.objects import applied, deployment, stored

CONTAINER = "spec.template.spec.containers[engine]"
SIDECAR: Object = {"name": "proxy", "image": "proxy:1"}


def edited(change: Callable[[Object], object]) -> tuple[Object, Object]:
    """Return a Deployment with every field as applied, and as stored with a change of its pod's spec."""
    manifest = applied(deployment(stored(**EVERYTHING)))
    live = copy.deepcopy(manifest)
    change(live["spec"]["template"]["spec"])
    return manifest, live


def engine(pod: Object) -> Object:
    found: Object = next(container for container in pod["containers"] if container["name"] == "engine")
    return found


def defaults(pod: Object) -> None:
    """Do to the pod's spec what the API server does."""
    pod.update(
        restartPolicy="Always", dnsPolicy="ClusterFirst", serviceAccount="chat", schedulerName="default-scheduler"
    )
    engine(pod).update(terminationMessagePath="/dev/termination-log")
    engine(pod)["resources"]["requests"]["memory"] = "1Gi"
    assert (engine(pod)["resources"]["requests"]["cpu"], engine(pod)["resources"]["limits"]["cpu"]) == ("0.5", "2")
    engine(pod)["resources"]["requests"]["cpu"] = "500m"
    engine(pod)["resources"]["limits"]["cpu"] = 2
    pod["volumes"][-1]["emptyDir"]["sizeLimit"] = "1Gi"
    engine(pod)["readinessProbe"].update(successThreshold=1)
    engine(pod)["readinessProbe"]["httpGet"].update(scheme="HTTP")
    del pod["hostNetwork"]


CHANGES: dict[str, tuple[Callable[[Object], object], list[str]]] = {
    "defaults and units": (defaults, []),
    "an image": (
        lambda pod: engine(pod).update(image="mirror/engine:1"),
        [f"{CONTAINER}.image"],
    ),
    "a quantity": (
        lambda pod: engine(pod)["resources"]["limits"].update(memory="1Gi"),
        [f"{CONTAINER}.resources.limits.memory"],
    ),
    "an added limit": (
        lambda pod: engine(pod)["resources"]["limits"].update({"example.com/net": "1"}),
        [f"{CONTAINER}.resources.limits.example.com/net"],
    ),
    "a variable's value": (
        lambda pod: engine(pod)["env"][0].update(value="hunter2"),
        [f"{CONTAINER}.env[HOME].value"],
    ),
    "an argument": (
        lambda pod: engine(pod)["args"].__setitem__(0, "bench"),
        [f"{CONTAINER}.args[0]"],
    ),
    "a sidecar in front": (
        lambda pod: pod["containers"].insert(0, SIDECAR | {"name": "mesh"}),
        ["spec.template.spec.containers[mesh]"],
    ),
    "a toleration": (
        lambda pod: pod["tolerations"].append({"key": "spot"}),
        ["spec.template.spec.tolerations[2]"],
    ),
    "a removed probe and a removed variable": (
        lambda pod: (engine(pod).pop("livenessProbe"), engine(pod)["env"].pop(0)),
        [f"{CONTAINER}.env[HOME]", f"{CONTAINER}.livenessProbe"],
    ),
    "the host's network": (lambda pod: pod.update(hostIPC=True), ["spec.template.spec.hostIPC"]),
    "a node selector": (
        lambda pod: pod["nodeSelector"].update(disk="slow", zone="a"),
        ["spec.template.spec.nodeSelector.disk", "spec.template.spec.nodeSelector.zone"],
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_values_that_admission_changed_and_fields_that_it_added_are_named(case: str) -> None:
    change, expected = CHANGES[case]
    assert list(rewritten_fields(*edited(change))) == expected


def test_a_field_that_another_manager_added_is_not_admissions() -> None:
    manifest, live = edited(lambda pod: pod.update(hostIPC=True))
    theirs = {"f:spec": {"f:template": {"f:spec": {"f:hostIPC": {}}}}}
    live["metadata"]["managedFields"].append({"manager": "kubectl-edit", "operation": "Update", "fieldsV1": theirs})
    assert rewritten_fields(manifest, live) == ()
