"""What is read of a body."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastgen_gateway.routing.client import Client, ClientTable
from fastgen_gateway.routing.refusal import Refusal
from fastgen_gateway.routing.request_body import (
    BLOCK_BYTES,
    MOST_BLOCKS,
    MOST_FIELDS,
    RequestBody,
    client_fields,
    with_fields,
)


def parsed(**fields: object) -> RequestBody:
    body = RequestBody.parse(json.dumps(fields).encode())
    assert isinstance(body, RequestBody), body
    return body


def test_the_model_and_the_size_of_the_prompt_are_read() -> None:
    body = parsed(model="m", prompt="x" * 398, temperature=1.5)
    assert (body.model, body.prompt_tokens) == ("m", 101)
    assert body.num_bytes == len(json.dumps({"model": "m", "prompt": "x" * 398, "temperature": 1.5}))


def test_prompts_that_begin_alike_have_the_same_first_hashes() -> None:
    shared = [{"role": "system", "content": "s" * 2000}]
    one = parsed(model="m", messages=[*shared, {"role": "user", "content": "a" * 2000}]).blocks
    two = parsed(model="m", messages=[*shared, {"role": "user", "content": "b" * 2000}], temperature=0).blocks
    same = sum(left == right for left, right in zip(one, two, strict=True))
    assert same == 8
    assert one[:same] == two[:same]


def test_equal_blocks_after_different_ones_have_different_hashes() -> None:
    one = parsed(model="m", prompt="a" * BLOCK_BYTES + "c" * 2000).blocks
    two = parsed(model="m", prompt="b" * BLOCK_BYTES + "c" * 2000).blocks
    assert not set(one) & set(two)


def test_tools_come_before_messages_whatever_their_order_in_the_body() -> None:
    tools, messages = [{"name": "t" * 2000}], [{"role": "user", "content": "c" * 2000}]
    assert (
        parsed(model="m", tools=tools, messages=messages).blocks
        == parsed(messages=messages, tools=tools, model="m").blocks
    )


def test_the_number_of_hashes_is_bounded() -> None:
    assert len(parsed(model="m", prompt="x" * (1 << 20)).blocks) == MOST_BLOCKS


def test_another_model_leaves_the_text_of_the_other_fields() -> None:
    body = b'{"a": 1.50, "model" : "default/m", "b": "\\u00e4", "c": [ 1,2 ]}'
    changed = with_fields(body, {"model": "m"})
    assert isinstance(changed, bytes)
    assert json.loads(changed) == {"a": 1.5, "model": "m", "b": "ä", "c": [1, 2]}
    assert b"1.50" in changed


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"model": "m", "\xff": 1}', "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        (b'{"x": ' + b"[" * 5000 + b"]" * 5000 + b"}", "it is nested too deeply"),
    ],
    ids=["name", "depth"],
)
def test_a_body_that_cannot_be_changed_is_refused(body: bytes, reason: str) -> None:
    expected = Refusal(400, "invalid_json", f"the body is not a JSON object: {reason}")
    assert with_fields(body, {"model": "m"}) == expected


def body_with(num_fields: int) -> bytes:
    """Return a body with so many fields beside the model."""
    return b'{"model":"m"' + b"".join(b',"%06d":0' % number for number in range(num_fields)) + b"}"


def test_a_body_with_too_many_fields_is_not_read_to_its_end() -> None:
    changed = with_fields(body_with(MOST_FIELDS - 1), {"model": "n"})
    assert isinstance(changed, bytes)
    assert json.loads(changed).pop("model") == "n"
    message = "the body has more than 1000 fields; leave out those that the API does not have"
    large = body_with(200_000)
    tracemalloc.start()
    refusals = [with_fields(body_with(MOST_FIELDS), {"model": "n"}), with_fields(large, {"model": "n"})]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert refusals == [Refusal(400, "too_many_fields", message)] * 2
    assert peak < 1 << 20, "an object for each field would take 40 MB"


def test_a_body_whose_fields_cannot_be_read_is_refused() -> None:
    """The depth that a parser accepts depends on its caller's."""
    key = ClientTable([("k", Client("c"))]).identify("Bearer k")
    assert key is not None
    refused = client_fields(b'{"x": ' + b"[" * 5000 + b"]" * 5000 + b"}", key)
    assert isinstance(refused, Refusal)
    assert refused.message == "the body is not a JSON object: it is nested too deeply"


@given(st.binary(max_size=200))
def test_bytes_that_are_not_a_request_are_refused(body: bytes) -> None:
    assert isinstance(RequestBody.parse(body), Refusal)


_JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["messages", "prompt", "input", "tools", "x"]), _JSON))
def test_any_prompt_is_read_with_its_model(fields: dict[str, object]) -> None:
    body = parsed(**fields, model="m")
    assert body.model == "m"
    assert body.prompt_tokens > 0
