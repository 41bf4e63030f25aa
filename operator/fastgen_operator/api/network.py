"""Who may reach the engines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from fastgen_operator.api.fields import ApiModel, ShortText, rules

_CIDR = Annotated[str, Field(max_length=64, pattern=r"^[0-9A-Fa-f:.]+/[0-9]{1,3}$")]
_LabelValue = Annotated[str, Field(max_length=63)]


class Requirement(ApiModel):
    """One condition on labels, as in a label selector."""

    key: ShortText = Field(description="The label's key.")
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"] = Field(description="How the label is compared.")
    values: list[_LabelValue] = Field(
        default=[], max_length=64, description="The label's values, for the operators In and NotIn."
    )


class LabelSelector(ApiModel):
    """Which labels an object must have; every object where nothing is given."""

    match_labels: dict[str, _LabelValue] = Field(
        default={}, max_length=16, description="Labels and their values, all of which must be there."
    )
    match_expressions: list[Requirement] = Field(
        default=[], max_length=16, description="Conditions on labels, all of which must hold."
    )


class IPBlock(ApiModel):
    """A range of addresses, without some ranges in it."""

    cidr: _CIDR = Field(description="The range, for example 10.0.0.0/8.")
    exceptions: list[_CIDR] = Field(
        default=[], alias="except", max_length=16, description="Ranges within it that are left out."
    )


class Peer(ApiModel):
    """Somebody on the network, as in a NetworkPolicy."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "has(self.ipBlock) ? !has(self.podSelector) && !has(self.namespaceSelector) "
                ": has(self.podSelector) || has(self.namespaceSelector)",
                "spec.network.allowFrom: each item is an ipBlock, or a podSelector, a namespaceSelector or both: "
                "split it into two items, or fill it in",
            )
        )
    )
    pod_selector: LabelSelector | None = Field(
        default=None,
        description="Pods by their labels: of the namespaces that namespaceSelector selects, or of the resource's own "
        "where that is not given.",
    )
    namespace_selector: LabelSelector | None = Field(
        default=None, description="Namespaces by their labels: all their pods, or those that podSelector selects."
    )
    ip_block: IPBlock | None = Field(default=None, description="Addresses, for what is outside the cluster.")


class Network(ApiModel):
    """Who may reach the engines."""

    allow_from: list[Peer] = Field(
        default=[],
        max_length=32,
        description="Who may reach the engines' port, as in a NetworkPolicy; the pods of the resource's own namespace "
        "where none is given. The operator, and Prometheus where there is a PodMonitor, are always let in to read the "
        "metrics.",
    )
