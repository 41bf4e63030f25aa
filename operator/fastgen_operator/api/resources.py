"""`spec.resources`: compute resources of one replica."""

from __future__ import annotations

from pydantic import Field

from fastgen_operator.api.fields import ApiModel, Quantity, engine_setting, model_rules


def within_limits(path: str) -> tuple[str, str]:
    """Return the rule that requests do not exceed limits; `path` names the object that has both."""
    return (
        # Only these three: a comparison of all entries exceeds the API server's cost limit.
        "!has(self.requests) || !has(self.limits) || ['cpu', 'memory', 'ephemeral-storage'].all(r, "
        "!(r in self.requests) || !(r in self.limits) || "
        "quantity(string(self.requests[r])).compareTo(quantity(string(self.limits[r]))) <= 0)",
        f"{path}.requests must not exceed {path}.limits: lower the request or raise the limit",
    )


class GPU(ApiModel):
    """GPUs of one replica, requested as an extended resource."""

    count: int = Field(default=0, ge=0, le=engine_setting("tensor_parallel").maximum)
    """Number of GPUs per replica, all on one node. Several divide the model among them (spec.engine.tensorParallel).
    Must be 0 if spec.engine.device is cpu."""
    resource_name: str = Field(
        default="nvidia.com/gpu",
        max_length=253,
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
    )
    """Name of the extended resource that the device plugin advertises, for example nvidia.com/gpu."""


class Resources(ApiModel):
    """Compute resources of one replica."""

    model_config = model_rules(
        *(
            (
                f"!has(self.{which}) || !(self.gpu.resourceName in self.{which})",
                f"spec.resources.{which} must not contain the GPU resource: set spec.resources.gpu.count instead",
            )
            for which in ("requests", "limits")
        ),
        within_limits("spec.resources"),
    )
    gpu: GPU = GPU()
    """GPUs of one replica."""
    requests: dict[str, Quantity] = Field(default={}, max_length=16)
    """Resource requests of the engine container, for example {cpu: 2, memory: 4Gi}."""
    limits: dict[str, Quantity] = Field(default={}, max_length=16)
    """Resource limits of the engine container, for example {memory: 8Gi}. With device cpu, the KV cache is sized to fit
    into the memory limit."""
