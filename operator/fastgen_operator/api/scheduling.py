"""Where the pods may run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fastgen_operator.api.fields import ApiModel, FreeForm, ShortText


class Toleration(ApiModel):
    """A taint that the pods tolerate, as in a pod's spec."""

    key: ShortText | None = Field(default=None, description="The taint's key; every key where not given.")
    operator: Literal["Exists", "Equal"] = Field(default="Equal", description="How the key's value is compared.")
    value: str | None = Field(default=None, max_length=253, description="The taint's value, for the operator Equal.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="The taint's effect; every effect where not given."
    )
    toleration_seconds: int | None = Field(
        default=None, ge=0, le=1 << 31, description="How long a NoExecute taint is tolerated; for ever where not given."
    )


class TopologySpread(ApiModel):
    """How the replicas spread over nodes; it always counts the pods of this FastGenDeployment."""

    topology_key: ShortText = Field(description="The node label whose values are the domains to spread over.")
    max_skew: int = Field(default=1, ge=1, le=1000, description="How far the number of pods of two domains may differ.")
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"] = Field(
        default="DoNotSchedule", description="What happens to a pod that would exceed the skew."
    )


class Scheduling(ApiModel):
    """Where the pods may run."""

    node_selector: dict[str, str] = Field(default={}, max_length=64, description="Labels that a node must have.")
    tolerations: list[Toleration] = Field(default=[], max_length=64, description="Taints that the pods tolerate.")
    affinity: FreeForm | None = Field(default=None, description="Affinity of the pods, as in a pod's spec.")
    priority_class_name: ShortText | None = Field(default=None, description="PriorityClass of the pods.")
    runtime_class_name: ShortText | None = Field(default=None, description="RuntimeClass of the pods.")
    topology_spread_constraints: list[TopologySpread] = Field(
        default=[], max_length=16, description="How the replicas spread over nodes."
    )
