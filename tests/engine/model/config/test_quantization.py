"""`quantization_config`: the fields that each library writes are read; unknown ones are rejected by name."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastgen.model import ModelError
from fastgen.model.config.module_names import CompressedTensorsNames, ModuleNames, TransformersNames, WildcardNames
from fastgen.model.config.quantization import (
    AWQ,
    GPTQ,
    MXFP4,
    Float8,
    Integers,
    quantization_of,
    quantization_of_modelopt,
)
from fastgen.model.native import open_checkpoint
from fastgen.model.source import ModelSource
from support.quantized_models import FORMATS, compressed, model_of, save_quantized

MODULE = "model.layers.3.self_attn.q_proj"
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}


def described(config: dict[str, Any], module: str = MODULE) -> object:
    found = quantization_of({"quantization_config": config})
    assert found is not None
    return found.format_of(module)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # as Qwen3 and DeepSeek-V3 are published
        (
            {
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "modules_to_not_convert": ["lm_head", "model.layers.3.mlp.gate"],
                "quant_method": "fp8",
                "weight_block_size": [128, 128],
            },
            Float8((128, 128), True),
        ),
        ({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}, Float8(None, True)),
        (compressed("float-quantized", {"type": "float", "strategy": "channel"}), Float8(None, False)),
        (compressed("pack-quantized", INT4 | {"actorder": "static"}), Integers(4, True, 128)),
        (compressed("pack-quantized", INT4 | {"symmetric": False}), Integers(4, False, 128)),
        (compressed("int-quantized", {"type": "int", "strategy": "channel"}), Integers(8, True, None)),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "FP8",
                "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
                "config_groups": {"group_0": {"targets": ["Linear"]}},
                "ignore": ["lm_head", "model.layers.4*"],
                "producer": {"name": "modelopt", "version": "0.37.0"},
            },
            Float8(None, True),
        ),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "modules_to_not_convert": None},
            AWQ(64),
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": True, "meta": {"quantizer": "x"}},
            GPTQ(4, 1),
        ),
        ({"quant_method": "gptq", "bits": 8, "format": "gptq_v2", "damp_percent": 0.1}, GPTQ(8, 0)),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*": {"bits": 8}}}, GPTQ(None, 1)),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.router", "lm_head"]}, MXFP4()),
    ],
)
def test_published_configurations_are_described(config: dict[str, Any], expected: object) -> None:
    assert described(config) == expected


def test_the_first_group_with_the_module_applies() -> None:
    config = compressed("mixed-precision", INT4)
    eight = {"targets": ["re:.*self_attn.*", "lm_head"], "weights": {"num_bits": 8, "type": "int"}, "format": None}
    config["config_groups"] = {"first": eight, **config["config_groups"]}
    assert described(config) == Integers(8, True, None)
    assert described(config, "model.layers.3.mlp.up_proj") == Integers(4, True, 128)


def test_modelopt_describes_itself_in_a_file_of_its_own(tmp_path: Path) -> None:
    found = quantization_of_modelopt({"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}})
    assert found is not None
    assert found.format_of(MODULE) == Float8(None, True)
    packed, _ = save_quantized(model_of("llama"), FORMATS["modelopt"], tmp_path)
    with_values = open_checkpoint(ModelSource.open(str(packed))).tensor(f"{MODULE.replace('3', '1')}.weight")
    change_config(packed, lambda config: {name: config[name] for name in config if name != "quantization_config"})
    (packed / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    again = open_checkpoint(ModelSource.open(str(packed))).tensor(f"{MODULE.replace('3', '1')}.weight")
    assert torch.equal(with_values, again)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quant_method is 'bitsandbytes': supported are awq, .*, otherwise|GGUF file",
        ),
        ({}, "quant_method is missing"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, r"quantization_config\.fmt is 'e5m2': expected 'e4m3'"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype is 'fp4'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size is \[128\]: expected the rows and"),
        ({"quant_method": "fp8", "rotation": "hadamard"}, "rotation is 'hadamard': it is not supported; use a checkp"),
        ({"quant_method": "awq", "version": "gemv"}, "version is 'gemv': expected 'gemm'"),
        ({"quant_method": "awq", "bits": 8}, "bits is 8: expected 4"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point is False: expected True"),
        ({"quant_method": "gptq", "bits": 3}, "bits is 3: expected 4 or 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int16"}, "pack_dtype is 'int16'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo is 'NVFP4': expected 'FP8' or"),
        (compressed("nvfp4-pack-quantized", INT4), r"quantization_config\.format is 'nvfp4-pack-quantized'"),
        (compressed("pack-quantized", INT4 | {"num_bits": 3}), r"group_0\.weights is 3-bit int"),
        (compressed("float-quantized", {"type": "float", "num_bits": 4}), r"group_0\.weights is 4-bit float"),
        (compressed("pack-quantized", INT4 | {"new": 1}), r"group_0\.weights\.new is 1: it is not supported"),
        (compressed("pack-quantized", INT4) | {"transform_config": {"R1": {}}}, "transform_config is"),
        (
            compressed("pack-quantized", INT4) | {"sparsity_config": {"format": "sparse-bitmask"}},
            "sparsity_config.form",
        ),
        (compressed("pack-quantized", INT4) | {"config_groups": {"group_0": 7}}, "group_0' is 7: expected an object"),
    ],
)
def test_what_is_not_supported_is_rejected_by_its_field(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        quantization_of({"quantization_config": {"note": None, **config} if config else {"bits": 4}})


@pytest.mark.parametrize(
    ("names", "inside", "outside"),
    [
        (TransformersNames(("model.layers.1",)), ["model.layers.1", "model.layers.1.mlp"], ["model.layers.11.mlp"]),
        (TransformersNames(("mlp.gate",)), ["model.layers.1.mlp.gate"], ["model.layers.1.mlp.gate_proj"]),
        (
            TransformersNames(("model.layers.*.mlp.gate",)),
            ["model.layers.12.mlp.gate"],
            ["model.layers.1.mlp.gate_proj"],
        ),
        (TransformersNames(()), [], ["lm_head", ""]),
        (TransformersNames.all(), ["lm_head", MODULE], []),
        (
            CompressedTensorsNames(("lm_head", "re:.*mlp.gate$")),
            ["lm_head", "a.mlp.gate"],
            ["b.lm_head", "a.mlp.gate_"],
        ),
        (CompressedTensorsNames(("Linear",)), [MODULE], []),
        (WildcardNames(("lm_head", "model.layers.4*")), ["lm_head", "model.layers.4.x", "model.layers.41.x"], [MODULE]),
        (WildcardNames(("model.layers.3.self_attn",)), [MODULE], ["model.layers.3.self_attn2.x"]),
    ],
)
def test_each_library_matches_names_by_its_own_rule(names: ModuleNames, inside: list[str], outside: list[str]) -> None:
    assert [name for name in [*inside, *outside] if name in names] == inside


@pytest.mark.parametrize("names", [TransformersNames, CompressedTensorsNames])
@pytest.mark.parametrize("entry", [r"re:(\w+)+$x", "re:.*.*.*.*.*x", "re:(", "re:" + "a" * 600, "re:a{2}{3}"])
def test_a_regular_expression_that_fails_or_takes_long_is_rejected(names: type[ModuleNames], entry: str) -> None:
    started = time.process_time()
    with pytest.raises(ModelError, match="regular expression"):
        _ = MODULE in names((entry,))
    assert time.process_time() - started < 1


def change_config(folder: Path, change: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def test_an_excluded_module_with_quantised_weights_is_rejected(tmp_path: Path) -> None:
    packed, _ = save_quantized(model_of("llama"), FORMATS["awq"], tmp_path)
    excluded = {"modules_to_not_convert": ["model.layers.2.mlp"]}
    change_config(packed, lambda config: config | {"quantization_config": config["quantization_config"] | excluded})
    words = r"modules_to_not_convert names 'model\.layers\.2\.mlp\.\w+_proj', but its weights are quantised"
    with pytest.raises(ModelError, match=words):
        open_checkpoint(ModelSource.open(str(packed)))


DAMAGES: list[tuple[str, str, Any, str]] = [
    ("awq", "qweight", lambda x: x[:-1].clone(), "qweight has 63 columns, which groups of 32 do not"),
    ("awq", "qzeros", lambda x: x[:, :-1].clone(), r"qzeros has shape \(2, 7\): expected \(2, 8\)"),
    ("awq", "scales", lambda x: x.int(), "scales has type I32: expected F16 or BF16 or F32"),
    ("gptq", "g_idx", lambda x: x + 1, "g_idx names groups 1 to 2: expected 0 to 1"),
    ("gptq", "g_idx", lambda x: x[:8].clone(), "qweight has 8 words for the 8 columns of g_idx: expected 4 bits"),
    ("gptq", "qzeros", None, "qzeros is missing: the checkpoint is incomplete"),
    ("pack-quantized", "weight_shape", lambda x: x * 2, "weight_packed has shape"),
    ("pack-quantized", "weight_shape", lambda x: x * 0 - 1, "weight_packed has shape"),
    ("pack-quantized with act-order", "weight_g_idx", lambda x: x + 1, "weight_g_idx names group 2 of 2"),
    ("pack-quantized asymmetric", "weight_zero_point", lambda x: x[:-1].clone(), "weight_zero_point has shape"),
    ("int-quantized", "weight_scale", lambda x: x[:-1].clone(), "weight_scale has shape"),
    ("fp8 in blocks", "weight_scale_inv", lambda x: x[:, :-1].clone(), "weight_scale_inv has shape"),
    ("float-quantized", "weight_scale", None, "weight_scale is missing: the checkpoint is incomplete"),
    ("float-quantized", "weight_scale", lambda x: x.int(), "weight_scale has type I32"),
]


@pytest.mark.parametrize(("name", "part", "change", "words"), DAMAGES)
def test_a_damaged_tensor_is_named(tmp_path: Path, name: str, part: str, change: Any, words: str) -> None:
    packed, _ = save_quantized(model_of("llama"), FORMATS[name], tmp_path)
    tensors = load_file(packed / "model.safetensors")
    damaged = f"{MODULE.replace('3', '1')}.{part}"
    value = tensors.pop(damaged)
    if change is not None:
        tensors[damaged] = change(value)
    save_file(tensors, packed / "model.safetensors")
    source = ModelSource.open(str(packed))
    with pytest.raises(ModelError, match=rf"layers\.1\.self_attn\.q_proj\.{words}"):
        open_checkpoint(source).tensor(f"{MODULE.replace('3', '1')}.weight")


def test_weights_of_another_format_than_described_are_named(tmp_path: Path) -> None:
    packed, _ = save_quantized(model_of("llama"), FORMATS["awq"], tmp_path)
    change_config(packed, lambda config: config | {"quantization_config": FORMATS["pack-quantized"].config})
    with pytest.raises(ModelError, match=r"\.qweight: quantization_config describes this weight as Integers"):
        open_checkpoint(ModelSource.open(str(packed)))
