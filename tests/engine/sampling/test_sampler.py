"""Sampling of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.sampling.drawing import Draw, draw_tokens
from engine.sampling.drawing import sample as sample_rows
from fastgen.core.request_error import RequestError
from fastgen.core.sampling_params import SamplingParams
from fastgen.kv_cache.sizing import ROWS_SAMPLED_AT_ONCE

LOGITS = torch.tensor([2.0, 5.0, 3.0, 4.0, -1.0, 5.0 - 1e-3, 0.0, 1.0])


def sample(logits: torch.Tensor, rows: Sequence[Draw]) -> list[int]:
    return sample_rows(logits, rows)[0]


def draws(count: int, seed: int = 1, **settings: Any) -> list[Draw]:
    return [Draw(SamplingParams(**settings), seed, range(position)) for position in range(count)]


def frequencies(logits: torch.Tensor, count: int = 4000, **settings: Any) -> torch.Tensor:
    tokens = sample(logits.expand(count, -1), draws(count, **settings))
    return torch.bincount(torch.tensor(tokens), minlength=logits.shape[0]) / count


def test_greedy_takes_the_largest_logit_and_the_first_of_equals() -> None:
    logits = torch.stack([LOGITS, torch.tensor([1.0, 7, 7, 7, 0, 0, 0, 0])])
    assert sample(logits, draws(2, temperature=0)) == [1, 1]


class Operations(TorchDispatchMode):
    """Counts the operations that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0},
        {"temperature": 0.7},
        {"top_p": 0.9, "top_k": 40, "min_p": 0.01},
        {"temperature": 0, "logprobs": 2},
    ],
)
def test_a_batch_takes_no_more_operations_than_two_rows(settings: dict[str, Any]) -> None:
    """Common settings are vectorised: a loop over rows would increase the count."""

    def operations(count: int) -> int:
        logits = torch.randn(count, 200, generator=torch.Generator().manual_seed(0))
        with Operations() as seen:
            sample(logits, draws(count, **settings))
        return seen.count

    assert operations(ROWS_SAMPLED_AT_ONCE) == operations(2)


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.empty(0, 8), []) == []


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_token_frequencies_follow_the_softmax(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(-1)
    assert (frequencies(LOGITS, temperature=temperature) - expected).abs().max() < 0.03


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 5, 3}),
        ({"top_p": 0.01}, {1}),
        ({"top_p": 0.75}, {1, 5}),
        ({"top_p": 0.8}, {1, 5, 3}),
        ({"min_p": 0.3}, {1, 5, 3}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 2, "top_p": 0.5}, {1}),  # top-p is a share of the top-k
        ({"top_k": 1000}, set(range(8))),
    ],
)
def test_filters_keep_the_top_tokens_and_their_proportions(settings: dict[str, Any], kept: set[int]) -> None:
    seen = frequencies(LOGITS, **settings)
    expected = LOGITS.softmax(-1)
    mask = torch.tensor([token in kept for token in range(8)])
    expected = expected.where(mask, 0.0) / expected[mask].sum()
    assert (seen[~mask] == 0).all()
    assert (seen - expected).abs().max() < 0.03


@pytest.mark.parametrize("settings", [{"top_p": 0.999}, {"top_k": 900}, {"min_p": 1e-9}, {}])
def test_flat_distributions_wider_than_the_first_try_are_sampled_completely(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3000) * 0.01
    tokens = sample(logits.expand(500, -1), draws(500, **settings))
    ranks = logits.argsort(descending=True).argsort()[torch.tensor(tokens)]
    assert (ranks > 600).any()
    assert ranks.max() < settings.get("top_k", 3000)


def test_a_row_gets_the_same_token_in_every_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(40, 2000) * 3
    options: list[dict[str, Any]] = [
        {},
        {"top_p": 0.9},
        {"top_k": 40},
        {"min_p": 0.05, "temperature": 3},
        {"temperature": 0},
    ]
    rows = [Draw(SamplingParams(**options[row % 5]), row * 7, range(row + 3)) for row in range(40)]
    together = sample(logits, rows)
    assert together == [sample(logits[row : row + 1], [rows[row]])[0] for row in range(40)]
    assert together[::-1] == sample(logits.flip(0), rows[::-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.5}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.1}, {"typical_p": 0.7}],
    ids=str,
)
def test_sampled_tokens_pass_a_chi_square_test(settings: dict[str, Any]) -> None:
    logits = torch.randn(400, generator=torch.Generator().manual_seed(3)) * 2
    sampling = SamplingParams(**settings)
    # A fine grid of uniform numbers gives the exact probabilities; test_top_k_top_p compares them with transformers.
    points, count = 2000, 1500
    grid = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    exact = torch.bincount(draw_tokens(logits.expand(points, -1), sampling, grid), minlength=400) / points
    seen = frequencies(logits, count, **settings) * count
    # Rare tokens share a cell: the test needs about five expected counts in each.
    common = exact * count >= 5
    expected = torch.cat([exact[common], exact[~common].sum()[None]]).double() * count
    observed = torch.cat([seen[common], seen[~common].sum()[None]]).double()
    filled = expected > 0
    assert (observed[~filled] == 0).all()
    statistic = ((observed - expected)[filled] ** 2 / expected[filled]).sum()
    freedom = int(filled.sum()) - 1
    # Chi-square's 99.9th percentile by Wilson and Hilferty (1931).
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3


FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 3},
    {"top_k": 600},
    {"top_p": 0.9},
    {"min_p": 0.1},
    {"typical_p": 0.9},
    {"top_p": 0.9, "typical_p": 0.9},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_no_numbers_give_a_token_of_the_vocabulary(
    wrong: float, dtype: torch.dtype, filters: dict[str, Any]
) -> None:
    """A model's activations may overflow for a client's prompt: that must not end the engine."""
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(1)).to(dtype)
    sound = logits[2:3].clone()
    logits[0, 7] = wrong
    logits[1] = wrong
    logits[3, 500:] = wrong
    rows = draws(4, seed=3, **filters)
    tokens = sample(logits, rows)
    assert all(0 <= token < 1000 for token in tokens)
    assert tokens[2:3] == sample(sound, rows[2:3]), "other rows are as they would be alone"
    if wrong == float("inf"):
        assert (tokens[0], tokens[3] >= 500) == (7, True)


LEAST = 5e-324  # above 0


@pytest.mark.parametrize("vocabulary", [8, 1000])
@pytest.mark.parametrize(
    "limits",
    [
        {"top_p": LEAST},
        {"typical_p": LEAST},
        {"top_p": LEAST, "typical_p": 0.5},
        {"top_p": LEAST, "typical_p": LEAST, "top_k": 900},
        {"top_p": LEAST, "top_k": 900},
        {"top_p": 1e-40, "min_p": 1.0, "typical_p": 0.5},
        {"repetition_penalty": 1e-6, "typical_p": 0.5},
        {"repetition_penalty": 1e-6, "presence_penalty": -2, "frequency_penalty": -2},
        {"repetition_penalty": 1e-6, "temperature": 1e-5},
    ],
    ids=str,
)
def test_the_least_values_that_are_accepted_give_a_token(limits: dict[str, Any], vocabulary: int) -> None:
    logits = 100 * torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(1))
    rows = [Draw(SamplingParams(**limits), seed, range(6), 3) for seed in range(3)]
    tokens = sample(logits, rows)
    assert all(0 <= token < vocabulary for token in tokens)
    if limits.keys() <= {"top_p", "top_k"}:
        assert tokens == logits.argmax(-1).tolist()


@pytest.mark.parametrize("penalty", [LEAST, 1e-320, 1e-45, 1e-38, 9e-7])
def test_a_repetition_penalty_by_which_logits_overflow_is_rejected(penalty: float) -> None:
    with pytest.raises(RequestError, match=r"repetition_penalty .*from 0\.000001 to 100"):
        SamplingParams(repetition_penalty=penalty)
