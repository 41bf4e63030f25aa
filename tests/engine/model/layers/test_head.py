"""Products of the output head: float32 results in every format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fastgen.model.checkpoint.safetensors import FloatTensor
from fastgen.model.layers.bfloat16_linear import BFloat16Head, BFloat16Linear
from fastgen.model.layers.head import TorchHead
from fastgen.model.layers.int8_linear import Int8Format
from fastgen.model.layers.linear import Linear, PackedFormat, WeightFormat
from fastgen.model.layers.torch_backend import TorchFormat
from fastgen.model.processor import INT8_VARIABLE
from fastgen.model.transformers_backend.load import load_transformers_model
from support.tiny_models import TINY, prompt

CPU = torch.device("cpu")
SHAPES = [(960, 576), (50, 258), (31, 17), (1, 5)]
FORMATS: dict[str, tuple[torch.dtype, Callable[[], WeightFormat]]] = {
    "float32": (torch.float32, lambda: PackedFormat(torch.float32)),
    "bfloat16": (torch.bfloat16, lambda: PackedFormat(torch.bfloat16)),
    "int8": (torch.float32, lambda: Int8Format(torch.float32)),
    "torch bfloat16": (torch.bfloat16, lambda: TorchFormat(CPU, torch.bfloat16)),
    "torch float16": (torch.float16, lambda: TorchFormat(CPU, torch.float16)),
}


def rounded(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


@pytest.mark.parametrize("kind", [BFloat16Head, TorchHead])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_of_bfloat16_are_not_rounded_for_any_number_of_rows(
    kind: Callable[[torch.Tensor], Linear], shape: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    weight = rounded(*shape)
    product = kind(weight.clone())
    for rows in (1, 2, 3, 4, 5, 31, 64, 300):
        x = rounded(rows, shape[1])
        logits = product(x)
        assert logits.dtype == torch.float32
        assert logits.is_contiguous()
        bound = x.double().abs() @ weight.double().abs().T * 2e-6
        assert ((logits - x.double() @ weight.double().T).abs() <= bound).all()


@pytest.mark.parametrize("kind", [BFloat16Head, BFloat16Linear])
def test_a_row_is_the_same_to_the_last_bit_in_every_batch(kind: Callable[[torch.Tensor], Linear]) -> None:
    torch.manual_seed(0)
    head, x = kind(rounded(100, 700)), rounded(170, 700)
    together = head(x)
    for rows in (1, 2, 3, 4, 5, 7, 8, 13, 33, 128, 129):
        assert torch.equal(head(x[:rows].contiguous()), together[:rows])
    assert torch.equal(head(x[169:].contiguous()), together[169:])


@pytest.mark.parametrize("shape", SHAPES)
def test_the_product_of_layers_is_that_of_the_head_rounded_once(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight = rounded(*shape)
    for rows in (0, 1, 5, 64, 300):
        x = rounded(rows, shape[1])
        product = BFloat16Linear(weight.clone())(x)
        assert product.is_contiguous()
        assert torch.equal(product, BFloat16Head(weight.clone())(x).bfloat16())


def test_infinity_and_nan_stay_in_their_row() -> None:
    torch.manual_seed(0)
    head, x = BFloat16Head(rounded(60, 300)), rounded(6, 300)
    alone = head(x)
    x[1, 7], x[3, 299] = torch.inf, torch.nan
    logits = head(x)
    assert torch.equal(logits[[0, 2, 4, 5]], alone[[0, 2, 4, 5]])
    assert not logits[[1, 3]].isfinite().any()


def test_inputs_of_another_shape_or_type_are_rejected() -> None:
    head = BFloat16Head(rounded(8, 6))
    for x in (rounded(6), rounded(2, 3, 6), rounded(2, 7), torch.randn(2, 6)):
        with pytest.raises(AssertionError):
            head(x)


def test_the_layout_is_padded_by_less_than_a_tile() -> None:
    from fastgen.kernels.cpu.vector_width import TILE_COLUMNS

    weights = BFloat16Head(rounded(100, 16))._weights
    assert 2 * 100 * 16 <= weights.nbytes < 2 * (100 + TILE_COLUMNS) * 16
    assert weights.base is None or weights.base.nbytes == weights.nbytes


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_tells_logits_apart_that_are_equal_in_16_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens' logits are 256 and 256.01."""
    monkeypatch.setenv(INT8_VARIABLE, "weight-only")
    dtype, make = FORMATS[name]
    weight = torch.zeros(8, 64)
    weight[:, 0], weight[3, 32] = 1, 1  # in blocks of their own, so that int8 is exact
    x = torch.zeros(1, 64, dtype=dtype)
    x[0, 0], x[0, 32] = 256, 0.01
    logits = make().head(FloatTensor(lambda: weight, (8, 64)))(x)
    assert logits.dtype == torch.float32
    assert logits.argmax() == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-biases", "gemma2"])
def test_logits_of_a_model_that_transformers_runs_are_not_rounded(name: str, tmp_path: Path) -> None:
    """The head follows the same hidden states, so that it is all that is compared."""
    TINY[name].build().save_pretrained(tmp_path)
    model = load_transformers_model(tmp_path, device=CPU, dtype=torch.bfloat16, progress=lambda _fraction: None)
    hidden = torch.randn(len(prompt(3)), model.architecture.hidden_size).bfloat16()
    with torch.inference_mode():
        logits = model.head(hidden)
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())
