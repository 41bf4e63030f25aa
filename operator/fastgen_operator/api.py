"""FastGenDeployment as typed models: the one source of the CRD (`crd.py`) and of what the operator reads.

Engine settings take their default, bounds and help from `fastgen.config`. A field is here only if it does something.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic.alias_generators import to_camel

from fastgen.config import DEFAULT_TOKEN_BUDGET, KNOBS, SERVER_KNOBS

NAME_LIMIT = 40
GPU_RESOURCE = "nvidia.com/gpu"

_knobs = {knob.name: knob for knob in KNOBS + SERVER_KNOBS}

# What `children/pod.py` passes itself; extraArgs may not say it again.
OPERATOR_FLAGS: tuple[str, ...] = (
    "--host",
    "--port",
    "--served-model-name",
    *(
        _knobs[name].flag
        for name in (
            "device",
            "dtype",
            "token_budget",
            "max_sequences",
            "max_model_length",
            "block_size",
            "memory_percent",
            "swap_space",
            "prefix_caching",
            "max_queued_requests",
            "drain_seconds",
        )
    ),
    "--no-prefix-caching",
)

Quantity = Annotated[
    int | str,
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "pattern": r"^([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE])?$",
        }
    ),
]
FreeForm = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True})]
ShortText = Annotated[str, Field(min_length=1, max_length=253)]


def _rules(*rules: tuple[str, str]) -> dict[str, Any]:
    """CEL rules, each with the message that names the field and the remedy."""
    return {"x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in rules]}


def _knob(name: str, *, required: bool = False) -> Any:
    """A field with the engine's own default, bounds and help for the setting `name`."""
    knob = _knobs[name]
    default = ... if required else knob.default
    return Field(default, ge=knob.minimum, le=knob.maximum, description=knob.help)


def _number_or_word(name: str, path: str) -> Any:
    """A whole number within the setting's bounds, or one of its words."""
    knob = _knobs[name]
    words = " or ".join(knob.words)
    allowed = f"a whole number from {knob.minimum} to {knob.maximum}"
    in_words = ", ".join(f"'{word}'" for word in knob.words)
    rule = (
        f"type(self) == int ? (self >= {knob.minimum} && self <= {knob.maximum}) : self in [{in_words}]",
        f"{path} must be {words}, or {allowed}",
    )
    return Field(
        knob.default,
        description=knob.help,
        json_schema_extra={
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            **_rules(rule),
        },
    )


def _block_sizes() -> str:
    knob = _knobs["block_size"]
    assert knob.minimum is not None, "the block size is bounded"
    assert knob.maximum is not None, "the block size is bounded"
    powers = [str(1 << bit) for bit in range(32) if knob.minimum <= 1 << bit <= knob.maximum]
    return ", ".join(powers)


class _Model(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True)


class Model(_Model):
    """Which model is served, and by what name."""

    source: str = Field(
        max_length=1024,
        description="Where the model is: file:///absolute/path of a GGUF file or a model folder in the engine's image.",
        json_schema_extra=_rules(
            (
                r"self.matches('^file:///[^\\s]+$')",
                "spec.model.source must be file:///absolute/path of a GGUF file or a model folder in the engine's "
                "image, for example file:///models/SmolLM2-135M-Instruct.Q4_1.gguf",
            )
        ),
    )
    served_name: ShortText | None = Field(
        default=None, description="The model name that requests use; the resource's name where not given."
    )


class KVCache(_Model):
    """The paged KV cache."""

    memory_percent: int = _knob("memory_percent")
    block_size: int = Field(
        default=_knobs["block_size"].default,
        ge=_knobs["block_size"].minimum,
        le=_knobs["block_size"].maximum,
        description=_knobs["block_size"].help,
        json_schema_extra=_rules(
            (
                f"self in [{_block_sizes()}]",
                f"spec.engine.kvCache.blockSize must be a power of two: one of {_block_sizes()}",
            )
        ),
    )
    swap_space: str = Field(
        default="0Gi",
        max_length=16,
        pattern=r"^[0-9]+([KMGT]i)?$",
        description=_knobs["swap_space"].help + " Counts towards the replica's memory.",
    )
    prefix_caching: bool = _knob("prefix_caching")


class Engine(_Model):
    """How the engine runs."""

    model_config = ConfigDict(
        json_schema_extra=_rules(
            (
                "!has(self.maxSequences) || (has(self.tokenBudget) "
                "? type(self.tokenBudget) != int || self.tokenBudget >= self.maxSequences "
                f": self.device != 'cpu' || self.maxSequences <= {DEFAULT_TOKEN_BUDGET['cpu']})",
                "spec.engine.tokenBudget must be at least spec.engine.maxSequences, because each running sequence "
                "takes one token of every pass: raise tokenBudget or lower maxSequences",
            ),
            (
                # A prefix counts too: command-line parsers take an unambiguous one for the whole flag.
                "!has(self.extraArgs) || self.extraArgs.all(a, !["
                + ", ".join(f"'{flag}'" for flag in OPERATOR_FLAGS)
                + "].exists(f, f.startsWith(a.split('=')[0])))",
                "spec.engine.extraArgs may not repeat (or shorten) a flag that the operator sets: use the field of the "
                f"spec instead of {', '.join(OPERATOR_FLAGS)}",
            ),
        )
    )
    image: Annotated[str, Field(min_length=1, max_length=512)] | None = Field(
        default=None, description="The engine's image; the operator's default where not given."
    )
    device: Literal["cpu", "cuda"] = _knob("device", required=True)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _knob("dtype")
    token_budget: int | str | None = _number_or_word("token_budget", "spec.engine.tokenBudget")
    max_sequences: int | None = _knob("max_sequences")
    max_model_length: int | None = _knob("max_model_length")
    max_queued_requests: int = _knob("max_queued_requests")
    kv_cache: KVCache = Field(default=KVCache(), description="The paged KV cache.")
    extra_args: list[Annotated[str, Field(min_length=1, max_length=1024)]] = Field(
        default=[], max_length=64, description="More arguments of `fastgen serve`, after those that the operator sets."
    )


class GPU(_Model):
    """GPUs of one replica, as an extended resource of the node."""

    count: int = Field(default=0, ge=0, le=64, description="GPUs that one replica reserves.")
    resource_name: str = Field(
        default=GPU_RESOURCE,
        max_length=253,
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
        description="The extended resource that a GPU is counted by on the nodes.",
    )


class Resources(_Model):
    """What one replica takes of its node."""

    model_config = ConfigDict(
        json_schema_extra=_rules(
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


class Rollout(_Model):
    """How a change of the pods is rolled out."""

    model_config = ConfigDict(
        json_schema_extra=_rules(
            (
                "self.maxSurge > 0 || self.maxUnavailable > 0",
                "spec.rollout.maxSurge and spec.rollout.maxUnavailable may not both be 0, because no pod could ever be "
                "replaced: set one of them to 1",
            )
        )
    )
    max_surge: int = Field(
        default=0, ge=0, le=1000, description="Pods above spec.replicas during a rollout; 0 needs no spare GPU."
    )
    max_unavailable: int = Field(
        default=1, ge=0, le=1000, description="Pods below spec.replicas that a rollout may take out of service at once."
    )
    progress_deadline_seconds: int = Field(
        default=1800, ge=10, le=86400, description="A rollout without progress for this long is reported as failed."
    )


class Toleration(_Model):
    """A taint that the pods tolerate, as in a pod's spec."""

    key: ShortText | None = Field(default=None, description="The taint's key; every key where not given.")
    operator: Literal["Exists", "Equal"] = Field(default="Equal", description="How the key's value is compared.")
    value: str | None = Field(default=None, max_length=253, description="The taint's value, for the operator Equal.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="The taint's effect; every effect where not given."
    )
    toleration_seconds: int | None = Field(
        default=None, ge=0, le=1 << 31, description="How long a NoExecute taint is tolerated; for ever where not given."
    )


class TopologySpread(_Model):
    """How the replicas spread over nodes; it always counts the pods of this FastGenDeployment."""

    topology_key: ShortText = Field(description="The node label whose values are the domains to spread over.")
    max_skew: int = Field(default=1, ge=1, le=1000, description="How far the number of pods of two domains may differ.")
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"] = Field(
        default="DoNotSchedule", description="What happens to a pod that would exceed the skew."
    )


class Scheduling(_Model):
    """Where the pods may run."""

    node_selector: dict[str, str] = Field(default={}, max_length=64, description="Labels that a node must have.")
    tolerations: list[Toleration] = Field(default=[], max_length=64, description="Taints that the pods tolerate.")
    affinity: FreeForm | None = Field(default=None, description="Affinity of the pods, as in a pod's spec.")
    priority_class_name: ShortText | None = Field(default=None, description="PriorityClass of the pods.")
    runtime_class_name: ShortText | None = Field(default=None, description="RuntimeClass of the pods.")
    topology_spread_constraints: list[TopologySpread] = Field(
        default=[], max_length=16, description="How the replicas spread over nodes."
    )


class Spec(_Model):
    """What the user wants."""

    model_config = ConfigDict(
        json_schema_extra=_rules(
            (
                "self.rollout.progressDeadlineSeconds >= self.startupDeadlineSeconds",
                "spec.rollout.progressDeadlineSeconds must be at least spec.startupDeadlineSeconds: a start that is "
                "still allowed may not be reported as failed; raise the one or lower the other",
            ),
            (
                "self.engine.device != 'cuda' || self.resources.gpu.count > 0",
                "spec.resources.gpu.count must be at least 1 where spec.engine.device is cuda: a pod gets no GPU that "
                "it does not ask for",
            ),
        )
    )
    model: Model = Field(description="Which model is served.")
    engine: Engine = Field(description="How the engine runs.")
    resources: Resources = Field(default=Resources(), description="What one replica takes of its node.")
    replicas: int = Field(default=1, ge=0, le=1000, description="Engines behind the Service; 0 stops serving.")
    rollout: Rollout = Field(default=Rollout(), description="How a change of the pods is rolled out.")
    drain_seconds: int = _knob("drain_seconds")
    startup_deadline_seconds: int = Field(
        default=1800, ge=10, le=86400, description="A pod that is not ready this long after its start is started again."
    )
    scheduling: Scheduling = Field(default=Scheduling(), description="Where the pods may run.")
