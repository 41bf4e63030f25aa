"""NetworkPolicies of the engines. They are additive: a user can allow more with another policy."""

from __future__ import annotations

from typing import Any

from fastgen_operator.children.desired import Desired
from fastgen_operator.children.platform import Neighbours, Rule
from fastgen_operator.kinds import POD_MONITOR, Object
from fastgen_operator.objects.container import FETCH_CONTAINER, HTTP_PORT


def build_network_policies(desired: Desired, held: Object | None = None) -> list[Object]:
    """Build the policy of the serving pods and, if there are any, those of a canary's pods and of a Job's pods.

    The engine has a single port, so peers that read the metrics can also use the model. All other traffic is denied.

    Args:
        held: the pod template of the serving pods if it is not the spec's, because of a canary.
    """
    spec, platform = desired.spec, desired.platform
    neighbours = platform.neighbours
    # Without clients in the spec, all pods in the resource's namespace.
    clients = [peer.model_dump(by_alias=True, exclude_unset=True) for peer in spec.network.allow_from]
    prometheus = neighbours.prometheus if platform.makes(POD_MONITOR) else ()
    gateway = neighbours.gateway if spec.gateway.expose else ()
    peers = [*(clients or ({"podSelector": {}},)), *neighbours.operator, *gateway, *prometheus]
    ingress = {"from": list(map(_as_stored, peers)), "ports": [{"port": HTTP_PORT, "protocol": "TCP"}]}
    names = [dns_egress(neighbours)]
    download = [*names, *neighbours.model_sources, *platform.pods.egress]
    # A policy applies for a pod's whole life, so a pod that downloads its model keeps access to the source.
    egress = download if spec.model.is_downloaded and not spec.is_preloaded else names
    serving = download if held is not None and _downloads(held) else egress
    policies: list[Object] = [{"spec": _policy(desired.selector, serving, ingress)}]
    # A FastGenDeployment's name has no dot, so these cannot be the names of another one's policies.
    if spec.rollout.canary is not None:
        canary = _policy(desired.canary_selector, egress, ingress)
        policies.append({"metadata": {"name": f"{desired.name}.canary"}, "spec": canary})
    if spec.is_preloaded:
        fetching = _policy(desired.fetch_selector, download)
        policies.append({"metadata": {"name": f"{desired.name}.fetch"}, "spec": fetching})
    return policies


def _downloads(template: Object) -> bool:
    """Return whether each pod of a template downloads the model."""
    return any(container["name"] == FETCH_CONTAINER for container in template["spec"].get("initContainers", ()))


def _policy(pods: dict[str, str], egress: list[Rule], *ingress: Rule) -> Object:
    return {
        "podSelector": {"matchLabels": pods},
        "policyTypes": ["Ingress", "Egress"],
        **({"ingress": list(ingress)} if ingress else {}),
        "egress": [_as_stored(rule) for rule in egress],
    }


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
    return {
        name: value
        for name, value in stored.items()
        if value not in (None, [], {}, "") or (value == {} and name.endswith("Selector"))
    }


def _value_as_stored(value: Any) -> Any:
    if isinstance(value, list):
        return [_value_as_stored(item) for item in value]
    return _as_stored(value) if isinstance(value, dict) else value
