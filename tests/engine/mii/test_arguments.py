"""Conversion of MII's arguments."""

from __future__ import annotations

import pytest

from fastgen.core.request_error import RequestError
from fastgen.core.sampling_params import SamplingParams
from fastgen.mii.arguments import GenerateArguments, check_model_arguments
from fastgen.settings import ConfigError


def test_defaults_are_those_of_mii() -> None:
    asked = GenerateArguments.of({})
    assert asked.sampling(24) == SamplingParams(max_tokens=1000, temperature=1.0, top_p=0.9)


def test_every_argument_reaches_the_sampling_parameters() -> None:
    given = {"max_new_tokens": 9, "min_new_tokens": 3, "temperature": 0.5, "top_p": 0.8, "top_k": 7, "ignore_eos": True}
    asked = GenerateArguments.of({**given, "seed": 3, "repetition_penalty": 1.1})
    assert asked.sampling(24) == SamplingParams(
        max_tokens=9, min_tokens=3, temperature=0.5, top_p=0.8, top_k=7, ignore_eos=True, seed=3, repetition_penalty=1.1
    )
    assert GenerateArguments.of({"stop": "."}).stop == (".",)


def test_do_sample_false_is_greedy_despite_other_arguments() -> None:
    asked = GenerateArguments.of({"do_sample": False, "temperature": 5.0, "top_k": 3, "max_new_tokens": 4})
    assert asked.sampling(1) == SamplingParams(max_tokens=4, temperature=0.0)
    assert asked.body(1)["temperature"] == 0.0


def test_max_length_includes_the_prompt() -> None:
    asked = GenerateArguments.of({"max_length": 30})
    assert asked.sampling(24).max_tokens == 6
    with pytest.raises(RequestError, match="max_length is 30 and the prompt has 30 tokens: raise it"):
        asked.sampling(30)


def test_an_unknown_argument_is_rejected_with_the_known_ones() -> None:
    with pytest.raises(RequestError, match="num_beams: no such argument; there are max_length, max_new_tokens"):
        GenerateArguments.of({"num_beams": 4})


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("replica_num", "FastGenDeployment"), ("all_rank_output", "leave it out"), ("quantization_mode", "int8")],
)
def test_an_unsupported_mii_argument_is_rejected_with_a_remedy(name: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}: .*{remedy}"):
        check_model_arguments({name: 2})
