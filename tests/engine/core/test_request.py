"""Bounds of requests, which the engine checks whoever sends them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastgen.core.request_error import RequestError
from fastgen.core.sampling_params import INTEGERS, MOST_LOGIT_BIASES, Grammar, SamplingParams


def test_a_request_may_bias_a_bounded_number_of_tokens() -> None:
    biases = tuple((token, 1.0) for token in range(MOST_LOGIT_BIASES + 1))
    SamplingParams(logit_bias=biases[1:])
    with pytest.raises(RequestError, match="logit_bias has 1025 tokens; at most 1024"):
        SamplingParams(logit_bias=biases)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        *((name, value, "an integer") for name in INTEGERS for value in (5.5, 5.0, True, "5", float("inf"), 1 << 63)),
        *((name, value, "a number") for name in ("temperature", "min_p", "top_p") for value in (True, "0.5", None)),
        ("temperature", float("nan"), "from 0"),
        ("top_k", None, "an integer"),
    ],
)
def test_a_sampling_parameter_of_another_type_is_rejected_by_name(name: str, value: Any, expected: str) -> None:
    with pytest.raises(RequestError, match=f"^{name} is .*: it must be {expected}") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_whole_numbers_of_other_libraries_are_accepted() -> None:
    assert SamplingParams(top_k=np.int64(5), temperature=np.float32(0.5), seed=np.uint8(3)).top_k == 5  # type: ignore[arg-type]


def test_a_grammar_of_tokens_has_ids() -> None:
    assert Grammar(kind="tokens", text="1,2").token_ids == (1, 2)
    with pytest.raises(RequestError, match="tokens are not ids"):
        Grammar(kind="tokens", text="a")
