"""MII's arguments as our own."""

from __future__ import annotations

import pytest

from fastgen.config import ConfigError
from fastgen.core.request import RequestError, SamplingParams
from fastgen.mii.arguments import GenerateArguments, check_model_arguments


def test_what_is_not_said_is_miis_default() -> None:
    asked = GenerateArguments.of({})
    assert asked.sampling(24) == SamplingParams(max_tokens=1000, temperature=1.0, top_p=0.9)


def test_every_argument_reaches_the_sampling() -> None:
    given = {"max_new_tokens": 9, "min_new_tokens": 3, "temperature": 0.5, "top_p": 0.8, "top_k": 7, "ignore_eos": True}
    asked = GenerateArguments.of({**given, "seed": 3, "repetition_penalty": 1.1})
    assert asked.sampling(24) == SamplingParams(
        max_tokens=9, min_tokens=3, temperature=0.5, top_p=0.8, top_k=7, ignore_eos=True, seed=3, repetition_penalty=1.1
    )
    assert GenerateArguments.of({"stop": "."}).stop == (".",)


def test_without_sampling_it_is_greedy_whatever_else_is_said() -> None:
    asked = GenerateArguments.of({"do_sample": False, "temperature": 5.0, "top_k": 3, "max_new_tokens": 4})
    assert asked.sampling(1) == SamplingParams(max_tokens=4, temperature=0.0)
    assert asked.body(1)["temperature"] == 0.0


def test_max_length_counts_the_prompt_too() -> None:
    asked = GenerateArguments.of({"max_length": 30})
    assert asked.sampling(24).max_tokens == 6
    with pytest.raises(RequestError, match="max_length is 30 and the prompt has 30 tokens: raise it"):
        asked.sampling(30)


def test_an_argument_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(RequestError, match="num_beams: no such argument; there are max_length, max_new_tokens"):
        GenerateArguments.of({"num_beams": 4})


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("replica_num", "FastGenDeployment"), ("tensor_parallel", "leave it out"), ("quantization_mode", "int8")],
)
def test_what_mii_said_elsewhere_has_a_remedy(name: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}: .*{remedy}"):
        check_model_arguments({name: 2})
