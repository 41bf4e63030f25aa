"""`spec.network` and `spec.gateway`: which peers can connect to the engines, and whether the gateway is one."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fastgen_operator.api.fields import ApiModel, LabelKey, LabelValue, model_rule, rule

# isCIDR: Kubernetes 1.31 and newer.
_CIDR = Annotated[
    str,
    Field(
        max_length=64,
        json_schema_extra=rule(
            "isCIDR(self)",
            "spec.network.allowFrom: ranges of addresses must be in CIDR notation: write one such as 10.0.0.0/8 or "
            "fd00::/64",
        ),
    ),
]


class Requirement(ApiModel):
    """One requirement of a label selector."""

    model_config = model_rule(
        "self.operator in ['In', 'NotIn'] ? has(self.values) && self.values.size() > 0 : "
        "!has(self.values) || self.values.size() == 0",
        "spec.network.allowFrom: values of a label selector are required for the operators In and NotIn, and must be "
        "empty for Exists and DoesNotExist: correct values or operator",
    )
    key: LabelKey
    """Label key that the requirement applies to."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    """Relationship between the key and the values."""
    values: list[LabelValue] = Field(default=[], max_length=64)
    """Label values. Required for the operators In and NotIn; must be empty for Exists and DoesNotExist."""


class LabelSelector(ApiModel):
    """A label selector. An empty one matches every object."""

    match_labels: dict[str, LabelValue] = Field(default={}, max_length=16)
    """Labels that an object must have. All of them must match."""
    match_expressions: list[Requirement] = Field(default=[], max_length=16)
    """Requirements on an object's labels. All of them must be met."""


class IPBlock(ApiModel):
    """A range of IP addresses."""

    model_config = model_rule(
        # The same as the API server asks of a NetworkPolicy.
        "!isCIDR(self.cidr) || !has(self.except) || self.except.all(each, !isCIDR(each) || "
        "cidr(self.cidr).containsIP(cidr(each).ip()) && "
        "cidr(self.cidr).prefixLength() < cidr(each).prefixLength())",
        "spec.network.allowFrom: each range in except must be a smaller one within cidr: correct or remove it",
    )
    cidr: _CIDR
    """Address range in CIDR notation, for example 10.0.0.0/8."""
    exceptions: list[_CIDR] = Field(default=[], alias="except", max_length=16)
    """Address ranges to exclude, each within cidr and smaller."""


class Peer(ApiModel):
    """A peer of a NetworkPolicy: an IP block, or pods and namespaces."""

    model_config = model_rule(
        "has(self.ipBlock) ? !has(self.podSelector) && !has(self.namespaceSelector) "
        ": has(self.podSelector) || has(self.namespaceSelector)",
        "spec.network.allowFrom: each item must set either ipBlock, or podSelector, namespaceSelector or both: "
        "split the item into two, or set one of these fields",
    )
    pod_selector: LabelSelector | None = None
    """Selects pods by label, in the namespaces that namespaceSelector matches, or in the namespace of the
    FastGenDeployment if namespaceSelector is unset."""
    namespace_selector: LabelSelector | None = None
    """Selects namespaces by label. All their pods are allowed, unless podSelector is also set."""
    ip_block: IPBlock | None = None
    """Range of IP addresses, for clients outside the cluster."""


class Network(ApiModel):
    """Network access to the engines."""

    allow_from: list[Peer] = Field(default=[], max_length=32)
    """Peers that can connect to the engines' port. If empty, all pods in the namespace of the FastGenDeployment can.
    The operator, and Prometheus if PodMonitors are in use, can always connect to read the metrics, and so can the
    gateway with spec.gateway.expose. Has no effect if the operator creates no NetworkPolicies
    (engine.networkPolicy.enabled in the values of its chart)."""


class Gateway(ApiModel):
    """The address that several FastGenDeployments have in common (gateway.enabled in the values of the chart)."""

    expose: bool = False
    """Whether the gateway routes requests for the model's name to this FastGenDeployment, and holds them while no
    replica is ready. Whoever can connect to the gateway can then use the model. If several have the same name, the
    oldest gets its requests; model NAMESPACE/NAME in a request addresses each of them."""
