"""`spec.scheduling`: constraints on the nodes that the pods run on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fastgen_operator.api.fields import ApiModel, FreeForm, ShortText


class Toleration(ApiModel):
    """A toleration, as in a pod's spec."""

    key: ShortText | None = None
    """Key of the tolerated taint. If unset, all keys match, and operator must be Exists."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """How the taint's value is compared. Exists matches every value. Defaults to Equal."""
    value: str | None = Field(default=None, max_length=253)
    """Value of the tolerated taint, for the operator Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the tolerated taint. If unset, all effects match."""
    toleration_seconds: int | None = Field(default=None, ge=0, le=1 << 31)
    """Time in seconds that a NoExecute taint is tolerated before the pod is evicted. If unset, it is tolerated
    forever. Requires the effect NoExecute."""


class TopologySpread(ApiModel):
    """A topology spread constraint. It counts the pods of this FastGenDeployment that have the same pod template."""

    topology_key: ShortText
    """Node label whose values define the topology domains, for example topology.kubernetes.io/zone."""
    max_skew: int = Field(default=1, ge=1, le=1000)
    """Maximum difference between the numbers of pods in any two topology domains. Defaults to 1."""
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"] = "DoNotSchedule"
    """What to do with a pod that would exceed maxSkew: leave it pending, or schedule it anyway.
    Defaults to DoNotSchedule."""


class Scheduling(ApiModel):
    """Constraints on the nodes that the pods run on."""

    node_selector: dict[str, str] = Field(default={}, max_length=64)
    """Labels that a node must have to run the pods."""
    tolerations: list[Toleration] = Field(default=[], max_length=64)
    """Tolerations of the pods."""
    affinity: FreeForm | None = None
    """Affinity of the pods, as in a pod's spec."""
    priority_class_name: ShortText | None = None
    """Name of the pods' PriorityClass."""
    runtime_class_name: ShortText | None = None
    """Name of the pods' RuntimeClass, for example nvidia."""
    topology_spread_constraints: list[TopologySpread] = Field(default=[], max_length=16)
    """How the pods are spread across topology domains."""
