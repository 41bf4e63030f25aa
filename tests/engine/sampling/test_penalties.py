"""Penalties and biases."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from fastgen.core.request import SamplingParams
from fastgen.core.sequence import RowParameters
from fastgen.sampling.penalties import Bias, TokenHistory, add_bias, penalise
from fastgen.sampling.rows import SamplingRows


def history(sampling: SamplingParams, tokens: list[int], num_prompt_tokens: int) -> TokenHistory:
    made = TokenHistory(sampling, num_prompt_tokens)
    made.update(tokens)
    return made


def plainly(logits: list[float], s: SamplingParams, tokens: list[int], num_prompt_tokens: int) -> list[float]:
    """Reference implementation of `penalise`, one token at a time."""
    generated = Counter(tokens[num_prompt_tokens:])
    for token in set(tokens):
        factor = s.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        logits[token] -= s.frequency_penalty * generated[token] + s.presence_penalty * (generated[token] > 0)
    return logits


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_repetition_penalty_equals_transformers(penalty: float) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 3
    tokens = [[1, 2, 2, 3], [4] * 9, list(range(50))]
    sampling = SamplingParams(repetition_penalty=penalty)
    expected = [
        RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([row]), logits[i : i + 1].clone())[0]
        for i, row in enumerate(tokens)
    ]
    penalise(logits, [sampling] * 3, [history(sampling, row, 2) for row in tokens])
    assert torch.allclose(logits, torch.stack(expected), atol=1e-6)


def test_a_batch_with_mixed_penalties_equals_the_readable_twin() -> None:
    source = random.Random(3)
    settings, tokens, prompts = [], [], []
    for _ in range(30):
        settings.append(
            SamplingParams(
                repetition_penalty=source.choice([1.0, 1.2, 0.7]),
                presence_penalty=source.choice([0.0, 1.5, -2.0]),
                frequency_penalty=source.choice([0.0, 0.4, -1.0]),
            )
        )
        prompts.append(source.randint(1, 20))
        tokens.append([source.randrange(40) for _ in range(prompts[-1] + source.randint(0, 200))])
    logits = torch.randn(30, 40, generator=torch.Generator().manual_seed(1)) * 3
    rows = zip(logits.tolist(), settings, tokens, prompts, strict=True)
    expected = torch.tensor([plainly(*row) for row in rows])
    penalise(logits, settings, [history(*row) for row in zip(settings, tokens, prompts, strict=True)])
    assert torch.allclose(logits, expected, atol=1e-4)


def test_only_the_repetition_penalty_includes_the_prompt() -> None:
    logits = torch.ones(1, 10)
    sampling = SamplingParams(presence_penalty=1.0, frequency_penalty=1.0)
    penalise(logits, [sampling], [history(sampling, [1, 2, 3], 3)])
    assert (logits == 1).all()


def test_incremental_token_counts_equal_counts_from_scratch() -> None:
    source = random.Random(5)
    tokens = [source.randrange(500) for _ in range(1200)]
    sampling = SamplingParams(repetition_penalty=1.1)
    growing = TokenHistory(sampling, 100)
    for length in (1, 90, 100, 101, *range(102, 1201, 7), 1200):
        growing.update(tokens[:length])
    whole = history(sampling, tokens, 100)
    assert growing.ids.tolist() == whole.ids.tolist() == list(dict.fromkeys(tokens))
    generated = Counter(tokens[100:])
    assert growing.counts.tolist() == whole.counts.tolist() == [generated[token] for token in dict.fromkeys(tokens)]


def test_biases_are_added_and_accumulate_for_one_token() -> None:
    logits = torch.zeros(3, 5)
    add_bias(logits, [Bias.of(SamplingParams(logit_bias=((1, 2.5), (4, -100.0), (1, 1.0)))), None, None])
    assert logits.tolist() == [[0, 3.5, 0, 0, -100], [0] * 5, [0] * 5]


def test_a_rows_biases_become_arrays_once() -> None:
    rows = SamplingRows(frozenset())
    sampling = SamplingParams(logit_bias=((1, 2.5),))
    rows.admit(RowParameters(row=0, sampling=sampling, seed=0, tokens=[1], num_prompt_tokens=1))
    first, second = (rows.draws([0], {})[0].bias for _ in range(2))
    assert first is second is not None
