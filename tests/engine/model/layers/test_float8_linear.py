"""Weights that stay in float8 on a GPU: which ones do, what their products compute, and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu.launches import Counting

from engine.model.layers.test_int8_models import relative_error
from engine.model.layers.test_weight_reader import DelayedCopier
from fastgen.core.step_plan import Chunk, StepPlan
from fastgen.kv_cache.tensors import KVCache
from fastgen.model.checkpoint.checkpoint import Part
from fastgen.model.layers import float8_linear
from fastgen.model.layers.float8_linear import Float8Linear
from fastgen.model.layers.gpu_backend import GPUFormat
from fastgen.model.layers.head import TorchHead
from fastgen.model.layers.linear import PlainLinear
from fastgen.model.layers.weight_reader import WeightReader
from fastgen.model.layers.weights import DecoderWeights, Mixture
from fastgen.model.native import load_on_gpu, open_checkpoint
from fastgen.model.source import ModelSource
from fastgen.model.step_input import StepInputBuilder
from fastgen.runner.gpu_runner import GPURunner
from support.driving import sequence
from support.quantized_models import FORMATS, float8, model_of, save_quantized
from support.tiny_models import prompt

CPU, FLOAT8 = torch.device("cpu"), torch.float8_e4m3fn
KEPT = ["float-quantized", "float-quantized per tensor", "fp8 per tensor", "modelopt", "modelopt per channel"]


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU stand in for a GPU with float8 units."""
    monkeypatch.setattr(float8_linear, "has_float8_units", lambda _device: True)


def weights_of(folder: Path, dtype: torch.dtype = torch.bfloat16, reader: WeightReader | None = None) -> DecoderWeights:
    source = ModelSource.open(str(folder))
    weight_format = GPUFormat(CPU, dtype, reader)
    return DecoderWeights.load(source.architecture, open_checkpoint(source), weight_format, lambda _fraction: None)


def products(weights: DecoderWeights) -> list[Any]:
    """Return the products of all layers without mixtures; with a bias, those that it is added to."""
    found: list[Any] = []
    for layer in weights.layers:
        assert not isinstance(layer.mlp, Mixture)
        found += [layer.qkv, layer.attention_output, layer.mlp.gate_up, layer.mlp.down]
    return [getattr(product, "product", product) for product in found]


@pytest.mark.parametrize("rows", [1, 2, 33])
def test_a_product_is_that_of_the_quantised_rows_and_the_dequantised_weight(rows: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(48, 160) * torch.logspace(-2, 2, 48)[:, None]
    tensors, exact = float8(weight, (1, 160))
    x = (torch.randn(rows, 160) * torch.logspace(-1, 1, rows)[:, None]).bfloat16()
    product = Float8Linear(tensors["weight"], tensors["weight_scale"].flatten())
    stored, values = float8(x.float(), (1, 160))
    expected = values @ exact.t()
    assert stored["weight"].shape == x.shape
    found = product(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=float(expected.abs().max()) * 2**-7)
    assert torch.equal(product.dequantised(torch.float32), exact)


@pytest.mark.usefixtures("units")
@pytest.mark.parametrize("family", ["llama-biases", "phi3"])
@pytest.mark.parametrize("name", KEPT)
def test_weights_with_a_scale_for_a_row_or_the_tensor_stay_float8(tmp_path: Path, name: str, family: str) -> None:
    packed, plain = save_quantized(model_of(family), FORMATS[name], tmp_path)
    kept, exact = weights_of(packed), weights_of(plain, torch.float32)
    for ours, reference in zip(products(kept), products(exact), strict=True):
        assert isinstance(ours, Float8Linear)
        torch.testing.assert_close(ours.dequantised(torch.float32), reference.weight, atol=0, rtol=2e-7)
        rows, columns = reference.weight.shape
        assert ours.num_bytes == rows * columns + 4 * rows
    assert isinstance(kept.head, TorchHead)


@pytest.mark.usefixtures("units")
@pytest.mark.parametrize("name", ["float-quantized", "float-quantized per tensor"])
def test_logits_differ_from_the_dequantised_model_by_the_rounding_of_activations(tmp_path: Path, name: str) -> None:
    packed, plain = save_quantized(model_of("llama"), FORMATS[name], tmp_path)
    ours, exact = hidden(packed), hidden(plain)
    assert 0 < relative_error(ours, exact) < 0.15


def hidden(folder: Path) -> torch.Tensor:
    """Compute a prompt in two chunks on the code path of a GPU; return the last hidden state."""
    source = ModelSource.open(str(folder))
    model = load_on_gpu(source, CPU, torch.bfloat16, max_model_length=64, progress=lambda _fraction: None)
    cache = KVCache(model.kv_shape, 4, 16, dtype=model.cache_dtype)
    runner = GPURunner(model, cache, max_model_length=64, max_sequences=1)
    subject, builder = sequence(prompt(40), [2, 0, 3]), StepInputBuilder(16)
    for start, end in ((0, 25), (25, 40)):
        subject.num_computed_tokens = start
        ticket = runner.launch(builder.build(StepPlan((Chunk(subject, start, end - start),))))
        ticket.sample([])
    last: torch.Tensor = ticket.forward.hidden[-1].float()
    return last


@pytest.mark.usefixtures("units")
def test_weights_that_threads_read_are_the_same(tmp_path: Path) -> None:
    packed, _ = save_quantized(model_of("llama"), FORMATS["float-quantized"], tmp_path)
    threaded, direct = weights_of(packed, reader=WeightReader(CPU, DelayedCopier, 3)), weights_of(packed)
    for ours, reference in zip(products(threaded), products(direct), strict=True):
        assert torch.equal(ours._weight.view(torch.uint8), reference._weight.view(torch.uint8))
        assert torch.equal(ours._scales, reference._scales)


@pytest.mark.usefixtures("units")
def test_experts_and_routers_are_dequantised(tmp_path: Path) -> None:
    packed, plain = save_quantized(model_of("mixtral"), FORMATS["float-quantized"], tmp_path)
    for ours, reference in zip(weights_of(packed).layers, weights_of(plain).layers, strict=True):
        assert isinstance(ours.mlp, Mixture)
        assert isinstance(reference.mlp, Mixture)
        assert isinstance(ours.mlp.router, PlainLinear)
        for found, expected in zip(ours.mlp.experts, reference.mlp.experts, strict=True):
            assert found is expected is None or torch.equal(found, expected)  # no biases


@pytest.mark.usefixtures("units")
@pytest.mark.parametrize("name", ["float-quantized", "awq"])
def test_a_product_that_must_be_exact_is_dequantised(tmp_path: Path, name: str) -> None:
    packed, _ = save_quantized(model_of("llama"), FORMATS[name], tmp_path)
    part = open_checkpoint(ModelSource.open(str(packed))).stored("model.layers.1.mlp.up_proj.weight")
    product = GPUFormat(CPU, torch.bfloat16).exact(part)
    assert isinstance(product, PlainLinear)
    assert torch.equal(product.weight, part.float32().bfloat16())


@pytest.mark.parametrize(
    ("name", "family", "dtype", "change"),
    [
        ("fp8 in blocks", "llama", torch.bfloat16, None),
        ("float-quantized", "llama", torch.float16, None),
        ("float-quantized", "llama", torch.float32, None),
        ("float-quantized", "llama", torch.bfloat16, "weight-only"),
        ("int-quantized", "llama", torch.bfloat16, None),
    ],
)
@pytest.mark.usefixtures("units")
def test_other_weights_are_dequantised(
    tmp_path: Path, name: str, family: str, dtype: torch.dtype, change: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = FORMATS[name]
    if change == "weight-only":
        group = stored.config["config_groups"]["group_0"]
        monkeypatch.setitem(group, "input_activations", None)
    packed, plain = save_quantized(model_of(family), stored, tmp_path)
    for ours, reference in zip(products(weights_of(packed, dtype)), products(weights_of(plain, dtype)), strict=True):
        assert isinstance(ours, PlainLinear)
        assert torch.equal(ours.weight, reference.weight)


@pytest.mark.parametrize(
    ("capability", "has_units"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)]
)
def test_float8_needs_compute_capability_8_9(
    capability: tuple[int, int], has_units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    assert float8_linear.has_float8_units(torch.device("cuda")) is has_units
    assert not float8_linear.has_float8_units(CPU)


@pytest.mark.usefixtures("units")
@pytest.mark.parametrize("part", [Part(rows=range(16, 64)), Part(columns=range(32, 96))])
def test_rows_and_columns_of_a_rank_stay_float8(tmp_path: Path, part: Part) -> None:
    packed, plain = save_quantized(model_of("llama"), FORMATS["float-quantized"], tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    ours, reference = (open_checkpoint(ModelSource.open(str(folder))).stored(name) for folder in (packed, plain))
    product = GPUFormat(CPU, torch.bfloat16).linear([ours.part(part)])
    assert isinstance(product, Float8Linear)
    torch.testing.assert_close(product.dequantised(torch.float32), reference.part(part).float32(), atol=0, rtol=2e-7)


def test_a_product_takes_two_launches() -> None:
    product: Callable[[torch.Tensor], torch.Tensor] = Float8Linear(torch.ones(32, 16).to(FLOAT8), torch.ones(32))
    x = torch.ones(3, 16, dtype=torch.bfloat16)
    with Counting() as counting:
        product(x)
    assert sum(counting.launches.values()) == 2, counting.launches
    assert counting.launches["_quantise_rows"] == 1
    assert not counting.waits
