"""The status part of FastGenDeployment, as the CRD shows it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic.alias_generators import to_camel

Time = Annotated[str, WithJsonSchema({"type": "string", "format": "date-time"})]


class _Model(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True)


class StatusCondition(_Model):
    """One observation, as Kubernetes' API conventions want it."""

    type: str = Field(
        max_length=316, description="What is observed, for example Ready; docs/operations.md has them all."
    )
    status: Literal["True", "False", "Unknown"] = Field(description="Whether the condition holds.")
    observed_generation: int | None = Field(default=None, ge=0, description="The generation of the spec it is about.")
    reason: str = Field(max_length=1024, description="Why, in one word for programs.")
    message: str = Field(max_length=32768, description="Why, in words for people.")
    last_transition_time: Time = Field(description="When the status last changed.")


class Capacity(_Model):
    """What one replica can do, as the autoscaler reckons."""

    tokens_per_second: int | None = Field(
        default=None, ge=0, description="Tokens that one replica computes per second within the latency target."
    )
    token_budget: int | None = Field(default=None, ge=0, description="Forward tokens of a pass of one replica.")
    source: str | None = Field(default=None, max_length=64, description="What the numbers come from, in one word.")


class ScalingStep(_Model):
    """One change of the replicas by the autoscaler."""

    time: Time = Field(description="When it was decided.")
    from_replicas: int = Field(ge=0, description="Replicas before.")
    to_replicas: int = Field(ge=0, description="Replicas from then on.")
    reason: str = Field(max_length=1024, description="Why, in one word for programs.")
    message: str = Field(max_length=1024, description="Why, in words for people.")


class AutoscalingStatus(_Model):
    """What the autoscaler has decided."""

    desired_replicas: int | None = Field(default=None, ge=0, description="Replicas that it wants now.")
    last_scale_time: Time | None = Field(default=None, description="When it last changed the replicas.")
    reason: str | None = Field(default=None, max_length=1024, description="Why, in one word for programs.")
    message: str | None = Field(default=None, max_length=1024, description="Why, in words for people.")
    history: list[ScalingStep] | None = Field(
        default=None, max_length=5, description="The last changes of the replicas, newest first."
    )


class Status(_Model):
    """What the operator has observed."""

    observed_generation: int | None = Field(default=None, ge=0, description="The generation of the spec it is about.")
    desired_replicas: int | None = Field(
        default=None, ge=0, description="Replicas wanted now: by the spec, or by the autoscaler."
    )
    replicas: int | None = Field(default=None, ge=0, description="Pods there are, of every revision.")
    ready_replicas: int | None = Field(default=None, ge=0, description="Pods of the current template that are ready.")
    updated_replicas: int | None = Field(default=None, ge=0, description="Pods of the current template.")
    selector: str | None = Field(default=None, max_length=1024, description="The label selector of the pods.")
    url: str | None = Field(default=None, max_length=1024, description="The OpenAI-compatible endpoint in the cluster.")
    capacity: Capacity | None = Field(default=None, description="What one replica can do.")
    autoscaling: AutoscalingStatus | None = Field(default=None, description="What the autoscaler has decided.")
    conditions: list[StatusCondition] | None = Field(
        default=None,
        max_length=16,
        description="Observations, one of each type.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
