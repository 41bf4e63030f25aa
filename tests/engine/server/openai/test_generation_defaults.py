"""A model's generation_config.json gives the sampling parameters that requests leave out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import transformers

from engine.server.openai.test_special_token_markers import write_model
from engine.server.scripted_prompts import messages_for
from engine.server.serving import serving
from fastgen.core.sampling_params import SamplingParams
from fastgen.model.generation_defaults import BANNED, IGNORED, NUMBERS, WITHOUT_EFFECT, generation_defaults
from fastgen.server.openai import completions
from fastgen.server.openai.generation_request import ChatRequest, CompletionRequest
from fastgen.server.serving.served_model import ServedModel
from fastgen.settings import ConfigError
from fastgen.text.grammars.checker import GrammarChecker
from fastgen.text.tokenizer import Tokenizer

QWEN3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [2], "max_new_tokens": 7}


@pytest.fixture
def described(tmp_path: Path) -> Callable[[object], Path]:
    def write(config: object) -> Path:
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
        return tmp_path

    return write


def test_the_files_sampling_parameters_are_read(described: Callable[[object], Path]) -> None:
    folder = described(QWEN3)
    read = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_tokens": 7}
    assert generation_defaults("auto", folder) == read
    assert generation_defaults("none", folder) == {}
    assert generation_defaults("auto", described({"top_k": -1, "temperature": None})) == {"top_k": 0}


def test_numbers_get_the_types_of_their_parameters(described: Callable[[object], Path]) -> None:
    """Requests with others could not be sent to the engine."""
    whole = generation_defaults("auto", described({"top_k": 50.0, "max_new_tokens": 7.0, "temperature": 1}))
    assert whole == {"top_k": 50, "max_tokens": 7, "temperature": 1.0}
    assert [type(whole[name]) for name in ("top_k", "max_tokens", "temperature")] == [int, int, float]
    assert generation_defaults("auto", described({"top_k": -1.0})) == {"top_k": 0}


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("temperature", -1, "it must be from 0"),
        ("temperature", float("nan"), "expected a number"),
        ("top_p", "0.9", "expected a number"),
        ("top_p", True, "expected a number"),
        ("min_p", 10**400, "expected a number"),
        ("top_k", 50.5, "expected an integer"),
        ("top_k", True, "expected an integer"),
        ("top_k", [50], "expected an integer"),
        ("top_k", float("inf"), "expected an integer"),
        ("top_k", 1 << 63, "it must be an integer below 2^63"),
        ("max_new_tokens", 5.5, "expected an integer"),
        ("max_new_tokens", 0, "it must be at least 1"),
        ("max_new_tokens", 1e300, "it must be an integer below 2^63"),
    ],
)
def test_a_value_that_cannot_be_used_is_named_with_its_file(
    described: Callable[[object], Path], key: str, value: Any, expected: str
) -> None:
    with pytest.raises(ConfigError, match=rf"generation_config\.json: {key} is .*: {re.escape(expected)}") as caught:
        generation_defaults("auto", described({key: value}))
    assert "--generation-config none" in str(caught.value)


def test_a_file_that_is_no_object_is_rejected(described: Callable[[object], Path]) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json: expected a JSON object"):
        generation_defaults("auto", described([1]))


def test_a_requests_own_values_win_over_the_models() -> None:
    body = CompletionRequest.model_validate({"prompt": "a", "temperature": 0, "top_p": None})
    sampling = body.sampling(5, {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_tokens": 7})
    assert sampling == SamplingParams(max_tokens=5, temperature=0, top_p=0.95, top_k=20)


def test_max_new_tokens_is_the_default_length_of_a_chats_answer() -> None:
    def limit(**fields: Any) -> int:
        return ChatRequest.model_validate({"messages": messages_for("a"), **fields}).token_limit(100, 7)

    assert limit() == 7
    assert limit(max_tokens=50) == 50
    assert ChatRequest.model_validate({"messages": messages_for("a")}).token_limit(5, 7) == 5


def test_the_server_shows_and_uses_the_defaults(smollm2: Tokenizer, tmp_path: Path) -> None:
    write_model(tmp_path, smollm2, "<unused>")
    given = {**QWEN3, "eos_token_id": 2, "top_k": 20.0, "max_new_tokens": 7.0}  # the engine takes integers only
    given |= {"suppress_tokens": [1], "bad_words_ids": [[1, 2]]}
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    with serving(tmp_path, model=str(tmp_path)) as server:
        server.wait_status("/ready", 200)
        defaults = server.get("/v1/models").json()["data"][0]["default_sampling_params"]
        numbers = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_tokens": 7}
        assert defaults == {**numbers, "bad_words": [[1, 2], [1]]}
        body = {"messages": messages_for("one two three four five six seven eight nine")}
        reply = server.post("/v1/chat/completions", body).json()
        assert (reply["usage"]["completion_tokens"], reply["choices"][0]["finish_reason"]) == (7, "length")
        assert (
            "the model's sampling defaults: temperature 0.6, top_k 20, top_p 0.95, max_tokens 7, 2 banned" in server.log
        )
        response = server.post("/v1/responses", {"input": "a"}).json()
        assert (response["temperature"], response["top_p"]) == (0.6, 0.95), "as of a chat"


def test_a_server_with_a_bad_default_ends_at_its_start(smollm2: Tokenizer, tmp_path: Path) -> None:
    write_model(tmp_path, smollm2, "<unused>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"max_new_tokens": 5.5}))
    with serving(tmp_path, model=str(tmp_path)) as server:
        assert server.wait_exit() == 2
        assert server.log.startswith("fastgen: error: ")
        assert "generation_config.json: max_new_tokens is 5.5: expected an integer" in server.log
        assert len(server.log.splitlines()) == 1


async def test_completions_use_the_defaults() -> None:
    model = SimpleNamespace(
        engine=SimpleNamespace(info=SimpleNamespace(max_model_length=64)),
        generation_defaults={"temperature": 0.6, "max_tokens": 7},
        grammars=GrammarChecker(cast(Tokenizer, None)),
        remaining_length=lambda tokens: 64 - tokens,
        tokenizer=None,
    )
    body = CompletionRequest.model_validate({"prompt": [1, 2], "top_p": 0.5})
    (request,) = (await completions.rendered_completion(body, cast(ServedModel, model))).requests
    assert request.sampling == SamplingParams(temperature=0.6, top_p=0.5, max_tokens=16)


def test_every_key_of_transformers_is_read_or_named_or_has_no_effect() -> None:
    known = set(transformers.GenerationConfig().to_dict())
    without_effect = [key for keys in WITHOUT_EFFECT.values() for key in keys]
    listed = [*NUMBERS, *BANNED, *IGNORED, *without_effect]
    assert len(set(listed)) == len(listed)
    assert known <= set(listed)


@pytest.mark.parametrize(
    ("given", "warned"),
    [
        *(({key: 7}, key) for key in IGNORED),
        *(({key: value}, None) for key, values in IGNORED.items() for value in (*values, None)),
        *(({key: 7}, None) for keys in WITHOUT_EFFECT.values() for key in keys),
        ({"of_next_year": 1}, "of_next_year"),
        ({"of_next_year": None}, None),
    ],
)
def test_a_key_that_changes_tokens_and_is_not_applied_is_named(
    described: Callable[[object], Path], caplog: pytest.LogCaptureFixture, given: dict[str, Any], warned: str | None
) -> None:
    assert generation_defaults("auto", described(given)) == {}
    assert [record.getMessage().split(" is ")[0] for record in caplog.records] == (
        [] if warned is None else [f"generation_config.json: {warned}"]
    )


def test_config_json_has_the_defaults_of_a_folder_without_a_generation_config(
    described: Callable[[object], Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = described({"temperature": 0.5})
    (folder / "config.json").write_text(
        json.dumps({"temperature": 0.7, "top_k": 5, "no_repeat_ngram_size": 2, "hidden_size": 8, "vocab_size": 9})
    )
    assert generation_defaults("auto", folder) == {"temperature": 0.5}
    assert not caplog.records
    (folder / "generation_config.json").unlink()
    assert generation_defaults("auto", folder) == {"temperature": 0.7, "top_k": 5}
    assert [record.getMessage().split(":")[:2] for record in caplog.records] == [
        ["config.json", " no_repeat_ngram_size is 2"]
    ]


def test_suppressed_tokens_and_bad_words_of_the_model_are_never_generated(described: Callable[[object], Path]) -> None:
    folder = described({"suppress_tokens": [3, 8], "bad_words_ids": [[1, 2]]})
    (folder / "config.json").write_text('{"vocab_size": 9}')
    defaults = generation_defaults("auto", folder)
    assert defaults == {"bad_words": ((1, 2), (3,), (8,))}
    body = CompletionRequest.model_validate({"prompt": "a"})
    assert body.sampling(5, defaults, bad_words=((7,),)).bad_words == ((1, 2), (3,), (8,), (7,)), "a request adds words"


def test_suppressed_tokens_of_a_gguf_file_are_never_generated() -> None:
    tokens = {"tokenizer.ggml.tokens": ["a", "b", "c"]}
    suppressed = tokens | {"tokenizer.ggml.suppress_tokens": [2, 0, 9, -1]}
    assert generation_defaults("auto", tokens) == {}
    assert generation_defaults("auto", suppressed) == {"bad_words": ((2,), (0,))}, "as in llama.cpp, without strangers"
    assert generation_defaults("none", suppressed) == {}
    with pytest.raises(ConfigError, match="suppress_tokens: is damaged"):
        generation_defaults("auto", tokens | {"tokenizer.ggml.suppress_tokens": ["a"]})


@pytest.mark.parametrize(
    "given", [{"suppress_tokens": [9]}, {"suppress_tokens": [-1]}, {"suppress_tokens": 3}, {"bad_words_ids": [[]]},
              {"bad_words_ids": [3]}, {"bad_words_ids": [["a"]]}]
)  # fmt: skip
def test_banned_tokens_that_the_vocabulary_lacks_are_rejected(
    described: Callable[[object], Path], given: dict[str, Any]
) -> None:
    folder = described(given)
    (folder / "config.json").write_text('{"vocab_size": 9}')
    with pytest.raises(ConfigError, match=r"suppress_tokens|bad_words_ids"):
        generation_defaults("auto", folder)
