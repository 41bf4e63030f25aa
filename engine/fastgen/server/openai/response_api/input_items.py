"""Input items of /v1/responses as the messages of a conversation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastgen.server.openai.messages import text_of

_TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
_ROLES = ("user", "assistant", "system", "developer")


def messages_of(items: list[Any]) -> list[dict[str, Any]]:
    """Return input items as messages.

    The items of an assistant's turn (reasoning, text, function calls) become one message.

    Raises:
        ValueError: if an item is not supported; names it by its index.
    """
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise ValueError(f"item {index} must be an object")
        kind = item.get("type", "message")
        add = _ITEMS.get(kind) if isinstance(kind, str) else None
        if add is None:
            raise ValueError(f"item {index} is of type {str(kind)[:40]!r}; supported are {', '.join(_ITEMS)}")
        try:
            add(item, messages)
        except ValueError as error:
            raise ValueError(f"item {index}: {error}") from None
    if not any("content" in message for message in messages):
        raise ValueError("has no message")
    return messages


def _message(item: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    role = item.get("role")
    if role not in _ROLES:
        raise ValueError(f"role must be one of {', '.join(_ROLES)}")
    text = _text(item.get("content"))
    if role == "assistant":
        turn = _turn(messages)
        turn["content"] = (turn.get("content") or "") + text
    else:
        messages.append({"role": role, "content": text})


def _function_call(item: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    name, arguments = item.get("name"), item.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise ValueError("a function_call must have a name and arguments, both strings")
    call = {"id": _call_id(item), "type": "function", "function": {"name": name, "arguments": arguments}}
    turn = _turn(messages)
    turn.setdefault("content", None)
    turn.setdefault("tool_calls", []).append(call)


def _function_call_output(item: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    messages.append({"role": "tool", "tool_call_id": _call_id(item), "content": _text(item.get("output"))})


def _reasoning(item: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    text = _text(item.get("content") or [])
    if text:
        _turn(messages, new=True)["reasoning_content"] = text


def _call_id(item: dict[str, Any]) -> str:
    call_id = item.get("call_id")
    if not isinstance(call_id, str):
        raise ValueError("call_id must be a string")
    return call_id


def _turn(messages: list[dict[str, Any]], *, new: bool = False) -> dict[str, Any]:
    """Return the assistant's message at the end of the conversation; append one if there is none."""
    if new or not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


def _text(content: Any) -> str:
    try:
        return text_of(content, _TEXT_PARTS)
    except ValueError as error:
        raise ValueError(f"content {error}") from None


_ITEMS: dict[str, Callable[[dict[str, Any], list[dict[str, Any]]], None]] = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _function_call_output,
    "reasoning": _reasoning,
}
