"""The form in which a chat template reads messages, found by rendering probes with it.

OpenAI's API has one form of messages; templates were written for several. Content is a string for most and a list of
parts for some. Arguments of earlier calls are an object that the template serializes, or JSON text that it copies. Null
content beside calls is what some templates ask for, and others print as None.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from typing import Any

from jinja2 import nodes

Message = Mapping[str, Any]
# Renders messages, with tools or without; None if the template rejects them or fails.
Trial = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], str | None]

# Digits, because templates may change the case of letters.
_FIRST, _SECOND = "407718293", "915538206"
_NAME, _KEY = "fastgen_probe", "fastgen_key"
_SURROGATE = re.compile("[\ud800-\udfff]")
_CALL_ID = "fastgen01"  # nine letters or digits: Mistral's templates require it
_TOOL = {"type": "function", "function": {"name": "other", "description": "", "parameters": {"type": "object"}}}


class MessageForm:
    """Converts messages to the form of one template. What it needs to know is found on first use."""

    def __init__(self, tree: nodes.Template, trial: Trial) -> None:
        self._tree = tree
        self._trial = trial
        self._content_forms: dict[str, tuple[bool, bool]] = {}
        self._call_form: tuple[bool, bool, bool] | None = None

    def shaped(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return messages in the template's form. Their content is a string, a list of text parts or null."""
        return [self._shaped(message) for message in messages]

    def _shaped(self, message: Message) -> dict[str, Any]:
        content, calls = message.get("content"), message.get("tool_calls")
        if not calls:
            return {**message, "content": self._content(str(message.get("role")), content)}
        reads_objects, reads_null, reads_empty = self._calls()
        if content:
            content = self._content("assistant", content)
        elif content is None:
            content = None if reads_null else ""
        else:
            content = "" if reads_empty or not reads_null else None
        return {**message, "content": content, "tool_calls": [_with_arguments(call, reads_objects) for call in calls]}

    def _content(self, role: str, content: Any) -> Any:
        if content is None:
            content = ""
        reads_text, reads_parts = self._content_form(role)
        if isinstance(content, str):
            return content if reads_text else [{"type": "text", "text": content}]
        return content if reads_parts else "\n".join(part["text"] for part in content)

    def _content_form(self, role: str) -> tuple[bool, bool]:
        """Return whether the template reads a role's content as a string, and as a list of parts."""
        found = self._content_forms.get(role)
        if found is None:
            found = self._content_forms[role] = self._tried_content(role)
        return found

    def _tried_content(self, role: str) -> tuple[bool, bool]:
        text = self._tried(role, _FIRST)
        parts = self._tried(role, [{"type": "text", "text": _FIRST}, {"type": "text", "text": _SECOND}])
        if text is None and parts is None and role != "user":
            return self._content_form("user")
        reads_text = text is not None and _FIRST in text
        # A template that prints the list itself prints the type of each part.
        num_types = 0 if text is None else text.count("type")
        reads_parts = parts is not None and _FIRST in parts and _SECOND in parts and parts.count("type") <= num_types
        if not reads_text and not reads_parts:  # it does not show such a message alone
            return True, _loops_over_content(self._tree)
        return reads_text, reads_parts

    def _tried(self, role: str, content: Any) -> str | None:
        """Render a conversation with a message of this role; None if the template rejects it."""
        message = {"role": role, "content": content}
        if role == "user":
            return self._trial([message], None)
        user = {"role": "user", "content": self._content("user", "a")}
        if role == "assistant":
            return self._trial([user, message, user], None)
        if role == "tool":
            answer = {**message, "tool_call_id": _CALL_ID, "name": _NAME}
            return self._trial([user, *self.shaped([_call(None, {_KEY: ""})]), answer], None)
        return self._trial([message, user], None)

    def _calls(self) -> tuple[bool, bool, bool]:
        """Return whether the template reads calls with arguments as an object, null content, and empty content."""
        if self._call_form is None:
            self._call_form = self._tried_calls()
        return self._call_form

    def _tried_calls(self) -> tuple[bool, bool, bool]:
        arguments = {_KEY: _SECOND}
        for given in (arguments, json.dumps(arguments)):
            null, empty = (self._tried_call(content, given) for content in (None, ""))
            prints_none = null is not None and null.count("None") > (empty or "").count("None")
            reads_null, reads_empty = _shows(null) and not prints_none, _shows(empty)
            if reads_null or reads_empty:
                return given is arguments, reads_null, reads_empty
        return True, False, True

    def _tried_call(self, content: Any, arguments: Any) -> str | None:
        user = {"role": "user", "content": self._content("user", "a")}
        messages = [user, _call(content, arguments)]
        shown = self._trial(messages, None)
        return shown if _shows(shown) else self._trial(messages, [_TOOL]) or shown


def _call(content: Any, arguments: Any) -> dict[str, Any]:
    function = {"name": _NAME, "arguments": arguments}
    call = {"id": _CALL_ID, "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _shows(text: str | None) -> bool:
    """Return whether a rendering has the probe's call, its arguments neither in Python's syntax nor escaped twice."""
    if text is None or _NAME not in text or _SECOND not in text:
        return False
    return f"'{_KEY}'" not in text and f'\\"{_KEY}' not in text


def _with_arguments(call: Any, reads_objects: bool) -> Any:
    """Return a call with its arguments as an object if `reads_objects` and they are JSON, otherwise as text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str) and not arguments.strip():
        arguments = None
    if reads_objects and isinstance(arguments, str):
        # The model may have written invalid or truncated JSON; the template then gets it unparsed.
        with suppress(ValueError, RecursionError):
            arguments = _loaded(arguments)
    elif arguments is None:
        arguments = {}
    if not reads_objects and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _loaded(text: str) -> Any:
    """Parse JSON. Halves of characters, which models escape and no tokenizer takes, become U+FFFD."""
    value = json.loads(text)
    if "\\u" not in text:
        return value
    plain = json.dumps(value, ensure_ascii=False)
    return value if _SURROGATE.search(plain) is None else json.loads(_SURROGATE.sub("\ufffd", plain))


def _loops_over_content(tree: nodes.Template) -> bool:
    """Return whether a template has a loop over the content of a message, as vLLM looks for it."""
    names = {
        assignment.target.name
        for assignment in tree.find_all(nodes.Assign)
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, frozenset())
    }
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node, names: Container[str]) -> bool:
    while isinstance(node, nodes.Filter | nodes.Test) and node.node is not None:
        node = node.node
    match node:
        case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Name():
            return node.name in names
    return False
