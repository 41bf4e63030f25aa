"""What one replica takes of its node."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from fastgen_operator.api.fields import ApiModel, Quantity, rules

GPU_RESOURCE = "nvidia.com/gpu"


class GPU(ApiModel):
    """GPUs of one replica, as an extended resource of the node."""

    count: int = Field(default=0, ge=0, le=64, description="GPUs that one replica reserves.")
    resource_name: str = Field(
        default=GPU_RESOURCE,
        max_length=253,
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
        description="The extended resource that a GPU is counted by on the nodes.",
    )


class Resources(ApiModel):
    """What one replica takes of its node."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            *(
                (
                    f"!has(self.{which}) || !(self.gpu.resourceName in self.{which})",
                    f"spec.resources.{which} may not name the GPU resource: set spec.resources.gpu.count instead",
                )
                for which in ("requests", "limits")
            )
        )
    )
    gpu: GPU = Field(default=GPU(), description="GPUs of one replica.")
    requests: dict[str, Quantity] = Field(
        default={},
        max_length=16,
        description="Resources that one replica is guaranteed, for example {cpu: 2, memory: 4Gi}.",
    )
    limits: dict[str, Quantity] = Field(
        default={},
        max_length=16,
        description="Resources that one replica may not exceed; the KV cache fits into the memory.",
    )
