"""Bounds of requests, which the engine checks whoever sends them."""

from __future__ import annotations

import pytest

from fastgen.core.request import MOST_LOGIT_BIASES, RequestError, SamplingParams


def test_a_request_may_bias_a_bounded_number_of_tokens() -> None:
    biases = tuple((token, 1.0) for token in range(MOST_LOGIT_BIASES + 1))
    SamplingParams(logit_bias=biases[1:])
    with pytest.raises(RequestError, match="logit_bias has 1025 tokens; at most 1024"):
        SamplingParams(logit_bias=biases)
