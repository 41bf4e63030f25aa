"""The NetworkPolicy: who may reach the engines, and what they may reach.

Policies add up, so that a user opens more by a policy of their own beside this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from fastgen_operator.children.metadata import HTTP_PORT, child, fetch_labels, selector
from fastgen_operator.kinds import NETWORK_POLICY, OWNER_LABEL, Object

# A NetworkPolicyPeer or NetworkPolicyEgressRule, as Kubernetes writes it.
Rule = dict[str, Any]

DNS_PORT: Final = 53
CLUSTER_DNS: Final[tuple[Rule, ...]] = (
    {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
        "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
    },
    # The address on which nodes answer themselves where NodeLocal DNSCache runs.
    {"ipBlock": {"cidr": "169.254.20.10/32"}},
)
HTTPS_ANYWHERE: Final[tuple[Rule, ...]] = ({"ports": [{"port": 443, "protocol": "TCP"}]},)


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Who is who in the cluster's network, as NetworkPolicies name it.

    Attributes:
        operator: peers that the operator scrapes from.
        prometheus: peers that Prometheus scrapes from, where there is a PodMonitor.
        dns: peers that answer the cluster's names.
        model_sources: egress rules for what downloads a model.
    """

    operator: tuple[Rule, ...] = ()
    prometheus: tuple[Rule, ...] = ()
    dns: tuple[Rule, ...] = CLUSTER_DNS
    model_sources: tuple[Rule, ...] = HTTPS_ANYWHERE


UNKNOWN_NEIGHBOURS: Final = Neighbours()


def build_network_policy(
    owner: Object, clients: Sequence[Rule], scrapers: Sequence[Rule], egress: Sequence[Rule]
) -> Object:
    """The policy of the serving pods.

    Args:
        clients: peers that may use the model; where there are none, the pods of the resource's own namespace.
        scrapers: peers that read the metrics. They are on the engine's one port, so that they could use the model too.
        egress: what the pods may reach; all else is closed.
    """
    peers = [*(clients or ({"podSelector": {}},)), *scrapers]
    spec = {
        "podSelector": {"matchLabels": selector(owner["metadata"]["name"])},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [_as_stored(peer) for peer in peers], "ports": [{"port": HTTP_PORT, "protocol": "TCP"}]}],
        "egress": [_as_stored(rule) for rule in egress],
    }
    return child(NETWORK_POLICY, owner, spec)


def build_fetch_policy(owner: Object, egress: Sequence[Rule]) -> Object:
    """The policy of the pod that downloads the model into the cache: nobody may reach it."""
    name = owner["metadata"]["name"]
    spec = {
        "podSelector": {"matchLabels": {OWNER_LABEL: fetch_labels(name)[OWNER_LABEL]}},
        "policyTypes": ["Ingress", "Egress"],
        "egress": [_as_stored(rule) for rule in egress],
    }
    policy = child(NETWORK_POLICY, owner, spec)
    # With a dot, so that it is no other FastGenDeployment's name.
    return {**policy, "metadata": {**policy["metadata"], "name": f"{name}.fetch"}}


def dns_egress(neighbours: Neighbours) -> Rule:
    """Names, and nothing else."""
    return {
        "to": list(neighbours.dns),
        "ports": [{"port": DNS_PORT, "protocol": "UDP"}, {"port": DNS_PORT, "protocol": "TCP"}],
    }


def _as_stored(rule: Rule) -> Rule:
    """What people write, as the API server stores it: without what is empty, and each port with its protocol."""
    stored: Rule = {}
    for name, value in rule.items():
        if name == "ports":
            stored[name] = [{"protocol": "TCP", **port} for port in value]
        elif isinstance(value, dict):
            stored[name] = _as_stored(value)
        elif isinstance(value, list):
            stored[name] = [_as_stored(item) if isinstance(item, dict) else item for item in value]
        else:
            stored[name] = value
    # An empty selector selects all; any other empty field says nothing.
    return {
        name: value
        for name, value in stored.items()
        if value not in (None, [], {}, "") or (value == {} and name.endswith("Selector"))
    }
