"""vLLM's and SGLang's extensions of OpenAI's API, and answers that strict clients check."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from engine.server.openai_types import check_chat, check_completion, events
from engine.server.scripted_prompts import messages_for, prompt_for
from engine.server.serving import Serving, serving
from support.waiting import wait_until

HI = [{"role": "user", "content": "Hi"}]


def ok(server: Serving, path: str, body: dict[str, Any]) -> Any:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


def error(server: Serving, path: str, body: dict[str, Any], status: int = 400) -> Any:
    response = server.post(path, body)
    assert response.status_code == status, response.text
    return response.json()["error"]


def test_token_ids_are_returned_with_a_completion(scripted: Serving) -> None:
    body = {"prompt": [[504, 2365], [504]], "max_tokens": 3, "return_token_ids": True}
    choices = ok(scripted, "/v1/completions", body)["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [[504, 2365], [504]]
    assert [choice["token_ids"] for choice in choices] == [[504, 2365, 504], [504, 504, 504]]
    streamed: dict[int, list[int]] = {0: [], 1: []}
    prompts = 0
    for chunk in events(scripted, "/v1/completions", body)[:-1]:
        (choice,) = chunk["choices"]
        streamed[choice["index"]] += choice["token_ids"]
        prompts += "prompt_token_ids" in choice
    assert streamed == {0: [504, 2365, 504], 1: [504, 504, 504]}
    assert prompts == 2
    assert "token_ids" not in ok(scripted, "/v1/completions", {"prompt": "a"})["choices"][0]


def test_token_ids_are_returned_with_a_chat(scripted: Serving) -> None:
    body = {"messages": messages_for("one two three"), "return_token_ids": True}
    reply = ok(scripted, "/v1/chat/completions", body)
    token_ids = reply["choices"][0]["token_ids"]
    assert len(token_ids) == reply["usage"]["completion_tokens"]
    assert len(reply["prompt_token_ids"]) == reply["usage"]["prompt_tokens"]
    chunks = events(scripted, "/v1/chat/completions", body)
    assert [token for chunk in chunks[:-1] for token in chunk["choices"][0].get("token_ids", [])] == token_ids
    assert [chunk.get("prompt_token_ids") for chunk in chunks[:2]] == [reply["prompt_token_ids"], None]
    check_chat(scripted, body)
    check_completion(scripted, {"prompt": "a", "return_token_ids": True})


@pytest.mark.parametrize(
    ("limit", "kept"),
    [
        ({"truncate_prompt_tokens": 2}, [12, 13]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, [10, 11]),
        ({"truncate_prompt_tokens": 9}, [10, 11, 12, 13]),
    ],
)
def test_a_prompt_is_truncated_to_a_limit(scripted: Serving, limit: dict[str, Any], kept: list[int]) -> None:
    body = {"prompt": [10, 11, 12, 13], "max_tokens": 1, "return_token_ids": True, **limit}
    assert ok(scripted, "/v1/completions", body)["choices"][0]["prompt_token_ids"] == kept


def test_minus_one_truncates_a_prompt_to_what_fits(scripted: Serving) -> None:
    body = {"prompt": [10] * 600, "max_tokens": 12, "truncate_prompt_tokens": -1}
    assert ok(scripted, "/v1/completions", body)["usage"]["prompt_tokens"] == 500
    assert error(scripted, "/v1/completions", {**body, "truncate_prompt_tokens": 0})["param"] == (
        "truncate_prompt_tokens"
    )
    chat = {"messages": [{"role": "user", "content": "go " * 700}], "truncate_prompt_tokens": 5, "max_tokens": 1}
    assert ok(scripted, "/v1/chat/completions", chat)["usage"]["prompt_tokens"] == 5


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/chat/completions", "messages", [{"role": "user", "content": "go " * 700}]),
        ("/v1/responses", "input", "go " * 700),
        ("/v1/completions", "prompt", "go " * 700),
    ],
)
def test_a_text_that_is_too_long_is_named_by_its_field(scripted: Serving, path: str, field: str, value: Any) -> None:
    refused = error(scripted, path, {field: value})
    assert refused["param"] == field
    assert re.fullmatch(
        rf"{field}: [0-9]+ tokens; the limit is 512, generated tokens included; shorten it", refused["message"]
    )


def test_a_truncation_side_without_a_limit_is_refused(scripted: Serving) -> None:
    assert error(scripted, "/v1/completions", {"prompt": "a", "truncation_side": "left"})["param"] == "truncation_side"


def test_invalid_allowed_tokens_are_named(scripted: Serving) -> None:
    for value in (["a"], [-1], "12", [49152, 3, 50000]):
        refused = error(scripted, "/v1/completions", {"prompt": "a", "allowed_token_ids": value})
        assert refused["param"] == "allowed_token_ids"
    assert "49152, 50000" in refused["message"]
    both = {"prompt": "a", "allowed_token_ids": [1], "regex": "a+"}
    assert error(scripted, "/v1/completions", both)["param"] == "allowed_token_ids"


@pytest.mark.parametrize("tool_choice", ["auto", "required"])
def test_allowed_tokens_are_refused_with_tools(scripted: Serving, tool_choice: str) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": HI, "tools": tools, "tool_choice": tool_choice, "allowed_token_ids": [1]}
    assert error(scripted, "/v1/chat/completions", body)["param"] == "allowed_token_ids"


@pytest.mark.parametrize(
    ("field", "value"), [("regex", "(unclosed"), ("json_schema", "no json"), ("ebnf", "root ::= missing")]
)
def test_sglangs_structure_fields_are_checked(scripted: Serving, field: str, value: str) -> None:
    assert error(scripted, "/v1/completions", {"prompt": "a", field: value})["param"] == field


def test_sglangs_structures_count_as_structures(scripted: Serving) -> None:
    refused = error(scripted, "/v1/completions", {"prompt": "a", "regex": "a+", "guided_regex": "b+"})
    assert "guided_regex already gives a structure" in refused["message"]


def test_no_stop_trim_keeps_the_stop_string(scripted: Serving) -> None:
    body = {"prompt": prompt_for("one two three"), "stop": "two", "no_stop_trim": True}
    assert ok(scripted, "/v1/completions", body)["choices"][0]["text"] == "one two"


def test_every_bad_key_of_logit_bias_is_named(scripted: Serving) -> None:
    refused = error(scripted, "/v1/completions", {"prompt": "a", "logit_bias": {"x": 1, "5": 1, "-2": 1}})
    assert "'x', '-2'" in refused["message"]
    refused = error(scripted, "/v1/completions", {"prompt": "a", "logit_bias": {"49152": 1, "5": 1, "60000": 1}})
    assert "49152, 60000" in refused["message"]


def test_usage_has_no_null_details(scripted: Serving) -> None:
    assert None not in ok(scripted, "/v1/completions", {"prompt": "a"})["usage"].values()


def test_continuous_usage_counts_no_token_in_the_role_chunk(scripted: Serving) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": messages_for("one two three"), "stream": True, "stream_options": options}
    lines = scripted.post("/v1/chat/completions", body).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] == 0
    assert counts[1] >= 1
    assert counts == sorted(counts)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("store", True),
        ("web_search_options", {}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("service_tier", "priority"),
        ("service_tier", "bogus"),
        ("verbosity", "low"),
        ("reasoning_effort", "bogus"),
        ("lora_path", "adapter"),
    ],
)
def test_an_unsupported_field_is_rejected_by_name(scripted: Serving, field: str, value: object) -> None:
    refused = error(scripted, "/v1/chat/completions", {"messages": HI, field: value})
    assert (refused["param"], refused["type"]) == (field, "invalid_request_error")


def test_fields_of_other_servers_that_cannot_change_the_answer_are_ignored(scripted: Serving) -> None:
    hints = {"kv_transfer_params": {"do_remote_decode": True}, "request_id": "a", "rid": "b", "data_parallel_rank": 1}
    assert ok(scripted, "/v1/chat/completions", {"messages": HI, "max_tokens": 2, **hints})["choices"]


def test_a_request_may_bring_its_chat_template_if_the_server_allows_it(tmp_path: Path, scripted: Serving) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 3,
        "chat_template": "{{ messages[0].content }} you",
    }
    assert "--trust-request-chat-template" in error(scripted, "/v1/chat/completions", body)["message"]
    assert error(scripted, "/tokenize", body)["param"] == "chat_template"
    with serving(tmp_path, "--trust-request-chat-template") as server:
        server.wait_status("/ready", 200)
        assert ok(server, "/v1/chat/completions", body)["choices"][0]["message"]["content"].startswith("Hello you")
        assert ok(server, "/tokenize", body)["count"] == 2
        invalid = error(server, "/v1/chat/completions", {**body, "chat_template": "{% if %}"})
        assert (invalid["param"], "line 1" in invalid["message"]) == ("chat_template", True)


def test_a_model_names_its_source_and_length(scripted: Serving) -> None:
    card = scripted.get("/v1/models").json()["data"][0]
    assert (card["root"], card["max_model_len"], card["parent"]) == ("smollm2", 512, None)
    assert card["deterministic"] is False


def test_the_load_is_the_number_of_open_requests(scripted: Serving) -> None:
    wait_until(lambda: scripted.get("/load").json() == {"server_load": 0}, "the end of other tests' requests")
    with socket.create_connection(("127.0.0.1", scripted.port)) as connection:
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
        )
        connection.sendall(head)  # no body yet
        wait_until(lambda: scripted.get("/load").json() == {"server_load": 1}, "the request to count")
    wait_until(lambda: scripted.get("/load").json() == {"server_load": 0}, "the request to end")


@pytest.mark.parametrize(
    ("method", "path", "instead"),
    [
        ("POST", "/v1/messages", "/v1/chat/completions"),
        ("POST", "/v1/messages/count_tokens", "/tokenize"),
        ("GET", "/v1/chat/completions", "not stored"),
        ("GET", "/v1/chat/completions/chatcmpl-1", "not stored"),
        ("POST", "/v1/audio/speech", "only text models"),
        ("POST", "/classify", "/v1/score"),
        ("POST", "/pooling", "/v1/embeddings"),
        ("GET", "/v1/nothing", "/openapi.json"),
    ],
)
def test_an_unsupported_route_returns_404_with_an_alternative(
    scripted: Serving, method: str, path: str, instead: str
) -> None:
    response = scripted.request(method, path, json={} if method == "POST" else None)
    failure = response.json()["error"]
    assert (response.status_code, failure["code"]) == (404, "not_found")
    assert f"{method} {path}:" in failure["message"]
    assert instead in failure["message"]
