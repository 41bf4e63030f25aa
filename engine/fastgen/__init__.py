"""FastGen: Dynamic SplitFuse serving over a paged KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastgen.version import VERSION as __version__

if TYPE_CHECKING:
    from fastgen.api import LLM
    from fastgen.core.request import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Brings in what is asked for when it is: `import fastgen` alone must not load torch."""
    if name == "LLM":
        from fastgen.api import LLM

        return LLM
    if name == "SamplingParams":
        from fastgen.core.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'fastgen' has no attribute {name!r}")
