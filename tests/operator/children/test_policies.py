"""ServiceAccount, PodDisruptionBudget, NetworkPolicy and PodMonitor manifests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastgen_operator.children.platform import CLUSTER_DNS, Neighbours, Platform
from fastgen_operator.kinds import (
    DEPLOYMENT,
    NETWORK_POLICY,
    OPTIONAL_KINDS,
    POD_DISRUPTION_BUDGET,
    POD_MONITOR,
    SERVICE_ACCOUNT,
    Kind,
    Object,
)
from harness.objects import manifest, manifests, stored

OPERATOR = {"podSelector": {"matchLabels": {"app": "operator"}}}
PROMETHEUS = {"podSelector": {"matchLabels": {"app": "prometheus"}}}
ALL = Platform("e", frozenset(OPTIONAL_KINDS), neighbours=Neighbours(operator=(OPERATOR,), prometheus=(PROMETHEUS,)))


def children(platform: Platform = ALL, **spec: Any) -> dict[Kind, Object]:
    return dict(manifests(stored(**spec), platform))


def policy(platform: Platform = ALL, **spec: Any) -> Object:
    found: Object = children(platform, **spec)[NETWORK_POLICY]["spec"]
    return found


def peers(platform: Platform = ALL, **spec: Any) -> list[Object]:
    (rule,) = policy(platform, **spec)["ingress"]
    assert rule["ports"] == [{"port": 8000, "protocol": "TCP"}]
    found: list[Object] = rule["from"]
    return found


@pytest.mark.parametrize(
    ("min_available", "replicas", "budget"),
    [
        (None, 1, {"maxUnavailable": 1}),
        (None, 8, {"maxUnavailable": 1}),
        (1, 1, {"maxUnavailable": 1}),
        (5, 3, {"maxUnavailable": 1}),
        (3, 3, {"maxUnavailable": 1}),
        (2, 3, {"minAvailable": 2}),
        (0, 3, {"minAvailable": 0}),
        (0, 0, {"maxUnavailable": 1}),
    ],
)
def test_a_node_can_always_be_drained_one_pod_at_a_time(
    min_available: int | None, replicas: int, budget: dict[str, int]
) -> None:
    owner = stored(disruption={} if min_available is None else {"minAvailable": min_available})
    spec = manifest(POD_DISRUPTION_BUDGET, owner, replicas=replicas)["spec"]
    assert spec == {
        **budget,
        "selector": {"matchLabels": {"fastgen.dev/deployment": "chat"}},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }


@pytest.mark.parametrize(
    ("access_mode", "budget"), [("ReadWriteOnce", {"maxUnavailable": "100%"}), ("ReadWriteMany", {"maxUnavailable": 1})]
)
def test_replicas_that_share_a_node_are_evicted_together(access_mode: str, budget: Object) -> None:
    """The replacement of the first evicted pod could not start on another node before the last one has left."""
    owner = stored(model={"source": "hf://owner/tiny"}, cache={"size": "1Gi", "accessMode": access_mode})
    spec = manifest(POD_DISRUPTION_BUDGET, owner, replicas=3)["spec"]
    assert budget.items() <= spec.items()
    assert "minAvailable" not in spec


def test_pods_use_their_own_service_account_without_a_token() -> None:
    made = children()
    account, pod = made[SERVICE_ACCOUNT], made[DEPLOYMENT]["spec"]["template"]["spec"]
    assert account["automountServiceAccountToken"] is False
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == (account["metadata"]["name"], False)


def test_the_service_account_and_network_policy_are_applied_before_the_deployment() -> None:
    names = [kind.name for kind in children()]
    assert names.index("ServiceAccount") < names.index("Deployment")
    assert names.index("NetworkPolicy") < names.index("Deployment")


def test_by_default_the_namespaces_pods_and_the_scrapers_are_allowed() -> None:
    assert peers() == [{"podSelector": {}}, OPERATOR, PROMETHEUS]


def test_allow_from_replaces_the_namespaces_pods() -> None:
    gateway = {"namespaceSelector": {"matchLabels": {"team": "web"}}, "podSelector": {"matchLabels": {"app": "gw"}}}
    outside = {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}
    assert peers(network={"allowFrom": [gateway, outside]}) == [gateway, outside, OPERATOR, PROMETHEUS]


def test_the_gateway_may_connect_to_exposed_resources_only() -> None:
    gateway: Object = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "fastgen-gateway"}}}
    with_gateway = replace(ALL, neighbours=Neighbours(gateway=(gateway,)))
    web: Object = {"podSelector": {"matchLabels": {"app": "web"}}}
    network: Object = {"allowFrom": [web]}
    assert peers(with_gateway, network=network) == [web]
    assert peers(with_gateway, network=network, gateway={"expose": True}) == [web, gateway]
    assert peers(ALL, network=network, gateway={"expose": True}) == [web, OPERATOR, PROMETHEUS]


def test_prometheus_is_allowed_only_if_a_pod_monitor_is_created() -> None:
    without_crd = Platform("e", neighbours=ALL.neighbours)
    assert PROMETHEUS not in peers(without_crd)
    switched_off = Platform("e", ALL.optional_kinds, frozenset({"PodMonitor"}), ALL.neighbours)
    assert PROMETHEUS not in peers(switched_off)


def test_a_serving_pod_can_only_reach_dns() -> None:
    dns = [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]
    assert policy()["egress"] == [{"to": list(CLUSTER_DNS), "ports": dns}]
    assert policy()["policyTypes"] == ["Ingress", "Egress"]


HUB = {"source": "hf://owner/name"}
ANYWHERE = {"ports": [{"port": 443, "protocol": "TCP"}]}
# The agent of EKS Pod Identity, as in AWS's documentation.
POD_IDENTITY = {
    "to": [{"ipBlock": {"cidr": "169.254.170.23/32"}}, {"ipBlock": {"cidr": "fd00:ec2::23/128"}}],
    "ports": [{"port": 80, "protocol": "TCP"}],
}


def policies(**spec: Any) -> dict[str, Object]:
    """Return the specs of the NetworkPolicies by name."""
    made = manifests(stored(**spec), ALL)
    return {each["metadata"]["name"]: each["spec"] for kind, each in made if kind == NETWORK_POLICY}


def test_a_pod_that_downloads_its_model_can_reach_the_source() -> None:
    assert list(policies()) == ["chat"]
    assert ANYWHERE not in policies()["chat"]["egress"]
    (spec,) = policies(model=HUB).values()
    assert spec["egress"] == [*policy()["egress"], ANYWHERE, POD_IDENTITY]


def test_the_page_about_object_storage_names_the_agent_that_downloads_may_reach() -> None:
    page = (Path(__file__).parents[3] / "docs/how-to/object-storage.md").read_text()
    addresses = [peer["ipBlock"]["cidr"].partition("/")[0] for peer in POD_IDENTITY["to"]]
    assert f"({' and '.join(addresses)}, port {POD_IDENTITY['ports'][0]['port']})" in page


def test_with_a_cache_only_the_download_pod_can_reach_the_source() -> None:
    found = policies(model=HUB, cache={"size": "1Gi"})
    assert found["chat"] == policies()["chat"]
    assert found["chat.fetch"] == {
        "podSelector": {"matchLabels": {"fastgen.dev/deployment": "chat_fetch"}},
        "policyTypes": ["Ingress", "Egress"],
        "egress": [*policy()["egress"], ANYWHERE, POD_IDENTITY],
    }


def test_rules_are_normalized_as_the_api_server_stores_them() -> None:
    dns: tuple[Object, ...] = ({"namespaceSelector": {}, "podSelector": {"matchLabels": {}}},)
    (rule,) = policy(Platform("e", neighbours=Neighbours(dns=dns)))["egress"]
    assert rule["to"] == [{"namespaceSelector": {}, "podSelector": {}}]


def test_optional_kinds_are_created_only_if_installed_and_enabled() -> None:
    assert not children(Platform("e")).keys() & set(OPTIONAL_KINDS)
    assert POD_MONITOR in children()
    switched_off = Platform("e", ALL.optional_kinds, frozenset({"PodMonitor"}))
    assert POD_MONITOR not in children(switched_off)
    assert POD_MONITOR in switched_off.kinds, "existing ones must still be observed, to be deleted"


def test_the_pod_monitor_labels_every_series_with_the_deployment_and_has_extra_labels() -> None:
    labels = (("release", "prometheus"), ("fastgen.dev/deployment", "not this"))
    monitor = manifest(POD_MONITOR, stored(), replace(ALL, pod_monitor_labels=labels))
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["metadata"]["labels"]["fastgen.dev/deployment"] == "chat"
    assert monitor["spec"]["podTargetLabels"] == ["fastgen.dev/deployment"]
    assert monitor["spec"]["podMetricsEndpoints"] == [{"port": "http", "path": "/metrics"}]
    assert POD_MONITOR.api_version == monitor["apiVersion"]
