"""A model in the command's own process."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from fastgen.config import EngineConfig
from fastgen.model.source import ModelSource
from fastgen.terminal import progress_bar

if TYPE_CHECKING:
    from fastgen.llm.llm import LLM


def load_model(config: EngineConfig) -> LLM:
    """Loads it; a bar shows how far it is, from before torch is imported on.

    Raises:
        ConfigError: when it cannot be served.
    """
    source = ModelSource.open(config.model)  # what is wrong with it shows before torch is imported
    with progress_bar() as on_loading:
        from fastgen.llm.llm import LLM

        settings = asdict(config) | {"model": str(source.path)}
        return LLM(settings.pop("model"), on_loading=on_loading, **settings)
