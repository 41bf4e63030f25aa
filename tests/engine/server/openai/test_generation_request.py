"""OpenAI's protocol with the scripted engine, which repeats the prompt."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from engine.server.serving import Serving
from support.waiting import HANG_SECONDS

HELLO = "Hello, wörld! 👋🏽 It is 12:30."


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


def test_a_completion_has_text_and_usage(scripted: Serving) -> None:
    done = scripted.client().completions.create(model="smollm2", prompt=HELLO, max_tokens=100)
    assert done.choices[0].text.startswith(HELLO + HELLO)
    assert done.choices[0].finish_reason == "length"
    assert done.usage is not None
    assert done.usage.completion_tokens == 100
    assert done.usage.total_tokens == done.usage.prompt_tokens + 100


def test_max_tokens_of_a_completion_defaults_to_sixteen(scripted: Serving) -> None:
    done = scripted.client().completions.create(model="smollm2", prompt=HELLO)
    assert done.usage is not None
    assert done.usage.completion_tokens == 16


def test_choices_follow_the_order_of_the_prompts(scripted: Serving) -> None:
    prompts = ["one two", "three four five", "six"]
    done = scripted.client().completions.create(model="smollm2", prompt=prompts, max_tokens=1, temperature=0)
    assert [choice.index for choice in done.choices] == [0, 1, 2]
    assert [choice.text for choice in done.choices] == ["one", "three", "six"]


def test_a_prompt_may_be_token_ids(scripted: Serving) -> None:
    one = scripted.client().completions.create(model="smollm2", prompt=[504, 1743], max_tokens=2)
    assert one.usage is not None
    assert one.usage.prompt_tokens == 2
    two = scripted.client().completions.create(model="smollm2", prompt=[[504, 1743], [504]], max_tokens=2)
    assert two.choices[0].text == one.choices[0].text
    assert len(two.choices) == 2


def test_streamed_completion_text_adds_up_to_the_complete_text(scripted: Serving) -> None:
    client = scripted.client()
    full = client.completions.create(model="smollm2", prompt=HELLO, max_tokens=60)
    chunks = list(
        client.completions.create(
            model="smollm2", prompt=HELLO, max_tokens=60, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == full.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == full.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_streams_of_several_prompts_interleave(scripted: Serving) -> None:
    texts = {0: "", 1: ""}
    for chunk in scripted.client().completions.create(
        model="smollm2", prompt=["one two", "three four"], max_tokens=4, stream=True
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "one twoone two", 1: "three fourthree four"}


def test_a_chat_is_rendered_with_the_chat_template(scripted: Serving) -> None:
    done = scripted.client().chat.completions.create(
        model="smollm2",
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "you"}]},
        ],
        max_completion_tokens=40,
        extra_body={"ignore_eos": True},
    )
    # The scripted engine repeats the prompt; special tokens give no text.
    assert done.choices[0].message.content is not None
    assert done.choices[0].message.content.startswith("system\nBe brief.\nuser\nHello, \nyou\nassistant\n")
    assert done.choices[0].message.role == "assistant"


def test_a_chat_may_use_the_whole_model_length_by_default(scripted: Serving) -> None:
    done = scripted.client().chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": "go on"}], extra_body={"ignore_eos": True}
    )
    assert done.usage is not None
    assert done.usage.total_tokens == 512
    assert done.choices[0].finish_reason == "length"


def test_a_streamed_chat_starts_with_the_role_and_ends_with_the_finish_reason(scripted: Serving) -> None:
    chunks = list(
        scripted.client().chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "Hi"}],
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8
    assert not any(chunk.choices and chunk.choices[0].delta.role for chunk in chunks[1:])


def test_a_stream_is_server_sent_events(scripted: Serving) -> None:
    body = {"model": "smollm2", "prompt": "a b", "max_tokens": 2, "stream": True}
    response = scripted.post("/v1/completions", body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    assert all(json.loads(event.removeprefix("data: "))["object"] == "text_completion" for event in events[:-1])


def test_a_stop_string_cuts_the_text(scripted: Serving) -> None:
    done = scripted.client().completions.create(
        model="smollm2", prompt="one two three four", max_tokens=50, stop=["hree"]
    )
    assert done.choices[0].text == "one two t"
    assert done.choices[0].finish_reason == "stop"


def test_stop_strings_do_not_disable_the_end_of_sequence_token(scripted: Serving) -> None:
    body = {"model": "smollm2", "prompt": "one<|im_end|>two", "max_tokens": 9, "stop": ["never"]}
    ended = scripted.post("/v1/completions", body).json()
    assert (ended["choices"][0]["text"], ended["choices"][0]["finish_reason"]) == ("one", "stop")
    further = scripted.post("/v1/completions", {**body, "ignore_eos": True}).json()
    assert further["choices"][0]["text"].startswith("onetwoone")


def test_only_the_served_model_names_are_accepted(scripted: Serving) -> None:
    client = scripted.client()
    assert [model.id for model in client.models.list()] == ["smollm2", "other-name"]
    assert client.completions.create(model="other-name", prompt="a").model == "other-name"
    with pytest.raises(openai.NotFoundError) as raised:
        client.completions.create(model="gpt-5", prompt="a")
    assert raised.value.code == "model_not_found"
    assert "smollm2, other-name" in raised.value.message


def test_a_model_can_be_retrieved_by_its_name(scripted: Serving) -> None:
    client = scripted.client()
    assert client.models.retrieve("other-name") == client.models.list().data[1]
    with pytest.raises(openai.NotFoundError, match="gpt-5"):
        client.models.retrieve("gpt-5")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", 10**400),
        ("top_p", 0),
        ("top_k", -2),
        ("top_k", 1 << 70),
        ("min_p", 2),
        ("typical_p", 0),
        ("seed", 1.5),
        ("seed", "7"),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("min_tokens", 99),
        ("stop", [""]),
        ("stop", ["a"] * 1000),
        ("stop", "a" * 5000),
        ("stop", [1]),
        ("stop_token_ids", ["1"]),
        ("stop_token_ids", [49152]),
        ("prompt", {}),
        ("prompt", []),
        ("prompt", ["a", 1]),
        ("prompt", ""),
        ("prompt", [49152]),
        ("prompt", [-1]),
        ("suffix", "x"),
        ("logit_bias", {"one": 5}),
        ("logit_bias", {"1": "5"}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"49152": 1}),
        ("logit_bias", [1]),
        ("logit_bias", {str(token): 1 for token in range(1025)}),
        ("bad_words", [""]),
        ("bad_words", {"a": 1}),
        ("bad_words", ["a" * 5000]),
        ("stream_options", {"include_usage": True}),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("priority", 1 << 40),
        ("timeout", -1),
        ("cache_salt", 5),
        ("stream", "yes"),
        ("skip_special_tokens", 0),
        ("use_beam_search", True),
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema"}),
        ("guided_json", "no json"),
        ("guided_choice", []),
        ("guided_regex", ""),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}),
        ("structured_outputs", {"structural_tag": {}}),
        ("structured_outputs", {"regexp": "a+"}),
        ("structured_outputs", {}),
        ("prompt", ["a"] * 2000),
    ],
)
def test_an_invalid_completion_field_is_named(scripted: Serving, field: str, value: object) -> None:
    response = scripted.post("/v1/completions", {"model": "smollm2", "prompt": "a", field: value})
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, field)
    assert error["type"] == "invalid_request_error"
    assert field in error["message"]


@pytest.mark.parametrize(
    ("biases", "message"),
    [
        ({"1": 101, "2": -101}, "logit_bias is 101.0 for token 1, -101.0 for token 2: it must be from -100 to 100"),
        ({str(token): 1 for token in range(49152)}, "logit_bias: has 49152 tokens; at most 1024 are accepted"),
    ],
    ids=["values out of range", "too many"],
)
def test_biases_beyond_the_limits_are_named(scripted: Serving, biases: dict[str, float], message: str) -> None:
    response = scripted.post("/v1/completions", {"prompt": "a", "logit_bias": biases})
    assert response.status_code == 400
    assert error_of(response)["message"].startswith(message)


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("messages", [], "messages"),
        ("messages", [{"content": "no role"}], "messages.0.role"),
        ("messages", [{"role": "user", "content": 5}], "messages.0.content"),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "messages.0.content"),
        ("messages", [{"role": "assistant", "tool_calls": [{}]}], "messages.0.tool_calls"),
        ("max_completion_tokens", 0, "max_completion_tokens"),
        ("max_completion_tokens", 9999, "max_completion_tokens"),
        ("tools", [{"type": "function"}], "tools.0.function"),
        ("tools", [{"type": "function", "function": {"name": ""}}], "tools.0.function.name"),
        ("tools", [{"type": "web_search"}], "tools.0.type"),
        ("tool_choice", "required", "tool_choice"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}, "tool_choice"),
        ("tool_choice", "any", "tool_choice"),
        ("functions", [{"name": "f"}], "functions"),
        ("chat_template", "{{ messages }}", "chat_template"),
        ("continue_final_message", 1, "continue_final_message"),
    ],
)
def test_an_invalid_chat_field_is_named(scripted: Serving, field: str, value: object, param: str) -> None:
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "a"}], field: value}
    response = scripted.post("/v1/chat/completions", body)
    assert (response.status_code, error_of(response)["param"]) == (400, param)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    ],
)
def test_a_part_of_a_message_that_is_no_text_is_rejected_with_its_field_and_type(
    scripted: Serving, part: dict[str, Any]
) -> None:
    messages = [{"role": "system", "content": "b"}, {"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
    response = scripted.post("/v1/chat/completions", {"model": "smollm2", "messages": messages})
    assert response.status_code == 400
    error = error_of(response)
    assert (error["type"], error["param"]) == ("invalid_request_error", "messages.1.content")
    expected = f"messages.1.content: contains a part of type '{part['type']}'; only text parts are supported"
    assert error["message"] == expected


def test_neutral_and_unknown_fields_are_accepted(scripted: Serving) -> None:
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "a", "name": "ann"}],
        "max_tokens": 1,
        "n": 1,
        "logprobs": False,
        "top_logprobs": 0,
        "parallel_tool_calls": True,
        "service_tier": "auto",
        "logit_bias": {},
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "none",
        "top_k": -1,
        "user": "ann",
        "metadata": {"a": "b"},
        "seed": None,
        "stop": None,
    }
    assert scripted.post("/v1/chat/completions", body).status_code == 200


def test_a_request_beyond_the_model_length_is_rejected_with_the_numbers(scripted: Serving) -> None:
    response = scripted.post("/v1/completions", {"prompt": "a b c", "max_tokens": 510})
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, "max_tokens")
    assert all(number in error["message"] for number in ("510", "3", "513", "512", "509"))
    too_long = scripted.post("/v1/completions", {"prompt": [1] * 512})
    assert (too_long.status_code, error_of(too_long)["param"]) == (400, "prompt")


def test_a_body_that_is_not_json_is_rejected(scripted: Serving) -> None:
    response = httpx.post(
        f"{scripted.url}/v1/completions",
        content=b'{"prompt": ',
        headers={"Content-Type": "application/json"},
        timeout=HANG_SECONDS,
    )
    assert response.status_code == 400
    assert "not valid JSON" in error_of(response)["message"]


@pytest.mark.parametrize(
    ("text", "half"),
    [(b"cut \\ud83d", b"\\ud83d (byte 15)"), (b"\\uD83D\\uDE00 \\uDE00 cut", b"\\uDE00 (byte 24)")],
)
def test_half_of_an_emoji_is_named(scripted: Serving, text: bytes, half: bytes) -> None:
    body, kind = b'{"prompt":"' + text + b'"}', {"Content-Type": "application/json"}
    response = scripted.request("POST", "/v1/completions", content=body, headers=kind)
    assert response.status_code == 400
    words = f"the body is not valid JSON: {half.decode()} is half of a character, such as an emoji that was cut"
    assert error_of(response)["message"].startswith(words)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "x" * 100_000),
        ("tool_choice", {"type": "function", "function": {"name": "x" * 100_000}}),
    ],
)
def test_an_error_does_not_repeat_a_long_text(scripted: Serving, name: str, value: Any) -> None:
    response = scripted.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], name: value})
    assert 400 <= response.status_code < 500
    assert len(response.content) < 2500
    assert error_of(response)["param"] == name
    assert ("is not served here" if name == "model" else "name one that is") in error_of(response)["message"]
    no_type = httpx.post(f"{scripted.url}/v1/completions", content=b"{}", timeout=HANG_SECONDS)
    assert no_type.status_code == 400
    assert "application/json" in error_of(no_type)["message"]


def test_a_body_that_is_too_large_is_rejected(scripted: Serving) -> None:
    response = scripted.post("/v1/completions", {"prompt": "a" * (17 << 20)})
    assert response.status_code == 413
    assert error_of(response)["code"] == "too_large"


def test_an_unknown_path_gets_an_error_in_openais_format(scripted: Serving) -> None:
    response = scripted.get("/v1/nothing")
    assert (response.status_code, error_of(response)["code"]) == (404, "not_found")


def test_a_long_text_is_tokenized_like_a_short_one(scripted: Serving) -> None:
    response = scripted.post("/v1/completions", {"prompt": "word " * 5000})
    assert "5001 tokens" in error_of(response)["message"] or "5000 tokens" in error_of(response)["message"]


def test_many_streams_at_once_do_not_mix(scripted: Serving) -> None:
    client = scripted.client()

    def stream(number: int) -> str:
        chunks = client.completions.create(model="smollm2", prompt=f"#{number}.", max_tokens=24, stream=True)
        return "".join(chunk.choices[0].text for chunk in chunks)

    with ThreadPoolExecutor(32) as pool:
        texts = list(pool.map(stream, range(32)))
    assert all(f"#{number}.".startswith(text[:2]) and f"#{number}." in text for number, text in enumerate(texts))


def test_version_reports_the_package_version(scripted: Serving) -> None:
    from fastgen import __version__

    assert scripted.get("/version").json() == {"version": __version__}
