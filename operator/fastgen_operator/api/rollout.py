"""`spec.rollout` and `spec.disruption`: how pods are replaced or evicted."""

from __future__ import annotations

from pydantic import Field

from fastgen_operator.api.fields import ApiModel, model_rule


class CanaryStep(ApiModel):
    """One step: a share of the requests, for a time."""

    percent: int = Field(ge=1, le=100)
    """Share of the requests that the gateway sends to the new revision, in percent. The new revision gets as large a
    share of spec.replicas as pods of its own, rounded up, besides the present ones."""
    minutes: int = Field(ge=1, le=10080)
    """Minimum duration of the step in minutes, from the time when its pods are ready. A step lasts longer until 20
    requests had a first token, for at most one hour: then the new revision is rolled back."""


class Analysis(ApiModel):
    """When a new revision is rolled back. The numbers are those of its engines, of the requests during a step."""

    max_error_percent: int = Field(default=1, ge=0, le=100)
    """Maximum share of requests that fail with a server error, or because the queue is full, in percent. The share is
    that of at least 100 requests, so that a single error does not count."""
    max_first_token_milliseconds: int | None = Field(default=None, ge=1, le=600000)
    """Maximum mean time to first token in milliseconds. If unset, it has no limit."""
    max_inter_token_milliseconds: int | None = Field(default=None, ge=1, le=60000)
    """Maximum mean time between two tokens of a request in milliseconds. If unset, it has no limit."""
    compare_with_stable: bool = True
    """Whether the means are also compared with those of the present revision during the same step: twice its time to
    first token, or one and a half times its time between tokens, is too slow."""


class CanaryRollout(ApiModel):
    """Tries a new revision on a share of the requests before it replaces the pods."""

    steps: list[CanaryStep] = Field(min_length=1, max_length=10)
    """Steps, in order. After the last one, the pods are replaced as by a rollout without a canary."""
    analysis: Analysis = Analysis()


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
    canary: CanaryRollout | None = None
    """Sends a share of the requests to a new revision before it replaces the pods. Requires the gateway
    (spec.gateway.expose). Pods are replaced at once if no replica is ready, or if the spec asks for none."""


class Disruption(ApiModel):
    """Disruption budget applied to voluntary evictions, such as node drains."""

    min_available: int | None = Field(default=None, ge=0, le=1000)
    """Minimum number of replicas that must stay available during voluntary evictions. If unset, or not below the number
    of replicas, one pod at a time can be evicted, so that a node can always be drained. Must be unset or 0 if
    spec.cache.accessMode is ReadWriteOnce: then all replicas run on one node and can only move together, so all of them
    can be evicted."""
