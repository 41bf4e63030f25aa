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

    type: str = Field(max_length=316, description="Ready, PodsScheduled, Progressing or Available.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether the condition holds.")
    observed_generation: int | None = Field(default=None, ge=0, description="The generation of the spec it is about.")
    reason: str = Field(max_length=1024, description="Why, in one word for programs.")
    message: str = Field(max_length=32768, description="Why, in words for people.")
    last_transition_time: Time = Field(description="When the status last changed.")


class Status(_Model):
    """What the operator has observed."""

    observed_generation: int | None = Field(default=None, ge=0, description="The generation of the spec it is about.")
    replicas: int | None = Field(default=None, ge=0, description="Pods there are, of every revision.")
    ready_replicas: int | None = Field(default=None, ge=0, description="Pods of the current template that are ready.")
    updated_replicas: int | None = Field(default=None, ge=0, description="Pods of the current template.")
    selector: str | None = Field(default=None, max_length=1024, description="The label selector of the pods.")
    url: str | None = Field(default=None, max_length=1024, description="The OpenAI-compatible endpoint in the cluster.")
    conditions: list[StatusCondition] | None = Field(
        default=None,
        max_length=16,
        description="Observations, one of each type.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
