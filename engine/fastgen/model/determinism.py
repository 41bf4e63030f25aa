"""Where `--deterministic` is available. Needs no torch."""

from __future__ import annotations

from fastgen.model.processor import INT8_VARIABLE, int8_choice
from fastgen.model.source import ModelSource
from fastgen.model.weight_storage import with_storage
from fastgen.settings import ConfigError, EngineConfig


def check_deterministic(source: ModelSource, config: EngineConfig) -> None:
    """Check that the model can be computed so that no row of a step depends on the others, if the settings require it.

    Raises:
        ConfigError: with the reason why it cannot.
    """
    reason = _obstacle(source, config) if config.deterministic else None
    if reason is not None:
        raise ConfigError(f"--deterministic: not available here: {reason}: remove it")


def _obstacle(source: ModelSource, config: EngineConfig) -> str | None:
    if source.native is None:
        return "transformers runs this model, and adds in an order that depends on the step"
    if config.dtype == "float16":
        return "torch computes --dtype float16, and adds in an order that depends on the step"
    if source.architecture.delta is not None:
        return "linear attention computes the tokens of a chunk together, so results depend on the chunks"
    if source.architecture.gated_attention:
        return "torch computes the gates of this model's attention, and their last bits depend on the step"
    quantization = with_storage(config, source).quantization
    if quantization != "none" and int8_choice().product == "weight-only":
        return (
            f"the product weight-only of --quantization {quantization} ({INT8_VARIABLE}) adds in an order that depends "
            "on the number of rows"
        )
    return None
