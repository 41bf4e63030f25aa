"""Structured output fields, converted to grammars for the engine."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from pydantic import ValidationError

from engine.server.scripted_prompts import messages_for, prompt_for
from engine.server.serving import Serving
from fastgen.core.request_error import RequestError
from fastgen.core.sampling_params import Grammar
from fastgen.server.openai.generation_request import ChatRequest, CompletionRequest

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
BY_SCHEMA = Grammar(kind="json_schema", text=json.dumps(SCHEMA))


def structure(**fields: Any) -> tuple[Grammar, str] | None:
    parsed = ChatRequest.model_validate({"messages": messages_for("a"), **fields}).structure()
    assert parsed == CompletionRequest.model_validate({"prompt": "a", **fields}).structure()
    return parsed


@pytest.mark.parametrize(
    ("field", "value", "grammar"),
    [
        ("response_format", {"type": "json_object"}, Grammar(kind="json_object")),
        ("response_format", {"type": "json_object", "schema": None}, Grammar(kind="json_object")),
        ("response_format", {"type": "json_object", "schema": SCHEMA}, BY_SCHEMA),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, BY_SCHEMA),
        ("guided_json", SCHEMA, BY_SCHEMA),
        ("guided_json", json.dumps(SCHEMA), BY_SCHEMA),
        ("guided_regex", r"\d+", Grammar(kind="regex", text=r"\d+")),
        ("guided_grammar", 'start: "a"', Grammar(kind="lark", text='start: "a"')),
        ("structured_outputs", {"json": SCHEMA, "regex": None}, BY_SCHEMA),
        ("structured_outputs", {"json_object": True}, Grammar(kind="json_object")),
        ("structured_outputs", {"grammar": 'start: "a"'}, Grammar(kind="lark", text='start: "a"')),
        ("structured_outputs", {"regex": "a", "disable_fallback": True}, Grammar(kind="regex", text="a")),
    ],
)
def test_every_structured_output_field_becomes_a_grammar(field: str, value: object, grammar: Grammar) -> None:
    assert structure(**{field: value}) == (grammar, field)


def test_guided_choice_matches_exactly_its_strings() -> None:
    choices = ["yes", "no (or not)", "1+1", "a|b", "new\nline", "[x]"]
    parsed = structure(guided_choice=choices)
    assert parsed is not None
    again = structure(structured_outputs={"choice": choices})
    assert again is not None
    assert again[0] == parsed[0]
    pattern = re.compile(parsed[0].text)
    assert all(pattern.fullmatch(choice) for choice in choices)
    assert not any(pattern.fullmatch(text) for text in ("11", "a", "b", "x", "no or not", "yesno"))


def test_response_format_text_is_no_structure() -> None:
    assert structure(response_format={"type": "text"}) is None
    assert structure() is None


def test_two_structures_in_one_request_are_rejected() -> None:
    with pytest.raises(RequestError, match="guided_regex: response_format already gives a structure") as raised:
        structure(response_format={"type": "json_object"}, guided_regex="a")
    assert raised.value.param == "guided_regex"


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("json_object", "yes", "must be true or false"),
        ("regex", "", "must be a non-empty string"),
        ("choice", [], "must be a list of non-empty strings"),
        ("json", 5, "must be a JSON schema"),
    ],
)
def test_an_invalid_key_of_structured_outputs_is_named(key: str, value: object, fault: str) -> None:
    with pytest.raises(ValidationError, match=f"{key} {fault}"):
        ChatRequest.model_validate({"messages": messages_for("a"), "structured_outputs": {key: value}})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guided_regex", "(unclosed"),
        ("guided_grammar", "start: missing_rule"),
        ("guided_grammar", "root ::= missing"),
        ("guided_grammar", 'root ::= ("a"'),
        ("guided_grammar", 'root ::= "' + "a" * 20_000 + '"'),
        ("guided_grammar", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
        ("guided_json", {"type": "no such type"}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}),
    ],
)
def test_an_invalid_structure_is_rejected_with_its_field(scripted: Serving, field: str, value: object) -> None:
    for path, body in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": messages_for("a")})):
        response = scripted.post(f"/v1/{path}", {**body, field: value})
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)
        assert response.json()["error"]["message"].startswith(f"{field}: ")


def test_only_json_structures_can_be_combined_with_tools(scripted: Serving) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": messages_for("a"), "tools": tools, "guided_regex": "a+"}
    response = scripted.post("/v1/chat/completions", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "guided_regex")


def test_output_that_matches_its_structure_is_complete(scripted: Serving) -> None:
    body = {"prompt": prompt_for('{"a":12}'), "guided_json": SCHEMA}
    choice = scripted.post("/v1/completions", body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ('{"a":12}', "stop")
