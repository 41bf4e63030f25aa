"""The format and size of a model's files, as the engine reports them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastgen.model.source import ModelSource
from fastgen.model.stored_weights import StoredWeights
from support.demo_weights import demo_model
from support.quantized_models import FORMATS, model_of, save_mxfp4, save_quantized
from support.tiny_models import TINY, TINY_MULTIMODAL


def stored(path: Path) -> StoredWeights:
    return StoredWeights.of(ModelSource.open(str(path)))


def test_a_gguf_file_has_the_type_of_most_matrices() -> None:
    file = Path(str(demo_model()))
    assert stored(file) == StoredWeights("GGUF Q4_1", file.stat().st_size)


@pytest.mark.parametrize("name", ["qwen3", "multimodal-qwen3-5"])
def test_a_folder_has_the_type_of_most_weights(name: str, tmp_path: Path) -> None:
    """Norms may be stored in another type, and a large vision tower in yet another."""
    model = (TINY | TINY_MULTIMODAL)[name].build().to(torch.bfloat16)
    for part, weight in model.named_parameters():
        if "norm" in part or "visual" in part:
            weight.data = weight.data.float()
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    (tmp_path / "consolidated.safetensors").write_bytes(b"not read by the engine")
    assert stored(tmp_path) == StoredWeights("safetensors BF16", sum(file.stat().st_size for file in files))


@pytest.mark.parametrize(("name", "words"), [("float-quantized", "FP8"), ("awq", "AWQ"), ("gptq", "GPTQ INT4")])
def test_quantised_matrices_name_the_format(name: str, words: str, tmp_path: Path) -> None:
    packed, _ = save_quantized(model_of("qwen3"), FORMATS[name], tmp_path)
    assert stored(packed).format == f"safetensors {words}"


def test_gpt_oss_is_stored_in_mxfp4(tmp_path: Path) -> None:
    packed, _ = save_mxfp4(model_of("gpt-oss"), tmp_path)
    assert stored(packed).format == "safetensors MXFP4"


def test_files_that_only_transformers_may_read_are_unknown(tmp_path: Path) -> None:
    TINY["qwen3"].build().save_pretrained(tmp_path)
    source = ModelSource.open(str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    assert StoredWeights.of(replace(source, native=None)) == StoredWeights()
