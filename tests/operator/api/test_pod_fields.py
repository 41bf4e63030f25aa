"""Every field of a pod's spec, as the API server knows them, is allowed, checked or refused in spec.podTemplate."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.controlplane import ControlPlane
from fastgen_operator.api.crd import custom_resource_definition
from harness.pod_fields import BELOW, SCHEMAS, Allowed, Checked, Refused
from harness.space import Space
from harness.user import User
from support.namespace import Object
from support.waiting import eventually

pytestmark = pytest.mark.controlplane

# Fields of a FastGenDeployment that the policy checks. All others reach nothing but the resource's own pods.
CHECKED = {
    "apiKeySecretName", "podTemplate", "model.source", "model.secretName", "engine.image",
    "scheduling.priorityClassName", "scheduling.runtimeClassName",
}  # fmt: skip
HARMLESS = {
    "operatorClass", "replicas", "drainSeconds", "startupDeadlineSeconds", "autoscaling", "rollout", "disruption",
    "network", "gateway", "resources", "model.revision", "model.servedName", "model.download",
    "scheduling.nodeSelector", "scheduling.tolerations", "scheduling.affinity", "scheduling.topologySpreadConstraints",
    "cache.size", "cache.storageClassName", "cache.accessMode", "cache.preload",
    "engine.device", "engine.dtype", "engine.tensorParallel", "engine.tokenBudget", "engine.interTokenTarget",
    "engine.maxSequences", "engine.maxModelLength", "engine.maxQueuedRequests", "engine.kvCache", "engine.extraArgs",
}  # fmt: skip


@pytest.fixture(scope="module")
def document(plane: ControlPlane) -> Object:
    """The schemas of the core API, by their last name."""
    schemas = json.loads(plane.kubectl("get", "--raw", "/openapi/v3/api/v1"))["components"]["schemas"]
    return {name.rpartition(".")[2]: schema for name, schema in schemas.items()}


def test_the_table_has_every_field_of_the_api_server(document: Object) -> None:
    for name, schema in SCHEMAS.items():
        assert set(document[name]["properties"]) == set(schema.fields), name
    for name in below(document):
        assert set(document[name].get("properties", ())) == set(BELOW[name].split()), name


def below(document: Object) -> set[str]:
    """Return the schemas of the fields that are allowed with any value, and of what is in them."""
    roots = [
        document[name]["properties"][field]
        for name, schema in SCHEMAS.items()
        for field, verdict in schema.fields.items()
        if isinstance(verdict, Allowed)
    ]
    found: set[str] = set()
    waiting = list(references(roots))
    while waiting:
        if (name := waiting.pop()) not in found:
            found.add(name)
            waiting += references(document[name])
    return found


def references(schema: Any) -> Iterator[str]:
    yield from re.findall(r'"\$ref": "[^"]*\.([^".]+)"', json.dumps(schema))


def test_every_field_is_allowed_checked_or_refused(space: Space) -> None:
    alice = User(space, "alice")
    eventually(lambda: alice.refusal(apiKeySecretName="other"), within=20, what="the policy")
    for name, schema in SCHEMAS.items():
        for field, verdict in schema.fields.items():
            match verdict:
                case Allowed(value):
                    accepted, rejected = [value], []
                case Checked(good, bad):
                    accepted, rejected = [good], [bad]
                case Refused(value):
                    accepted, rejected = [], [value]
            for value in accepted:
                spec = schema.patch({field: value})
                # A null in a Checked field stands for the field's absence.
                if value is not None or name == "PodSpec":
                    assert alice.refusal(podTemplate={"spec": spec}) == "", f"{name}.{field}"
            for value in rejected:
                words = alice.refusal(podTemplate={"spec": schema.patch({field: value})})
                assert "denied request: spec." in words, f"{name}.{field}: {words}"
                assert alice.name in words, words


def test_every_field_of_a_resource_is_checked_or_harmless() -> None:
    (version,) = custom_resource_definition()["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    parts = ("model", "engine", "scheduling", "cache")
    names = {name for name in schema if name not in parts}
    names |= {f"{part}.{name}" for part in parts for name in schema[part]["properties"]}
    assert names == CHECKED | HARMLESS
    template = schema["podTemplate"]["properties"]
    assert set(template) == {"metadata", "spec"}
    assert set(template["metadata"]["properties"]) == {"labels", "annotations"}
