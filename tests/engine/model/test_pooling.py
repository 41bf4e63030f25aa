"""How a model pools, from its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.runner.test_gpu_path import cpu_runner
from fastgen import LLM
from fastgen.model import ModelError
from fastgen.model.pooling import PoolingConfig, pooling_config
from fastgen.model.source import ModelSource
from fastgen.server.serving.served_task import ServedTask
from fastgen.settings import ConfigError
from support.gguf_writing import write_gguf
from support.tiny_models import TINY, saved

NORMALISE = "sentence_transformers.models.Normalize"


def with_modules(folder: Path, pooling: dict[str, Any], *others: str, **config: Any) -> ModelSource:
    """Write sentence-transformers' files into a model's folder."""
    kinds = ["sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling", *others]
    modules = [
        {"idx": i, "name": str(i), "path": "1_Pooling" if "Pooling" in kind else "", "type": kind}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return ModelSource.open(str(folder))


@pytest.mark.parametrize(
    ("pooling", "others", "expected"),
    [
        (
            {"word_embedding_dimension": 64, "pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False},
            [NORMALISE],
            PoolingConfig("last", normalised=True),
        ),
        ({"pooling_mode_mean_tokens": True}, [], PoolingConfig("mean", normalised=False)),
        ({"pooling_mode": "lasttoken"}, [], PoolingConfig("last", normalised=False)),
    ],
)
def test_the_pooling_of_sentence_transformers_is_used(
    pooling: dict[str, Any], others: list[str], expected: PoolingConfig, tmp_path: Path
) -> None:
    source = with_modules(saved("qwen3", tmp_path), pooling, *others)
    assert pooling_config(source) == expected
    assert ServedTask.of(source, "auto", "auto") == ServedTask("embed", expected)
    assert ServedTask.of(source, "generate", "auto").name == "generate"
    assert ServedTask.of(source, "embed", "mean").pooling == PoolingConfig("mean")


def test_trained_dimensions_are_read(tmp_path: Path) -> None:
    source = with_modules(saved("qwen3", tmp_path), {"pooling_mode_lasttoken": True}, matryoshka_dimensions=[32, 16])
    found = pooling_config(source)
    assert found is not None
    assert found.dimensions == (32, 16)


@pytest.mark.parametrize(
    ("pooling", "others", "message"),
    [
        ({"pooling_mode_cls_token": True}, [], "pooling by cls_token is not supported"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, [], "mean_tokens, max_tokens"),
        ({"pooling_mode_mean_tokens": True}, ["sentence_transformers.models.Dense"], "module Dense is not supported"),
    ],
)
def test_modules_that_are_not_built_are_refused_by_name(
    pooling: dict[str, Any], others: list[str], message: str, tmp_path: Path
) -> None:
    source = with_modules(saved("qwen3", tmp_path), pooling, *others)
    with pytest.raises(ModelError, match=message):
        pooling_config(source)


@pytest.mark.parametrize(
    ("file", "field", "neutral", "value"),
    [
        ("config_sentence_transformers.json", "default_prompt_name", None, "query"),
        ("sentence_bert_config.json", "do_lower_case", False, True),
        ("1_Pooling/config.json", "include_prompt", True, False),
    ],
)
def test_fields_of_sentence_transformers_that_change_the_vectors_are_refused_by_name(
    file: str, field: str, neutral: Any, value: Any, tmp_path: Path
) -> None:
    source = with_modules(saved("qwen3", tmp_path), {"pooling_mode_mean_tokens": True})
    path = source.path / file
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | {field: neutral}))
    assert pooling_config(source) == PoolingConfig("mean", normalised=False)
    path.write_text(json.dumps(before | {field: value}))
    with pytest.raises(ModelError, match=f"{path.name}: {field} is .*: not supported; (set|give)"):
        pooling_config(source)


def with_pooling_type(path: Path, number: int) -> ModelSource:
    """Write a tiny GGUF file whose metadata has a pooling_type."""
    torch.manual_seed(0)
    write_gguf(TINY["qwen3"].build(), path, pooling_type=number)
    return ModelSource.open(str(path))


@pytest.mark.parametrize(("number", "method"), [(1, "mean"), (3, "last")])
def test_the_pooling_type_of_a_gguf_file_is_used(number: int, method: Any, tmp_path: Path) -> None:
    source = with_pooling_type(tmp_path / "m.gguf", number)
    assert ServedTask.of(source, "auto", "auto") == ServedTask("embed", PoolingConfig(method))


def test_a_gguf_file_that_does_not_pool_generates(tmp_path: Path) -> None:
    source = with_pooling_type(tmp_path / "m.gguf", 0)
    assert ServedTask.of(source, "auto", "auto").name == "generate"


@pytest.mark.parametrize(("number", "name"), [(2, "cls"), (4, "rank"), (9, "unknown")])
def test_a_pooling_type_that_is_not_built_is_refused_by_name_unless_flags_replace_it(
    number: int, name: str, tmp_path: Path
) -> None:
    source = with_pooling_type(tmp_path / "m.gguf", number)
    for task in ("auto", "embed"):
        with pytest.raises(ModelError, match=rf"m\.gguf: qwen3\.pooling_type is {number} \({name}\): .*give --task"):
            ServedTask.of(source, task, "auto")
    assert ServedTask.of(source, "embed", "mean").pooling == PoolingConfig("mean")
    assert ServedTask.of(source, "generate", "auto").name == "generate"


def test_models_generate_unless_their_files_or_the_flag_say_otherwise(tmp_path: Path) -> None:
    source = ModelSource.open(str(saved("qwen3", tmp_path)))
    assert ServedTask.of(source, "auto", "auto") == ServedTask("generate")
    assert ServedTask.of(source, "embed", "auto") == ServedTask("embed", PoolingConfig("last"))
    with pytest.raises(ConfigError, match="--pooling mean: this server generates text; set --task embed"):
        ServedTask.of(source, "auto", "mean")


def test_a_checkpoint_without_a_head_has_the_hidden_states_of_one_with_a_head(tmp_path: Path) -> None:
    from engine.runner.test_pooling import LAST, pooled, result, run

    whole, bare = saved("qwen3", tmp_path), tmp_path / "bare"
    bare.mkdir()
    config = json.loads((whole / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3Model"]}))
    tensors: dict[str, torch.Tensor] = load_file(whole / "model.safetensors")
    tensors = {name.removeprefix("model."): values for name, values in tensors.items() if name != "lm_head.weight"}
    save_file(tensors, bare / "model.safetensors")
    request = pooled(1, 40, LAST)
    expected, got = (result(run(cpu_runner(folder), [request])[0][request.id]) for folder in (whole, bare))
    assert got.tolist() == expected.tolist()
    source = ModelSource.open(str(bare))
    assert ServedTask.of(source, "auto", "auto").name == "embed"
    with pytest.raises(ConfigError, match="no output head"):
        ServedTask.of(source, "generate", "auto")
    with pytest.raises(ConfigError, match="no output head"):
        LLM(str(bare))


def test_models_with_attention_to_later_tokens_are_refused(tmp_path: Path) -> None:
    folder = saved("qwen3", tmp_path)
    with pytest.raises(ModelError, match="is_causal is false"):
        with_modules(folder, {"pooling_mode_mean_tokens": True}, is_causal=False)
