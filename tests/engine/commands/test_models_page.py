"""docs/reference/models.md says what the engine makes of every model type that transformers has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers

from fastgen.commands.model_support import MODELS_PATH, ModelSupport, known_classes, model_support, models_page
from fastgen.model.config import gguf_families
from fastgen.model.config.huggingface_families import FAMILIES
from fastgen.model.config.multimodal import MULTIMODAL

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.slow  # opens some 300 configurations


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str], ModelSupport]:
    return {(row.model_type, row.model_class): row for row in model_support()}


def test_the_committed_page_is_up_to_date() -> None:
    page = (ROOT / MODELS_PATH).read_text()
    (pinned,) = re.findall(r"^transformers==(\S+)", (ROOT / "requirements/dev.txt").read_text(), re.MULTILINE)
    assert f"transformers {pinned}," in page
    if transformers.__version__ != pinned:
        pytest.skip(f"the page is of transformers {pinned}")
    assert page == models_page(), "run: python -m fastgen.commands.reference --write"


def test_every_class_of_transformers_that_generates_text_has_a_row(found: dict[tuple[str, str], ModelSupport]) -> None:
    assert found.keys() == known_classes()
    assert len(found) > 200
    for row in found.values():
        assert (row.way == "refused") == bool(row.reason)
        assert "\n" not in row.reason


def test_native_rows_are_the_families(found: dict[tuple[str, str], ModelSupport]) -> None:
    native = {row.model_type: row for row in found.values() if row.way == "native"}
    assert native.keys() == FAMILIES.keys()
    assert {row.model_class for row in native.values()} == {family.model_class for family in FAMILIES.values()}
    assert all(row.architecture is not None for row in native.values())


def test_text_parts_are_those_of_the_table(found: dict[tuple[str, str], ModelSupport]) -> None:
    rows = {(row.model_type, row.model_class) for row in found.values() if row.way == "text part"}
    assert rows == {(kind, row.model_class) for kind, row in MULTIMODAL.items()}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (("gemma3n", "Gemma3nForConditionalGeneration"), "embeddings for each layer"),
        (("llama4", "Llama4ForCausalLM"), "only Llama4ForConditionalGeneration is supported"),
        (("olmo_hybrid", "OlmoHybridForCausalLM"), "linear_attention in layer 0"),
        (("bart", "BartForCausalLM"), "encoder-decoder"),
        (("mpt", "MptForCausalLM"), "fixed attention"),
    ],
)
def test_what_is_refused_has_its_reason(
    found: dict[tuple[str, str], ModelSupport], row: tuple[str, str], words: str
) -> None:
    assert found[row].way == "refused"
    assert words in found[row].reason


def test_every_architecture_of_gguf_files_names_the_types_that_it_stores() -> None:
    assert gguf_families.MODEL_TYPES.keys() == gguf_families.FAMILIES.keys()
    assert {kind for kinds in gguf_families.MODEL_TYPES.values() for kind in kinds} <= FAMILIES.keys()
