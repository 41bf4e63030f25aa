"""Input items of /v1/responses as the messages of a conversation."""

from __future__ import annotations

from typing import Any

from fastgen.server.openai.fields.messages import TextContent, content_of

_TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")


def messages_of(items: list[Any]) -> list[dict[str, Any]]:
    """Return input items as messages.

    The items of an assistant's turn (reasoning, text, function calls) become one message; reasoning begins a new one.

    Raises:
        ValueError: if an item is not supported, naming it by its index, or if there is no message.
    """
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        try:
            if not isinstance(item, dict):
                raise ValueError("must be an object")
            _add(item, messages)
        except ValueError as error:
            raise ValueError(f"item {index}: {error}") from None
    for message in messages:
        if message["role"] == "assistant" and message.get("content") is not None:
            message["content"] = "".join(message["content"])  # once: items may be thousands
    if not any("content" in message for message in messages):
        raise ValueError("has no message; add one")
    return messages


def _add(item: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    """Add an item to the messages. The content of an assistant's message is a list of texts."""
    match {"type": "message", **item}:
        case {"type": "message", "role": "assistant"}:
            turn = _turn(messages)
            turn["content"] = turn.get("content") or []
            turn["content"].append(_text(item.get("content")))
        case {"type": "message", "role": "user" | "system" | "developer" as role}:
            messages.append({"role": role, "content": _content(item.get("content"))})
        case {"type": "message"}:
            raise ValueError("role must be one of user, assistant, system, developer")
        case {"type": "function_call", "call_id": str(call_id), "name": str(name), "arguments": str(arguments)}:
            turn = _turn(messages)
            turn.setdefault("content", None)
            call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            turn.setdefault("tool_calls", []).append(call)
        case {"type": "function_call"}:
            raise ValueError("a function_call must have a call_id, a name and arguments, all strings")
        case {"type": "function_call_output", "call_id": str(call_id)}:
            output = _content(item.get("output"), "output")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        case {"type": "function_call_output"}:
            raise ValueError("call_id must be a string")
        case {"type": "reasoning"}:
            field = "content" if item.get("content") else "summary"
            text = _text(item.get(field) or [], field)
            if text:
                messages.append({"role": "assistant", "reasoning_content": text})
        case {"type": kind}:
            supported = "message, function_call, function_call_output and reasoning"
            raise ValueError(f"its type is {str(kind)[:40]!r}; supported are {supported}")


def _turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the assistant's message at the end of the conversation; append one if there is none."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


def _content(content: Any, field: str = "content") -> TextContent:
    try:
        return content_of(content, _TEXT_PARTS)
    except ValueError as error:
        raise ValueError(f"{field} {error}") from None


def _text(content: Any, field: str = "content") -> str:
    """Return the text of the model's own content, whose parts follow each other without a break."""
    given = _content(content, field)
    return given if isinstance(given, str) else "".join(part["text"] for part in given)
