"""`spec.scheduling`: constraints on the nodes that the pods run on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fastgen_operator.api.fields import ApiModel, FreeForm, LabelKey, LabelValue, ObjectName, model_rules, rule


class Toleration(ApiModel):
    """A toleration, as in a pod's spec."""

    # What pod validation requires of them: ValidateTolerations in k8s.io/kubernetes/pkg/apis/core/validation.
    model_config = model_rules(
        (
            "!has(self.value) || self.value == '' || !has(self.operator) || self.operator != 'Exists'",
            "spec.scheduling.tolerations[].value must not be set with the operator Exists, which matches every value: "
            "remove value, or set operator to Equal",
        ),
        (
            "has(self.key) || has(self.operator) && self.operator == 'Exists'",
            "spec.scheduling.tolerations[].operator must be Exists without a key, to match all taints: set operator to "
            "Exists, or set key",
        ),
        (
            "!has(self.tolerationSeconds) || has(self.effect) && self.effect == 'NoExecute'",
            "spec.scheduling.tolerations[].tolerationSeconds requires the effect NoExecute: set effect to NoExecute, "
            "or remove tolerationSeconds",
        ),
    )
    key: LabelKey | None = None
    """Key of the tolerated taint. If unset, all keys match, and operator must be Exists."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """How the taint's value is compared. Exists matches every value. Defaults to Equal."""
    value: LabelValue | None = None
    """Value of the tolerated taint, for the operator Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the tolerated taint. If unset, all effects match."""
    toleration_seconds: int | None = Field(default=None, ge=0, le=1 << 31)
    """Time in seconds that a NoExecute taint is tolerated before the pod is evicted. If unset, it is tolerated
    forever. Requires the effect NoExecute."""


class TopologySpread(ApiModel):
    """A topology spread constraint. It counts the pods of this FastGenDeployment that have the same pod template."""

    topology_key: LabelKey
    """Node label whose values define the topology domains, for example topology.kubernetes.io/zone."""
    max_skew: int = Field(default=1, ge=1, le=1000)
    """Maximum difference between the numbers of pods in any two topology domains. Defaults to 1."""
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"] = "DoNotSchedule"
    """What to do with a pod that would exceed maxSkew: leave it pending, or schedule it anyway.
    Defaults to DoNotSchedule."""


class Scheduling(ApiModel):
    """Constraints on the nodes that the pods run on."""

    node_selector: dict[str, LabelValue] = Field(default={}, max_length=64)
    """Labels that a node must have to run the pods."""
    tolerations: list[Toleration] = Field(default=[], max_length=64)
    """Tolerations of the pods."""
    affinity: FreeForm | None = None
    """Affinity of the pods, as in a pod's spec."""
    priority_class_name: ObjectName | None = None
    """Name of the pods' PriorityClass."""
    runtime_class_name: ObjectName | None = None
    """Name of the pods' RuntimeClass, for example nvidia."""
    topology_spread_constraints: list[TopologySpread] = Field(
        default=[],
        max_length=16,
        json_schema_extra=rule(
            "self.all(one, self.exists_one(other, one.topologyKey == other.topologyKey && "
            "(has(one.whenUnsatisfiable) ? one.whenUnsatisfiable : 'DoNotSchedule') == "
            "(has(other.whenUnsatisfiable) ? other.whenUnsatisfiable : 'DoNotSchedule')))",
            "spec.scheduling.topologySpreadConstraints[] must not repeat a topologyKey with the same "
            "whenUnsatisfiable: remove one of them",
        ),
    )
    """How the pods are spread across topology domains."""
