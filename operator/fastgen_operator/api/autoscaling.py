"""How many replicas there are to be, by the load."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from fastgen_operator.api.fields import ApiModel, rules


class Targets(ApiModel):
    """What the fleet is sized for."""

    time_to_first_token_milliseconds: int = Field(
        default=1000,
        ge=10,
        le=3_600_000,
        description="Milliseconds within which a request's first token is to come: the more prompt tokens wait, the "
        "more replicas work them off in this time.",
    )
    inter_token_latency_milliseconds: int = Field(
        default=50,
        ge=1,
        le=60_000,
        description="Milliseconds between two tokens of a running generation: a replica counts for as many tokens per "
        "second as it computes in passes no longer than this, and its engine is told to keep to it (a change replaces "
        "the pods).",
    )
    utilization_percent: int = Field(
        default=85,
        ge=10,
        le=100,
        description="Share of its capacity, in percent, that a replica is to be filled to; the rest takes up bursts.",
    )


class ScaleUp(ApiModel):
    """How fast the fleet grows."""

    stabilization_seconds: int = Field(
        default=0,
        ge=0,
        le=3600,
        description="Seconds for which more replicas must have been needed all the time before they are added.",
    )


class ScaleDown(ApiModel):
    """How fast the fleet shrinks."""

    stabilization_seconds: int = Field(
        default=300,
        ge=0,
        le=86400,
        description="Seconds for which fewer replicas must have sufficed all the time before any is removed; also how "
        "long a restarted operator only watches.",
    )
    max_step_percent: int = Field(
        default=25,
        ge=1,
        le=100,
        description="Share of the replicas, in percent, that may be removed in one step; always at least one.",
    )


class Autoscaling(ApiModel):
    """The replicas follow the tokens that wait and arrive, between two bounds."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.minReplicas <= self.maxReplicas",
                "spec.autoscaling.minReplicas must be at most spec.autoscaling.maxReplicas: lower the one or raise "
                "the other",
            )
        )
    )
    min_replicas: int = Field(
        default=1,
        ge=1,
        le=1000,
        description="Fewest replicas. At least 1: nothing holds requests that come while there are none.",
    )
    max_replicas: int = Field(ge=1, le=1000, description="Most replicas.")
    targets: Targets = Field(default=Targets(), description="What the fleet is sized for.")
    scale_up: ScaleUp = Field(default=ScaleUp(), description="How fast the fleet grows.")
    scale_down: ScaleDown = Field(default=ScaleDown(), description="How fast the fleet shrinks.")
