"""`spec.engine`: configuration of the inference engine."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from fastgen.settings import DEFAULT_TOKEN_BUDGET
from fastgen_operator.api.fields import ApiModel, crd_field, engine_setting, model_rules, number_or_word, rule

# The settings that the operator passes to the engine, by their flags in the order of the command line. Most are fields
# of `Engine` and `KVCache` with the same name: see `children/pod.py`.
PASSED_SETTINGS: Final = {
    "--port": "port",
    "--served-model-name": "served_model_name",
    **{
        engine_setting(name).flag: name
        for name in (
            *("device", "dtype", "tensor_parallel", "token_budget", "max_sequences", "max_model_length", "block_size"),
            *("memory_percent", "swap_space", "max_queued_requests", "drain_seconds", "inter_token_target"),
            *("api_key_file", "prefix_caching"),
        )
    },
}
# extraArgs must not contain these. Probes and Services rely on the default of --host.
_RESERVED_FLAGS: Final = ("--host", *PASSED_SETTINGS, "--no-prefix-caching")


def _block_sizes() -> str:
    bounds = engine_setting("block_size")
    low, high = bounds.minimum or 1, bounds.maximum or 1
    return ", ".join(str(1 << bit) for bit in range(32) if low <= 1 << bit <= high)


class KVCache(ApiModel):
    """Configuration of the paged KV cache."""

    memory_percent: int = crd_field("memory_percent")
    block_size: int = crd_field(
        "block_size",
        json_schema_extra=rule(
            f"self in [{_block_sizes()}]",
            f"spec.engine.kvCache.blockSize must be a power of two: one of {_block_sizes()}",
        ),
    )
    swap_space: str = Field(
        default="0Gi",
        max_length=16,
        pattern=r"^[0-9]+([KMGT]i)?$",
        description=engine_setting("swap_space").help + " The swap space counts towards the container's memory limit.",
    )
    prefix_caching: bool = crd_field("prefix_caching")


class Engine(ApiModel):
    """Configuration of the inference engine."""

    model_config = model_rules(
        (
            "!has(self.maxSequences) || (has(self.tokenBudget) "
            "? type(self.tokenBudget) != int || self.tokenBudget >= self.maxSequences "
            f": self.device != 'cpu' || self.maxSequences <= {DEFAULT_TOKEN_BUDGET['cpu']})",
            "spec.engine.tokenBudget must be at least spec.engine.maxSequences, because each running sequence "
            "is scheduled one token in every step: raise tokenBudget (default for device cpu: "
            f"{DEFAULT_TOKEN_BUDGET['cpu']}) or lower maxSequences",
        ),
        (
            # Prefixes are rejected too, because argument parsers expand an unambiguous prefix to the full flag.
            "!has(self.extraArgs) || self.extraArgs.all(a, !["
            + ", ".join(f"'{flag}'" for flag in _RESERVED_FLAGS)
            + "].exists(f, f.startsWith(a.split('=')[0])))",
            "spec.engine.extraArgs must not contain a flag that the operator sets or relies on, or a prefix of one: "
            "remove it, and use the spec field of the setting if there is one; the flags are "
            f"{', '.join(_RESERVED_FLAGS)}",
        ),
    )
    image: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    """Container image of the engine. Defaults to the image that the operator is configured with."""
    device: Literal["cpu", "cuda"] = crd_field("device", required=True)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = crd_field("dtype")
    tensor_parallel: int | None = crd_field(
        "tensor_parallel", default=None, more="Defaults to spec.resources.gpu.count, and on CPUs to 1."
    )
    token_budget: int | str | None = number_or_word("token_budget", "spec.engine.tokenBudget")
    inter_token_target: int | str = number_or_word(
        "inter_token_target",
        "spec.engine.interTokenTarget",
        "A number is also the default of spec.autoscaling.targets.interTokenLatencyMilliseconds.",
    )
    max_sequences: int | None = crd_field("max_sequences")
    max_model_length: int | None = crd_field("max_model_length")
    max_queued_requests: int = crd_field("max_queued_requests")
    kv_cache: KVCache = KVCache()
    extra_args: list[Annotated[str, Field(min_length=1, max_length=1024)]] = Field(default=[], max_length=64)
    """Additional command-line arguments for `fastgen serve`, appended to those that the operator sets. Each flag and
    each value is an item of its own, for example [--quantization, int8]."""
