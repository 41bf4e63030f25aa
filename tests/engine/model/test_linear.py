"""Packed products."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fastgen.model.layers.linear import (
    LinearKind,
    MKLLinear,
    OneDNNLinear,
    PlainLinear,
    TiledLinear,
    choose_linear,
    fastest_first,
    packing_fault,
)

KINDS = [
    TiledLinear,
    pytest.param(
        MKLLinear, marks=pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="a torch build without MKL")
    ),
    pytest.param(
        OneDNNLinear,
        marks=pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="a torch build without oneDNN"),
    ),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(960, 576), (576, 1536), (31, 17), (1, 5)])
def test_one_packing_serves_every_number_of_rows(kind: LinearKind, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape)
    packed = kind(weight.clone())
    for rows in (1, 2, 3, 5, 8, 31, 64, 100, 255, 256, 257, 400):
        x = torch.randn(rows, shape[1])
        torch.testing.assert_close(packed(x), F.linear(x, weight), atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_that_a_packed_product_might_get_wrong_are_refused(kind: LinearKind) -> None:
    packed = kind(torch.randn(8, 6))
    for x in (torch.randn(6), torch.randn(2, 3, 6), torch.randn(6, 4).T, torch.randn(2, 7)):
        with pytest.raises(AssertionError):
            packed(x)


@pytest.mark.parametrize("kind", KINDS)
def test_packing_is_chosen_where_it_is_right(kind: LinearKind) -> None:
    weight = torch.randn(64, 48)
    assert packing_fault(kind, weight) is None
    assert choose_linear([weight], [kind]) is kind


def test_a_row_is_the_same_to_the_last_bit_whatever_is_beside_it() -> None:
    torch.manual_seed(0)
    tiled, x = TiledLinear(torch.randn(100, 700)), torch.randn(70, 700)
    together = tiled(x)
    for rows in (1, 2, 3, 4, 5, 33):
        assert torch.equal(tiled(x[:rows].contiguous()), together[:rows])
    assert torch.equal(tiled(x[69:].contiguous()), together[69:])


class Wrong(MKLLinear):
    """Right but for passes of 65 rows."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight) + (0.1 if x.shape[0] == 65 else 0.0)


class Absent(MKLLinear):
    """An operation that this torch does not have."""

    def __init__(self, weight: torch.Tensor) -> None:
        raise AttributeError(f"no such operation for {tuple(weight.shape)}")


def test_a_packing_that_is_wrong_or_absent_is_not_used_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fastgen.model"):
        assert choose_linear([torch.randn(64, 48)], [Wrong, Absent]) is PlainLinear
    assert "with 65 rows" in caplog.text
    assert "no such operation" in caplog.text


@pytest.mark.parametrize(("vendor", "first"), [("GenuineIntel", MKLLinear), ("AuthenticAMD", TiledLinear)])
def test_the_processors_maker_decides_which_packing_is_tried_first(
    tmp_path: Path, vendor: str, first: LinearKind
) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    assert fastest_first(path)[0] is first
    assert fastest_first(tmp_path / "missing")[0] is TiledLinear
