"""Load a model into the command's own process."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from fastgen.config import EngineConfig
from fastgen.model.source import ModelSource
from fastgen.terminal import progress_bar

if TYPE_CHECKING:
    from fastgen.llm.llm import LLM


def load_model(config: EngineConfig) -> LLM:
    """Load the model, with a progress bar that starts before torch is imported.

    Raises:
        ConfigError: the model cannot be served.
    """
    source = ModelSource.open(config.model)  # errors show before torch is imported
    with progress_bar() as on_loading:
        from fastgen.llm.llm import LLM

        settings = asdict(config) | {"model": str(source.path)}
        return LLM(settings.pop("model"), on_loading=on_loading, **settings)
