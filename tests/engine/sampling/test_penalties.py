"""Penalties and biases."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from engine.sampling.drawing import parameters
from fastgen.core.sampling_params import SamplingParams
from fastgen.core.sequence import RowParameters
from fastgen.kernels.gpu.sampling.changes import Changes, change_logits
from fastgen.sampling.host_sampler import TokenHistory
from fastgen.sampling.parameters import bias_of


def history(sampling: SamplingParams, tokens: list[int], num_prompt_tokens: int) -> TokenHistory:
    return TokenHistory(RowParameters(0, sampling, 0, num_prompt_tokens, tokens))


def penalise(logits: torch.Tensor, settings: list[SamplingParams], histories: list[TokenHistory]) -> None:
    """Apply the penalties of each row to `logits` in place."""
    changes = [Changes(seen=(counted.ids, counted.counts)) for counted in histories]
    assert change_logits(logits, parameters(settings, logits.shape[1]), changes) == []


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
    growing = history(sampling, tokens[:130], 100)
    for token in tokens[130:]:
        growing.append(token)
    whole = history(sampling, tokens, 100)
    assert growing.ids.tolist() == whole.ids.tolist() == list(dict.fromkeys(tokens))
    generated = Counter(tokens[100:])
    assert growing.counts.tolist() == whole.counts.tolist() == [generated[token] for token in dict.fromkeys(tokens)]


def test_biases_are_added_and_accumulate_for_one_token() -> None:
    logits = torch.zeros(3, 5)
    sampling = SamplingParams(logit_bias=((1, 2.5), (4, -100.0), (1, 1.0)))
    change_logits(logits, parameters([sampling] * 3, 5), [Changes(bias=bias_of(sampling)), Changes(), Changes()])
    assert logits.tolist() == [[0, 3.5, 0, 0, -100], [0] * 5, [0] * 5]
