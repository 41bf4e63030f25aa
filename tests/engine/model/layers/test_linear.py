"""Packed products."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fastgen.model.checkpoint.safetensors import FloatTensor
from fastgen.model.layers import linear
from fastgen.model.layers.linear import (
    LinearKind,
    OneDNNLinear,
    PackedFormat,
    PlainLinear,
    TiledLinear,
    packing_fault,
    stacked,
)
from fastgen.settings import ConfigError

PACKED = [
    TiledLinear,
    pytest.param(
        OneDNNLinear,
        marks=pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="a torch build without oneDNN"),
    ),
]
KINDS = [*PACKED, PlainLinear]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(960, 576), (576, 1536), (31, 17), (1, 5)])
def test_one_packing_serves_every_number_of_rows(kind: LinearKind, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape)
    packed = kind(weight.clone())
    for rows in (1, 2, 3, 5, 8, 31, 64, 100, 255, 256, 257, 400):
        x = torch.randn(rows, shape[1])
        torch.testing.assert_close(packed(x), F.linear(x, weight), atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("kind", PACKED)
def test_inputs_with_undocumented_behaviour_are_rejected(kind: LinearKind) -> None:
    packed = kind(torch.randn(8, 6))
    for x in (torch.randn(6), torch.randn(2, 3, 6), torch.randn(6, 4).T, torch.randn(2, 7)):
        with pytest.raises(AssertionError):
            packed(x)


@pytest.mark.parametrize(
    ("choice", "kind"), [("", TiledLinear), ("tiled", TiledLinear), ("onednn", OneDNNLinear), ("plain", PlainLinear)]
)
def test_environment_chooses_the_product(choice: str, kind: LinearKind, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind is OneDNNLinear and not torch.backends.mkldnn.is_available():
        pytest.skip("a torch build without oneDNN")
    monkeypatch.setenv("FASTGEN_CPU_LINEAR", choice)
    assert isinstance(placed(torch.randn(64, 48)), kind)


def test_unknown_product_is_an_error_that_lists_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTGEN_CPU_LINEAR", "mkl")
    with pytest.raises(ConfigError, match=r"FASTGEN_CPU_LINEAR=mkl: choose one of tiled, onednn, plain$"):
        PackedFormat()


def placed(weight: torch.Tensor) -> linear.Linear:
    return PackedFormat().linear([FloatTensor(lambda: weight, tuple(weight.shape))])


@pytest.mark.parametrize("shape", [(576, 576), (100, 17), (1, 5)])
def test_tiled_layout_is_padded_by_less_than_a_tile(shape: tuple[int, int]) -> None:
    weights = TiledLinear(torch.randn(shape))._weights
    assert shape[0] <= weights.size // shape[1] < shape[0] + linear.TILE_COLUMNS
    assert weights.base is None or weights.base.nbytes == weights.nbytes


def test_a_row_is_the_same_to_the_last_bit_in_every_batch() -> None:
    torch.manual_seed(0)
    tiled, x = TiledLinear(torch.randn(100, 700)), torch.randn(70, 700)
    together = tiled(x)
    for rows in (1, 2, 3, 4, 5, 33):
        assert torch.equal(tiled(x[:rows].contiguous()), together[:rows])
    assert torch.equal(tiled(x[69:].contiguous()), together[69:])


class Wrong(OneDNNLinear):
    """Wrong only for steps of 65 rows."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight) + (0.1 if x.shape[0] == 65 else 0.0)


class Absent(OneDNNLinear):
    """An operation that this build of torch lacks."""

    def __init__(self, weight: torch.Tensor) -> None:
        raise AttributeError(f"no such operation for {tuple(weight.shape)}")


@pytest.mark.parametrize(("kind", "fault"), [(Wrong, "with 65 rows"), (Absent, "no such operation")])
def test_a_wrong_or_missing_onednn_product_raises_an_error_with_the_reason(
    kind: LinearKind, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTGEN_CPU_LINEAR", "onednn")
    monkeypatch.setattr(linear, "OneDNNLinear", kind)
    monkeypatch.setitem(linear.KINDS, "onednn", kind)
    assert fault in str(packing_fault(kind, torch.randn(64, 48)))
    with pytest.raises(ConfigError, match=f"FASTGEN_CPU_LINEAR=onednn cannot be used here: .*{fault}.*choose tiled"):
        placed(torch.randn(64, 48))


class Bfloat16(FloatTensor):
    """A stored tensor that must not be read as float32, which takes six times as long."""

    def __init__(self, matrix: torch.Tensor) -> None:
        super().__init__(lambda: matrix, tuple(matrix.shape))

    def float32(self) -> torch.Tensor:
        raise AssertionError


@pytest.mark.parametrize("number", [1, 2])
def test_matrices_are_read_in_their_stored_type(number: int) -> None:
    stored = [torch.randn(4, 6).bfloat16() for _ in range(number)]
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(stacked([Bfloat16(matrix) for matrix in stored], dtype), torch.cat(stored).to(dtype))


def test_a_single_matrix_does_not_stay_a_part_of_its_file() -> None:
    matrix = torch.randn(4, 6).bfloat16()
    assert stacked([Bfloat16(matrix)], torch.bfloat16).data_ptr() != matrix.data_ptr()
