"""How generations of the real engine end: end tokens, and stop strings that name special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastgen import LLM, SamplingParams
from fastgen.core.request import FinishReason
from fastgen.core.request_error import RequestError
from fastgen.mii.pipeline import Pipeline
from support.demo_weights import demo_model
from support.parrot import save_parrot

pytestmark = pytest.mark.slow

LANES = [["one", "<|eot|>", "two", "three"], ["abc", "<|sp|>", "def<|sp", "gh", "<|other|>", "xyz"]]
GREEDY = SamplingParams(temperature=0, max_tokens=20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    special = ["<|eot|>", "<|sp|>", "<|other|>"]
    return save_parrot(tmp_path_factory.mktemp("parrot"), LANES, special=special)


def load(folder: Path, **tokenizer_config: Any) -> LLM:
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return LLM(str(folder), device="cpu", dtype="float32", kv_cache_memory="16MiB", token_budget=256)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return load(folder)


@pytest.mark.parametrize(
    ("tokenizer_config", "sampling", "text", "num_tokens"),
    [
        ({}, {}, "onetwothree", 5),
        ({"eos_token": "<|eot|>"}, {}, "one", 2),
        ({"eos_token": "<|eot|>"}, {"ignore_eos": True, "max_tokens": 3}, "onetwo", 3),
        ({"eos_token": "<|unknown|>"}, {}, "onetwothree", 5),
    ],
)
def test_the_tokenizers_end_token_ends_generations(
    folder: Path, tokenizer_config: dict[str, Any], sampling: dict[str, Any], text: str, num_tokens: int
) -> None:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 20, **sampling})
    (done,) = load(folder, **tokenizer_config).generate("<|s0|>", params)
    assert (done.text, len(done.token_ids)) == (text, num_tokens)
    assert done.finish_reason is (FinishReason.LENGTH if "max_tokens" in sampling else FinishReason.STOP)


@pytest.mark.parametrize(
    ("stop", "text", "found"),
    [
        ("<|sp|>", "abc", "<|sp|>"),
        ("c<|sp|>def<", "ab", "c<|sp|>def<"),
        ("gh<|other|>x", "abcdef<|sp", "gh<|other|>x"),
        ("<|eot|>", "abcdef<|spghxyz", None),
    ],
)
def test_a_stop_string_may_name_a_special_token(llm: LLM, stop: str, text: str, found: str | None) -> None:
    (done,) = llm.generate("<|s1|>", GREEDY, stop=[stop])
    assert (done.text, done.stop_reason) == (text, found)
    assert "".join(delta.text for delta in llm.stream("<|s1|>", GREEDY, stop=[stop])) == text
    (response,) = Pipeline(llm)("<|s1|>", stop=stop, do_sample=False, max_new_tokens=20)
    assert (response.generated_text, response.finish_reason) == (text, "stop")


@pytest.mark.parametrize(("stop", "text"), [("def<", "abc"), (["xy", "def<"], "abc"), ((), "abcdef<|spghxyz")])
def test_one_stop_string_may_be_given_without_a_list(llm: LLM, stop: Any, text: str) -> None:
    assert llm.generate("<|s1|>", GREEDY, stop=stop)[0].text == text
    assert Pipeline(llm)("<|s1|>", stop=stop, do_sample=False, max_new_tokens=20)[0].generated_text == text


@pytest.mark.parametrize("stop", ["", ["x", ""], [5]])
def test_an_empty_stop_string_is_rejected_by_name(llm: LLM, stop: Any) -> None:
    with pytest.raises(RequestError, match="stop: "):
        llm.generate("<|s1|>", GREEDY, stop=stop)
    with pytest.raises(RequestError, match="stop: "):
        list(llm.stream("<|s1|>", GREEDY, stop=stop))
    with pytest.raises(RequestError, match="stop: "):
        Pipeline(llm)("<|s1|>", stop=stop)


def test_a_generation_of_a_gguf_file_ends_on_its_end_of_text_token() -> None:
    llm = LLM(str(demo_model()), device="cpu", max_model_length=64, kv_cache_memory="16MiB", token_budget=64)
    sampling = SamplingParams(temperature=0, max_tokens=5, logit_bias=((0, 100.0),))
    (done,) = llm.generate("Hello", sampling)
    assert (done.text, done.finish_reason, len(done.token_ids)) == ("", FinishReason.STOP, 1)
