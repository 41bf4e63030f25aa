"""Bounds of requests, which the engine checks whoever sends them."""

from __future__ import annotations

import re
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
    ("name", "given", "kept"),
    [
        ("logit_bias", {5: 1, 3: -2.5}, ((5, 1.0), (3, -2.5))),
        ("logit_bias", [[5, 1]], ((5, 1.0),)),
        ("logit_bias", None, ()),
        ("stop_token_ids", [1, np.int64(2)], (1, 2)),
        ("stop_token_ids", None, ()),
        ("bad_words", [[1, 2], (3,)], ((1, 2), (3,))),
    ],
)
def test_mappings_and_lists_are_accepted_as_in_other_libraries(name: str, given: Any, kept: tuple[Any, ...]) -> None:
    params = SamplingParams(**{name: given})
    assert getattr(params, name) == kept
    assert params == SamplingParams(**{name: kept})


@pytest.mark.parametrize(
    ("name", "given", "allowed"),
    [
        ("logit_bias", {"5": 1.0}, "a mapping or pairs of token ids and numbers"),
        ("logit_bias", {5: "1"}, "a mapping or pairs of token ids and numbers"),
        ("logit_bias", (5, 1.0), "a mapping or pairs of token ids and numbers"),
        ("logit_bias", "5", "a mapping or pairs of token ids and numbers"),
        ("logit_bias", {5: float("nan")}, "from -100 to 100"),
        ("stop_token_ids", 5, "token ids"),
        ("stop_token_ids", "5", "token ids"),
        ("stop_token_ids", ["a"], "token ids"),
        ("stop_token_ids", [True], "token ids"),
        ("bad_words", ["damn"], "token ids"),
        ("bad_words", [5], "token ids"),
        ("bad_words", [[]], "without empty words"),
        ("grammar", "[0-9]+", "a Grammar or None"),
    ],
)
def test_values_of_another_kind_are_rejected_by_name(name: str, given: Any, allowed: str) -> None:
    with pytest.raises(RequestError, match=f"^{name} is .*: it must be {re.escape(allowed)}$") as caught:
        SamplingParams(**{name: given})
    assert caught.value.param == name


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
