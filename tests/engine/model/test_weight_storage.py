"""What --quantization auto is, and what the log says about a GGUF file's weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.model.config.test_gguf_families import build
from fastgen.model.source import ModelSource
from fastgen.model.weight_storage import describe_storage, with_storage
from fastgen.settings import ConfigError, EngineConfig
from support.gguf_writing import write_gguf


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    return ModelSource.open(str(write_gguf(build("llama"), tmp_path / "tiny.gguf", "Q4_0")))


def storage(source: ModelSource, **settings: str) -> str:
    return with_storage(EngineConfig(model="", **settings), source).quantization  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _multiplies_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastgen.model.weight_storage.has_byte_products", lambda _bits: True)


def test_auto_is_int8_for_gguf_files_with_quantised_weights(source: ModelSource) -> None:
    assert storage(source) == "int8"


@pytest.mark.parametrize("given", ["none", "int8", "stored"])
def test_what_is_set_stays(source: ModelSource, given: str) -> None:
    assert storage(source, quantization=given) == given


@pytest.mark.parametrize(
    "settings", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "float16"}, {"device": "cuda"}]
)
def test_auto_keeps_weights_in_a_dtype_that_is_set_and_on_gpus(source: ModelSource, settings: dict[str, str]) -> None:
    assert storage(source, **settings) == "none"


def test_auto_is_none_without_instructions_for_bytes(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastgen.model.weight_storage.has_byte_products", lambda bits: bits > 256)
    assert storage(source) == "none"


def test_auto_is_none_for_files_without_quantised_weights_and_for_other_checkpoints(tmp_path: Path) -> None:
    plain = ModelSource.open(str(write_gguf(build("llama"), tmp_path / "plain.gguf", "F32")))
    assert storage(plain) == "none"
    assert plain.gguf is not None
    assert describe_storage(plain.gguf, "none", "bfloat16") is None
    assert storage(replace(plain, gguf=None)) == "none"


@pytest.mark.parametrize(
    ("types", "expected"), [({"F16": 9, "Q8_0": 1}, "none"), ({"Q6_K": 9, "F16": 1}, "int8"), ({}, "none")]
)
def test_auto_follows_most_of_the_matrices(
    source: ModelSource, monkeypatch: pytest.MonkeyPatch, types: dict[str, int], expected: str
) -> None:
    monkeypatch.setattr(type(source.gguf), "matrix_types", lambda _self: types)
    assert storage(source) == expected


def test_the_log_says_what_weights_become_and_how_to_get_the_other(source: ModelSource) -> None:
    file = source.gguf
    assert file is not None
    stored, grown, int8 = (describe_storage(file, name, "bfloat16") for name in ("stored", "none", "int8"))
    assert int8 is not None
    assert "MiB in int8: --quantization stored keeps them as they are, --quantization none takes" in int8
    assert stored is not None
    assert stored.startswith("weights as the file stores them: Q4_0 packed")
    assert stored.endswith("MiB in bfloat16: --quantization none computes with those")
    assert grown is not None
    assert "MiB in bfloat16: --quantization stored keeps them as they are, --quantization int8 takes" in grown


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        ({"Q4_K": 9, "Q6_K": 2, "F32": 1}, "Q4_K and Q6_K packed, F32 in bfloat16;"),
        ({"Q8_0": 3}, "Q8_0 in int8, because they have no packed form;"),
        (
            {"Q4_0": 3, "Q8_0": 1, "IQ4_NL": 1, "F16": 1},
            "Q4_0 packed, Q8_0 and IQ4_NL in int8, because they have no packed form, F16 in bfloat16;",
        ),
    ],
)  # fmt: skip
def test_each_type_is_named_with_what_becomes_of_it(
    source: ModelSource, monkeypatch: pytest.MonkeyPatch, types: dict[str, int], expected: str
) -> None:
    file = source.gguf
    assert file is not None
    monkeypatch.setattr(type(file), "matrix_types", lambda _self: types)
    described = describe_storage(file, "stored", "bfloat16")
    assert described is not None
    assert described.startswith(f"weights as the file stores them: {expected}")


def test_storage_other_than_none_is_for_cpus() -> None:
    EngineConfig(model="", device="cuda")
    with pytest.raises(ConfigError, match="--quantization stored: supported on --device cpu only"):
        EngineConfig(model="", device="cuda", quantization="stored")
