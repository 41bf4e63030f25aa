"""Packed products."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F

from fastgen.model import linear
from fastgen.model.linear import PackedLinear, PlainLinear, choose_linear, packing_fault

pytestmark = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch build has no MKL to pack for")


@pytest.mark.parametrize("shape", [(960, 576), (576, 1536), (31, 17), (1, 5)])
def test_one_packing_serves_every_number_of_rows(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape)
    packed = PackedLinear(weight.clone())
    for rows in (1, 2, 3, 5, 8, 31, 64, 100, 255, 256, 257, 400):
        x = torch.randn(rows, shape[1])
        torch.testing.assert_close(packed(x), F.linear(x, weight), atol=2e-4, rtol=1e-5)


def test_inputs_that_the_packed_product_would_get_wrong_are_refused() -> None:
    packed = PackedLinear(torch.randn(8, 6))
    for x in (torch.randn(6), torch.randn(2, 3, 6), torch.randn(6, 4).T, torch.randn(2, 7)):
        with pytest.raises(AssertionError):
            packed(x)


def test_packing_is_chosen_where_it_is_right() -> None:
    weight = torch.randn(64, 48)
    assert packing_fault(weight) is None
    assert choose_linear([weight]) is PackedLinear


class Wrong(PackedLinear):
    """Right but for passes of 65 rows."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x) + (0.1 if x.shape[0] == 65 else 0.0)


def test_a_packing_that_is_wrong_at_some_number_of_rows_is_not_used_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(linear, "PackedLinear", Wrong)
    with caplog.at_level(logging.WARNING, "fastgen.model"):
        assert choose_linear([torch.randn(64, 48)]) is PlainLinear
    assert "with 65 rows" in caplog.text


def test_a_torch_without_the_operation_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert choose_linear([torch.randn(4, 4)]) is PlainLinear
