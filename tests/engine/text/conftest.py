from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fastgen.model.checkpoint.gguf_file import GGUFFile
from fastgen.text.tokenizer import Tokenizer
from support import demo_weights


@pytest.fixture(scope="session")
def smollm2_metadata() -> Mapping[str, Any]:
    """Tokenizer metadata of the demo model's file."""
    return GGUFFile(Path(str(demo_weights.demo_model()))).metadata


@pytest.fixture(scope="session")
def smollm2(smollm2_metadata: Mapping[str, Any]) -> Tokenizer:
    return Tokenizer.load(smollm2_metadata)
