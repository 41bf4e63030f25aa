"""How pods are replaced, by a rollout or by those who run the cluster."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from fastgen_operator.api.fields import ApiModel, rules


class Rollout(ApiModel):
    """How a change of the pods is rolled out."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.maxSurge > 0 || self.maxUnavailable > 0",
                "spec.rollout.maxSurge and spec.rollout.maxUnavailable may not both be 0, because no pod could ever be "
                "replaced: set one of them to 1",
            )
        )
    )
    max_surge: int = Field(
        default=0, ge=0, le=1000, description="Pods above those wanted during a rollout; 0 needs no spare GPU."
    )
    max_unavailable: int = Field(
        default=1, ge=0, le=1000, description="Pods below those wanted that a rollout may take out of service at once."
    )
    progress_deadline_seconds: int = Field(
        default=1800, ge=10, le=86400, description="A rollout without progress for this long is reported as failed."
    )


class Disruption(ApiModel):
    """How many pods those who run the cluster may take away, when they drain a node for example."""

    min_available: int | None = Field(
        default=None,
        ge=0,
        le=1000,
        description="Replicas that must stay. Where not given, or not below the number of replicas, one pod at a time "
        "may go, so that a node can always be drained.",
    )
