"""What the API server refuses: reported in a condition within seconds, without stopping anything else."""

from __future__ import annotations

import json

import pytest

from fastgen_operator.kinds import POD_DISRUPTION_BUDGET
from harness.adverse import dead_webhook, quota
from harness.space import Space, resource
from support.namespace import Object
from support.waiting import eventually

pytestmark = [pytest.mark.controlplane, pytest.mark.usefixtures("operator")]

# Specs that the CRD accepts and the API server cannot use in a Deployment, with the words of the condition.
UNUSABLE: dict[str, tuple[Object, str]] = {
    "an unknown field": (
        {"podTemplate": {"spec": {"hostNetwrok": True}}},
        "spec.podTemplate.spec.hostNetwrok: field not declared in schema",
    ),
    "an unknown affinity": (
        {"scheduling": {"affinity": {"foo": 1}}},
        "spec.scheduling.affinity.foo: field not declared",
    ),
    "a value of the wrong type": (
        {"podTemplate": {"spec": {"priority": "high"}}},
        "spec.podTemplate.spec.priority: ",
    ),
    "an invalid value": (
        {"podTemplate": {"spec": {"volumes": [{"name": "Not_A_Name", "emptyDir": {}}]}}},
        "spec.podTemplate.spec.volumes[",
    ),
    "an unknown resource": ({"resources": {"limits": {"gpus": "1"}}}, "spec.resources.limits[gpus]: Invalid value"),
    "a merge that cannot be done": (
        {"podTemplate": {"spec": {"containers": [{"name": "engine", "$patch": "delete"}]}}},
        "the container engine must not be removed",
    ),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_template_that_cannot_be_applied_is_reported_and_the_resource_still_scales(case: str, space: Space) -> None:
    spec, words = UNUSABLE[case]
    before = space.serve()
    space.patch("fgd/chat", {"spec": {**spec, "replicas": 2}})
    condition = space.wait_condition("Progressing", "False", "PodTemplateRefused")
    assert words in condition["message"]
    assert "the pods stay unchanged" in condition["message"]
    live = space.get("fgd", "chat")
    assert live["status"]["observedGeneration"] == live["metadata"]["generation"]
    assert space.condition("Ready")["reason"] == "PodTemplateRefused"
    space.make_ready(count=2)
    space.patch("fgd/chat", {"spec": {"replicas": 0}})
    eventually(lambda: space.pods() == [], within=20, what="no pods")
    assert space.get("deployment", "chat")["spec"]["template"] == before
    assert len(space.items("replicasets")) == 1


def test_a_correction_of_an_unusable_template_is_rolled_out(space: Space) -> None:
    before = space.serve()
    space.patch("fgd/chat", {"spec": {"podTemplate": {"spec": {"hostNetwrok": True}}}})
    space.wait_condition("Progressing", "False", "PodTemplateRefused")
    space.patch("fgd/chat", {"spec": {"podTemplate": None}})
    space.wait_condition("Ready", "True", "AllReplicasReady")
    assert space.get("deployment", "chat")["spec"]["template"] == before


def test_a_rejected_disruption_budget_is_reported_and_does_not_stop_scaling(space: Space) -> None:
    quota(space, POD_DISRUPTION_BUDGET, "count/poddisruptionbudgets.policy=0")
    space.apply(resource())
    space.make_ready()
    condition = space.wait_condition("Ready", "False", "ApplyRefused")
    assert "the PodDisruptionBudget was refused: " in condition["message"]
    space.wait_condition("Available", "True", "AllReplicasReady")
    space.patch("fgd/chat", {"spec": {"replicas": 2}})
    space.wait_pods(2)
    space.kubectl("delete", "quota", "none")
    space.make_ready(count=2)
    space.wait_condition("Ready", "True", "AllReplicasReady")


def test_a_new_deployment_waits_for_its_network_policy_and_an_existing_one_does_not(space: Space) -> None:
    with dead_webhook(space, "networking.k8s.io", "networkpolicies"):
        space.apply(resource())
        condition = space.wait_condition("Ready", "False", "ApplyRefused")
        assert "the NetworkPolicy was refused: " in condition["message"]
        assert "the Deployment is not created before its NetworkPolicy" in condition["message"]
        assert space.get("service", "chat"), "what does not depend on it"
        assert space.items("deployments") == []
    space.make_ready()
    with dead_webhook(space, "networking.k8s.io", "networkpolicies"):
        peer = {"ipBlock": {"cidr": "10.0.0.0/8"}}
        space.patch("fgd/chat", {"spec": {"replicas": 2, "network": {"allowFrom": [peer]}}})
        space.wait_pods(2)
        condition = space.wait_condition("Ready", "False", "ApplyRefused")
        assert "the NetworkPolicy was refused: " in condition["message"]
        assert "the Deployment is not created" not in condition["message"]


def test_a_claim_of_others_is_not_mounted_when_a_cache_of_its_name_is_added(space: Space) -> None:
    before = space.serve()
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    kind = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "chat"}}
    space.kubectl("create", "--filename", "-", stdin=json.dumps({**kind, "spec": claim}))
    spec = {"model": {"source": "hf://tests/tiny"}, "cache": {"size": "1Gi", "preload": False}, "replicas": 2}
    space.patch("fgd/chat", {"spec": spec})
    condition = space.wait_condition("Progressing", "False", "NameTaken")
    assert "a PersistentVolumeClaim named chat exists" in condition["message"]
    space.wait_pods(2)
    assert space.get("deployment", "chat")["spec"]["template"] == before


def test_a_name_taken_later_does_not_stop_scaling(space: Space) -> None:
    space.serve()
    space.kubectl("delete", "service", "chat", "--wait=false")
    policy = space.get("networkpolicy", "chat")["metadata"]
    other = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "name": "chat", "uid": policy["uid"]}
    space.patch("pdb/chat", {"metadata": {"ownerReferences": [{**other, "controller": True}]}})
    condition = space.wait_condition("Progressing", "False", "NameTaken")
    assert "a PodDisruptionBudget named chat exists" in condition["message"]
    space.patch("fgd/chat", {"spec": {"replicas": 2}})
    space.wait_pods(2)
    space.wait_condition("Progressing", "False", "NameTaken")
