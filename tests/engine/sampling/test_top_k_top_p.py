"""Top-k, top-p, min-p and typical-p against transformers' warpers: exact distributions instead of samples.

A draw is a function of one uniform number, so an even grid of N numbers gives every probability to 1 / N.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from engine.sampling.drawing import draw_tokens
from fastgen.core.sampling_params import SamplingParams

GRID = 512


def probabilities(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Return the probabilities [V] of one row to 1 / GRID, by the function that the sampler would call."""
    uniforms = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    rows = 256
    tokens = [draw_tokens(logits.expand(rows, -1), sampling, part) for part in uniforms.split(rows)]
    return torch.bincount(torch.cat(tokens), minlength=len(logits)) / GRID


def expected(logits: torch.Tensor, s: SamplingParams) -> torch.Tensor:
    """Return the probabilities [V] by transformers, in the order of its generate()."""
    warpers: list[Any] = [TemperatureLogitsWarper(s.temperature)]
    if s.top_k:
        warpers.append(TopKLogitsWarper(min(s.top_k, len(logits))))
    if s.top_p < 1:
        warpers.append(TopPLogitsWarper(s.top_p))
    if s.min_p > 0:
        warpers.append(MinPLogitsWarper(s.min_p))
    if s.typical_p < 1:
        warpers.append(TypicalLogitsWarper(s.typical_p))
    scores = logits[None].double()
    for warper in warpers:
        scores = warper(torch.zeros(1, 1, dtype=torch.int64), scores)
    return scores.softmax(-1)[0]


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 300},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"typical_p": 0.2},
    {"typical_p": 0.9},
    {"top_k": 50, "top_p": 0.9},
    {"top_k": 400, "top_p": 0.99, "min_p": 0.001, "temperature": 1.3},
    {"top_p": 0.9, "typical_p": 0.5},
    {"top_k": 30, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.8, "temperature": 0.7},
    {"temperature": 2.0, "min_p": 0.1, "typical_p": 0.95},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("size", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_filters_give_the_distribution_of_transformers(settings: dict[str, Any], size: int) -> None:
    sampling = SamplingParams(**settings)
    logits = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 3
    # A token's share of the grid is its probability up to one grid point at either end.
    assert (probabilities(logits, sampling) - expected(logits, sampling)).abs().max() <= 2 / GRID


def test_filters_that_keep_thousands_of_tokens_are_exact() -> None:
    logits = torch.randn(6000, generator=torch.Generator().manual_seed(0)) * 0.3
    uniforms = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for settings in (
        {},
        {"top_p": 0.9},
        {"min_p": 0.3},
        {"top_k": 5000, "top_p": 0.99},
        {"top_p": 0.95, "min_p": 0.1, "typical_p": 0.7, "temperature": 1.5},
        {"typical_p": 0.3},
    ):
        sampling = SamplingParams(**settings)
        tokens = draw_tokens(logits.expand(64, -1), sampling, uniforms)
        shares = expected(logits, sampling)
        until = shares.cumsum(-1)
        assert (shares[tokens] > 0).all()
        # Many tokens are drawn in order of their ids: the uniform number falls into the token's share.
        assert (until[tokens] - shares[tokens] - 1e-5 <= uniforms).all()
        assert (uniforms <= until[tokens] + 1e-5).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_logits_of_any_floating_type_are_sampled(dtype: torch.dtype) -> None:
    logits = (torch.randn(500, generator=torch.Generator().manual_seed(2)) * 3).to(dtype)
    for settings in ({}, {"top_p": 0.9}, {"typical_p": 0.5}):
        sampling = SamplingParams(**settings)
        assert (probabilities(logits, sampling) - expected(logits, sampling)).abs().max() <= 3 / GRID


def test_extreme_uniform_numbers_draw_a_possible_token() -> None:
    logits = torch.full((1, 700), -torch.inf)
    logits[0, [300, 650]] = torch.tensor([0.0, -30.0])
    for uniform in (0.0, 1 - 2**-53):
        number = torch.tensor([uniform], dtype=torch.float64)
        for settings in ({}, {"top_k": 5}, {"top_p": 0.99999}, {"typical_p": 0.9}, {"min_p": 1e-20}):
            sampling = SamplingParams(**settings)
            assert draw_tokens(logits, sampling, number).item() in (300, 650)
