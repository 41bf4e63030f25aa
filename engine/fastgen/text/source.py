"""The source of a tokenizer as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """Input of `Tokenizer.load`, filled in when a model is opened.

    Attributes:
        kind: "gguf" uses `metadata`; "huggingface" uses `directory`.
        metadata: a GGUF file's `tokenizer.*` keys with plain Python values.
        directory: a folder with tokenizer.json, and optionally tokenizer_config.json, chat_template.jinja and
            additional_chat_templates.
    """

    kind: Literal["gguf", "huggingface"]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    directory: Path | None = None
