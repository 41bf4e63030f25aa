"""FastGen: Dynamic SplitFuse serving over a paged KV cache."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastgen.core.sampling_params import Grammar, SamplingParams
    from fastgen.llm.llm import LLM
    from fastgen.mii.client import client
    from fastgen.mii.pipeline import pipeline
    from fastgen.mii.server import serve
    from fastgen.version import VERSION as __version__

__all__ = ["LLM", "Grammar", "SamplingParams", "__version__", "client", "pipeline", "serve"]

# No name here may also be a submodule: importing the submodule would replace the attribute.
_MODULES = {
    "LLM": "fastgen.llm.llm",
    "Grammar": "fastgen.core.sampling_params",
    "SamplingParams": "fastgen.core.sampling_params",
    "client": "fastgen.mii.client",
    "pipeline": "fastgen.mii.pipeline",
    "serve": "fastgen.mii.server",
}


def __getattr__(name: str) -> Any:
    """Import public names on first use: `import fastgen` alone must not load torch, nor read package metadata."""
    if name == "__version__":
        return importlib.import_module("fastgen.version").VERSION
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'fastgen' has no attribute {name!r}")
