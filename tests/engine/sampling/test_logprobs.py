"""Log-probabilities."""

from __future__ import annotations

import torch

from engine.sampling.drawing import Draw, sample
from fastgen.core.sampling_params import SamplingParams
from fastgen.sampling.logprobs import token_logprobs


def test_logprobs_are_the_log_softmax_with_ranks_and_top_tokens() -> None:
    logits = torch.randn(20, 300, generator=torch.Generator().manual_seed(0)) * 4
    tokens = [row * 7 for row in range(20)]
    found = token_logprobs(logits, tokens, [row % 6 for row in range(20)])
    exact = logits.double().log_softmax(-1)
    for row, (got, token) in enumerate(zip(found, tokens, strict=True)):
        assert got.token_id == token
        assert abs(got.logprob - exact[row, token]) < 1e-5
        assert got.rank == 1 + (logits[row] > logits[row, token]).sum()
        order = exact[row].argsort(descending=True)[: row % 6]
        assert [named for named, _ in got.top] == order.tolist()
        assert all(abs(logprob - exact[row, named]) < 1e-5 for named, logprob in got.top)


def test_equally_probable_tokens_are_ranked_by_id() -> None:
    logits = torch.tensor([[1.0, 3, 3, 0, 3, 3, 1, 3]])
    got = token_logprobs(logits.repeat(2, 1), [5, 6], [3, 7])
    assert [token for token, _ in got[0].top] == [1, 2, 4]
    assert [token for token, _ in got[1].top] == [1, 2, 4, 5, 7, 0, 6]
    assert [item.rank for item in got] == [4, 7]


def test_half_precision_logits_are_summed_in_full_precision() -> None:
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    got = token_logprobs(logits, [1, 2, 3, 4], [2] * 4)
    exact = logits.double().log_softmax(-1)
    assert all(abs(item.logprob - exact[row, item.token_id]) < 1e-5 for row, item in enumerate(got))


def test_requesting_more_top_tokens_than_the_vocabulary_returns_all() -> None:
    (got,) = token_logprobs(torch.tensor([[0.0, 1.0, 2.0]]), [0], [20])
    assert [token for token, _ in got.top] == [2, 1, 0]
    assert token_logprobs(torch.empty(0, 3), [], []) == []


def test_requested_logprobs_of_sampled_tokens_ignore_sampling_parameters() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(2)) * 3
    exact = logits.double().log_softmax(-1)
    shaping = {"temperature": 0.3, "top_k": 2, "logit_bias": ((7, 90.0),), "min_tokens": 3}
    tokens, logprobs = sample(
        logits,
        [
            Draw(SamplingParams(**shaping, logprobs=2), 1, (0, 1), 2),
            Draw(SamplingParams(), 1, (0, 1), 2),
            Draw(SamplingParams(temperature=0, logprobs=0), 1, (0, 1), 2),
            Draw(SamplingParams(**shaping), 1, (0, 1), 2),
        ],
    )
    assert list(logprobs) == [0, 2]
    assert tokens[0] == tokens[3] == 7
    for row, found in logprobs.items():
        assert found.token_id == tokens[row]
        assert abs(found.logprob - exact[row, found.token_id]) < 1e-5
    assert (logprobs[2].rank, logprobs[2].top) == (1, ())
