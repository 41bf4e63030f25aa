"""`spec.autoscaling`: how the number of replicas follows the load."""

from __future__ import annotations

from pydantic import Field

from fastgen_operator.api.fields import ApiModel, model_rules


class Targets(ApiModel):
    """Latency and utilization targets that determine the number of replicas. They are no settings of the engines."""

    time_to_first_token_milliseconds: int = Field(default=1000, ge=10, le=3_600_000)
    """Target for the time from a request's arrival to its first token, in milliseconds. The autoscaler adds replicas
    until the queued prompt tokens can be computed within this time."""
    inter_token_latency_milliseconds: int | None = Field(default=None, ge=1, le=60_000)
    """Target for the time between two consecutive tokens of a response, in milliseconds. The capacity of a replica is
    its token throughput with steps of this duration. The default is spec.engine.interTokenTarget, which bounds the
    engine's steps; if that is auto or off, it is 50."""
    utilization_percent: int = Field(default=85, ge=10, le=100)
    """Target utilization of each replica, as a percentage of its capacity. The remainder is headroom for bursts."""


class ScaleUp(ApiModel):
    """Scaling policy for adding replicas."""

    stabilization_seconds: int = Field(default=0, ge=0, le=3600)
    """Stabilization window for scaling up, in seconds. Replicas are added only if more were needed throughout the
    window. 0 scales up immediately."""


class ScaleDown(ApiModel):
    """Scaling policy for removing replicas."""

    stabilization_seconds: int = Field(default=300, ge=0, le=86400)
    """Stabilization window for scaling down, in seconds. Replicas are removed only if fewer were sufficient throughout
    the window. After an operator restart, nothing is removed until one full window has been observed."""
    max_step_percent: int = Field(default=25, ge=1, le=100)
    """Maximum share of the current replicas, in percent, to remove in one step. At least one replica can always be
    removed."""


class Autoscaling(ApiModel):
    """Scales the replicas on token demand, within bounds."""

    model_config = model_rules(
        (
            "self.minReplicas <= self.maxReplicas",
            "spec.autoscaling.minReplicas must be at most spec.autoscaling.maxReplicas: lower minReplicas or raise "
            "maxReplicas",
        )
    )
    min_replicas: int = Field(default=1, ge=1, le=1000)
    """Lower bound for the number of replicas. Scaling to zero is not supported, because nothing would hold the requests
    that arrive in the meantime."""
    max_replicas: int = Field(ge=1, le=1000)
    """Upper bound for the number of replicas."""
    targets: Targets = Targets()
    scale_up: ScaleUp = ScaleUp()
    scale_down: ScaleDown = ScaleDown()
