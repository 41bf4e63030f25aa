"""Fields of a message: what reaches the chat template, and what is rejected."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from fastgen.server.openai.fields.messages import ChatMessage


def shown(**fields: Any) -> dict[str, Any]:
    return ChatMessage.model_validate(fields).for_template()


def test_fields_of_templates_reach_them_and_null_ones_do_not() -> None:
    message = {"role": "user", "content": "a", "name": "Ann", "mood": {"calm": True}, "weight": None}
    assert shown(**message) == {name: value for name, value in message.items() if name != "weight"}


def test_a_refusal_is_the_content_of_a_message_without_one() -> None:
    """As in OpenAI's responses, which clients send back."""
    assert shown(role="assistant", content=None, refusal="No.") == {"role": "assistant", "content": "No."}
    assert shown(role="assistant", content="Yes.", refusal=None) == {"role": "assistant", "content": "Yes."}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("function_call", {"name": "f", "arguments": "{}"}, "use tool_calls"),
        ("audio", {"id": "a"}, "only text is supported"),
        ("refusal", 5, "must be a string"),
    ],
)
def test_a_field_that_no_template_reads_is_rejected_unless_it_is_null(name: str, value: Any, words: str) -> None:
    with pytest.raises(ValidationError, match=words) as caught:
        shown(role="assistant", content=None, **{name: value})
    assert caught.value.errors()[0]["loc"] == (name,)
    assert shown(role="assistant", content="a", **{name: None}) == {"role": "assistant", "content": "a"}
