"""Models with --quantization stored: a GGUF file's weights keep its bits, and the model its quality."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch

from engine.model.checkpoint.test_gguf_types import random_blocks
from engine.model.config.test_gguf_families import TOKENS, build
from engine.model.layers.test_int8_models import relative_error
from fastgen.kernels.cpu.vector_width import has_vnni
from fastgen.model import ModelError
from fastgen.model.checkpoint.gguf_types import TYPES, dequantise
from fastgen.model.checkpoint.packed_blocks import PackedBlocks
from fastgen.model.checkpoint.safetensors import FloatTensor
from fastgen.model.layers.int8_linear import Int8Linear, Int8VNNILinear
from fastgen.model.layers.packed_linear import PackedLinear, StoredFormat
from fastgen.model.processor import int8_choice
from fastgen.model.source import ModelSource
from fastgen.runner.runner import ModelRunner
from support.demo_weights import demo_model
from support.driving import load, run_in_chunks
from support.gguf_writing import write_gguf
from support.perplexity import perplexity, text_tokens

BLOCKS = [1, 0, 2, 4, 5, 3]
BY_NAME = {kind.name: kind for kind in TYPES.values()}


class Stored(FloatTensor):
    """A stored tensor with blocks of its own."""

    def __init__(self, matrix: torch.Tensor, blocks: PackedBlocks | None) -> None:
        super().__init__(lambda: matrix, tuple(matrix.shape))
        self._blocks = blocks

    def blocks(self) -> PackedBlocks | None:  # type: ignore[override]
        return self._blocks


def stored(name: str, rows: int) -> Stored:
    """Return a random matrix [rows, 256] of a GGUF type, or of float32."""
    if name == "F32":
        return Stored(torch.randn(rows, 256), None)
    kind = BY_NAME[name]
    raw = random_blocks(name, rows * 256 // kind.block).reshape(-1)
    return Stored(torch.from_numpy(dequantise(raw, kind).reshape(rows, 256)), PackedBlocks.of_tensor(raw, kind, 256))


@pytest.mark.parametrize(
    "names", [("Q4_K", "Q4_K", "Q6_K"), ("Q4_0", "F32", "F32"), ("Q5_K",), ("Q6_K", "Q4_1", "Q6_K")]
)
def test_projections_of_different_types_are_one_product(names: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    parts = [stored(name, 40 + 8 * number) for number, name in enumerate(names)]
    product, x = StoredFormat().linear(parts), torch.randn(5, 256)
    expected = x @ torch.cat([part.float32() for part in parts]).T
    out = product(x)
    assert out.shape == expected.shape
    assert (out - expected).norm() / expected.norm() < 0.012


def logits(path: Path, quantization: str) -> torch.Tensor:
    runner = load(path, kv_cache_memory=4 << 20, block_size=16, quantization=quantization)
    return run_in_chunks(runner, TOKENS, BLOCKS, [60, *[1] * 23])


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen2", "phi3 with a window", "gemma3"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_logits_are_within_a_few_percent_of_the_dequantised_models(tmp_path: Path, name: str, kind: str) -> None:
    path = write_gguf(build(name), tmp_path / "tiny.gguf", kind)
    # A router's choice between two experts may change.
    assert relative_error(logits(path, "stored"), logits(path, "none")) < (0.2 if name == "mixtral" else 0.1)


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q8_0"])
def test_logits_are_those_of_int8_weights_that_are_exact(tmp_path: Path, kind: str) -> None:
    """Both quantise the same activations; they only add in another order."""
    if not has_vnni():
        pytest.skip("int8 weights are multiplied with exact activations")
    path = write_gguf(build("llama"), tmp_path / "tiny.gguf", kind)
    assert relative_error(logits(path, "stored"), logits(path, "int8")) < 0.005


def test_a_damaged_scale_is_an_error_that_names_the_tensor(tmp_path: Path) -> None:
    path = write_gguf(build("llama"), tmp_path / "tiny.gguf", "Q4_0")
    file = ModelSource.open(str(path)).gguf
    assert file is not None
    info = file._tensors["blk.1.attn_k.weight"]
    content = bytearray(path.read_bytes())
    content[info.offset : info.offset + 2] = b"\x00\x7e"  # NaN
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"damaged \(tensor blk\.1\.attn_k\.weight has a scale that is not finite\)"):
        load(path, kv_cache_memory=4 << 20, block_size=16, quantization="stored")


@pytest.fixture(scope="module")
def stored_demo() -> ModelRunner:
    return load(demo_model(), quantization="stored")


@pytest.mark.slow
def test_perplexity_of_the_demo_model_is_within_one_percent_of_the_dequantised_model(
    stored_demo: ModelRunner, demo_runner: ModelRunner, demo_source: ModelSource
) -> None:
    tokens = text_tokens(demo_source)[:192]
    ours, exact = (perplexity(runner, tokens) for runner in (stored_demo, demo_runner))
    assert ours != exact
    assert abs(ours / exact - 1) < 0.01


@pytest.mark.slow
def test_weights_of_the_demo_model_take_at_most_1_1_times_the_file(
    stored_demo: ModelRunner, demo_runner: ModelRunner
) -> None:
    weights = stored_demo._model._weights
    products = [weights.head.product]
    for layer in weights.layers:
        products += [layer.qkv, layer.attention_output, layer.mlp.gate_up, layer.mlp.down]
    assert all(isinstance(product, PackedLinear | Int8Linear | Int8VNNILinear) for product in products)
    assert weights.embedding == weights.head.product.look_up, "a tied embedding exists once"
    rows = torch.tensor([0, 49151, 17, 48, 0])
    assert torch.equal(weights.embedding(rows), demo_runner._model._weights.embedding(rows))
    assert sum(product.num_bytes for product in products) <= 1.1 * demo_model().stat().st_size


@pytest.mark.slow
def test_logits_do_not_depend_on_how_a_prompt_is_cut(stored_demo: ModelRunner, demo_source: ModelSource) -> None:
    tokens = text_tokens(demo_source)[:40]
    whole, cut = (run_in_chunks(stored_demo, tokens, [0], sizes) for sizes in ([40], [7, 1, 16]))
    assert whole.argmax() == cut.argmax()
    # A step of one row rounds no activations: 0.5 to 0.8 on four texts, as far as both are from the exact weights'.
    assert (whole - cut).abs().max() < 1


def test_the_log_names_the_products(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    path = write_gguf(build("llama"), tmp_path / "tiny.gguf", "Q4_0")
    with caplog.at_level(logging.INFO, "fastgen.model"):
        load(path, kv_cache_memory=4 << 20, block_size=16, quantization="stored")
        assert "products with stored blocks of up to six bits, which quantise activations" in caplog.text
        assert "weights as the file stores them: Q4_0 packed" in caplog.text
        load(path, kv_cache_memory=4 << 20, block_size=16)
    assert (
        "the file's quantised weights take 0 MiB and become 0 MiB in float32: --quantization stored keeps"
        in caplog.text
    )


def test_the_log_names_what_auto_chooses_for_a_gguf_file(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastgen.model.weight_storage.has_byte_products", lambda _bits: True)
    path = write_gguf(build("llama"), tmp_path / "tiny.gguf", "Q4_0")
    with caplog.at_level(logging.INFO, "fastgen.model"):
        load(path, kv_cache_memory=4 << 20, block_size=16, dtype="auto", quantization="auto")
    product, storage = caplog.messages[:2]
    assert f"; {int8_choice()}, kernels with " in product
    assert re.search("; dtype (float32|bfloat16): (--quantization int8 computes in it|the processor has .*)$", product)
    assert "become 0 MiB in int8: --quantization stored keeps them as they are" in storage
