"""`spec.rollout` and `spec.disruption`: how pods are replaced or evicted."""

from __future__ import annotations

from pydantic import Field

from fastgen_operator.api.fields import ApiModel, model_rule


class Rollout(ApiModel):
    """Rolling update strategy of the Deployment."""

    model_config = model_rule(
        "self.maxSurge > 0 || self.maxUnavailable > 0",
        "spec.rollout.maxSurge and spec.rollout.maxUnavailable must not both be 0, because no pod could ever "
        "be replaced: set one of them to 1",
    )
    max_surge: int = Field(default=0, ge=0, le=1000)
    """Maximum number of pods above the desired replicas during a rollout. 0 needs no spare GPU."""
    max_unavailable: int = Field(default=1, ge=0, le=1000)
    """Maximum number of replicas that can be unavailable during a rollout. Must not be 0 if maxSurge is 0."""
    progress_deadline_seconds: int = Field(default=1800, ge=10, le=86400)
    """Time without progress, in seconds, after which a rollout is reported as failed in the condition Progressing. Must
    be at least startupDeadlineSeconds."""


class Disruption(ApiModel):
    """Disruption budget applied to voluntary evictions, such as node drains."""

    min_available: int | None = Field(default=None, ge=0, le=1000)
    """Minimum number of replicas that must stay available during voluntary evictions. If unset, or not below the number
    of replicas, one pod at a time can be evicted, so that a node can always be drained. Must be unset or 0 if
    spec.cache.accessMode is ReadWriteOnce: then all replicas run on one node and can only move together, so all of them
    can be evicted."""
