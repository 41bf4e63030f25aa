"""The status of a FastGenDeployment, as the CRD describes it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic.alias_generators import to_camel

Time = Annotated[str, WithJsonSchema({"type": "string", "format": "date-time"})]


class _Model(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True)


class StatusCondition(_Model):
    """One aspect of the observed state, as in the Kubernetes API conventions."""

    type: str = Field(
        max_length=316, description="Type of the condition, for example Ready. docs/operations.md lists all of them."
    )
    status: Literal["True", "False", "Unknown"] = Field(description="Whether the condition holds.")
    observed_generation: int | None = Field(
        default=None, ge=0, description="Generation of the spec that the condition was computed from."
    )
    reason: str = Field(max_length=1024, description="Machine-readable reason for the status, as one CamelCase word.")
    message: str = Field(max_length=32768, description="Human-readable details about the status.")
    last_transition_time: Time = Field(description="Last time the status of the condition changed.")


class Capacity(_Model):
    """Capacity of one replica, as the autoscaler estimates it."""

    tokens_per_second: int | None = Field(
        default=None,
        ge=0,
        description="Tokens per second, prompt and generated, that one replica computes within the inter-token latency "
        "target.",
    )
    token_budget: int | None = Field(
        default=None, ge=0, description="Maximum number of tokens that a replica computes in one engine step."
    )
    source: str | None = Field(
        default=None,
        max_length=64,
        description="Source of the estimate: StepModel (the engines' step-time model) or Throughput (measured while "
        "requests were queued).",
    )


class ScalingStep(_Model):
    """One change of the number of replicas by the autoscaler."""

    time: Time = Field(description="Time of the decision.")
    from_replicas: int = Field(ge=0, description="Desired replicas before the change.")
    to_replicas: int = Field(ge=0, description="Desired replicas after the change.")
    reason: str = Field(max_length=1024, description="Machine-readable reason for the change, as one CamelCase word.")
    message: str = Field(max_length=1024, description="Human-readable details about the change.")


class AutoscalingStatus(_Model):
    """State of the autoscaler."""

    desired_replicas: int | None = Field(
        default=None, ge=0, description="Number of replicas that the autoscaler currently requests."
    )
    last_scale_time: Time | None = Field(
        default=None, description="Last time the autoscaler changed the number of replicas."
    )
    reason: str | None = Field(
        default=None,
        max_length=1024,
        description="Machine-readable reason for the current number of replicas, as one CamelCase word.",
    )
    message: str | None = Field(
        default=None, max_length=1024, description="Human-readable details about the current number of replicas."
    )
    history: list[ScalingStep] | None = Field(
        default=None, max_length=5, description="Most recent changes of the number of replicas, newest first."
    )


class Status(_Model):
    """Observed state of the FastGenDeployment."""

    observed_generation: int | None = Field(
        default=None, ge=0, description="Generation of the spec that the status was computed from."
    )
    desired_replicas: int | None = Field(
        default=None, ge=0, description="Desired number of replicas, from the spec or from the autoscaler."
    )
    replicas: int | None = Field(default=None, ge=0, description="Number of pods, of all revisions.")
    ready_replicas: int | None = Field(
        default=None, ge=0, description="Number of ready pods that have the current pod template."
    )
    updated_replicas: int | None = Field(
        default=None, ge=0, description="Number of pods that have the current pod template."
    )
    selector: str | None = Field(
        default=None, max_length=1024, description="Label selector of the pods, for the scale subresource."
    )
    url: str | None = Field(
        default=None, max_length=1024, description="URL of the OpenAI-compatible API inside the cluster."
    )
    capacity: Capacity | None = Field(
        default=None, description="Capacity of one replica. Set only if spec.autoscaling is set."
    )
    autoscaling: AutoscalingStatus | None = Field(
        default=None, description="State of the autoscaler. Set only if spec.autoscaling is set."
    )
    conditions: list[StatusCondition] | None = Field(
        default=None,
        max_length=16,
        description="Conditions of the FastGenDeployment, one of each type.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
