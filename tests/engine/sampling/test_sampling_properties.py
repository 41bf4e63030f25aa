"""Any combination of parameters gives each row an allowed token, the same one as the row alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.sampling.drawing import Draw, sample
from engine.sampling.test_logit_masks import allowing
from fastgen.core.sampling_params import SamplingParams

ENDS = frozenset({0, 3})


def chance(strategy: st.SearchStrategy[Any], usual: Any) -> st.SearchStrategy[Any]:
    return st.one_of(st.just(usual), strategy)


def parameters(vocabulary: int) -> st.SearchStrategy[SamplingParams]:
    token = st.integers(0, vocabulary - 1)
    bias = st.tuples(token, st.floats(-100, 100))
    return st.builds(
        SamplingParams,
        max_tokens=st.just(50),
        min_tokens=chance(st.integers(0, 50), 0),
        temperature=st.one_of(st.just(0.0), st.just(1.0), st.floats(0, 100), st.floats(0, 1e-3)),
        top_k=chance(st.integers(0, 2 * vocabulary), 0),
        top_p=chance(st.floats(5e-324, 1), 1.0),
        min_p=chance(st.floats(0, 1), 0.0),
        typical_p=chance(st.floats(5e-324, 1), 1.0),
        repetition_penalty=chance(st.one_of(st.floats(0.01, 100), st.floats(1e-6, 1e-3)), 1.0),
        presence_penalty=chance(st.floats(-2, 2), 0.0),
        frequency_penalty=chance(st.floats(-2, 2), 0.0),
        logit_bias=st.lists(bias, max_size=3).map(tuple),
        stop_token_ids=st.lists(token, max_size=3).map(tuple),
        bad_words=st.lists(st.lists(token, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
        ignore_eos=st.booleans(),
        logprobs=st.one_of(st.none(), st.integers(0, 20)),
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, list[Draw]]:
    vocabulary = draw(st.sampled_from([4, 33, 300, 5000]))
    size = draw(st.integers(1, 8))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = torch.randn(size, vocabulary, generator=generator) * draw(st.sampled_from([0.0, 0.01, 3.0, 1e4]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    rows = []
    for _ in range(size):
        sampling = draw(parameters(vocabulary))
        tokens = draw(st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=30))
        prompt = draw(st.integers(1, len(tokens)))
        allowed = draw(st.one_of(st.none(), st.sets(st.integers(0, vocabulary - 1), min_size=1, max_size=5)))
        mask = None if allowed is None else allowing(*allowed, words=-(-vocabulary // 32))
        rows.append(Draw(sampling, draw(st.integers(0, 2**63 - 1)), tokens, prompt, ENDS, mask))
    return logits.clamp(-6e4, 6e4).to(dtype), rows


@pytest.mark.slow
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(batch=batches())
def test_any_parameters_give_each_row_an_allowed_token_equal_to_the_row_alone(
    batch: tuple[torch.Tensor, list[Draw]],
) -> None:
    logits, rows = batch
    before = logits.clone()
    tokens, logprobs = sample(logits, rows)
    assert torch.equal(logits, before), "the logits stay as they are"
    for row, (draw, token) in enumerate(zip(rows, tokens, strict=True)):
        assert 0 <= token < logits.shape[1]
        if draw.mask is not None:
            assert draw.mask[token // 32] >> token % 32 & 1
        else:
            assert_not_banned(draw, token, logits.shape[1])
        assert (row in logprobs) == (draw.sampling.logprobs is not None)
        if row in logprobs:
            assert logprobs[row].logprob <= 1e-6
            assert len(logprobs[row].top) == min(draw.sampling.logprobs or 0, logits.shape[1])
        assert sample(logits[row : row + 1], [draw])[0] == [token]


def assert_not_banned(draw: Draw, token: int, vocabulary: int) -> None:
    s, generated = draw.sampling, list(draw.tokens[draw.num_prompt_tokens :])
    banned = {word[-1] for word in s.bad_words if [*generated, word[-1]][-len(word) :] == list(word)}
    if len(generated) < s.min_tokens:
        banned |= set(s.stop_token_ids) | (set() if s.ignore_eos else ENDS)
    if len(banned) < vocabulary:
        assert token not in banned
