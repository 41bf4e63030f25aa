"""NetworkPolicies of the engines. They are additive: a user can allow more with another policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from fastgen_operator.children.metadata import HTTP_PORT, child, fetch_labels, selector, without_empty
from fastgen_operator.kinds import NETWORK_POLICY, OWNER_LABEL, Object

# A NetworkPolicyPeer or NetworkPolicyEgressRule.
Rule = dict[str, Any]

DNS_PORTS: Final = (53,)
CLUSTER_DNS: Final[tuple[Rule, ...]] = (
    {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
        "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
    },
    # Link-local address of NodeLocal DNSCache.
    {"ipBlock": {"cidr": "169.254.20.10/32"}},
)
# Anything by HTTPS, and the agent of EKS Pod Identity, which has the credentials for S3.
MODEL_SOURCES: Final[tuple[Rule, ...]] = (
    {"ports": [{"port": 443, "protocol": "TCP"}]},
    {
        "to": [{"ipBlock": {"cidr": "169.254.170.23/32"}}, {"ipBlock": {"cidr": "fd00:ec2::23/128"}}],
        "ports": [{"port": 80, "protocol": "TCP"}],
    },
)


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Peers and rules for the NetworkPolicies of all resources.

    Attributes:
        operator: peers of the operator's pods.
        prometheus: peers of Prometheus; used if PodMonitors are created.
        dns: peers of the cluster's DNS servers.
        dns_ports: ports of the DNS servers' pods, which can differ from their Service's.
        model_sources: egress rules for pods that download a model.
    """

    operator: tuple[Rule, ...] = ()
    prometheus: tuple[Rule, ...] = ()
    dns: tuple[Rule, ...] = CLUSTER_DNS
    dns_ports: tuple[int, ...] = DNS_PORTS
    model_sources: tuple[Rule, ...] = MODEL_SOURCES


UNKNOWN_NEIGHBOURS: Final = Neighbours()


def build_network_policy(
    owner: Object, clients: Sequence[Rule], scrapers: Sequence[Rule], egress: Sequence[Rule]
) -> Object:
    """Build the policy of the serving pods.

    Args:
        clients: peers that can use the model; if empty, all pods in the resource's namespace.
        scrapers: peers that read the metrics. The engine has a single port, so they can also use the model.
        egress: rules for outgoing traffic; everything else is denied.
    """
    name = owner["metadata"]["name"]
    peers = [_as_stored(peer) for peer in (*(clients or ({"podSelector": {}},)), *scrapers)]
    ingress = [{"from": peers, "ports": [{"port": HTTP_PORT, "protocol": "TCP"}]}]
    return _policy(owner, name, selector(name), egress, {"ingress": ingress})


def build_fetch_policy(owner: Object, egress: Sequence[Rule]) -> Object:
    """Build the policy of the pod that downloads the model to the cache; it denies all ingress."""
    name = owner["metadata"]["name"]
    # A FastGenDeployment's name has no dot, so this cannot be the name of another one's policy.
    return _policy(owner, f"{name}.fetch", {OWNER_LABEL: fetch_labels(name)[OWNER_LABEL]}, egress, {})


def _policy(owner: Object, name: str, pods: dict[str, str], egress: Sequence[Rule], ingress: Rule) -> Object:
    spec = {
        "podSelector": {"matchLabels": pods},
        "policyTypes": ["Ingress", "Egress"],
        **ingress,
        "egress": [_as_stored(rule) for rule in egress],
    }
    return child(NETWORK_POLICY, owner, {"spec": spec}, name=name)


def dns_egress(neighbours: Neighbours) -> Rule:
    """Return the egress rule for DNS."""
    return {
        "to": list(neighbours.dns),
        "ports": [{"port": port, "protocol": way} for port in neighbours.dns_ports for way in ("UDP", "TCP")],
    }


def _as_stored(rule: Rule) -> Rule:
    """Return a user-written rule as the API server stores it: without empty fields, each port with a protocol."""
    stored = {
        name: [{"protocol": "TCP", **port} for port in value] if name == "ports" else _value_as_stored(value)
        for name, value in rule.items()
    }
    # An empty selector matches everything, so it is kept.
    selectors = {name: value for name, value in stored.items() if value == {} and name.endswith("Selector")}
    return without_empty(stored) | selectors


def _value_as_stored(value: Any) -> Any:
    if isinstance(value, list):
        return [_value_as_stored(item) for item in value]
    return _as_stored(value) if isinstance(value, dict) else value
