"""Where nothing changes, nothing is written; and an operator that dies changes nothing either."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness.process import OperatorProcess
from harness.space import Space, resource
from support.waiting import eventually

pytestmark = pytest.mark.controlplane

# A value in every field, most of them written otherwise than the API server writes them.
EVERYTHING: dict[str, Any] = {
    "model": {"source": "file:///models/tiny.gguf", "servedName": "tiny"},
    "engine": {
        "image": "engine:other",
        "device": "cpu",
        "dtype": "float32",
        "tokenBudget": 128,
        "maxSequences": 64,
        "maxModelLength": 4096,
        "maxQueuedRequests": 7,
        "kvCache": {"memoryPercent": 50, "blockSize": 32, "swapSpace": "1024Mi", "prefixCaching": False},
        "extraArgs": ["--chunking", "greedy"],
    },
    "resources": {
        "gpu": {"count": 1, "resourceName": "example.com/gpu"},
        "requests": {"cpu": "0.5", "memory": "1024Mi", "ephemeral-storage": 1000000000},
        "limits": {"cpu": 2, "memory": "2048Mi"},
    },
    "replicas": 2,
    "apiKeySecretName": "keys",
    "podTemplate": {
        "metadata": {"labels": {"team": "search"}, "annotations": {"note": "yes"}},
        # Much of it says nothing, or is written otherwise than the API server writes it.
        "spec": {
            "hostNetwork": False,
            "nodeSelector": {},
            "tolerations": [],
            "imagePullSecrets": [{"name": "registry"}],
            "volumes": [{"name": "scratch", "emptyDir": {"sizeLimit": "1024Mi"}}],
            "containers": [
                {
                    "name": "proxy",
                    "image": "proxy:1",
                    "tty": False,
                    "command": [],
                    "env": [{"name": "EMPTY", "value": ""}],
                    "resources": {"requests": {"cpu": "0.1"}},
                    "readinessProbe": {"tcpSocket": {"port": 1}, "initialDelaySeconds": 0},
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                    "volumeMounts": [{"name": "scratch", "mountPath": "/scratch", "readOnly": False, "subPath": ""}],
                }
            ],
        },
    },
    "rollout": {"maxSurge": 1, "maxUnavailable": 0, "progressDeadlineSeconds": 900},
    "disruption": {"minAvailable": 1},
    "network": {
        "allowFrom": [
            {"podSelector": {}},
            {
                "podSelector": {"matchLabels": {}},
                "namespaceSelector": {"matchExpressions": [{"key": "a", "operator": "Exists"}]},
            },
            {"ipBlock": {"cidr": "10.0.0.0/8", "except": []}},
        ]
    },
    "drainSeconds": 0,
    "startupDeadlineSeconds": 333,
    "scheduling": {
        "nodeSelector": {"disk": "fast"},
        "tolerations": [
            {"key": "gpu", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5},
            {"key": "a"},
        ],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a", "b"]}]}
                    ]
                }
            }
        },
        "priorityClassName": "system-cluster-critical",
        "topologySpreadConstraints": [{"topologyKey": "zone"}, {"topologyKey": "host", "maxSkew": 2}],
    },
}


@pytest.fixture
def alone(space: Space) -> Space:
    """The namespace, as soon as what earlier tests left has gone: the operator counts its writes for all of them."""

    def others() -> list[str]:
        items = json.loads(space.cluster.kubectl("get", "fgd", "--all-namespaces", "--output", "json"))["items"]
        return [item["metadata"]["namespace"] for item in items]

    eventually(lambda: others() == [], within=60, what="the end of earlier tests' resources")
    return space


def test_nothing_is_written_in_the_steady_state_nor_by_a_restart(alone: Space, operator: OperatorProcess) -> None:
    alone.apply(resource())
    alone.make_ready()
    alone.wait_condition("Ready", "True", "AllReplicasReady")
    settled, writes = alone.settled(), operator.writes()
    operator.let_resyncs_pass(4)
    assert operator.writes() == writes
    assert alone.versions() == settled
    operator.restart()
    operator.let_resyncs_pass(3)
    assert operator.writes() == {}
    assert alone.versions() == settled


def test_no_field_of_the_spec_makes_the_operator_write_for_ever(alone: Space, operator: OperatorProcess) -> None:
    alone.apply(resource(**EVERYTHING))
    eventually(lambda: alone.condition("Ready"), within=20, what="a first status")
    settled, writes = alone.settled(), operator.writes()
    operator.let_resyncs_pass(4)
    assert operator.writes() == writes
    assert alone.versions() == settled
    pod = alone.get("deployment", "chat")["spec"]["template"]["spec"]
    assert pod["topologySpreadConstraints"][1]["labelSelector"] == {"matchLabels": {"fastgen.dev/deployment": "chat"}}
    assert pod["containers"][0]["resources"]["limits"] == {"cpu": "2", "memory": "2Gi", "example.com/gpu": "1"}


def test_a_field_taken_out_of_the_spec_leaves_the_children(space: Space, operator: OperatorProcess) -> None:
    del operator
    space.apply(resource(scheduling={"nodeSelector": {"disk": "fast"}}, resources={"limits": {"memory": "2Gi"}}))
    eventually(lambda: space.condition("Ready"), within=20, what="a first status")
    space.apply(resource())

    def gone() -> bool:
        pod = space.get("deployment", "chat")["spec"]["template"]["spec"]
        return "nodeSelector" not in pod and pod["containers"][0]["resources"] == {}

    eventually(gone, within=20, what="the fields gone from the pods")


def test_what_others_add_to_a_child_is_kept(space: Space, operator: OperatorProcess) -> None:
    space.apply(resource())
    space.wait_pods(1)
    space.patch("deployment/chat", {"metadata": {"annotations": {"team": "search"}}, "spec": {"minReadySeconds": 1}})
    operator.let_resyncs_pass(3)
    deployment = space.get("deployment", "chat")
    assert deployment["metadata"]["annotations"]["team"] == "search"
    assert deployment["spec"]["minReadySeconds"] == 1


def test_an_operator_killed_between_two_writes_converges_after_a_restart(
    space: Space, operator: OperatorProcess
) -> None:
    operator.stop()
    for number in range(4):
        space.apply(resource(f"chat{number}"))
    operator.start()
    eventually(lambda: space.items("services"), within=20, what="a first child", every=0.01)
    operator.kill()
    assert space.items("fgd"), "the resources outlive the operator"
    operator.start()
    for number in range(4):
        space.make_ready(f"chat{number}")
        space.wait_condition("Ready", "True", "AllReplicasReady", f"chat{number}")
    assert len(space.items("replicasets")) == 4, "a template was rolled more than once"
    assert len(space.items("pods")) == 4


def test_edits_made_while_the_operator_was_away_are_carried_out(space: Space, operator: OperatorProcess) -> None:
    space.apply(resource())
    space.wait_pods(1)
    operator.stop()
    space.patch("fgd/chat", {"spec": {"replicas": 3}})
    space.kubectl("delete", "service", "chat")
    operator.start()
    space.wait_pods(3)
    assert space.get("service", "chat")["spec"]["ports"][0]["port"] == 8000
