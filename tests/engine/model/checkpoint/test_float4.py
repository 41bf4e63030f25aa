"""Stacked experts in MXFP4: values as transformers computes them, rows across experts, damaged tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from fastgen.model import ModelError
from fastgen.model.checkpoint.quantized.find import quantized_weights
from fastgen.model.checkpoint.quantized.weight import QuantizedTensor, QuantizedWeight
from fastgen.model.checkpoint.tensor_files import TensorFiles
from fastgen.model.config.quantization import quantization_of
from support.quantized_models import Tensors, mxfp4

MODULE = "model.layers.0.mlp.experts.gate_up_proj"
CONFIG = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}}
EXPERTS, ROWS, COLUMNS = 3, 10, 96


def saved(tensors: Tensors, folder: Path) -> dict[str, QuantizedWeight]:
    save_file({f"{MODULE}_{part}": tensor for part, tensor in tensors.items()}, folder / "model.safetensors")
    quantization = quantization_of(CONFIG)
    assert quantization is not None
    return quantized_weights(TensorFiles(folder), quantization)


def experts() -> tuple[Tensors, torch.Tensor]:
    torch.manual_seed(1)
    return mxfp4(torch.randn(EXPERTS, ROWS, COLUMNS) * torch.logspace(-3, 3, EXPERTS)[:, None, None])


def test_values_equal_those_of_transformers_and_of_the_specification(tmp_path: Path) -> None:
    tensors, expected = experts()
    weight = saved(tensors, tmp_path)[MODULE]
    assert weight.shape == (EXPERTS, ROWS, COLUMNS)
    found = QuantizedTensor(weight, 0, (EXPERTS * ROWS, COLUMNS)).float32().view(weight.shape)
    assert torch.equal(found, expected)
    theirs = convert_moe_packed_tensors(tensors["blocks"], tensors["scales"], dtype=torch.float32)
    assert torch.equal(found, theirs.transpose(1, 2))


@pytest.mark.parametrize(("first", "count"), [(0, 10), (10, 10), (13, 4), (5, 20), (29, 1)])
def test_rows_of_experts_are_read_alone(tmp_path: Path, first: int, count: int) -> None:
    tensors, expected = experts()
    part = QuantizedTensor(saved(tensors, tmp_path)[MODULE], first, (count, COLUMNS))
    wanted = expected.flatten(0, 1)[first : first + count]
    assert torch.equal(part.values(), wanted)
    assert torch.equal(torch.from_numpy(part.int8().dequantised()), wanted)
    rows = torch.tensor([count - 1, 0])
    assert torch.equal(part.table()(rows), wanted[rows])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors | {"scales": tensors["scales"][:, :, :2].clone()}, "gate_up_proj_scales has shape"),
        (lambda tensors: tensors | {"blocks": tensors["blocks"][..., :8].clone()}, "gate_up_proj_blocks has shape"),
        (lambda tensors: tensors | {"blocks": tensors["blocks"].float()}, "gate_up_proj_blocks has type F32"),
        (lambda tensors: {"blocks": tensors["blocks"]}, "gate_up_proj_scales is missing"),
        (lambda tensors: tensors | {"scales": tensors["scales"] | 255}, "gate_up_proj_scales has a scale that is not"),
    ],
)
def test_damaged_experts_are_named(tmp_path: Path, change: object, words: str) -> None:
    assert callable(change)
    with pytest.raises(ModelError, match=words):
        saved(change(experts()[0]), tmp_path)[MODULE].read(0, 1)
