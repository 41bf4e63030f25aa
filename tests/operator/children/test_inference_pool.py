"""InferencePools: which resources have one, and the way to the gateway's picker, against a real API server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.controlplane import ControlPlane
from fastgen_gateway.bootstrap import Ports
from fastgen_gateway.ext_proc.pool_messages import pool_of
from fastgen_operator.children.platform import Platform
from fastgen_operator.kinds import DEPLOYMENT, ENDPOINT_SLICE, INFERENCE_POOL, SERVICE, Kind, Object
from fastgen_operator.plan.observed import Observed
from fastgen_operator.plan.plan import make_plan
from harness.chart import CLUSTER_NAME, Helm, operator_kubeconfig
from harness.definitions import INFERENCE_POOL_CRD
from harness.objects import deployment, manifests, situation, stored
from harness.process import OperatorProcess
from harness.space import Space, resource, running
from harness.thief import changed, dry, thief_of
from support.waiting import eventually

CRD = "inferencepools.inference.networking.k8s.io"
WITH_GATEWAY = Platform("engine:test", frozenset({INFERENCE_POOL}), has_gateway=True, pickers=("10.0.0.1", "10.0.0.2"))
EXPOSED: Object = {"gateway": {"expose": True}}
PICKER = "chat-picker"


def pool_children(platform: Platform = WITH_GATEWAY, **spec: Any) -> dict[Kind, Object]:
    return pool_children_of(stored(**{**EXPOSED, **spec}), platform)


def pool_children_of(owner: Object, platform: Platform = WITH_GATEWAY) -> dict[Kind, Object]:
    """Return the pool and what leads to its picker."""
    made = manifests(owner, platform)
    return {kind: each for kind, each in made if kind == INFERENCE_POOL or each["metadata"]["name"] == PICKER}


def test_a_pool_selects_the_pods_and_names_a_service_that_leads_to_the_gateways_pods() -> None:
    made = pool_children()
    reference = made[INFERENCE_POOL]["spec"]["endpointPickerRef"]
    assert made[INFERENCE_POOL]["spec"] == {
        "selector": {"matchLabels": {"fastgen.dev/deployment": "chat"}},
        "targetPorts": [{"number": 8000}],
        "endpointPickerRef": {"name": PICKER, "port": {"number": 9002}, "failureMode": "FailOpen"},
    }
    service, endpoints = made[SERVICE], made[ENDPOINT_SLICE]
    assert "selector" not in service["spec"]
    assert [port["port"] for port in service["spec"]["ports"]] == [reference["port"]["number"]]
    assert endpoints["metadata"]["labels"]["kubernetes.io/service-name"] == service["metadata"]["name"]
    assert endpoints["metadata"]["namespace"] == made[INFERENCE_POOL]["metadata"]["namespace"]
    assert [each["addresses"] for each in endpoints["endpoints"]] == [["10.0.0.1"], ["10.0.0.2"]]
    assert (endpoints["addressType"], endpoints["ports"][0]["port"]) == ("IPv4", Ports().pools)
    assert endpoints["ports"][0]["name"] == service["spec"]["ports"][0]["name"]


def test_the_gateway_recognizes_the_name_of_the_picker() -> None:
    name = pool_children()[INFERENCE_POOL]["spec"]["endpointPickerRef"]["name"]
    for authority in (f"{name}.space.svc:9002", f"{name}.space", f"{name}.space.svc.cluster.local"):
        assert pool_of(authority) == ("space", "chat")
    assert pool_of("chat-picker-picker.space") == ("space", "chat-picker")
    for other in ("chat.space.svc:9002", name, f"{name}.", "-picker.space", f"x|{name}.space", ""):
        assert pool_of(other) is None


@pytest.mark.parametrize(
    ("platform", "spec"),
    [
        (replace(WITH_GATEWAY, has_gateway=False), {}),
        (replace(WITH_GATEWAY, without=frozenset({"InferencePool"})), {}),
        (replace(WITH_GATEWAY, optional_kinds=frozenset()), {}),
        (WITH_GATEWAY, {"gateway": {"expose": False}}),
    ],
    ids=["no gateway", "disabled", "no CRD", "not exposed"],
)
def test_there_is_no_pool_that_nobody_serves(platform: Platform, spec: Object) -> None:
    assert pool_children(platform, **spec) == {}


def test_endpoints_follow_the_ready_pods_of_the_gateway() -> None:
    none, unknown = replace(WITH_GATEWAY, pickers=()), replace(WITH_GATEWAY, pickers=None)
    assert pool_children(none).keys() == pool_children(unknown).keys() == {SERVICE, INFERENCE_POOL}
    assert ENDPOINT_SLICE in none.kinds
    assert ENDPOINT_SLICE not in unknown.kinds, "what is unknown is not deleted"
    assert pool_children(replace(WITH_GATEWAY, pickers=("fd00::1",)))[ENDPOINT_SLICE]["addressType"] == "IPv6"


def test_endpoints_are_not_added_to_a_service_of_another_owner() -> None:
    theirs: Object = {"metadata": {"name": PICKER, "namespace": "space", "uid": "theirs", "resourceVersion": "1"}}
    plan = make_plan(situation(Observed(stored(**EXPOSED), {(SERVICE, PICKER): theirs})), WITH_GATEWAY)
    assert plan.problem is not None
    assert (plan.problem.reason, PICKER in plan.problem.message) == ("NameTaken", True)
    owner = stored(**EXPOSED)
    serving = {(DEPLOYMENT, "chat"): deployment(owner), (SERVICE, PICKER): theirs}
    plan = make_plan(situation(Observed(owner, serving)), WITH_GATEWAY)
    assert plan.applies
    assert {(apply.kind, apply.name) for apply in plan.applies} & {
        (SERVICE, PICKER),
        (ENDPOINT_SLICE, PICKER),
        (INFERENCE_POOL, "chat"),
    } == set()


@pytest.fixture
def bare(plane: ControlPlane) -> Iterator[ControlPlane]:
    """The control plane with InferencePools, and the operator's rights that the chart's gateway adds."""
    plane.kubectl("apply", "--server-side", "--filename", "-", stdin=json.dumps(INFERENCE_POOL_CRD.fetch()))
    plane.wait_for_crds(CRD)
    _set_rights(plane, "--set", "gateway.enabled=true")
    yield plane
    _set_rights(plane)
    plane.kubectl("delete", "crd", CRD, "--ignore-not-found")


def _set_rights(plane: ControlPlane, *args: str) -> None:
    rendered = Helm(plane.programs / "helm").render(*args)
    (role,) = (each for each in rendered if (each["kind"], each["metadata"]["name"]) == ("ClusterRole", CLUSTER_NAME))
    plane.kubectl("apply", "--server-side", "--filename", "-", stdin=yaml.safe_dump(role))


@pytest.fixture
def gatewayed(
    bare: ControlPlane, space: Space, tmp_path: Path, unattended: None, operators: list[OperatorProcess]
) -> OperatorProcess:
    """An operator of the test's namespace, in which it also looks for the gateway's pods."""
    del unattended
    place = ("--namespace", space.name, "--gateway-namespace", space.name)
    operators.append(OperatorProcess(operator_kubeconfig(bare), tmp_path / "log", place))
    operators[0].start()
    return operators[0]


def make_gateway_pod(space: Space, name: str, address: str, *, ready: bool = True) -> None:
    context = {
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    metadata = {"name": name, "labels": {"app.kubernetes.io/name": "fastgen-gateway"}}
    containers = [{"name": "picker", "image": "gateway:test", "securityContext": context}]
    space.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": containers}})
    at = {"podIP": address, "podIPs": [{"ip": address}]}
    space.patch(f"pod/{name}", {"status": {**running(ready=ready), **at}}, "status")


def addresses(space: Space) -> list[str]:
    found = [each for each in space.items("endpointslices") if each["metadata"]["name"] == PICKER]
    return [address for each in found for endpoint in each["endpoints"] for address in endpoint["addresses"]]


def names(space: Space, kind: str) -> set[str]:
    return {each["metadata"]["name"] for each in space.items(kind)}


@pytest.mark.controlplane
def test_a_pool_of_an_exposed_resource_leads_to_the_ready_pods_of_the_gateway(
    gatewayed: OperatorProcess, space: Space
) -> None:
    make_gateway_pod(space, "gateway-1", "10.9.8.1")
    make_gateway_pod(space, "gateway-2", "10.9.8.2", ready=False)
    space.apply(resource(**EXPOSED))
    eventually(lambda: addresses(space) == ["10.9.8.1"], within=30, what="the address of the ready pod")
    eventually(lambda: names(space, CRD) == {"chat"}, within=30, what="the pool")
    reference = space.get(CRD, "chat")["spec"]["endpointPickerRef"]
    assert reference["name"] == PICKER
    assert space.get("service", PICKER)["spec"]["ports"][0]["port"] == reference["port"]["number"]
    make_gateway_pod(space, "gateway-2", "10.9.8.2")
    eventually(lambda: addresses(space) == ["10.9.8.1", "10.9.8.2"], within=30, what="the other address")
    make_gateway_pod(space, "gateway-1", "10.9.8.1", ready=False)
    eventually(lambda: addresses(space) == ["10.9.8.2"], within=30, what="the first address to be gone")
    space.make_ready()
    space.wait_condition("Ready", "True", "AllReplicasReady")
    assert "its picker serves the InferencePool chat" in space.condition("Exposed")["message"]
    before, writes = space.versions(), gatewayed.writes()
    gatewayed.let_resyncs_pass(3)
    assert (space.versions(), gatewayed.writes()) == (before, writes)
    (kept,) = [each for each in space.items("endpointslices") if each["metadata"]["name"] == PICKER]
    gatewayed.restart()
    gatewayed.let_resyncs_pass(3)
    assert (space.versions(), gatewayed.writes()) == (before, {})
    assert kept in space.items("endpointslices"), "a restart changes nothing"
    space.patch("fgd/chat", {"spec": {"gateway": {"expose": False}}})
    eventually(lambda: names(space, CRD) == set() and names(space, "services") == {"chat"}, within=30, what="no pool")
    eventually(lambda: addresses(space) == [], within=30, what="no endpoints")


@pytest.mark.controlplane
def test_without_a_gateway_there_is_no_pool_and_a_condition_says_so(
    bare: ControlPlane, space: Space, unattended: None, own_operator: OperatorProcess
) -> None:
    del bare, unattended
    space.apply(resource(**EXPOSED))
    space.make_ready()
    space.wait_condition("Ready", "True", "AllReplicasReady")
    own_operator.let_resyncs_pass(2)
    assert names(space, CRD) == set()
    assert names(space, "services") == {"chat"}
    assert "no InferencePool" in space.condition("Exposed")["message"]
    assert "gateway.enabled" in space.condition("Exposed")["message"]


@pytest.mark.controlplane
def test_a_pool_of_another_owner_is_left_unchanged(gatewayed: OperatorProcess, space: Space) -> None:
    theirs = {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": "chat"},
        "spec": {
            "selector": {"matchLabels": {"fastgen.dev/deployment": "chat"}},
            "targetPorts": [{"number": 8000}],
            "endpointPickerRef": {"name": "my-picker", "port": {"number": 9002}},
        },
    }
    space.apply(theirs)
    space.apply(resource(**EXPOSED))
    space.make_ready()
    space.wait_condition("Ready", "True", "AllReplicasReady")
    gatewayed.let_resyncs_pass(2)
    pool = space.get(CRD, "chat")
    assert pool["spec"]["endpointPickerRef"]["name"] == "my-picker"
    assert "ownerReferences" not in pool["metadata"]
    space.kubectl("delete", CRD, "chat", "--wait=false")
    eventually(lambda: "ownerReferences" in space.get(CRD, "chat")["metadata"], within=20, what="a pool of its own")


@pytest.mark.controlplane
def test_the_operators_credentials_allow_only_endpoints_of_pickers(bare: ControlPlane, space: Space) -> None:
    thief = thief_of(bare)
    space.apply(resource(**EXPOSED))
    made = pool_children_of(space.get("fgd", "chat"))
    eventually(lambda: not any(dry(thief, *child) for child in made.items()), within=20, what="rights on all of them")
    label = ("metadata", "labels", "kubernetes.io/service-name")
    for kind, path, value, words in (
        (ENDPOINT_SLICE, ("metadata", "name"), "payments", "with the name of"),
        (ENDPOINT_SLICE, label, "chat", "endpoints of the picker"),
        (ENDPOINT_SLICE, ("ports", 0, "port"), 443, "endpoints of the picker"),
        (SERVICE, ("metadata", "name"), "chat", "without a selector"),
        (SERVICE, ("metadata", "name"), "payments-picker", "with the name of"),
        (SERVICE, ("spec", "selector"), {"fastgen.dev/deployment": "chat"}, "without a selector"),
    ):
        assert words in dry(thief, kind, changed(made[kind], path, value)), (kind.name, path)
